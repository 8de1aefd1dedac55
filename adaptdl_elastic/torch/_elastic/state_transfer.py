"""Send states from the memory of one replica (donor) to that of another.

The first donor sends all replicas a description of the states: their names, and their nesting with shapes in
place of tensors. Then each receiver (a newcomer, or a survivor that is a step behind) gets the tensors from
one donor, point to point. The receivers are divided among the donors. Tensors are sent in buckets of one
dtype, so that many small tensors cost one message. Besides the state, at most one bucket of memory is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from adaptdl_elastic import checkpoint
from adaptdl_elastic._session import Session
from adaptdl_elastic.checkpoint.state_copy import Slot, fill, parts_of, strip
from adaptdl_elastic.torch._process_group.backends import STALL, Group, patiently, present

BUCKET = 1024 * 1024
"""Largest size of a bucket in bytes, unless a single tensor is larger."""


def give(session: Session, newcomers: list[int], donors: list[int], names: set[str] | None = None) -> None:
    """Send states to new replicas. All donors call it with the same arguments.

    Args:
        session: This replica's session.
        newcomers: Ranks of the new replicas.
        donors: Ranks of the replicas that send.
        names: Names of the states to send; None: all.
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
            described[name] = ("tensors", strip(state.state_dict(), tensors))
        elif session.rank == donors[0]:
            described[name] = ("bytes", state.snapshot())
    _describe(session, (described, newcomers, donors) if session.rank == donors[0] else None)
    mine = [n for turn, n in enumerate(newcomers) if donors[turn % len(donors)] == session.rank]

    group = _group(session)

    def send() -> None:
        # in turn, so that none of them takes the donor for stopped
        for bucket in _buckets(tensors):
            send_bucket(group, bucket, mine)

    if mine:
        patiently(session, group, send)


def take(session: Session, overwrites: Callable[[], None] | None = None) -> None:
    """Receive every state that the donors send, and load it.

    A newcomer receives into its existing tensors. A survivor receives into new memory, so that its own state
    stays intact if the donor dies meanwhile. If its device has no room for new memory, it receives into its
    existing tensors too.

    Args:
        session: This replica's session.
        overwrites: Function that is called before existing tensors of a survivor are overwritten; None for a
            newcomer, whose tensors hold no state of value.
    """
    described, newcomers, donors = _describe(session, None)
    donor = donors[newcomers.index(session.rank) % len(donors)]
    tensors = None if overwrites is None else _apart(described)
    if tensors is None:
        if overwrites is not None:
            overwrites()
        tensors = _targets(session, described)
    group = _group(session)

    def receive() -> None:
        for bucket in _buckets(tensors):
            _receive(group, bucket, donor)

    patiently(session, group, receive)
    supply = iter(tensors)
    checkpoint.restore_states(
        {name: fill(body, supply) if kind == "tensors" else body for name, (kind, body) in described.items()}
    )


def _describe(session: Session, what: Any) -> Any:
    """Return the first donor's description of the states; the other replicas pass None."""
    assert session.reducer is not None
    return session.reducer.allreduce(what, lambda a, b: b if a is None else a, tag="states", objects=True)


def _apart(described: dict[str, tuple[str, Any]]) -> list[torch.Tensor] | None:
    """Return new tensors for all described tensors, or None if the device has no room for them."""
    bodies = [body for kind, body in described.values() if kind == "tensors"]
    try:
        return _fresh(bodies)
    except torch.OutOfMemoryError:
        return None


def _targets(session: Session, described: dict[str, tuple[str, Any]]) -> list[torch.Tensor]:
    """Return the tensors to receive into: this replica's existing ones where they fit, else new ones."""
    targets: list[torch.Tensor] = []
    for name, (kind, body) in described.items():
        if kind != "tensors":
            continue
        state = session.states.get(name)
        # they differ e.g. for an optimizer before its first step
        targets += _matching(state.state_dict() if isinstance(state, checkpoint.TensorState) else None, body)
    return targets


def _matching(own: Any, body: Any, in_parts: bool = True) -> list[torch.Tensor]:
    """Return the tensors of `own` for top-level parts of equal structure, new tensors for the others."""
    tensors: list[torch.Tensor] = []
    if same_skeleton(strip(own, tensors), body):
        return tensors
    if in_parts and isinstance(own, dict) and isinstance(body, dict):
        return [one for key, part in body.items() for one in _matching(own.get(key), part, in_parts=False)]
    return _fresh(body)


def _fresh(described: Any) -> list[torch.Tensor]:
    """Return new tensors for the described ones."""
    return [slot.fresh() for slot in parts_of(described, Slot)]


def send_bucket(group: Group, bucket: list[torch.Tensor], newcomers: Sequence[int]) -> None:
    """Send tensors of one dtype in one message. They may be on different devices, as an optimizer's are.

    Several newcomers get a large tensor in turns of BUCKET, for a group that sends in smaller parts anyway.
    """
    parts = [tensor.detach().to(group.device).reshape(-1) for tensor in bucket]
    flat = torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()
    in_turns = len(newcomers) > 1 and group.device.type == "cpu"
    for part in torch.split(flat, BUCKET // flat.element_size()) if in_turns else [flat]:
        for newcomer in newcomers:
            group.send(part, newcomer, STALL)


def _receive(group: Group, bucket: list[torch.Tensor], donor: int) -> None:
    device = group.device
    if len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].device == device:
        group.receive(bucket[0].detach().view(-1), donor, STALL)
        return
    flat = torch.empty(sum(t.numel() for t in bucket), dtype=bucket[0].dtype, device=device)
    group.receive(flat, donor, STALL)
    with torch.no_grad():
        for tensor, part in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def _group(session: Session) -> Group:
    group = present(session)
    assert group is not None
    return group


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield runs of tensors of one dtype, of at most BUCKET bytes; a larger tensor is a bucket by itself."""
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


def same_skeleton(one: Any, other: Any) -> bool:
    """Return whether two results of `strip` are equal, the order of dicts included: tensors follow it."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [*one] == [*other] and all(same_skeleton(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(same_skeleton, one, other))
    return bool(one == other)
