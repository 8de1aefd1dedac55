"""Turn what happens on this node into events of the event log (docs/reference/events.md)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from adaptdl_elastic.rendezvous.run_record import Event
from adaptdl_elastic.rendezvous.schema.records import Failure, Plan, Transition

# seconds of frequent samples, then seconds between two samples, so that a day does not fill a disk
_DENSE_FOR, _THEN_EVERY = 600.0, 15.0
_SAMPLED = (
    *("goodput", "predicted_goodput", "throughput", "efficiency", "batch_size", "step", "epoch"),
    # what `adaptdl report` computes with
    *("replicas", "nodes", "init_batch_size", "max_batch_size", "local_bsz_bounds", "gradient_accumulation"),
    *("grad_params", "grad_error", "estimator", "perf_params", "max_profiled_replicas"),
)
PLAIN_AFTER = 30.0  # seconds without a hello after which a script is taken for one without the library


@dataclass
class _UnwrittenGeneration:
    """A generation whose event has not been written yet."""

    plan: Plan
    started: float  # wall clock
    before: float | None  # wall clock of the end of the last step before it
    library: bool = False


@dataclass
class EventRecorder:
    """Writes the events of this node; writes each generation once."""

    write: Callable[[Event], None]
    wall: Callable[[], float] = time.time
    _unwritten: _UnwrittenGeneration | None = None
    _uses_library: bool = False  # whether a replica has ever said hello, so the script uses the library
    _last_step: float | None = None
    _running: bool = False  # whether a generation has unwritten here and not ended
    _sampled: float = 0.0  # wall clock of the last `goodput` event
    _opened: float = field(init=False)

    def __post_init__(self) -> None:
        self._opened = self.wall()

    def emit(self, event: str, when: float | None = None, **fields: Any) -> None:
        """Write one event."""
        self.write({"time": self.wall() if when is None else when, "event": event, **fields})

    def started(self, plan: Plan, pids: dict[int, int], last_step: float | None) -> None:
        """Record that this node's replicas have started.

        Args:
            plan: the plan of their generation.
            pids: rank → pid of this node's replicas.
            last_step: wall clock of the end of the previous generation's last step, as other nodes report it.
        """
        self.flush()
        # newcomers do not know the last step of replicas that still train; those report the pause
        joins = plan.transition is Transition.INPLACE and not self._running
        known = [t for t in (self._last_step, last_step) if t is not None and not joins]
        self._running = True
        self._unwritten = _UnwrittenGeneration(
            plan, self.wall(), max(known, default=None), self._uses_library
        )
        self.emit("started", generation=plan.generation, pids={str(rank): pid for rank, pid in pids.items()})

    def hello(self) -> None:
        """Record that a replica uses the library: the generation begins with its first step."""
        self._uses_library = True
        if self._unwritten is not None:
            self._unwritten.library = True

    def step(self, when: float) -> None:
        """Record the end of a step."""
        self._last_step = max(when, self._last_step or when)
        if self._unwritten is not None:
            self._write_generation(self._unwritten, when)

    def last_step_was(self, when: float | None) -> None:
        """Record the last step before a change, as a replica reports it, since not every step is reported."""
        if when is not None:
            self._last_step = max(float(when), self._last_step or 0.0)

    def flush(self) -> None:
        """Write what is known of the present generation, because it ends or reports nothing for long."""
        if self._unwritten is not None:
            self._write_generation(
                self._unwritten, None if self._unwritten.library else self._unwritten.started
            )

    def ended(self) -> None:
        """Record the end of the generation; without the library it is also the end of its last step."""
        unwritten = self._unwritten
        self._running = False
        self.flush()
        if self._last_step is None or (unwritten is not None and not unwritten.library):
            self._last_step = self.wall()

    def due(self) -> float | None:
        """Return the wall-clock time at which `flush` is due, or None."""
        unwritten = self._unwritten
        return None if unwritten is None or unwritten.library else unwritten.started + PLAIN_AFTER

    @property
    def last_step(self) -> float | None:
        """Wall-clock end of the newest step that was reported here."""
        return self._last_step

    def goodput(self, hints: dict[str, Any]) -> None:
        """Write rank 0's measurements; after a while less often."""
        now = self.wall()
        interval = 1.5 if now - self._opened < _DENSE_FOR else _THEN_EVERY
        if hints.get("goodput") is not None and now - self._sampled >= interval:
            self._sampled = now
            self.emit("goodput", **{name: hints.get(name) for name in _SAMPLED})

    def failure(self, failure: Failure, used: int, most: int) -> None:
        """Record the failure of a replica."""
        self.emit(
            "failure",
            rank=failure.rank,
            exit_code=failure.exit_code,
            message=failure.message,
            restarts_used=used,
            max_restarts=most,
        )

    def lost(self, generation: int, failure: Failure) -> None:
        """Record the death of a replica that the others survive."""
        self.emit(
            "replica_lost",
            generation=generation,
            rank=failure.rank,
            exit_code=failure.exit_code,
            message=failure.message,
        )

    def _write_generation(self, unwritten: _UnwrittenGeneration, first_step: float | None) -> None:
        self._unwritten = None
        plan = unwritten.plan
        pause = None
        if first_step is not None and unwritten.before is not None:
            pause = max(0.0, first_step - unwritten.before)
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
