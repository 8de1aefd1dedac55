"""Give a newcomer a default process group without peers until it joins the others.

It has the planned rank and size, so that a script finds what it asks for and models can be wrapped. No other
process is connected. torch's `fake` backend would leave the tensors of a collective unchanged, or fill in
this replica's own: a seed that rank 0 should broadcast would silently be 0 here and another value there. So a
collective called by the script ends the newcomer, and training goes on without it, unless the others have
kept its result (`script_collectives`). A barrier moves no data, and the others have passed it: it ends at
once. So does every collective in a batch that does not count (`torch._elastic.dry_batch`). Collectives of
AdaptiveDataParallel are answered as the `fake` backend does: their results are replaced by the others' state
when the newcomer joins. The call stack tells the two apart.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed

from adaptdl_elastic import _frames, _session, collective

dist: Any = torch.distributed  # its stub does not export all of it

_BACKEND = "newcomer"
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_BETWEEN = (
    str(contextlib.__file__),
    str(warnings.__file__),
    "typing_extensions.py",
)  # these files wrap torch's functions
_PASSES_ON = str(Path(__file__).with_name("script_collectives.py"))  # its functions stand between, too
_c10d: Any = torch.distributed.distributed_c10d
_C10D = str(_c10d.__file__)
_new_group = _c10d._new_process_group_helper
_COLLECTIVES = (  # with all names that they have had in torch since 2.6
    "broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "_allgather_base",
    "allgather_coalesced", "allgather_into_tensor_coalesced", "all_gather_single",
    "all_gather_single_coalesced", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "alltoall", "alltoall_base", "all_to_all_single", "send", "recv", "recv_anysource",
)  # fmt: skip
_BARRIERS = ("barrier", "monitored_barrier")
# what the fake group has instead of torch 2.13's names of groups
_OLD_NAMES = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}


class _WaitingGroup(dist.ProcessGroup):  # type: ignore[misc]
    """Define a process group whose collectives end the process, unless this library has called them."""

    def __init__(self, rank: int, size: int, fake: Any) -> None:
        super().__init__(rank, size)
        self._fake, self._name = fake, ""

    # torch's C++ code calls these methods by these names

    def getBackendName(self) -> str:
        """Return the name for torch's logs."""
        return _BACKEND

    def setGroupName(self, name: str) -> None:
        """Set the name."""
        self._name = name

    def getGroupName(self) -> str:
        """Return the name."""
        return self._name

    group_name = property(getGroupName)


def _barrier(self: _WaitingGroup, *args: Any, **kwargs: Any) -> Any:
    """End at once: the others have passed it."""
    return self._fake.barrier()


def _guarded(name: str) -> Any:
    def call(self: _WaitingGroup, *args: Any, **kwargs: Any) -> Any:
        _only_for_us(name)
        known = name if hasattr(self._fake, name) else _OLD_NAMES.get(name, name)
        return getattr(self._fake, known)(*args, **kwargs)

    return call


for _name in _COLLECTIVES:
    setattr(_WaitingGroup, _name, _guarded(_name))
for _name in _BARRIERS:
    setattr(_WaitingGroup, _name, _barrier)


def is_torch(code: CodeType) -> bool:
    """Return whether `code` belongs to torch, or to a standard module that wraps torch's functions."""
    return code.co_filename.startswith(_TORCH) or code.co_filename.endswith(_BETWEEN)


def _only_for_us(method: str) -> None:
    """End the newcomer, unless this library calls torch, or a loop's body in a batch that does not count."""
    if _session.current().dry:
        return
    found: FrameType | None = None
    name = f"a collective ({method})"
    for frame in itertools.islice(_frames.callers(), 2, None):  # the first two callers are in this module
        file = frame.f_code.co_filename
        if file == _C10D:
            name = f"torch.distributed.{frame.f_code.co_name}"
        elif not is_torch(frame.f_code) and file != _PASSES_ON:
            found = frame
            break
    if found is not None and _frames.is_library(found.f_code):
        return
    place = "a thread of torch's" if found is None else f"{found.f_code.co_filename}:{found.f_lineno}"
    collective.give_up(
        f"it calls {name} ({place}) before its data loop, to which the running replicas cannot answer any "
        f"more"
    )


def enter(backend: str, rank: int, size: int) -> None:
    """Make such a group torch's default one, under the name of the others' `backend`."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (it registers the backend)

    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=rank, world_size=size)
    world = dist.group.WORLD
    _c10d._world.pg_map[world] = (dist.Backend(backend), _c10d._world.pg_map[world][1])
    _c10d._new_process_group_helper = _no_group


def leave() -> None:
    """Remove the default group, and restore torch's functions."""
    _c10d._new_process_group_helper = _new_group
    dist.destroy_process_group()


def _no_group(*args: Any, **kwargs: Any) -> Any:
    """Replace torch's function that makes every group."""
    _only_for_us("new_group")
    return _new_group(*args, **kwargs)


def _create(options: Any, more: Any) -> _WaitingGroup:
    plugin = dist.Backend._plugins["FAKE"]
    if plugin.extended_api:
        fake = plugin.creator_fn(options, more)
    else:
        fake = plugin.creator_fn(options.store, options.group_rank, options.group_size, options.timeout)
    return _WaitingGroup(options.group_rank, options.group_size, fake)
