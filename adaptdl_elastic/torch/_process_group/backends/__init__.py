"""What differs between torch's backends when a group breaks, ends, and has done its work.

*A peer dies.* gloo: a collective raises, soon (its sockets are closed), or never ends. NCCL: nobody may
say anything for minutes. *The result of a collective is there.* gloo: when its future or `wait` ends. NCCL:
these end when it is queued, for the GPU to wait; whether it has arrived is asked of an event on the GPU
(`is_completed`). *To hang up.* gloo: shut its sockets down. NCCL: abort the communicator, which ends all
that is queued, with whatever is in memory then. *To leave a group that is in order.* gloo: destroy it.
NCCL: abort it, since that waits for no peer, and is what the self-test has tried. *To free a group that is
not.* gloo: never, if it has lost an operation, because its destructor would wait for that. NCCL: never,
because its destructor waits for threads that look at every operation that has failed.

Everything else of this library knows a group as a `Group`, one for each generation of a process. What is
said of NCCL is from the source of torch (ProcessGroupNCCL.cpp, 2.9 and later) and NCCL's documentation.
"""

from __future__ import annotations

from typing import Any

from adaptdl_elastic.torch._process_group.backends.base import (
    ARRIVES,
    Group,
    broadcast,
    keep,
    patiently,
    present,
)
from adaptdl_elastic.torch._process_group.backends.gloo import Gloo
from adaptdl_elastic.torch._process_group.backends.nccl import Nccl

__all__ = ["ARRIVES", "KINDS", "Gloo", "Group", "Nccl", "broadcast", "keep", "kind", "patiently", "present"]

KINDS: dict[str, type[Group]] = {"gloo": Gloo, "nccl": Nccl}
"""By torch's name of the backend."""


def kind(backend: Any) -> type[Group]:
    """Which `Group` a backend needs, as `init_process_group` takes it: "nccl", "cpu:gloo,cuda:nccl"."""
    names = {part.rpartition(":")[2] for part in str(backend).lower().split(",")}
    main = names - {"gloo"} or names
    return KINDS.get(main.pop(), Group) if len(main) == 1 else Group
