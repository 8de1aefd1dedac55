"""Draw a run's report as one HTML file that needs nothing else: no script, no font, no network.

The text and the form are in `report.html.jinja`. Colours follow the reader's light or dark setting. Every
picture has its numbers in a table beside it, so that a screen reader loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np

from adaptdl_elastic.autoscaler.diagnostics.run_report import Report, mark, range_name, range_text, ratio
from adaptdl_elastic.rendezvous.text import duration

Point = tuple[float, float]

_LEFT, _RIGHT, _TOP, _BOTTOM = 92, 720, 10, 212  # of a picture's axes, in its own units
_TICKS = 5
_HIGHEST = 8  # a band without an upper end is drawn up to this multiple of the critical batch size
_RANGES = {
    "one standard error either way": "one standard error of the squared gradient either way",
    "spread": "the lowest and highest value within the period",
}


@dataclass(frozen=True)
class _Picture:
    """Hold what a picture shows: ticks of its axes, and the corners of two lines and a band."""

    ticks: list[tuple[float, float, str, str]]  # right, down, time, height
    one: str
    two: str
    band: str


def page(found: Report, title: str) -> str:
    """Return the report as an HTML document.

    Args:
        found: The report.
        title: Heading of the page, such as the name of the job or of the log.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"duration": duration, "mark": mark, "range_text": range_text, "ratio": ratio}
    began = found.samples[0].time - (found.starting or 0.0)
    name = range_name(found) if found.periods else ""
    return environment.get_template("report.html.jinja").render(
        found=found,
        title=title,
        range_name=name,
        range_meaning=_RANGES[name] if name else "",
        noise=_noise(found) if found.periods else None,
        goodput=_picture(
            [(one.time - began, one.goodput) for one in found.samples],
            [(one.time - began, one.predicted_goodput) for one in found.samples if one.predicted_goodput],
        ),
        priced=any(one.cost is not None for one in found.alternatives),
    )


def _noise(found: Report) -> _Picture:
    middle = [((one.start + one.end) / 2, one) for one in found.periods]
    return _picture(
        [(at, one.critical_batch_size) for at, one in middle],
        [(at, one.batch_size) for at, one in middle],
        [(at, one.lowest, min(one.highest, _HIGHEST * one.critical_batch_size)) for at, one in middle],
        logarithmic=True,
    )


def _picture(
    one: Sequence[Point],
    two: Sequence[Point],
    band: Sequence[tuple[float, float, float]] = (),
    logarithmic: bool = False,
) -> _Picture:
    """Place two lines over time, and a band of (time, lowest, highest)."""
    edge = [(x, high) for x, _, high in band] + [(x, low) for x, low, _ in reversed(band)]
    heights = [y for _, y in (*one, *two, *edge)]
    ends = np.array([min(heights) if logarithmic else 0.0, max(heights)])
    bottom, top = np.log2(np.maximum(ends, 1e-9)) if logarithmic else ends
    top = top if top > bottom else bottom + 1.0
    last = max(x for x, _ in (*one, *two)) or 1.0

    def corners(points: Sequence[Point]) -> str:
        if not points:
            return ""
        x, y = np.array(points, dtype=float).T
        y = np.log2(np.maximum(y, 1e-9)) if logarithmic else y
        right = _LEFT + (_RIGHT - _LEFT) * np.maximum(x, 0.0) / last
        down = _BOTTOM - (_BOTTOM - _TOP) * (y - bottom) / (top - bottom)
        return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(right, down, strict=True))

    ticks = []
    for share in np.linspace(0.0, 1.0, _TICKS):
        height = bottom + (top - bottom) * share
        height = 2.0**height if logarithmic else height
        number = f"{height:,.0f}" if 10 <= height < 1e9 else f"{height:.3g}"
        right, down = _LEFT + (_RIGHT - _LEFT) * share, _BOTTOM - (_BOTTOM - _TOP) * share
        ticks.append((round(right, 1), round(down, 1), duration(last * share), number))
    return _Picture(ticks, corners(one), corners(two), corners(edge))
