"""Turns what happens on this node into events of the event log (docs/architecture.md, Events)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from adaptdl_elastic.agent.terminal.event_log import Event
from adaptdl_elastic.rendezvous.schema.records import Failure, Plan, Transition

_DENSE_FOR, _THEN_EVERY = 600.0, 15.0  # seconds: a day must not fill a disk
_SAMPLED = ("goodput", "predicted_goodput", "throughput", "efficiency", "batch_size", "step", "epoch")
PLAIN_AFTER = 30.0  # seconds without a hello after which a script is taken for one without the library


@dataclass
class _Begun:
    """A generation whose event is not written yet."""

    plan: Plan
    started: float  # wall clock
    before: float | None  # end of the last step before it
    library: bool = False


@dataclass
class Journal:
    """Knows what has been written, so that each generation is written once."""

    write: Callable[[Event], None]
    wall: Callable[[], float] = time.time
    _begun: _Begun | None = None
    _knows: bool = False  # the script uses the library: it has said hello once
    _last_step: float | None = None
    _holds: bool = False  # a generation has begun here and not ended
    _sampled: float = 0.0  # wall clock of the last `goodput` event
    _opened: float = field(init=False)

    def __post_init__(self) -> None:
        self._opened = self.wall()

    def emit(self, event: str, when: float | None = None, **fields: Any) -> None:
        """Write one event."""
        self.write({"time": self.wall() if when is None else when, "event": event, **fields})

    def started(self, plan: Plan, pids: dict[int, int], last_step: float | None) -> None:
        """This node's replicas have started; `last_step` is what other nodes said of the one before."""
        self.flush()
        # who joins others that are still training has not heard of their last step: they tell the pause
        joins = plan.transition is Transition.INPLACE and not self._holds
        known = [t for t in (self._last_step, last_step) if t is not None and not joins]
        self._holds = True
        self._begun = _Begun(plan, self.wall(), max(known, default=None), self._knows)
        self.emit("started", generation=plan.generation, pids={str(rank): pid for rank, pid in pids.items()})

    def hello(self) -> None:
        """A replica uses the library: its first step is the beginning."""
        self._knows = True
        if self._begun is not None:
            self._begun.library = True

    def step(self, when: float) -> None:
        """A step was finished."""
        self._last_step = max(when, self._last_step or when)
        if self._begun is not None:
            self._write_generation(self._begun, when)

    def last_step_was(self, when: float | None) -> None:
        """A replica says when its last step before a change was; steps are not all reported."""
        if when is not None:
            self._last_step = max(float(when), self._last_step or 0.0)

    def flush(self) -> None:
        """The generation ends, or says nothing for long: write what is known of it."""
        if self._begun is not None:
            self._write_generation(self._begun, None if self._begun.library else self._begun.started)

    def ended(self) -> None:
        """The generation is over; for a script without the library that is the end of its last step."""
        begun = self._begun
        self._holds = False
        self.flush()
        if self._last_step is None or (begun is not None and not begun.library):
            self._last_step = self.wall()

    def due(self) -> float | None:
        """Wall-clock time at which `flush` is due."""
        begun = self._begun
        return None if begun is None or begun.library else begun.started + PLAIN_AFTER

    @property
    def last_step(self) -> float | None:
        """Wall-clock end of the newest step that was reported here."""
        return self._last_step

    def goodput(self, hints: dict[str, Any]) -> None:
        """What rank 0 reports goes into the log too, less and less often."""
        now = self.wall()
        interval = 1.5 if now - self._opened < _DENSE_FOR else _THEN_EVERY
        if hints.get("goodput") is not None and now - self._sampled >= interval:
            self._sampled = now
            self.emit("goodput", **{name: hints.get(name) for name in _SAMPLED})

    def failure(self, failure: Failure, used: int, most: int) -> None:
        """A replica failed by itself."""
        self.emit(
            "failure",
            rank=failure.rank,
            exit_code=failure.exit_code,
            message=failure.message,
            restarts_used=used,
            max_restarts=most,
        )

    def lost(self, generation: int, failure: Failure) -> None:
        """A replica has died, and the others go on without it."""
        self.emit(
            "replica_lost",
            generation=generation,
            rank=failure.rank,
            exit_code=failure.exit_code,
            message=failure.message,
        )

    def _write_generation(self, begun: _Begun, first_step: float | None) -> None:
        self._begun = None
        plan = begun.plan
        pause = None
        if first_step is not None and begun.before is not None:
            pause = max(0.0, first_step - begun.before)
        self.emit(
            "generation",
            when=first_step,
            generation=plan.generation,
            replicas=plan.replicas,
            nodes=plan.nodes,
            placements={p.node: p.replicas for p in plan.placements},
            cause=plan.cause.value,
            transition=plan.transition.value,
            reason=plan.reason,
            pause_s=pause,
        )
