"""State from the memory of one replica into that of another.

The first donor tells everybody what there is (names, and the nesting with shapes in place of tensors);
then each newcomer, or one who has fallen behind, gets the tensors from one who has them, point to point,
donors taking turns. Tensors go in buckets of one type, so that many small ones cost one message, and no
more than one bucket is held beyond the state itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from adaptdl_elastic import checkpoint
from adaptdl_elastic._session import Session
from adaptdl_elastic.reducer import PeerLostError

STUCK = "a transfer that never ends"  # in the session's scratch
_LOOK, _GRACE = 0.05, 0.2  # seconds between looks for a death; that a transfer has to end by itself then

BUCKET = 1024 * 1024
"""Bytes of a message, unless a single tensor is larger."""


@dataclass(frozen=True)
class Slot:
    """Stands where a tensor was."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def give(session: Session, newcomers: list[int], donors: list[int], names: set[str] | None = None) -> None:
    """The side of those who have it. Every one of them calls it with the same arguments.

    names: of the states to give, all when None.
    """
    if not newcomers:
        return
    assert session.reducer is not None
    described: dict[str, tuple[str, Any]] = {}
    tensors: list[torch.Tensor] = []
    for name, state in sorted(session.states.items()):
        if names is not None and name not in names:
            continue
        if isinstance(state, checkpoint.TensorState):
            described[name] = ("tensors", _strip(state.state_dict(), tensors))
        elif session.rank == donors[0]:
            described[name] = ("bytes", state.snapshot())
    _describe(session, (described, newcomers, donors) if session.rank == donors[0] else None)
    mine = [n for turn, n in enumerate(newcomers) if donors[turn % len(donors)] == session.rank]

    def send() -> None:
        for newcomer in mine:
            for bucket in _buckets(tensors):
                flat = torch.cat([t.detach().reshape(-1) for t in bucket]) if len(bucket) > 1 else bucket[0]
                dist.send(_sendable(flat), newcomer)

    if mine:
        _patiently(session, send)


def take(session: Session) -> None:
    """The side of a newcomer: receive every state, and be in it."""
    described, newcomers, donors = _describe(session, None)
    donor = donors[newcomers.index(session.rank) % len(donors)]
    tensors = _targets(session, described)

    def receive() -> None:
        for bucket in _buckets(tensors):
            _receive(bucket, donor)

    _patiently(session, receive)
    supply = iter(tensors)
    checkpoint.restore_states(
        {name: _fill(body, supply) if kind == "tensors" else body for name, (kind, body) in described.items()}
    )


def _patiently(session: Session, transfer: Callable[[], None]) -> None:
    """Run `transfer`, unless somebody dies meanwhile.

    In a thread, because gloo does not notice when the other end dies in the middle of a tensor: then the
    thread is left to torch's time limit, and its group must never be freed.
    """
    failed: list[BaseException] = []

    def run() -> None:
        try:
            transfer()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="adaptdl-transfer", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK)
        if thread.is_alive() and session.control.lost is not None:
            thread.join(_GRACE)
            if thread.is_alive():
                session.scratch[STUCK] = True
                raise PeerLostError(session.control.lost or "a replica is gone")
    if failed:
        raise failed[0]


def _describe(session: Session, what: Any) -> Any:
    """What the first donor says there is; the others pass None."""
    assert session.reducer is not None
    return session.reducer.allreduce(what, lambda a, b: b if a is None else a, tag="states")


def _targets(session: Session, described: dict[str, tuple[str, Any]]) -> list[torch.Tensor]:
    """Where each tensor goes: into the one that this replica has in its place already, else a new one."""
    targets: list[torch.Tensor] = []
    for name, (kind, body) in described.items():
        if kind != "tensors":
            continue
        slots: list[Slot] = []
        _find_slots(body, slots)
        state, own = session.states.get(name), list[torch.Tensor]()
        if isinstance(state, checkpoint.TensorState):
            skeleton = _strip(state.state_dict(), own)
            if skeleton != body:  # as an optimizer's, which has no state before its first step
                own = _matching(skeleton, own, body)
        targets += own or [torch.empty(slot.shape, dtype=slot.dtype) for slot in slots]
    return targets


def _matching(skeleton: Any, own: list[torch.Tensor], body: Any) -> list[torch.Tensor]:
    """`own` tensors for those top-level parts that are alike, new ones for the others."""
    if not (isinstance(skeleton, dict) and isinstance(body, dict)):
        return []
    supply, targets = iter(own), list[torch.Tensor]()
    mine: dict[Any, list[torch.Tensor]] = {}
    for key, part in skeleton.items():
        slots: list[Slot] = []
        _find_slots(part, slots)
        mine[key] = [next(supply) for _ in slots]
    for key, part in body.items():
        slots = []
        _find_slots(part, slots)
        alike = key in skeleton and skeleton[key] == part
        targets += mine[key] if alike else [torch.empty(slot.shape, dtype=slot.dtype) for slot in slots]
    return targets


def _receive(bucket: list[torch.Tensor], donor: int) -> None:
    device = _device()
    if len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].device == device:
        dist.recv(bucket[0].detach().view(-1), donor)
        return
    flat = torch.empty(sum(t.numel() for t in bucket), dtype=bucket[0].dtype, device=device)
    dist.recv(flat, donor)
    with torch.no_grad():
        for tensor, part in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _device() -> torch.device:
    """Where messages have to be for the present backend."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(_device()).contiguous().reshape(-1)


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Runs of small tensors of one type, of at most BUCKET bytes, and each larger tensor by itself."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if not nbytes:
            continue
        if bucket and (size + nbytes > BUCKET or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += nbytes
    if bucket:
        yield bucket


def _strip(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with a Slot in place of every tensor, which goes to the end of `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Slot(tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: _strip(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_strip(item, tensors) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def _find_slots(value: Any, slots: list[Slot]) -> None:
    """Every Slot, in the order in which `_strip` met the tensors."""
    if isinstance(value, Slot):
        slots.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            _find_slots(item, slots)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _find_slots(item, slots)


def _fill(value: Any, supply: Iterator[torch.Tensor]) -> Any:
    """The inverse of `_strip`."""
    if isinstance(value, Slot):
        return next(supply)
    if isinstance(value, dict):
        return {key: _fill(item, supply) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_fill(item, supply) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value
