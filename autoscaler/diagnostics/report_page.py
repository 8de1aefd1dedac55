"""Draw a run's report as one HTML file that needs nothing else: no script, no font, no network.

Colours follow the reader's light or dark setting. Every picture has its numbers in a table beside it, so
that a screen reader loses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from adaptdl_elastic.autoscaler.diagnostics.run_report import Report, range_name, range_text
from adaptdl_elastic.rendezvous.text import duration

Point = tuple[float, float]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 240, 64, 28, 10  # of a picture, in its own units
_TICKS = 5
_HIGHEST = 8  # a band without an upper end is drawn up to this multiple of the critical batch size
_RANGES = {
    "one standard error either way": "one standard error of the squared gradient either way",
    "spread": "the lowest and highest value within the period",
}

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6570; --line: #d5dae0; --page: #ffffff;
  --one: #1f6feb; --two: #d1580b; --band: #1f6feb30; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa5b1; --line: #30363d;
  --page: #0d1117; --one: #6cb0ff; --two: #ffa657; --band: #6cb0ff30; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
  max-width: 48rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 600; } figure { margin: 1rem 0; overflow-x: auto; }
figcaption, .soft { color: var(--soft); font-size: .9rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; }
.axis { stroke: var(--line); } .one { stroke: var(--one); fill: none; stroke-width: 2; }
.two { stroke: var(--two); fill: none; stroke-width: 2; stroke-dasharray: 6 3; }
.band { fill: var(--band); stroke: none; } .key-one { color: var(--one); } .key-two { color: var(--two); }
"""


def page(found: Report, title: str) -> str:
    """Return the report as an HTML document.

    Args:
        found: The report.
        title: Heading of the page, such as the name of the job or of the log.
    """
    sizes = " → ".join(str(size) for size in found.replicas) or "unknown"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{duration(found.seconds)}, replicas {sizes}, {escape(found.ended)}. Training "
        f"{duration(found.training)}, changes and restarts {duration(found.pauses)}, start "
        f"{duration(found.starting)}.</p>",
    ]
    if found.advice:
        parts += [
            "<h2>For the next run</h2><ul>",
            *(f"<li>{escape(line)}</li>" for line in found.advice),
            "</ul>",
        ]
    parts += _noise(found) + _goodput(found) + _sizes(found) + _changes(found)
    parts += [f'<p class="soft">Not known: {escape(line)}.</p>' for line in found.missing]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _noise(found: Report) -> list[str]:
    if not found.periods:
        return []
    middle = [((one.start + one.end) / 2, one) for one in found.periods]
    picture = _picture(
        "critical batch size and batch size over time",
        [(at, one.critical_batch_size) for at, one in middle],
        [(at, one.batch_size) for at, one in middle],
        [(at, one.lowest, min(one.highest, _HIGHEST * one.critical_batch_size)) for at, one in middle],
        logarithmic=True,
    )
    rows = [
        (
            f"{duration(one.start)} – {duration(one.end)}",
            f"{one.critical_batch_size:,.0f}",
            range_text(one),
            f"{one.batch_size:,.0f}",
        )
        for one in found.periods
    ]
    name = range_name(found)
    how = f" Measured from: {escape('; '.join(found.estimators))}." if found.estimators else ""
    return [
        "<h2>Critical batch size</h2>",
        "<p>At this batch size the gradient's noise is as large as the gradient: training needs twice the "
        "samples of a small batch, and twice the steps of a very large one. Far below it a larger batch is "
        f"nearly free; far above it samples are wasted. The range is {_RANGES[name]}.{how}</p>",
        picture,
        _key(f"critical batch size (band: {name})", "batch size used"),
        _table(("time", "critical batch size", name, "batch size used"), rows),
    ]


