"""Find replicas whose models drift apart, and end the job with an error that names the loop.

The problem. Replicas have equal parameters only as long as all of them step at the same batches and change
parameters alike. A counter that begins at 0 in a newcomer, or `if rank == 0:`, breaks this without an error.

What is done. Each replica counts the optimizer steps of each window that trains. It tells the others when
they are not those of the window before, or if there were none, so that ordinary training sends nothing. At
the end of an epoch it sends a digest of its parameters. Rank 0 compares its own records with those of every
other replica, and each of them compares its own with rank 0's: whichever record comes second is compared, so
that a difference is found one batch late and no replica waits. Before a change or a checkpoint the digests
come with the positions on which the replicas agree.

Deaths. A window whose gradients a death has spoilt is not recorded. Records of an earlier generation are
ignored.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from adaptdl_elastic import _frames
from adaptdl_elastic._explained import see
from adaptdl_elastic._session import Session
from adaptdl_elastic.reducer import CollectiveMismatchError

log = logging.getLogger(__name__)

RECORD, APART = "window", "apart"
"""Kinds of the control messages: a replica's record of a window or an epoch; what was found."""

_KEPT = 256  # windows whose records are kept for replicas that are behind or ahead
_STEP = (
    "all replicas must step at the same batches, and a newcomer's counters begin at 0: step where "
    "i + 1 == adl.expected_batches(), not len(loader), or let the loader accumulate "
    "(gradient_accumulation=True)"
)
_CHANGE = (
    "all replicas must change parameters alike: look for a step, or an edit of a parameter, under a "
    "condition that differs between them, such as the rank or a counter"
)

Place = tuple[int, ...]
"""Epoch, data loop, data loop outside of epochs, sample index."""

Counts = dict[str, int]
"""Steps of a window by model, or digests of parameters by type of device."""


class ReplicasApartError(CollectiveMismatchError):
    """Raised if the replicas' models have drifted apart. A restart would not help."""

    ends_job = True
    """Read by the agent's side: the job fails without restarts."""


