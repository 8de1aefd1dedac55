"""Summarise a run from its events: pure functions, so that they also work on an old log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from adaptdl_elastic.agent.terminal.event_log import Event

_FREQUENT = {"batch_size", "goodput", "checkpoint", "metrics"}
_NOT_METRICS = {"time", "event", "epoch", "rank", "step"}


@dataclass(frozen=True)
class Generation:
    """A size of the job, from its first step to the first step of the next one."""

    number: int
    start: float  # seconds since the run began
    end: float
    replicas: int
    nodes: int
    cause: str
    reason: str
    pause: float | None  # seconds without a step before it; None: the first one, or unknown
    transition: str = "restart"
    placements: tuple[tuple[str, int], ...] = ()  # (node, replicas)


@dataclass(frozen=True)
class BatchSize:
    """A batch size in use from `time` on."""

    time: float
    batch_size: int
    gain: float
    lr_factor: float
    goodput: float | None
    predicted: float | None
    efficiency: float | None


@dataclass(frozen=True)
class Summary:
    """A run, with times in seconds since its first event."""

    began: float  # seconds since the epoch
    seconds: float
    generations: tuple[Generation, ...] = ()
    batch_sizes: tuple[BatchSize, ...] = ()
    goodputs: tuple[tuple[float, float | None, float | None], ...] = ()  # (time, measured, predicted)
    metrics: tuple[tuple[float, dict[str, float]], ...] = ()
    epochs: tuple[tuple[float, int], ...] = ()
    failures: tuple[tuple[float, str], ...] = ()
    drains: tuple[tuple[float, str], ...] = ()
    checkpoints: int = 0
    exit_code: int | None = None
    exit_reason: str = ""

    @property
    def pauses(self) -> tuple[float, ...]:
        """Seconds of each change of size."""
        return tuple(g.pause for g in self.generations if g.pause is not None)

    @property
    def final_metrics(self) -> dict[str, float]:
        """The last value of everything that was reported."""
        return {name: value for _, values in self.metrics for name, value in values.items()}


@dataclass
class Collector:
    """Collects the events that a summary needs; drops some of frequent kinds if there are too many."""

    most: int = 4000
    events: list[Event] = field(default_factory=list)
    checkpoints: int = 0

    @property
    def summary(self) -> Summary:
        """The summary of the run, whose checkpoints are all counted."""
        return replace(summarise(self.events), checkpoints=self.checkpoints)

    def add(self, event: Event) -> None:
        """Take in an event."""
        self.events.append(event)
        self.checkpoints += event["event"] == "checkpoint"
        if len(self.events) > self.most:
            many = [i for i, e in enumerate(self.events) if e["event"] in _FREQUENT]
            drop = set(many[1:-100:2])  # every other one of the older events
            self.events = [e for i, e in enumerate(self.events) if i not in drop]
            self.most = max(self.most, len(self.events) + 100)


def summarise(events: Sequence[Event], now: float | None = None) -> Summary:
    """Return the summary of a run's events; `now` is the end of a run that has no `exit` event yet."""
    ordered = sorted(events, key=lambda event: float(event["time"]))
    if not ordered:
        return Summary(now or 0.0, 0.0)
    began = float(ordered[0]["time"])
    last = float(ordered[-1]["time"])
    end = (last if now is None or _of(ordered, "exit") else max(now, last)) - began
    exits = _of(ordered, "exit")
    return Summary(
        began=began,
        seconds=end,
        generations=_generations(_of(ordered, "generation"), began, end),
        batch_sizes=tuple(_batch_size(e, began) for e in _of(ordered, "batch_size")),
        goodputs=tuple(
            (float(e["time"]) - began, _number(e.get("goodput")), _number(e.get("predicted_goodput")))
            for e in ordered
            if e["event"] in ("goodput", "batch_size")
        ),
        metrics=tuple((float(e["time"]) - began, numbers(e)) for e in _of(ordered, "metrics")),
        epochs=tuple((float(e["time"]) - began, int(e["epoch"])) for e in _of(ordered, "epoch")),
        failures=tuple((float(e["time"]) - began, _failure(e)) for e in _of(ordered, "failure")),
        drains=tuple((float(e["time"]) - began, str(e.get("reason"))) for e in _of(ordered, "drain")),
        checkpoints=len(_of(ordered, "checkpoint")),
        exit_code=int(exits[-1]["exit_code"]) if exits else None,
        exit_reason=str(exits[-1].get("reason", "")) if exits else "",
    )


def _of(events: Iterable[Event], name: str) -> list[Event]:
    return [event for event in events if event["event"] == name]


def _generations(events: Sequence[Event], began: float, end: float) -> tuple[Generation, ...]:
    starts = [float(event["time"]) - began for event in events]
    ends = [*starts, end][1:]
    return tuple(
        Generation(
            number=int(event["generation"]),
            start=start,
            end=stop,
            replicas=int(event["replicas"]),
            nodes=int(event.get("nodes", 1)),
            cause=str(event.get("cause", "")),
            reason=str(event.get("reason", "")),
            pause=_number(event.get("pause_s")),
            transition=str(event.get("transition", "restart")),
            placements=tuple((str(n), int(c)) for n, c in (event.get("placements") or {}).items()),
        )
        for event, start, stop in zip(events, starts, ends, strict=True)
    )


def _batch_size(event: Event, began: float) -> BatchSize:
    return BatchSize(
        time=float(event["time"]) - began,
        batch_size=int(event["batch_size"]),
        gain=float(event.get("gain", 1.0)),
        lr_factor=float(event.get("lr_factor", 1.0)),
        goodput=_number(event.get("goodput")),
        predicted=_number(event.get("predicted_goodput")),
        efficiency=_number(event.get("efficiency")),
    )


def _failure(event: Event) -> str:
    return f"replica {event.get('rank')}: {event.get('message') or event.get('exit_code')}"


def numbers(event: Event) -> dict[str, float]:
    """Return the fields of a `metrics` event that are numbers."""
    return {
        name: float(value)
        for name, value in event.items()
        if name not in _NOT_METRICS and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
