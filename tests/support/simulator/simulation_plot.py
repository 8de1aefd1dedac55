"""Draw a simulation: the slots of each job over time, utilisation and waiting jobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simulator.engine import Outcome


def draw(outcome: Outcome, path: Path, title: str = "") -> None:
    """Draw allocations by job over time, and below them utilisation and waiting jobs, to an image file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    samples = outcome.samples
    hours = np.array([sample.time for sample in samples]) / 3600
    names = [job.name for job in outcome.jobs]
    table = np.array([[sample.replicas.get(name, 0) for sample in samples] for name in names])
    apps = sorted({job.app.name for job in outcome.jobs})
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    palette = _palette(len(apps))
    colors = []
    seen: dict[str, int] = {}
    for job in outcome.jobs:
        shade = seen.get(job.app.name, 0)
        seen[job.app.name] = shade + 1
        base = np.array(palette[apps.index(job.app.name)])
        colors.append(tuple(base + (1 - base) * (0.12 * (shade % 4))))
    top.stackplot(hours, table, colors=colors, step="post", linewidth=0)
    top.plot(hours, [sample.slots for sample in samples], color="black", linewidth=1, drawstyle="steps-post")
    for name, color in zip(apps, palette, strict=True):
        top.plot([], [], color=color, linewidth=6, label=name)
    top.legend(loc="upper right", fontsize=8)
    top.set_ylabel("slots, by job")
    top.set_title(title)
    used = [100 * sum(s.replicas.values()) / max(s.slots, 1) for s in samples]
    bottom.plot(hours, used, color="tab:blue", linewidth=1, drawstyle="steps-post", label="slots in use (%)")
    bottom.set_ylim(0, 105)
    bottom.set_ylabel("in use (%)", color="tab:blue")
    waiting = bottom.twinx()
    waiting.plot(hours, [s.waiting for s in samples], color="tab:red", linewidth=1, drawstyle="steps-post")
    waiting.set_ylabel("jobs waiting", color="tab:red")
    bottom.set_xlabel("hours")
    figure.savefig(path, dpi=110)


def _palette(count: int) -> list[tuple[float, float, float]]:
    from matplotlib import colormaps

    colors = colormaps["tab10"]
    return [colors(i % 10)[:3] for i in range(count)]
