"""What `make ec2-demo` leaves to look at: a table of what was bought, and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ec2_demo_story import BUDGET, CHEAP, DEAR, Line, Story

from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus


def table(bill: AutoscalerStatus, lines: Mapping[str, Line]) -> str:
    """What was bought, what it cost, and why it went."""
    rows = [f"{'instance':<21}{'from':>8}{'to':>9}{'billed':>10}{'cost':>11}  it went because"]
    for name, line in lines.items():
        end = "" if line.ended is None else f"{line.ended:.0f} s"
        cost = f"${line.cost:.4f}"
        rows.append(f"{name:<21}{line.began:>6.0f} s{end:>9}{line.seconds:>8.0f} s{cost:>11}  {line.why}")
    for pool, instances, hours, spent in bill.bought:
        text, cost = f"group {pool}: {instances}", f"${spent:.4f}"
        rows.append(f"{text:<38}{hours * 3600:>8.0f} s{cost:>11}  by the autoscaler's own account")
    return "\n".join(rows)


def _apart(marks: Sequence[tuple[float, str]], gap: float) -> list[tuple[float, str]]:
    """The numbers of the marks, those of one moment together."""
    found: list[tuple[float, str]] = []
    for number, (moment, _) in enumerate(marks, 1):
        if found and moment - found[-1][0] < gap:
            found[-1] = (found[-1][0], f"{found[-1][1]},{number}")
        else:
            found.append((moment, str(number)))
    return found


def picture(story: Story, path: Path) -> None:
    """Nodes, price and goodput over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    times = [s.time for s in story.samples]
    figure, axes = plt.subplots(4, 1, figsize=(11, 10), height_ratios=(3, 3, 3, 3.4), constrained_layout=True)
    nodes, price, goodput, key = axes
    nodes.step(times, [s.instances for s in story.samples], where="post", label="instances", color="tab:grey")
    nodes.fill_between(
        times, [s.replicas for s in story.samples], step="post", alpha=0.4, label="replicas at work"
    )
    nodes.set_yticks([0, 1, 2, 3])
    nodes.set_ylabel("nodes")
    price.step(times, [s.price for s in story.samples], where="post", color="tab:orange", label="spot price")
    price.step(times, [s.hourly for s in story.samples], where="post", color="tab:red", label="paid")
    price.axhline(BUDGET, color="black", linewidth=0.8, linestyle="--", label="budget")
    price.set_yscale("symlog", linthresh=1.0)
    price.set_yticks([0, CHEAP, 2 * CHEAP, DEAR], ["0", f"{CHEAP:g}", f"{2 * CHEAP:g}", f"{DEAR:g}"])
    price.minorticks_off()
    price.set_ylim(-0.15, 120)
    price.set_ylabel("$ per hour")
    known = [
        (s.time, s.goodput if s.replicas else float("nan")) for s in story.samples if s.goodput is not None
    ]
    goodput.plot([t for t, _ in known], [g for _, g in known], color="tab:green")
    goodput.set_ylim(bottom=0)
    goodput.set_ylabel("goodput, samples/s")
    goodput.set_xlabel("seconds")
    for moment, _ in story.marks:
        for axis in (nodes, price, goodput):
            axis.axvline(moment, color="grey", linewidth=0.5, linestyle=":")
    for level, (moment, text) in enumerate(_apart(story.marks, story.now / 40)):
        nodes.annotate(
            text, (moment, 1.02 + 0.08 * (level % 2)), xycoords=("data", "axes fraction"), fontsize=7
        )
    for axis in (nodes, price, goodput):
        axis.set_xlim(0, story.now)
    for axis in (nodes, price):
        axis.legend(loc="upper left", fontsize=8)
    key.axis("off")
    said = [f"{number:2d}  {moment:6.1f} s  {text}" for number, (moment, text) in enumerate(story.marks, 1)]
    key.text(0, 1, "\n".join(said), va="top", family="monospace", fontsize=8)
    figure.suptitle("A job on an auto-scaling group of spot instances (moto; instances are local agents)")
    figure.savefig(path, dpi=110)