class DriftWatch:
    """Compare this replica's optimizer steps and parameters with those of others. One object per session.

    Args:
        session: This replica's session.
        tell: Function that sends a control message to a rank, this one included.
    """

    def __init__(self, session: Session, tell: Callable[[int, Any], None]) -> None:
        self._session, self._tell = session, tell
        self.error: ReplicasApartError | None = None
        self._lock = threading.Lock()
        self._own: dict[Place, Counts] = {}  # (generation, place) → own record
        self._others: dict[Place, dict[int, tuple[Counts, bool]]] = {}  # records of places not reached yet
        self._last: tuple[int, Counts] | None = None  # generation and steps of the window before
        self._loop: Place = ()
        self._line = self._epoch_line = ""  # of the script's data loop and epoch loop
        # of the running window
        self._at: Place | None = None
        self._before: Counts = {}
        self.synchronised = False  # also with one replica

    def check(self) -> None:
        """Raise ReplicasApartError if the replicas are known to have drifted apart."""
        if self.error is not None:
            raise self.error

    # -- windows -----------------------------------------------------------------------------------

    def window_begins(self, place: Place) -> None:
        """Begin to count the steps of the window at `place`."""
        session, self.synchronised = self._session, False
        if session.replicas == 1:
            return
        self._before, self._at = self._steps(), (session.generation, *place)
        if self._loop != self._at[:-1]:
            self._loop, self._line = self._at[:-1], _frames.script_line()

    def synchronises(self) -> None:
        """Note that gradients of the running window are about to be averaged over the replicas."""
        self.synchronised, at = True, self._at
        if at in self._others:
            for rank, record in list(self._others.get(at, {}).items()):
                self._check_waiting(at, rank, *record)

    def window_ends(self) -> None:
        """Record the steps of the running window, which trains; raise ReplicasApartError if they differ."""
        at, self._at = self._at, None
        generation = self._session.generation
        if at is None or at[0] != generation or self._session.dry or not self._session.models:
            return
        steps = {name: now - self._before.get(name, 0) for name, now in self._steps().items()}
        usual = any(steps.values()) and self._last == (generation, steps)
        self._last = (generation, steps)
        self._record(at, steps, send=not usual)

    def epoch_ends(self, epoch: int) -> None:
        """Compare the parameters at the end of an epoch; raise ReplicasApartError if they differ."""
        session = self._session
        whole = not (session.recovery.failed or session.joining)
        if whole and session.consensus.lost is None and session.replicas > 1 and session.models:
            self._epoch_line = _frames.script_line()
            self._record((session.generation, epoch), self.digest(), send=True)

    def _steps(self) -> Counts:
        return {model.name: model.attempted_steps for model in self._session.models}

    def _record(self, at: Place, found: Counts, send: bool) -> None:
        session = self._session
        if send:
            message = (RECORD, at[0], [list(at[1:]), found, self.synchronised])
            for rank in range(1, session.replicas) if session.rank == 0 else (0,):
                self._tell(rank, message)
        with self._lock:
            self._own[at] = found
            others = self._others.pop(at, {})
            if len(self._own) > _KEPT:
                del self._own[next(iter(self._own))]
        for rank, (other, _) in others.items():
            self._compare(at, found, rank, other)
        self.check()

    def on_record(self, sender: int, generation: int, body: Any) -> None:
        """Take another replica's record. Runs in the thread that receives control messages."""
        place, found, synchronised = body
        if generation != self._session.generation:
            return
        at = (generation, *place)
        with self._lock:
            own = self._own.get(at)
            if own is None:
                self._others.setdefault(at, {})[sender] = found, synchronised
                if len(self._others) > _KEPT:
                    del self._others[next(iter(self._others))]
        if own is not None:
            self._compare(at, own, sender, found)
        elif at == self._at and self.synchronised:
            self._check_waiting(at, sender, found, synchronised)

    # -- differences -------------------------------------------------------------------------------

    def _compare(self, at: Place, own: Counts, rank: int, other: Counts) -> None:
        mine = self._session.rank
        for name in sorted(own.keys() & other.keys()):
            if own[name] != other[name]:
                times = dict(sorted({mine: own[name], rank: other[name]}.items()))
                steps = " and ".join(f"{count} times on rank {one}" for one, count in times.items())
                where = self._where(at, f"the optimizer of {name} stepped {steps}")
                return self._found(at, where if len(at) > 2 else self._parameters(at[1], *times))

    def _check_waiting(self, at: Place, rank: int, steps: Counts, synchronised: bool) -> None:
        """Report the error if this replica waits for gradients that replica `rank` does not synchronise."""
        if synchronised or any(steps.values()):
            return
        mine, group = self._session.rank, self._session.group
        what = f"rank {mine} synchronises gradients, and rank {rank} neither does nor steps"
        self._found(at, self._where(at, what))
        if group is not None:
            group.abort()

    def _where(self, at: Place, what: str) -> str:
        return f"{self._line}: at sample {at[-1]} of epoch {at[1]} {what}: {_STEP}{see(_STEP)}"

    def _parameters(self, epoch: int, one: int, other: int) -> str:
        what = f"the parameters of ranks {one} and {other} differ in epoch {epoch}"
        return f"{self._epoch_line}: {what}: {_CHANGE}{see(_CHANGE)}"

    def _found(self, at: Place, text: str) -> None:
        for rank in {self._session.rank, 0}:
            self._tell(rank, (APART, at[0], text))

    def on_apart(self, generation: int, text: str) -> None:
        """Let this replica end with an error: whatever waits for another replica ends at once.

        Runs in any thread.
        """
        session = self._session
        if self.error is not None or generation != session.generation:
            return
        self.error = ReplicasApartError(text)
        log.error("%s", text)
        for rank in range(1, session.replicas) if session.rank == 0 else ():
            self._tell(rank, (APART, generation, text))
        if session.reducer is not None:
            session.reducer.come_apart(self.error)
        for model in session.models:
            model.giving_up(text)()

    # -- parameters --------------------------------------------------------------------------------

    def digest(self) -> Counts:
        """Return sums of the bits of all parameters that every replica has, by type of device.

        All replicas add the same averaged gradients, so their parameters are equal to the last bit. The norm
        of a gradient, as for clipping, is rounded differently on devices of other types and with other
        numbers of threads, so only devices of one type are compared. Parameters in shards, and those that
        the script hides from DDP, are left out.
        """
        sums: dict[torch.device, Any] = {}
        for model in self._session.models:
            hidden = getattr(model, "parameters_to_ignore", ())
            for name, param in model.module.named_parameters():
                if name not in hidden and not model.has_own_process_group and _comparable(param):
                    bits = _sum_of_bits(param.detach())
                    sums[param.device] = sums.get(param.device, 0) * 31 + bits
        return {f"{_kind(device)} {number}": int(sums[device]) for number, device in enumerate(sums)}

    def compare(self, digests: Sequence[Counts]) -> None:
        """Raise ReplicasApartError, on every replica, unless the `digests` of all replicas are equal."""
        for rank, other in enumerate(digests):
            if any(other.get(kind, value) != value for kind, value in digests[0].items()):
                self._epoch_line = _frames.script_line()
                raise ReplicasApartError(self._parameters(self._session.epoch or 0, 0, rank))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits as integers of 8 bytes, which is 15 times faster than that of others.

    The result depends on the elements only, since replicas may have other strides and addresses.
    """
    size = tensor.element_size()
    flat = tensor.contiguous().view(-1)
    flat = flat.clone() if flat.storage_offset() * size % 8 else flat
    whole = flat.numel() - flat.numel() % (8 // size)
    rest = flat[whole:].view(_INTEGERS[size])
    return flat[:whole].view(torch.int64).sum() + rest.sum(dtype=torch.int64)


def _comparable(param: torch.Tensor) -> bool:
    if torch.nn.parameter.is_lazy(param) or param.is_meta or param.layout is not torch.strided:
        return False
    # a subclass, such as one of quantized or sharded tensors, may not show its bits
    return type(param.detach()) is torch.Tensor and param.element_size() in _INTEGERS


def _kind(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"
