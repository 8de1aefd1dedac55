"""Save objects of the script that carry state and were given to no part of this library, e.g. an average.

The problem. A script may train with an AveragedModel, a second scheduler or an optimizer of its own, without
giving it to the library. A resumed script would begin with a new one.

What is done. When an epoch loop begins, and after each epoch, the script's variables are searched for objects
with `state_dict` and `load_state_dict`, and for schedulers without these (`plain_attributes`). A mark of each
state is recorded, for which a few elements of each tensor are read. Before a save and before a change in
place the marks are compared. An object that has changed on every replica, and is equal there but for its
tensors, belongs to the State of this module from then on, by the name of its variable. An object that takes
over the variable also takes over the name. A state is loaded when the epoch loop begins in which it was
saved. An object in a list has no name of its own, so it is only named in a line of the log.

Left out is what is part of a model, or of a State of the script. An object whose state cannot be saved or
loaded is named in a line of the log and left out; training goes on.
"""

from __future__ import annotations

import logging
import operator
import pickle
import zlib
from typing import Any

import torch

from adaptdl_elastic import _frames, checkpoint, collective
from adaptdl_elastic._session import Session
from adaptdl_elastic.checkpoint.state_copy import copy_to_host, fill, parts_of, strip
from adaptdl_elastic.reducer import PeerLostError
from adaptdl_elastic.torch._elastic.plain_attributes import PlainAttributes, changes_options
from adaptdl_elastic.torch._elastic.state_marks import marks_of_script, sampled
from adaptdl_elastic.torch._runtime.position import script_position

NAME = "adaptdl-script-objects"

_LIBRARIES = ("adaptdl_elastic.", "accelerate.")
# search inside an object: levels, and objects per level
_DEPTH, _MOST = 6, 10_000
# length of the longest list of the script that is searched
_LONGEST = 100

_LINE = "%s (%s) changes in training and is in no checkpoint: %s; keep it in a checkpoint.TensorState"

_DIFFERS = (
    "the values of the State {!r} differ between the replicas, and only rank 0's are saved and sent to "
    "newcomers. What the script decides by must be equal: change it on every replica, from what is equal on "
    "all, such as a synchronized Accumulator"
)

logger = logging.getLogger(__name__)


class _Object:
    """Hold an object of the script, and what its state was like when it was found."""

    def __init__(self, one: Any, own: bool) -> None:
        # own: whether the object is a variable of its own; out: whether it is left out for good
        self.one, self.own, self.out = one, own, False
        # what has the methods of its state
        self.stateful = one if _has_state_dict(one) else PlainAttributes(one)
        self.mark = self.read()

    def read(self) -> Any:
        """Return a mark that differs if the state differs, or None; note why the state cannot be saved."""
        tensors, mark = list[torch.Tensor](), None
        try:
            plain = strip(self.stateful.state_dict(), tensors)
            self.addresses = {tensor.data_ptr() for tensor in tensors} - {0}
            self.digest = zlib.crc32(repr(plain).encode())
            mark = self.digest, [_sample(tensor) for tensor in tensors]
            # also differs after a change in a large array of numpy, but not every state can be pickled
            mark = zlib.crc32(pickle.dumps(plain)), mark[1]
            # refuses unknown types
            copy_to_host(fill(plain, iter([torch.empty(0)] * len(tensors))), "its state")
            sharded = any(type(tensor.detach()) is not torch.Tensor for tensor in tensors)
            self.why = "its tensors are sharded" if sharded else None
        except Exception as error:
            # from the script's `state_dict`, too
            self.why = str(error) if mark else f"its state_dict() fails ({error!r})"
        return mark


