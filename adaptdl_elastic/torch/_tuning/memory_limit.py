"""Remember the largest local batch that fits into the memory of every replica.

The limit is unknown until a batch did not fit, or until a search at the start has found it. It only ever
becomes smaller. It is part of every checkpoint, replicas that join receive it, and the scheduling hints tell
it to the coordinator. The coordinator tells it to later jobs of the same script, which begin with it.

A data loop inside another one has a limit of its own. It holds for the loops over one loader, and no other
part of the job needs to know it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from adaptdl_elastic import _session, checkpoint, env
from adaptdl_elastic._session import Session
from adaptdl_elastic._values import BatchSize, Limits, StepOutOfMemory
from adaptdl_elastic.torch._tuning.batch_size import local_batch

log = logging.getLogger(__name__)

LIMIT = "memory_limit"
"""Kind of the command by which all replicas take over a lower limit at the same boundary."""


class MemoryLimit(checkpoint.TensorState):
    """Hold the limit, in samples of one replica. One per session: `memory_limit()`."""

    required = False

    def __init__(self, session: Session) -> None:
        super().__init__("adaptdl-memory")
        self._session = session
        self.largest: int | None = None  # None: not known
        self.inner: dict[str, int] = {}  # key of a loader → limit of its loops inside other data loops

    def state_dict(self) -> dict[str, Any]:
        """Return the limits for checkpoints, newcomers and survivors."""
        return {"largest": self.largest, "inner": dict(self.inner)}

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over the limits in `state_dict`."""
        self.largest = state_dict["largest"]
        self.inner = dict(state_dict.get("inner", {}))  # a checkpoint of an earlier version has none

    def agree(self, states: Iterable[dict[str, Any]]) -> None:
        """Take over the smallest limits in the replicas' `states`."""
        known = list(states)
        self.largest = min((one["largest"] for one in known if one["largest"] is not None), default=None)
        keys = {key for one in known for key in one["inner"]}
        self.inner = {key: min(one["inner"][key] for one in known if key in one["inner"]) for key in keys}

    def learn(self, failure: StepOutOfMemory) -> None:
        """Lower the limits of the loops whose batches have not fitted in a step."""
        if failure.largest is not None:
            self.lower(failure.largest, str(failure))
        for key, largest in failure.inner.items():
            known = self.inner.get(key)
            if known is not None and known <= largest:
                continue
            self.inner[key] = largest
            if self._session.rank == 0:
                log.warning(
                    "%s: from now on a data loop over loader %s inside another one has more batches, of at "
                    "most %d samples of one replica",
                    failure,
                    key,
                    largest,
                )

    def lower(self, largest: int, why: str) -> bool:
        """Lower the limit to `largest`, and tell the user; return False if it is not above that.

        Args:
            largest: Samples of one replica that fit.
            why: What has shown it, for the message.
        """
        if self.largest is not None and self.largest <= largest:
            return False
        self.largest = largest
        session = self._session
        if session.rank == 0:
            log.warning(
                "%s: from now on the batch of one replica has at most %d samples in a pass, and larger "
                "batches are accumulated (the batch of a step stays as it is)",
                why,
                largest,
            )
            session.emit("memory_limit", largest=largest, message=why, step=session.step)
        return True


def memory_limit(session: Session | None = None) -> MemoryLimit:
    """Return the limit of this process's session.

    The first call restores it from the checkpoint, or else takes what earlier jobs of the script have learnt.
    """
    session = session or _session.current()
    found = session.memory
    if found is None:
        found = session.memory = MemoryLimit(session)
        checkpoint.load_state(found)
        told = env.memory_limit()
        if found.largest is None and told is not None:
            found.lower(
                told, f"other jobs of this script ran out of memory above {told} samples of a replica"
            )
    assert isinstance(found, MemoryLimit)
    return found


def limited(limits: Limits, largest: int | None) -> Limits:
    """Return a loader's limits with the limit of the memory, if it is known.

    If the initial batch does not fit on one replica, accumulation is allowed even if the script did not allow
    it, because the batch size is to stay the same.
    """
    if largest is None:
        return limits
    low, high = limits.bounds or (1, largest)
    bounds = min(low, largest), min(high, largest)
    return Limits(
        limits.init, limits.maximum, bounds, limits.accumulation or local_batch(limits.init, 1) > largest
    )


def split(now: BatchSize, largest: int | None) -> BatchSize:
    """Return the same batch of one replica in passes of at most `largest` samples, rounded up."""
    if largest is None or now.atomic_bsz <= largest:
        return now
    samples = now.atomic_bsz * (now.accumulation_steps + 1)
    passes = -(-samples // largest)
    return BatchSize(-(-samples // passes), passes - 1)
