"""Read and set the plain values of an object of the script that changes an optimizer's options.

Many scripts have a scheduler of their own without `state_dict`. Its state are the numbers and strings among
its attributes, and among those of the objects that it holds, if they are of its module or torch's schedulers.
Values that have not changed since the object was found are settings, such as a rank or a device: they stay
those of each process.
"""

from __future__ import annotations

import copy
import dis
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

PLAIN = (type(None), bool, int, float, complex, str, bytes)
"""Types of values that cannot change by themselves."""
# length of the longest list of objects that is searched, and of plain values that is kept
_LONGEST, _LONGEST_PLAIN = 100, 10_000


def changes_options(one: Any) -> bool:
    """Return whether an object is a scheduler: a method of its class sets items of `param_groups`.

    It holds an optimizer, and neither a model, data nor tensors, which would be a half of its state.
    """
    # a module of Python may have thousands of names
    if issubclass(type(one), ModuleType | type):
        return False
    try:
        kinds = [type(part) for part in vars(one).values()]
    except Exception:  # an object of the script may answer in any way
        return False
    if not any(issubclass(kind, torch.optim.Optimizer) for kind in kinds):
        return False
    if any(issubclass(kind, torch.nn.Module | torch.Tensor | torch.utils.data.DataLoader) for kind in kinds):
        return False
    methods = [getattr(part, "__code__", None) for kind in type(one).__mro__ for part in vars(kind).values()]
    return any(
        "param_groups" in code.co_names
        and any(op.opname == "STORE_SUBSCR" for op in dis.get_instructions(code))
        for code in methods
        if isinstance(code, CodeType)
    )


class PlainAttributes:
    """Give an object `state_dict` and `load_state_dict`, without a change of the object."""

    def __init__(self, one: Any) -> None:
        self._one = one
        self._first = copy.deepcopy(self._values())

    def state_dict(self) -> dict[str, Any]:
        """Return the values that have changed since this object was made, by what holds them."""
        return {
            path: {key: one for key, one in values.items() if key not in first or first[key] != one}
            for path, values in self._values().items()
            for first in [self._first.get(path, {})]
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the values to `state`, and to the first ones where `state` has none."""
        owners = self._owners()
        for path in self._first | state:
            values = {**self._first.get(path, {}), **state.get(path, {})}
            for key, value in copy.deepcopy(values).items():
                owners[path][key] = value

    def _values(self) -> dict[str, dict[Any, Any]]:
        return {
            path: {key: part for key, part in _items(owner) if _is_plain(part)}
            for path, owner in self._owners().items()
            if not isinstance(owner, tuple)
        }

    def _owners(self) -> dict[str, Any]:
        """Return what holds the values, by its path: attributes of objects, lists and dicts."""
        found, own = {"": vars(self._one)}, type(self._one).__module__
        known, left = {id(found[""])}, [""]
        for path in left:
            for key, part in _items(found[path]):
                searched = type(part).__module__ == own or isinstance(part, LRScheduler)
                inner: Any = vars(part) if searched and hasattr(part, "__dict__") else part
                container = isinstance(inner, dict | list | tuple) and len(inner) <= _LONGEST
                if container and id(inner) not in known and not _is_plain(part):
                    known.add(id(inner))
                    found[f"{path}.{key}"] = inner
                    left.append(f"{path}.{key}")
        return found


def _items(owner: Any) -> list[tuple[Any, Any]]:
    return list(owner.items() if isinstance(owner, dict) else enumerate(owner))


def _is_plain(part: Any) -> bool:
    if isinstance(part, dict | list | tuple | set) and len(part) > _LONGEST_PLAIN:
        return False
    return all(type(leaf) in PLAIN for leaf in leaves(part))


def leaves(value: Any) -> Iterator[Any]:
    """Yield what nested dicts, lists, tuples and sets hold, the keys included."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    elif type(value) not in (list, tuple, set):
        yield value
        return
    for part in value:
        yield from leaves(part)