class ScriptObjects(checkpoint.TensorState):
    """Hold the objects of the script that are saved by default. One per session."""

    required = False
    # True once an object is kept: until then a step has nothing to put back
    part_of_step = False

    def __init__(self, session: Session) -> None:
        super().__init__(NAME)
        self._session = session
        self._found: dict[str, _Object] = {}
        # names of the objects that are saved
        self._kept: set[str] = set()
        # saved states of objects that the script has not reached yet
        self._early: dict[str, Any] = {}

    def look(self) -> None:
        """Search the variables of the script that calls the library."""
        variables = _frames.script_variables()
        parts = [
            (f"{name}[{place!r}]", part)
            for name, one in variables
            if isinstance(one, list | tuple | dict) and len(one) <= _LONGEST
            for place, part in (one.items() if isinstance(one, dict) else enumerate(one))
        ]
        known, new = {id(found.one) for found in self._found.values()}, set[str]()
        for own, several in ((True, variables), (False, parts)):
            for name, one in several:
                if id(one) not in known and _carries_state(one):
                    # the same variable of two calls on the stack: the next run may have only one
                    key = f"{name} of an inner call" if name in new else name
                    self._found[key] = _Object(one, own and key == name)
                    known.add(id(one))
                    new.add(key)
        self.load_state_dict(self._early)

    def collect_for_save(self) -> None:
        """Decide before a checkpoint, or a change in place, what is saved. A collective."""
        there = [(name, found) for name, found in self._found.items() if not found.out]
        changed = {(name, found.digest) for name, found in there if self._joins(name, found)}
        values = {("a State", name, mark) for name, mark in marks_of_script(self._session).items()}
        try:
            agreed = collective.combine(changed | values, operator.and_, NAME)
        except PeerLostError:
            # the next boundary notices it; behind the last one nothing has to
            return
        self._kept |= {name for name, _ in changed & agreed}
        self.part_of_step = bool(self._kept)
        for name, _ in changed - agreed:
            self._tell(name, "it differs between the replicas")
        for value in values:
            problem = None if value in agreed else _DIFFERS.format(value[1])
            self._session.metrics.report_problem(f"the State {value[1]!r}", problem)

    def _joins(self, name: str, found: _Object) -> bool:
        """Return whether an object has changed and can be saved from now on; leave out what cannot be."""
        mark, kept = found.read(), name in self._kept
        if not kept and mark in (None, found.mark):
            return False
        found.out = not kept and self._is_part(found)
        why = found.why if found.own else "it has no variable of its own"
        if why is not None and not found.out:
            self._tell(name, why)
        return not (kept or found.out)

    def _is_part(self, found: _Object) -> bool:
        """Return whether an object is part of a model or of a State of the script."""
        parts, tensors = set[int](), list[torch.Tensor]()
        for model in self._session.models:
            parts |= {id(model.optimizer), id(getattr(model, "mp_scaler", None)), *inside(model.lr_scheduler)}
            parts.update(map(id, model.module.modules()))
            tensors += [*model.module.parameters(), *model.module.buffers()]
        for state in self._session.states.values():
            if not type(state).__module__.startswith(_LIBRARIES):
                parts.update(map(id, vars(state).values()))
                if isinstance(state, checkpoint.TensorState):
                    tensors += parts_of(state.state_dict(), torch.Tensor)
        return id(found.one) in parts or set() < found.addresses <= {one.data_ptr() for one in tensors}

    def _tell(self, name: str, why: str) -> None:
        """Leave out an object, and say that it is in no checkpoint."""
        self._found[name].out = True
        self._kept.discard(name)
        if self._session.rank == 0:
            logger.warning(_LINE, name, type(self._found[name].one).__name__, why)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the objects by their names."""
        position = self._session.position
        loop = 0 if position is None else position.epoch_loops
        return {
            name: {"state": found.stateful.state_dict(), "lr": rates, "loop": loop}
            for name in sorted(self._kept & self._found.keys())
            for found in [self._found[name]]
            for rates in [[group["lr"] for group in _groups(found.one)]]
        } | self._early

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the states of the objects that the script has reached, and keep the others."""
        position, self._early = script_position(), {}
        self._kept.update(state_dict)
        self.part_of_step = bool(self._kept)
        for name, saved in state_dict.items():
            # the object of an earlier loop that is over may have another object's name
            later = saved["loop"] > position.epoch_loops and position.finished >= (position.until or 0)
            if later or name not in self._found:
                self._early[name] = saved
                continue
            found = self._found[name]
            try:
                found.stateful.load_state_dict(saved["state"])
                # a scheduler that is made after the optimizer was loaded has changed the learning rates
                for group, rate in zip(_groups(found.one), saved["lr"], strict=False):
                    group["lr"] = rate
            except Exception as error:
                self._tell(name, f"its saved state cannot be loaded ({error!r})")


def look(session: Session) -> None:
    """Search the variables of the script that calls the library, and load what is saved of them."""
    state = session.states.get(NAME)
    if state is None:
        state = ScriptObjects(session)
        checkpoint.load_state(state)
    assert isinstance(state, ScriptObjects)
    state.look()


def named(session: Session) -> list[Any]:
    """Return the objects of the script that are saved when they change, each with all that it holds."""
    state = session.states.get(NAME)
    found = state._found.values() if isinstance(state, ScriptObjects) else ()
    return [
        one.one for one in found if one.own and not one.out and one.why is None and one.stateful is one.one
    ]


def _carries_state(one: Any) -> bool:
    kind = type(one)
    ours = isinstance(one, checkpoint.State | torch.utils.data.DataLoader)
    ours = ours or kind.__module__.startswith(_LIBRARIES)
    return not ours and (_has_state_dict(one) or changes_options(one))


def _has_state_dict(one: Any) -> bool:
    return all(callable(getattr(type(one), name, None)) for name in ("state_dict", "load_state_dict"))


def _sample(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what differs after a change: a write through `tensor.data` does not raise the version."""
    elements = repr(sampled(getattr(tensor, "to_local", lambda: tensor)()).tolist())
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version, elements


def _groups(one: Any) -> list[Any]:
    """Return the parameter groups of a scheduler's optimizer, or none."""
    return list(getattr(getattr(one, "optimizer", None), "param_groups", ()))


def inside(one: Any) -> set[int]:
    """Return the ids of an object and of all objects inside it, such as the schedulers of SequentialLR."""
    known, level = set[int](), [one]
    for _ in range(_DEPTH):
        level = [one for one in level if id(one) not in known][:_MOST]
        known.update(map(id, level))
        level = [part for one in level for part in _parts(one)]
    return known


def _parts(one: Any) -> list[Any]:
    if isinstance(one, torch.optim.Optimizer | torch.nn.Module | torch.Tensor):
        return []
    inner = one if isinstance(one, dict) else getattr(one, "__dict__", {})
    return [*one] if isinstance(one, list | tuple) else [*inner.values()]
