"""Read a run from its events, as `adaptdl-run --event-log` writes them, in one pass.

The summary at the end of a run, `adaptdl report` and its page select from the record that this gives.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass as validated

Event = dict[str, Any]

_LAST_TIME = 1e11  # seconds since the epoch; a later time is none
_SHORTEST_S = 1e-12  # a curve by which a pass takes less is none
_NOT_METRICS = {"time", "event", "epoch", "rank", "step"}

_Count = Annotated[int, Field(strict=True, ge=1, le=10**9)]
_Amount = Annotated[float, Field(strict=True, ge=0, le=1e100)]
_Curve = tuple[_Amount, _Amount, _Amount, _Amount, _Amount, _Amount, _Amount]


class RunLogError(ValueError):
    """An event log cannot be reported on; the message is one line with the remedy."""


@validated(frozen=True)
class Generation:
    """A size of the job, from its first step to the first step of the next one."""

    time: float
    replicas: _Count
    nodes: _Count = 1
    cause: str = ""
    reason: str = ""
    # seconds without a step before it; None: the first one, or unknown
    pause_s: _Amount | None = None
    placements: dict[str, int] = field(default_factory=dict)  # node → replicas


@validated(frozen=True)
class BatchSize:
    """A batch size in use from `time` on."""

    time: float
    batch_size: _Count
    gain: float = 1.0
    lr_factor: _Amount | None = None
    atomic_bsz: _Count | None = None
    accumulation_steps: Annotated[int, Field(strict=True, ge=0, le=10**9)] | None = None
    goodput: _Amount | None = None


@validated(frozen=True)
class Sample:
    """What the job said about itself at one time. ValueError: no job can be so."""

    time: float
    replicas: _Count
    nodes: _Count
    batch_size: _Count  # samples, over all replicas
    init_batch_size: _Count
    max_batch_size: _Count | None
    local_bsz_bounds: tuple[_Count, _Count] | None
    accumulation: Annotated[bool, Field(alias="gradient_accumulation")]
    goodput: _Amount  # samples at the initial batch size, per second
    predicted_goodput: _Amount | None
    squared_gradient: _Amount | None  # |G|²
    variance: _Amount | None  # of the mean gradient of an initial batch
    # parameters of the throughput model
    curve: Annotated[_Curve | None, Field(alias="perf_params")]
    tried_replicas: Annotated[_Count, Field(alias="max_profiled_replicas")]
    # standard error of |G|²
    gradient_error: Annotated[_Amount | None, Field(alias="grad_error")] = None
    estimator: str = ""  # how |G|² and the variance were measured

    def __post_init__(self) -> None:
        low, high = self.local_bsz_bounds or (1, 1)
        without_time = self.curve is not None and (sum(self.curve[:2]) < _SHORTEST_S or self.curve[-1] < 1)
        too_small = low > high or (self.max_batch_size or math.inf) < self.init_batch_size
        if too_small or without_time or (self.squared_gradient is None) != (self.variance is None):
            raise ValueError("no such job")


@dataclass
class Run:
    """What the events of a run tell, in their order. Times are in seconds since the epoch.

    Attributes:
        history: Whether measurements are kept; without them a long run does not fill the memory.
    """

    history: bool = True
    began: float = 0.0  # first event
    ended: float = 0.0  # last event
    kinds: set[str] = field(default_factory=set)
    started: int = -1  # newest generation whose replicas were started
    generations: list[Generation] = field(default_factory=list)
    batch_sizes: list[BatchSize] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    # time, measured, predicted
    goodputs: list[tuple[float, float | None, float | None]] = field(default_factory=list)
    metrics: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    # the last value of everything that was reported
    final_metrics: dict[str, float] = field(default_factory=dict)
    failures: list[tuple[float, str]] = field(default_factory=list)
    drains: list[tuple[float, str]] = field(default_factory=list)
    exit_code: int | None = None
    outcome: str = ""  # exit code and reason; empty: the run has not ended

    @property
    def spans(self) -> list[tuple[Generation, float]]:
        """Each generation, and its end."""
        ends = [*(one.time for one in self.generations[1:]), self.ended]
        return list(zip(self.generations, ends, strict=False))

    def precedes(self, event: Event) -> bool:
        """Return whether an event belongs to a later run.

        A run follows an `exit`. It also begins where generations are counted from the beginning again: the
        run before was killed, and the same log was used again.
        """
        generation = event.get("generation")
        again = event["event"] == "started" and isinstance(generation, int) and generation <= self.started
        return again or self.outcome != ""

    def add(self, event: Event) -> None:
        """Take in an event. ValueError: no run has such an event."""
        time, kind = event["time"], event["event"]
        match kind:
            case "started" if isinstance(event.get("generation"), int):
                self.started = event["generation"]
            case "generation":
                self.generations.append(Generation(**event))
            case "batch_size":
                self.batch_sizes.append(BatchSize(**event))
            # older versions said too little
            case "goodput" if self.history and "init_batch_size" in event:
                self.samples.append(_sample(event))
            case "metrics":
                self.final_metrics |= (values := numbers(event))
                if self.history:
                    self.metrics.append((time, values))
            case "failure":
                why = event.get("message") or event.get("exit_code")
                self.failures.append((time, f"replica {event.get('rank')}: {why}"))
            case "drain":
                self.drains.append((time, str(event.get("reason"))))
            case "exit":
                self.exit_code = event.get("code", event.get("exit_code"))
                reason = event.get("reason")
                self.outcome = f"exit code {self.exit_code}" + (f": {reason}" if reason else "")
        if self.history and kind in ("goodput", "batch_size"):
            measured, predicted = _number(event.get("goodput")), _number(event.get("predicted_goodput"))
            self.goodputs.append((time, measured, predicted))
        self.began = self.began if self.kinds else time
        self.ended = max(self.ended, time)
        self.kinds.add(kind)


def read_run(path: Path, warn: Callable[[str], None] = lambda line: None) -> Run:
    """Read the last run in an event log.

    Args:
        path: The log.
        warn: Called with one line if the log was cut in the middle. The other lines are read all the same. A
            last line that was cut short is left out.

    Raises:
        RunLogError: there is no such file, it is empty, or it is no event log.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise RunLogError(
            f"{path}: {error.strerror}; start a job with adaptdl-run --event-log FILE to get a log"
        ) from None
    run, events, damaged = Run(), 0, list[int]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            event = _event(line)
            newest = Run() if run.precedes(event) else run
            newest.add(event)
        except (ValueError, TypeError, KeyError, RecursionError):
            damaged += [number] * (number < len(lines))
        else:
            run, events = newest, events + 1
    if len(damaged) >= max(events, 1):
        raise RunLogError(f"{path}: line {damaged[0]} is no event of adaptdl-run")
    if not events:
        raise RunLogError(f"{path}: the log is empty; has the job begun to train?")
    if damaged:
        which = "line" if len(damaged) == 1 else f"{len(damaged)} lines, the first of them line"
        warn(f"{path}: left out {which} {damaged[0]}, no event of adaptdl-run (a log that was cut there?)")
    return run


def _event(line: str) -> Event:
    event: Event = json.loads(line)
    json.dumps(event, ensure_ascii=False).encode()  # no half of a character
    if not isinstance(event["event"], str) or not 0 <= event["time"] <= _LAST_TIME:
        raise ValueError("no event")
    return event


def _sample(event: Event) -> Sample:
    squared_gradient, variance = event["grad_params"] or (None, None)
    known = {name: value for name, value in event.items() if value is not None or name != "estimator"}
    return Sample(**known, squared_gradient=squared_gradient, variance=variance)


def numbers(event: Event) -> dict[str, float]:
    """Return the fields of a `metrics` event that are numbers."""
    return {
        name: value
        for name, value in event.items()
        if name not in _NOT_METRICS and isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) else None
