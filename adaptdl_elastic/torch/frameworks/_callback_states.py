"""Keep the states of a framework's callbacks in the job's checkpoints, and give them to newcomers.

A callback's state is what its own methods return, such as `state_dict()`. Of a callback without such methods
it is its models, its tensors, and the plain values that have changed since the training began. Values that
have not changed are settings: they stay those of the script, also after a restart of an edited one.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint
from adaptdl_elastic.checkpoint.state_copy import like

logger = logging.getLogger(__name__)

OwnState = tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], Any]]
"""Methods of a callback that return its state and load it."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_FRAMEWORKS = ("lightning.", "pytorch_lightning.", "transformers.", "adaptdl_elastic.")


class CallbackStates(checkpoint.TensorState):
    """Keep the states of callbacks. Make it when the callbacks have begun the training.

    Args:
        name: Name of this State.
        callbacks: Callbacks and their names, which need not be different.
        model: The trained model, whose own parameters are not a part of a callback's state.
        own: Function that returns the methods by which a callback saves and loads itself; None: it has none.
    """

    part_of_step = True
    required = False

    def __init__(
        self,
        name: str,
        callbacks: Iterable[tuple[str, Any]],
        model: torch.nn.Module,
        own: Callable[[Any], OwnState | None],
    ) -> None:
        super().__init__(name)
        self._kept: dict[str, _Kept] = {}
        for label, one in callbacks:
            while label in self._kept:
                label += "'"
            self._kept[label] = _Kept(one, own(one), _tensors(model))
        missing = [text for one in self._kept.values() for text in one.missing()]
        if missing and adl.rank() == 0:
            logger.warning(
                "not in the job's checkpoints, and not given to new replicas: %s. If training changes one, "
                "give its callback a state_dict() and a load_state_dict()",
                ", ".join(missing),
            )
        checkpoint.load_state(self)

    def state_dict(self) -> dict[str, Any]:
        return {key: one.state() for key, one in self._kept.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for key, state in state_dict.items():
            if key in self._kept:
                self._kept[key].load(state)


class _Kept:
    """Read and set the state of one callback."""

    def __init__(self, callback: Any, own: OwnState | None, trained: set[int]) -> None:
        self._callback, self._own, self._trained = callback, own, trained
        self._name = type(callback).__name__
        # methods of the framework need not save everything: EMAWeightAveraging's leave out the average
        self._complete = own is not None and not own[0].__module__.startswith(_FRAMEWORKS)
        self._has_values = own is None and not type(callback).__module__.startswith(_FRAMEWORKS)
        self._first = {
            name: copy.deepcopy(value)
            for name, value in self._values().items()
            if not any(isinstance(leaf, torch.Tensor) for leaf in _leaves(value))
        }

    def _modules(self) -> dict[str, torch.nn.Module]:
        """Return the callback's models that share no parameter with the trained one."""
        return {
            name: value
            for name, value in vars(self._callback).items()
            if not self._complete
            and isinstance(value, torch.nn.Module)
            and self._trained.isdisjoint(_tensors(value))
        }

    def _values(self) -> dict[str, Any]:
        """Return the callback's tensors and plain values, unless it saves its state itself."""
        return {
            name: value
            for name, value in vars(self._callback).items()
            if self._has_values
            and all(
                type(leaf) in _PLAIN or (isinstance(leaf, torch.Tensor) and id(leaf) not in self._trained)
                for leaf in _leaves(value)
            )
        }

    def missing(self) -> Iterator[str]:
        """Yield the names of attributes that may be a state, and are not kept."""
        kept = self._values()
        for name, value in vars(self._callback).items() if self._has_values else ():
            # metrics of torchmetrics are modules whose state dicts are empty
            if hasattr(value, "metric_state") or not (name in kept or callable(value)):
                yield f"{self._name}.{name} ({type(value).__name__})"

    def state(self) -> dict[str, Any]:
        """Return the state, with the tensors themselves."""
        return {
            "own": self._own[0]() if self._own else {},
            "modules": {name: module.state_dict() for name, module in self._modules().items()},
            "values": {
                name: value
                for name, value in self._values().items()
                if name not in self._first or self._first[name] != value
            },
        }

    def load(self, state: dict[str, Any]) -> None:
        """Set the callback to `state`, and to its first values where `state` has none."""
        attributes, modules = vars(self._callback), self._modules()
        if state["own"] and self._own:
            self._own[1](copy.deepcopy(state["own"]))
        for name, saved in state["modules"].items():
            if name in modules:
                modules[name].load_state_dict(saved)
            else:
                logger.warning("%s.%s is not restored: make it when the training begins", self._name, name)
        found = {**self._first, **state["values"]}
        for name in self._values().keys() - found.keys():
            del attributes[name]
        for name, value in found.items():
            attributes[name] = _copied(value, attributes.get(name))


def _tensors(model: torch.nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*model.parameters(), *model.buffers())}


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what nested dicts, lists, tuples and sets hold, the keys included."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    elif type(value) not in (list, tuple, set):
        yield value
        return
    for part in value:
        yield from _leaves(part)


def _copied(value: Any, old: Any) -> Any:
    """Return a copy of `value`, whose tensors are on the devices of those in `old`."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(getattr(old, "device", value.device), copy=True)
    if isinstance(value, dict):
        olds = old if isinstance(old, dict) else {}
        return like(value, ((key, _copied(part, olds.get(key))) for key, part in value.items()))
    if isinstance(value, list | tuple):
        first = iter(old if isinstance(old, list | tuple) else ())
        return type(value)(_copied(part, next(first, None)) for part in value)
    return copy.copy(value)
