"""Find objects of the script that forbid a change of the number of replicas in place.

Such objects are, for example, schedulers, GradScalers and DistributedDataParallel models that were not given
to this library. They are found among all objects of the process. The search takes tenths of a second and runs
when no replica waits for it: before the first data loop, and while newcomers start. Only objects in use
matter: an unused scheduler or GradScaler has the same state in a newcomer, which creates its own.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from adaptdl_elastic import env
from adaptdl_elastic._session import Session
from adaptdl_elastic.torch._elastic.script_objects import inside, named
from adaptdl_elastic.torch._gradient import grad_scaler
from adaptdl_elastic.torch._process_group import capability
from adaptdl_elastic.torch._process_group.backends import present
from adaptdl_elastic.torch._runtime.heap import instances_of

GROUPS = "the script has process groups of its own"

_c10d: Any = torch.distributed.distributed_c10d
_KINDS = (LRScheduler, torch.amp.GradScaler, DistributedDataParallel)


def scan_user_objects(session: Session, again: bool = False) -> None:
    """Search the objects of this process for `_KINDS`; if `again` is False, only once per session."""
    if session.user_objects is not None and not again:
        return
    session.user_objects = [weakref.ref(one) for one in instances_of(*_KINDS)]


def _found(session: Session, kind: type[Any]) -> list[Any]:
    """Return the script's existing objects of type `kind`."""
    if not capability.wanted(session):
        return []  # changes in place are not wanted: skip the search
    scan_user_objects(session)
    alive = [reference() for reference in session.user_objects or ()]
    return [one for one in alive if isinstance(one, kind)]


def own_groups(session: Session) -> bool:
    """Return whether the script has made process groups, including groups without this replica.

    All replicas get the same answer, because every group is made by a call on all of them. The same answer
    is necessary: either all replicas can survive a death, or none.
    """
    ours = present(session)
    return bool(_c10d._world.group_count > 1 + (0 if ours is None else ours.further_made))


def why_not_remade(session: Session) -> str | None:
    """Return why the default process group may not be replaced; None if this replica knows no reason.

    Another replica may know a reason.
    """
    ours = present(session)
    if own_groups(session) or len(_c10d._world.pg_map) > 1 + (0 if ours is None else ours.further_here):
        return GROUPS
    if any(one not in session.models for one in _found(session, DistributedDataParallel)):
        return "there is a DistributedDataParallel beside AdaptiveDataParallel"
    return None


def why_nobody_may_join(session: Session) -> str | None:
    """Return why a newcomer would not get the state of the others; None if there is no reason."""
    if session.trains_outside:
        return "the script trains outside of remaining_epochs_until"
    saved = inside(named(session))
    for model in session.models:
        if model.thawed:
            return "parameters were thawed (requires_grad) after AdaptiveDataParallel was made"
        known = saved | inside(model.lr_scheduler)
        for one in _found(session, LRScheduler):
            if getattr(one, "optimizer", None) is model.optimizer and id(one) not in known and _moved(one):
                return f"AdaptiveDataParallel was not given the {type(one).__name__} in use as lr_scheduler"
    for scaler in _found(session, torch.amp.GradScaler):
        used = scaler.is_enabled() and getattr(scaler, "_scale", None) is not None
        if used and not grad_scaler.attached(scaler):
            return "AdaptiveDataParallel was not given the GradScaler in use as mp_scaler"
    return None


def may_change(session: Session) -> tuple[bool, str]:
    """Return whether the number of replicas can change in place, newcomers included, and why not."""
    able, why = possible(session)
    if able:
        why = why_not_remade(session) or why_nobody_may_join(session) or ""
    return not why, why


def possible(session: Session) -> tuple[bool, str]:
    """Return whether the running replicas can form another generation in place, and why not.

    The answer is the same on all replicas.
    """
    why = capability.why_not(session)
    if why is not None:
        return False, why
    if any(model.has_own_process_group for model in session.models):
        return False, "an AdaptiveDataParallel was given a process group of its own"
    if not session.models:
        return False, "no AdaptiveDataParallel has been made"
    if own_groups(session):
        return False, GROUPS
    if session.channel is not None and env.secret() is None:
        return False, "there is no ADAPTDL_SECRET"
    return True, ""


def _moved(scheduler: Any) -> bool:
    """Return whether a scheduler has been stepped since its creation, which itself counts as one step."""
    return bool(getattr(scheduler, "_step_count", getattr(scheduler, "last_epoch", 0) + 1) > 1)