def _goodput(found: Report) -> list[str]:
    began = found.samples[0].time - (found.starting or 0.0)
    measured = [(one.time - began, one.goodput) for one in found.samples]
    predicted = [(one.time - began, one.predicted_goodput) for one in found.samples if one.predicted_goodput]
    text = "" if found.calibration is None else f" Measured over predicted: {found.calibration:.2f} (median)."
    return [
        "<h2>Goodput</h2>",
        f"<p>Samples a second, counted by what they are worth at the initial batch size.{text}</p>",
        _picture("measured and predicted goodput over time", measured, predicted),
        _key("measured", "predicted"),
    ]


def _sizes(found: Report) -> list[str]:
    if not found.alternatives:
        return []
    priced = any(one.cost is not None for one in found.alternatives)
    rows = [
        (
            f"{one.replicas}" + (" (extrapolated)" if one.extrapolated else ""),
            duration(one.seconds),
            f"{one.samples:,.0f}",
            f"{one.batch_size:,.0f}",
            f"{one.replica_hours:.2f}",
            *((f"{one.cost:,.2f}",) if one.cost is not None else ()),
        )
        for one in found.alternatives
    ]
    head = ("replicas", "time", "samples", "batch size", "replica hours", *(("cost",) if priced else ()))
    return [
        "<h2>The same progress on other sizes</h2>",
        _table(head, rows),
        '<p class="soft">From the step-time curve that this run fitted and its gradient statistics.</p>',
    ]


def _changes(found: Report) -> list[str]:
    if not found.changes:
        return []
    rows = [
        (
            duration(one.time),
            f"{one.batch_size:,}",
            f"{one.lr_factor:.2f}",
            f"{one.expected:.2f}" if one.expected else "–",
        )
        for one in found.changes
    ]
    head = ("time", "batch size", "learning rate ×", "expected goodput ×")
    return ["<h2>Changes of the batch size</h2>", _table(head, rows)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _key(one: str, two: str) -> str:
    return (
        f'<p class="soft"><span class="key-one">——</span> {escape(one)} '
        f'&nbsp; <span class="key-two">- - -</span> {escape(two)}</p>'
    )


def _picture(
    name: str,
    one: Sequence[Point],
    two: Sequence[Point],
    band: Sequence[tuple[float, float, float]] = (),
    logarithmic: bool = False,
) -> str:
    """Draw two lines over time, and a band of (time, lowest, highest)."""
    heights = [y for _, y in (*one, *two)] + [y for _, low, high in band for y in (low, high)]
    low = min(heights) if logarithmic else 0.0
    scale = _logarithm if logarithmic else float
    bottom, top = scale(low), scale(max(heights))
    top = top if top > bottom else bottom + 1.0
    last = max(x for x, *_ in (*one, *two)) or 1.0

    def place(x: float, y: float) -> str:
        right = _LEFT + (_WIDTH - _LEFT) * max(0.0, x) / last
        down = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - (scale(y) - bottom) / (top - bottom))
        return f"{right:.1f},{down:.1f}"

    parts = [_axes(bottom, top, last, _power if logarithmic else float)]
    if band:
        edge = [place(x, high) for x, _, high in band] + [place(x, lowest) for x, lowest, _ in reversed(band)]
        parts.append(f'<polygon class="band" points="{" ".join(edge)}"/>')
    for style, line in (("one", one), ("two", two)):
        if line:
            parts.append(f'<polyline class="{style}" points="{" ".join(place(*point) for point in line)}"/>')
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(name)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _axes(bottom: float, top: float, last: float, value: Callable[[float], float]) -> str:
    parts = []
    for tick in range(_TICKS):
        share = tick / (_TICKS - 1)
        down = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - share)
        height = value(bottom + (top - bottom) * share)
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{down:.1f}" y2="{down:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{height:,.4g}</text>')
        right = _LEFT + (_WIDTH - _LEFT) * share
        anchor = "end" if tick == _TICKS - 1 else "middle" if tick else "start"
        parts.append(
            f'<text x="{right:.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{duration(last * share)}</text>'
        )
    return "".join(parts)


def _logarithm(value: float) -> float:
    return math.log2(max(value, 1e-9))


def _power(value: float) -> float:
    return float(2**value)
