"""Hide how torch's backends differ when a group loses a peer, ends, and completes its work.

* *A peer dies.* gloo: a collective soon raises (its sockets are closed), or never ends. NCCL: no error may
  come for minutes.
* *The result of a collective is complete.* gloo: when its future or `wait` ends. NCCL: these end when the
  collective is enqueued, for the GPU to wait; whether it is complete is found by an event on the GPU
  (`is_completed`).
* *Abort.* gloo: shut its sockets down. NCCL: abort the communicator, which ends everything enqueued, with
  whatever memory content there is.
* *Leave an intact group.* gloo: destroy it. NCCL: abort it, since that waits for no peer and was tried by the
  self-test.
* *Free a group that is not intact.* gloo: never, if it has lost an operation, because its destructor would
  wait for that. NCCL: never, because its destructor waits for threads that check every failed operation.

`base` defines how a group is used, `gloo` and `nccl` implement it. All other modules use a group as a
`Group`, one per generation of a process. The statements about NCCL are from torch's source
(ProcessGroupNCCL.cpp, 2.9 and later) and NCCL's documentation.
"""

from __future__ import annotations

from typing import Any

from adaptdl_elastic.torch._process_group.backends.base import (
    ARRIVES,
    STALL,
    Group,
    broadcast,
    keep,
    keep_object,
    patiently,
    present,
)
from adaptdl_elastic.torch._process_group.backends.gloo import Gloo
from adaptdl_elastic.torch._process_group.backends.nccl import Nccl

__all__ = [
    "ARRIVES",
    "KINDS",
    "STALL",
    "Gloo",
    "Group",
    "Nccl",
    "broadcast",
    "keep",
    "keep_object",
    "kind",
    "patiently",
    "present",
]

KINDS: dict[str, type[Group]] = {"gloo": Gloo, "nccl": Nccl}
"""Classes by torch's names of the backends."""


def kind(backend: Any) -> type[Group]:
    """Return the `Group` class for a backend as in `init_process_group`: "nccl", "cpu:gloo,cuda:nccl"."""
    names = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}
    main = names - {"gloo"} or names
    return KINDS.get(main.pop(), Group) if len(main) == 1 else Group
