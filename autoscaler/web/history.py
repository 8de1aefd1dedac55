"""The numbers of jobs over time, as seen while the page is served, in bounded memory.

The store keeps only the newest report of a job. Allocations are in the store's log of events, also those from
before the page was served.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from adaptdl_elastic.autoscaler.cluster_view import View
from adaptdl_elastic.protocol.hints import JobHints

MOST_POINTS = 400
"""Points of one curve. Beyond that every second one is dropped, and new ones are taken half as often."""

MOST_REPORTED = 6
"""Numbers of a script that are followed, for each job."""

MOST_EVENTS = 1000
"""Events that are kept, as many as the store keeps."""


class Curve:
    """Values of one number over time."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._gap = 0.0

    def add(self, when: float, value: float) -> None:
        """Add a value; if it comes sooner than the distance between points, it replaces the last value."""
        points = self.points
        if points and when <= points[-1][0]:
            return
        if len(points) > 1 and when - points[-2][0] < self._gap:
            points[-1] = when, value
            return
        points.append((when, value))
        if len(points) > MOST_POINTS:
            del points[1:-1:2]
            self._gap = max((points[-1][0] - points[0][0]) / MOST_POINTS, 2 * self._gap)


class History:
    """Curves and events of all jobs. Not thread-safe."""

    def __init__(self) -> None:
        self._curves: dict[str, dict[str, Curve]] = {}
        self._seen: dict[str, int] = {}  # job → revision of the newest hints
        self._events: dict[str, dict[str, Any]] = {}  # key → event, in the order of time

    def observe(self, view: View) -> None:
        """Take note of every report that is new, and forget jobs that are gone."""
        for name in [name for name in self._curves if name not in view.jobs]:
            del self._curves[name]
            self._seen.pop(name, None)
        for name, job in view.jobs.items():
            if job.hints is None or self._seen.get(name) == job.hints.revision:
                continue
            self._seen[name] = job.hints.revision
            curves = self._curves.setdefault(name, {})
            for curve, value in numbers(job.hints.record).items():
                if value is not None:
                    curves.setdefault(curve, Curve()).add(job.hints.record.time or view.wall, value)

    def add_events(self, found: Iterable[tuple[str, str]]) -> None:
        """Take note of events: their keys, and their values as text."""
        for key, text in found:
            try:
                event = json.loads(text)
            except ValueError:
                continue
            if isinstance(event, dict) and isinstance(event.get("time"), int | float):
                self._events[key] = event
        if len(self._events) > MOST_EVENTS:
            for key in sorted(self._events)[:-MOST_EVENTS]:
                del self._events[key]

    def curves(self, job: str) -> dict[str, list[tuple[float, float]]]:
        """Return the curves of one job, by name."""
        return {name: list(curve.points) for name, curve in self._curves.get(job, {}).items()}

    def events(self, job: str | None = None) -> list[dict[str, Any]]:
        """Return the events, oldest first; only those of one job if it is named."""
        ordered = [self._events[key] for key in sorted(self._events)]
        return ordered if job is None else [one for one in ordered if one.get("job") == job]


def numbers(hints: JobHints) -> Mapping[str, float | None]:
    """Return the numbers of a report that the page draws."""
    noise = None
    if hints.grad_params is not None and hints.grad_params[0] > 0:
        noise = hints.init_batch_size * hints.grad_params[1] / hints.grad_params[0]
    reported = dict(sorted(hints.reported.items())[:MOST_REPORTED])
    return {
        "batch_size": float(hints.batch_size),
        "lr_factor": hints.lr_factor,
        "noise": noise,
        "goodput": hints.goodput,
        "predicted_goodput": hints.predicted_goodput,
        **{f"reported {name}": value for name, value in reported.items()},
    }
