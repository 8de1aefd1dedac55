"""Keep the states of a framework's callbacks in the job's checkpoints, and give them to newcomers.

A callback's state is what its own methods return, such as `state_dict()`. Of a callback without such methods
it is its models, its tensors, and the plain values that have changed since the training began. Values that
have not changed are settings: they stay those of the script, also after a restart of an edited one.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint
from adaptdl_elastic.checkpoint.state_copy import like
from adaptdl_elastic.torch._elastic.plain_attributes import PLAIN, leaves

logger = logging.getLogger(__name__)

FRAMEWORKS = ("lightning.", "pytorch_lightning.", "transformers.", "adaptdl_elastic.")
"""Beginnings of the modules whose callbacks are not the script's own."""


class CallbackStates(checkpoint.TensorState):
    """Keep the states of callbacks. Make it when the callbacks have begun the training.

    Args:
        name: Name of this State.
        callbacks: Callbacks; several may be of one class.
        model: The trained model, whose own parameters are not a part of a callback's state.
    """

    part_of_step = True
    required = False

    def __init__(self, name: str, callbacks: Iterable[Any], model: torch.nn.Module) -> None:
        super().__init__(name)
        self._kept: dict[str, _Kept] = {}
        for one in callbacks:
            label = getattr(one, "state_key", type(one).__name__)
            while label in self._kept:
                label += "'"
            self._kept[label] = _Kept(one, _tensors(model))
        missing = ", ".join(text for one in self._kept.values() for text in one.missing())
        if missing and adl.rank() == 0:
            logger.warning(
                "not in the job's checkpoints, and not given to new replicas: %s. If training changes one, "
                "give its callback a state_dict() and a load_state_dict()",
                missing,
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

    def __init__(self, callback: Any, trained: set[int]) -> None:
        self._callback, self._trained = callback, trained
        self._name = type(callback).__name__
        save = getattr(callback, "state_dict", None)
        # that of Lightning's base class returns nothing
        self._own = getattr(save, "__qualname__", "Callback.state_dict") != "Callback.state_dict"
        # methods of the framework need not save everything: EMAWeightAveraging's leave out the average
        self._complete = self._own and not str(getattr(save, "__module__", "")).startswith(FRAMEWORKS)
        self._has_values = not self._own and not type(callback).__module__.startswith(FRAMEWORKS)
        self._first: dict[str, Any] = {}
        for name, value in self._parts()[1].items():
            if not any(isinstance(leaf, torch.Tensor) for leaf in leaves(value)):
                self._first[name] = copy.deepcopy(value)

    def _parts(self) -> tuple[dict[str, torch.nn.Module], dict[str, Any]]:
        """Return the models, without those that have the trained parameters, and the other values to keep."""
        modules, values = dict[str, torch.nn.Module](), dict[str, Any]()
        for name, value in vars(self._callback).items():
            if isinstance(value, torch.nn.Module):
                if not self._complete and self._trained.isdisjoint(_tensors(value)):
                    modules[name] = value
            elif self._has_values and all(map(self._may_be_kept, leaves(value))):
                values[name] = value
        return modules, values

    def _may_be_kept(self, leaf: Any) -> bool:
        return type(leaf) in PLAIN or (isinstance(leaf, torch.Tensor) and id(leaf) not in self._trained)

    def missing(self) -> Iterator[str]:
        """Yield the names of attributes that may be a state, and are not kept."""
        kept = self._parts()[1]
        for name, value in vars(self._callback).items() if self._has_values else ():
            # metrics of torchmetrics are modules whose state dicts are empty
            if hasattr(value, "metric_state") or not (name in kept or callable(value)):
                yield f"{self._name}.{name} ({type(value).__name__})"

    def state(self) -> dict[str, Any]:
        """Return the state, with the tensors themselves."""
        modules, values = self._parts()
        first = self._first
        return {
            "own": self._callback.state_dict() if self._own else {},
            "modules": {name: module.state_dict() for name, module in modules.items()},
            "values": {k: value for k, value in values.items() if k not in first or first[k] != value},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Set the callback to `state`, and to its first values where `state` has none."""
        attributes, (modules, values) = vars(self._callback), self._parts()
        if state["own"] and self._own:
            self._callback.load_state_dict(copy.deepcopy(state["own"]))
        for name, saved in state["modules"].items():
            if name in modules:
                modules[name].load_state_dict(saved)
            else:
                logger.warning("%s.%s is not restored: make it when the training begins", self._name, name)
        found = {**self._first, **state["values"]}
        for name in values.keys() - found.keys():
            del attributes[name]
        for name, value in found.items():
            attributes[name] = _copied(value, attributes.get(name))


def _tensors(model: torch.nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*model.parameters(), *model.buffers())}


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
