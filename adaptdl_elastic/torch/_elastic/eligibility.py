"""What a script has besides what this library was given, and a change of size in place cannot be right for.

Nobody tells of it: the objects of the process are looked through, which takes tenths of a second, where
nobody waits for it: before the first data loop, and while newcomers start. What counts is use. A scheduler
or a loss scale that has not moved is the same in a newcomer, which makes its own.
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
from adaptdl_elastic.torch._gradient import grad_scaler
from adaptdl_elastic.torch._process_group import capability
from adaptdl_elastic.torch._runtime.heap import instances_of

GROUPS = "the script has process groups of its own"

_c10d: Any = torch.distributed.distributed_c10d
_KINDS = (LRScheduler, torch.amp.GradScaler, DistributedDataParallel)
_DEPTH, _MOST = 6, 10_000  # levels of attributes and containers that a scheduler may keep other ones in


def scan_user_objects(session: Session, again: bool = False) -> None:
    """Look through the objects of this process, unless that has been done and it need not be done again."""
    if session.user_objects is not None and not again:
        return
    session.user_objects = [weakref.ref(one) for one in instances_of(*_KINDS)]


def _found(session: Session, kind: type[Any]) -> list[Any]:
    """Return the user's objects of a kind that still exist."""
    if not capability.wanted(session):
        return []  # nobody asks
    scan_user_objects(session)
    alive = [reference() for reference in session.user_objects or ()]
    return [one for one in alive if isinstance(one, kind)]


def own_groups() -> bool:
    """Whether the script has made process groups, also those that this replica is not in.

    All replicas have the same answer, as they must to be armed against deaths together: every group is
    made by a call on all of them, and counted there.
    """
    return bool(_c10d._world.group_count > 1)


def why_not_remade(session: Session) -> str | None:
    """Return why the default group may not be replaced; None if no reason is known here.

    Other replicas may know other reasons.
    """
    if own_groups() or len(_c10d._world.pg_map) > 1:
        return GROUPS
    if any(one not in session.models for one in _found(session, DistributedDataParallel)):
        return "there is a DistributedDataParallel beside AdaptiveDataParallel"
    return None


def why_nobody_may_join(session: Session) -> str | None:
    """Return the state in use that new replicas would not get from the others; None: there is none."""
    for model in session.models:
        if model.thawed:
            return "parameters were thawed (requires_grad) after AdaptiveDataParallel was made"
        known = _inside(model.lr_scheduler)
        for one in _found(session, LRScheduler):
            if getattr(one, "optimizer", None) is model.optimizer and id(one) not in known and _moved(one):
                return f"AdaptiveDataParallel was not given the {type(one).__name__} in use as lr_scheduler"
    for scaler in _found(session, torch.amp.GradScaler):
        used = scaler.is_enabled() and getattr(scaler, "_scale", None) is not None
        if used and not grad_scaler.attached(scaler):
            return "AdaptiveDataParallel was not given the GradScaler in use as mp_scaler"
    return None


def may_change(session: Session) -> tuple[bool, str]:
    """Whether this script and backend can change their size in place, newcomers and all; and why not."""
    able, why = possible(session)
    if able:
        why = why_not_remade(session) or why_nobody_may_join(session) or ""
    return not why, why


def possible(session: Session) -> tuple[bool, str]:
    """Whether replicas of this script and backend can be of another generation; the same on all; why not."""
    why = capability.why_not(session)
    if why is not None:
        return False, why
    if any(model.has_own_process_group for model in session.models):
        return False, "an AdaptiveDataParallel was given a process group of its own"
    if not session.models:
        return False, "no AdaptiveDataParallel has been made"
    if own_groups():
        return False, GROUPS
    if session.channel is not None and env.secret() is None:
        return False, "there is no ADAPTDL_SECRET"
    return True, ""


def _moved(scheduler: Any) -> bool:
    """Whether a scheduler has been stepped since it was made, which itself counts as one step."""
    return bool(getattr(scheduler, "_step_count", getattr(scheduler, "last_epoch", 0) + 1) > 1)


def _inside(scheduler: Any) -> set[int]:
    """Identities of a scheduler and of those it is made of, as SequentialLR is, and a script's own may be."""
    known, level = set[int](), [scheduler]
    for _ in range(_DEPTH):
        level = [one for one in level if id(one) not in known][:_MOST]
        known.update(map(id, level))
        level = [part for one in level for part in _parts(one)]
    return known


def _parts(one: Any) -> list[Any]:
    if isinstance(one, list | tuple):
        return [*one]
    if isinstance(one, dict):
        return [*one.values()]
    if isinstance(one, torch.optim.Optimizer | torch.nn.Module | torch.Tensor):
        return []
    return [*getattr(one, "__dict__", {}).values()]
