"""Measure what a replica does in a training step, and keep what it is doing now.

The training loop, the communication hook and the optimizer's step call `enter` when one stage of a step ends
and the next begins. The stages of a step come in the order of `Stage`. Two parts of the library use them:
`_tuning.replica_speed` finds the replica that is slower than the others, and `hang_watch` finds the replica
that all others wait for.

On a GPU the host only queues the work, so the host's clock cannot tell computing from waiting for the other
replicas. There two events on the device's stream enclose the wait; they are read some steps later, when
reading them needs no synchronisation.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from enum import IntEnum
from typing import Any, NamedTuple

import torch

_PENDING_EVENTS = 32
"""Most pairs of events that wait to be read."""


class Stage(IntEnum):
    """List the stages of a step, in their order."""

    BOUNDARY = 0  # between two steps, where replicas agree; the position is that of the coming step
    DATA = 1  # it waits for the loader's next batch
    BODY = 2  # the loop's body, until all gradients of this replica are computed
    GRADIENTS = 3  # its gradients wait for those of the other replicas
    STEP = 4  # the rest of the body: optimizer step, and what the script does besides


DESCRIPTIONS = {
    Stage.DATA: "waiting for data",
    Stage.BODY: "in the body of its loop, before its gradients were complete",
    Stage.GRADIENTS: "waiting for the gradients of the others",
    Stage.STEP: "in the body of its loop, after its gradients were averaged",
    Stage.BOUNDARY: "between two steps",
}


class StepParts(NamedTuple):
    """Seconds of one step, by what the replica did. Their sum is the time from step to step."""

    data: float
    compute: float
    communication: float  # work for sending gradients; waiting for other replicas is not included
    waiting: float

    @property
    def own(self) -> float:
        """Seconds in which the replica was busy itself, so that others may have waited for it."""
        return self.data + self.compute + self.communication


class StepClock:
    """Keep the stage of this replica, and how long it has spent in each stage of the current step.

    `arrived` may be called in a thread of the communication library; everything else in the training thread.
    """

    def __init__(self) -> None:
        self.stage = Stage.STEP
        self.changed = time.monotonic()  # when the present stage began
        self.moves = 0  # how often the stage has changed
        self.on_gpu = False  # whether the last gradients were computed there
        self.passes = 0  # backward passes of the present batch whose gradients were averaged
        self._spent = [0.0] * len(Stage)
        self._sending = 0.0
        self._lock = threading.Lock()
        self._ready: Any = None  # CUDA event: this step's gradients are computed
        self._pending: deque[tuple[Any, Any, StepParts]] = deque(maxlen=_PENDING_EVENTS)

    def enter(self, stage: Stage) -> None:
        """Begin `stage` now."""
        with self._lock:
            now = time.monotonic()
            self._spent[self.stage] += now - self.changed
            self.stage, self.changed = stage, now
            self.moves += 1
            if stage < Stage.GRADIENTS:
                self.passes = 0

    def sent(self, seconds: float) -> None:
        """Record that the last `seconds` of the present stage were spent on starting to send gradients."""
        with self._lock:
            self._sending += seconds
            self._spent[self.stage] -= seconds

    def computed(self, on_gpu: bool) -> None:
        """Record that all gradients of this replica are computed, and on their way to the others."""
        self.on_gpu = on_gpu
        if on_gpu:
            self._ready = _event()
        self.passes += 1
        self.enter(Stage.GRADIENTS)

    def arrived(self) -> None:
        """Record that the averaged gradients are here."""
        if self.stage is Stage.GRADIENTS:
            self.enter(Stage.STEP)

    def stepping(self) -> None:
        """Record that the optimizer steps now: gradients were averaged, if there were any to average."""
        self.arrived()
        if self._ready is not None and not isinstance(self._ready, tuple):
            self._ready = self._ready, _event()

    def restart(self) -> None:
        """Begin a step now, without the times so far."""
        with self._lock:
            self._spent, self._sending = [0.0] * len(Stage), 0.0
            self.changed, self._ready = time.monotonic(), None

    def finish(self) -> list[StepParts]:
        """End a step; return the steps whose parts are known by now, the earliest first."""
        with self._lock:
            now = time.monotonic()
            self._spent[self.stage] += now - self.changed
            self.changed = now
            spent, self._spent = self._spent, [0.0] * len(Stage)
            sending, self._sending = self._sending, 0.0
            ready, self._ready = self._ready, None
        compute = max(spent[Stage.BODY] + spent[Stage.STEP], 0.0)
        waiting = max(spent[Stage.GRADIENTS] + spent[Stage.BOUNDARY], 0.0)
        parts = StepParts(spent[Stage.DATA], compute, sending, waiting)
        if not isinstance(ready, tuple):
            return [parts]
        self._pending.append((*ready, parts))
        found = []
        while self._pending and self._pending[0][1].query():
            begun, ended, parts = self._pending.popleft()
            waited = begun.elapsed_time(ended) / 1e3
            busy = max(parts.compute + parts.waiting - waited, 0.0)
            found.append(parts._replace(compute=busy, waiting=waited))
        return found


def _event() -> Any:
    """Return a CUDA event recorded on the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
