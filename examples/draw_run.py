"""Draw a run from its event log: replicas, batch size, learning rate, goodput and metrics over time.

    adaptdl-run --event-log=events.jsonl ... train.py
    python examples/draw_run.py events.jsonl run.png

Needs matplotlib. It needs no display and does not use pyplot's global state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adaptdl_elastic.rendezvous.run_record import Generation, Run, read_run
from adaptdl_elastic.rendezvous.text import duration, pluralize

_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_BLUE, _GREEN, _ORANGE, _RED, _PURPLE = "#2f6fde", "#17916b", "#e07b00", "#d64545", "#7c4dbd"
# one colour per node; further nodes get the default colour
_NODES = (_BLUE, _ORANGE, _GREEN, _PURPLE, _RED, _MUTED)
_HIGHER_IS_BETTER = ("acc", "auc", "f1", "score", "precision", "recall", "bleu")
_WIDTH = 10.0  # inches
_LABELLED = 12  # most generations whose reason fits into the picture


def draw(run: Run, path: Path, title: str) -> None:
    """Write the picture in the format of the file name's suffix; OSError if it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(run)
    heights = [height for height, _ in panels]
    figure = Figure(figsize=(_WIDTH, 1.3 + sum(heights)), dpi=144, facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(panels), 1, height_ratios=heights, hspace=0.22)
    axes: list[Any] = []
    for row, (_, paint) in enumerate(panels):
        axis = figure.add_subplot(grid[row, 0], sharex=axes[0] if axes else None)
        axes.append(axis)
        _dress(axis, last=row == len(panels) - 1)
        _mark(axis, run)
        paint(axis, run)
    axes[0].set_xlim(0, max(run.ended - run.began, 1e-3))
    axes[-1].set_xlabel("time since the start", color=_MUTED, fontsize=9)
    axes[-1].xaxis.set_major_formatter(lambda value, _: _clock(value))
    figure.suptitle(title, x=0.08, y=0.985, ha="left", fontsize=14, fontweight="bold", color=_INK)
    figure.text(0.08, 1 - 0.5 / figure.get_figheight(), _headline(run), fontsize=9, color=_MUTED, va="center")
    figure.subplots_adjust(
        left=0.08, right=0.97, top=1 - 0.8 / figure.get_figheight(), bottom=0.5 / figure.get_figheight()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


Paint = Callable[[Any, Run], None]


def _panels(run: Run) -> list[tuple[float, Paint]]:
    """Return the height in inches and the drawing function of each panel that the run has data for."""
    panels: list[tuple[float, Paint]] = [(1.7, _replicas)]
    if run.batch_sizes:
        panels += [(1.3, _batch), (1.1, _learning_rate)]
        if any(measured is not None for _, measured, _ in run.goodputs):
            panels.append((1.5, _goodput))
    if run.metrics:
        panels.append((1.5, _metrics))
    return panels


def _headline(run: Run) -> str:
    parts = [duration(run.ended - run.began)]
    changes = len(run.generations) - 1
    if changes > 0:
        text = pluralize(changes, "change") + " of size"
        pauses = [duration(one.pause_s) for one in run.generations if one.pause_s is not None]
        if pauses:
            text += ", pauses " + ", ".join(pauses[:6])
            text += " …" if len(pauses) > 6 else ""
        parts.append(text)
    if run.failures:
        parts.append(pluralize(len(run.failures), "failure"))
    parts += [f"final {name} {value:.4g}" for name, value in run.final_metrics.items() if _better_up(name)]
    return "   ·   ".join(parts)


def _dress(axis: Any, last: bool) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(_GRID)
    axis.tick_params(colors=_MUTED, labelsize=8, length=0, labelbottom=last)
    axis.grid(axis="y", color=_GRID, linewidth=0.7)
    axis.set_axisbelow(True)


def _mark(axis: Any, run: Run) -> None:
    """Draw pauses as bands, failures and drains as lines, in every panel."""
    for generation in run.generations:
        if generation.pause_s:
            start = generation.time - run.began
            axis.axvspan(start - generation.pause_s, start, color=_RED, alpha=0.13, lw=0)
    for at, _ in run.failures:
        axis.axvline(at - run.began, color=_RED, linewidth=1.0)
    for at, _ in run.drains:
        axis.axvline(at - run.began, color=_ORANGE, linewidth=1.0, linestyle=(0, (4, 2)))


def _name(axis: Any, text: str) -> None:
    axis.set_title(text, loc="left", fontsize=9, color=_INK, pad=4)


def _replicas(axis: Any, run: Run) -> None:
    _name(axis, "replicas")
    generations = run.generations
    nodes = list(dict.fromkeys(node for g in generations for node in g.placements))
    colors = dict(zip(nodes, _NODES, strict=False)) if len(nodes) > 1 else {}
    for generation, (begin, end) in zip(generations, _spells(run), strict=True):
        width = end - begin
        bottom = 0
        for node, replicas in (generation.placements or {"": generation.replicas}).items():
            color = colors.get(node, _BLUE)
            axis.bar(
                begin, replicas, width, bottom, align="edge", color=color, alpha=0.3, lw=0,
                label=f"on {node}" if colors else None,
            )  # fmt: skip
            bottom += replicas
        axis.plot([begin, end], [generation.replicas] * 2, color=_BLUE, lw=2)
        seconds = run.ended - run.began
        if len(generations) <= _LABELLED and width > 0.05 * seconds:
            axis.text(
                begin + 0.006 * seconds,
                generation.replicas * 0.94,
                _cause(generation),
                fontsize=7.5,
                color=_INK,
                va="top",
                clip_on=True,
            )
    if colors:
        handles, labels = axis.get_legend_handles_labels()
        first = dict(zip(reversed(labels), reversed(handles), strict=True))
        named = [f"on {node}" for node in nodes if f"on {node}" in first]
        _legend(axis, [first[name] for name in named], named)
    top = max((g.replicas for g in generations), default=1)
    axis.set_ylim(0, top * 1.15)
    axis.yaxis.get_major_locator().set_params(integer=True)


def _cause(generation: Generation) -> str:
    size = f"{generation.replicas}" + (f" on {generation.nodes} nodes" if generation.nodes > 1 else "")
    pause = f"\npause {duration(generation.pause_s)}" if generation.pause_s is not None else ""
    return f"{size} · {generation.cause.replace('_', ' ')}{pause}"


def _spells(run: Run) -> list[tuple[float, float]]:
    """Return begin and end of each generation's training, without pauses, in seconds since the run began."""
    pauses = [*(one.pause_s or 0.0 for one in run.generations[1:]), 0.0]
    return [
        (one.time - run.began, max(one.time, end - pause) - run.began)
        for (one, end), pause in zip(run.spans, pauses, strict=False)
    ]


def _steps(axis: Any, run: Run, values: Sequence[float], color: str, **style: Any) -> None:
    times = [one.time - run.began for one in run.batch_sizes]
    axis.step([*times, run.ended - run.began], [*values, values[-1]], where="post", color=color, **style)


def _batch(axis: Any, run: Run) -> None:
    _name(axis, "batch size (all replicas)")
    sizes = [float(b.batch_size) for b in run.batch_sizes]
    _steps(axis, run, sizes, _GREEN, lw=1.8)
    axis.set_ylim(0, 1.15 * max(sizes))


def _learning_rate(axis: Any, run: Run) -> None:
    _name(axis, "learning rate, as a factor of the script's")
    factors = [b.lr_factor or 1.0 for b in run.batch_sizes]
    _steps(axis, run, factors, _PURPLE, lw=1.8)
    axis.set_ylim(min(0.9, 0.9 * min(factors)), max(1.1, 1.1 * max(factors)))


def _goodput(axis: Any, run: Run) -> None:
    _name(axis, "goodput (useful samples per second)")
    # each label appears once; the first part of a run may have only one of the curves
    labels = ["predicted", "measured"]
    for begin, end in _spells(run):
        inside = [(at - run.began, *values) for at, *values in run.goodputs if begin <= at - run.began < end]
        predicted = [(at, value) for at, _, value in inside if value is not None]
        measured = [(at, value) for at, value, _ in inside if value is not None]
        if predicted:
            times, values = zip(*[*predicted, (end, predicted[-1][1])], strict=True)
            style = _once(labels, "predicted")
            axis.step(times, values, where="post", color=_MUTED, lw=1.4, linestyle=(0, (4, 2)), **style)
        if measured:
            style = _once(labels, "measured")
            axis.plot(*zip(*measured, strict=True), color=_ORANGE, lw=1.8, marker="o", ms=2.5, **style)
    axis.set_ylim(bottom=0)
    axis.margins(y=0.15)
    _legend(axis)


def _once(labels: list[str], name: str) -> dict[str, str]:
    """Return the label of a curve, unless another curve has it already."""
    if name not in labels:
        return {}
    labels.remove(name)
    return {"label": name}


def _metrics(axis: Any, run: Run) -> None:
    names = list(dict.fromkeys(name for _, values in run.metrics for name in values))
    up = [name for name in names if _better_up(name)]
    shown = up or names[:2]
    _name(axis, ", ".join(shown))
    for name, color in zip(shown[:3], (_GREEN, _BLUE, _ORANGE), strict=False):
        points = [(at - run.began, values[name]) for at, values in run.metrics if name in values]
        axis.plot(*zip(*points, strict=True), color=color, lw=1.8, marker="o", ms=3, label=name)
        axis.annotate(
            f"{points[-1][1]:.4g}", points[-1], xytext=(0, 6), textcoords="offset points",
            ha="right", fontsize=8, color=color,
        )  # fmt: skip
    axis.margins(y=0.2)
    if len(shown) > 1:
        _legend(axis)


def _legend(axis: Any, handles: Sequence[Any] | None = None, labels: Sequence[str] | None = None) -> None:
    if handles is None or labels is None:
        handles, labels = axis.get_legend_handles_labels()
    if handles:
        axis.legend(
            handles, labels, loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=max(3, len(labels)),
            frameon=False, fontsize=8, labelcolor=_MUTED,
        )  # fmt: skip


def _better_up(name: str) -> bool:
    return any(part in name.lower() for part in _HIGHER_IS_BETTER)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def main(log: str, picture: str) -> None:
    """Read an event log, and draw it."""
    draw(read_run(Path(log)), Path(picture), Path(log).stem)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: draw_run.py EVENTS.jsonl PICTURE.png (or .svg, .pdf)")
    main(*sys.argv[1:])
