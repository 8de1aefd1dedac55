"""Keep a value of the script that is saved, sent to newcomers and put back with a step that did not count.

An example is the best accuracy so far: `best = adl.Value("best", 0.0)`, and `best.value = accuracy` where it
is exceeded. `adl.Values` holds several: `values = adl.Values(best=0.0, epoch=0)`, `values.best = accuracy`.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from adaptdl_elastic import checkpoint

_PLAIN = (int, float, str, type(None), list, tuple, dict)


class Value(checkpoint.TensorState):
    """Hold a value of the job: a plain Python variable would begin again in every new process.

    Every replica must give it the same values: they are compared before a checkpoint and before a change of
    the number of replicas. Make it outside of data loops.

    Args:
        name: Name of the value in checkpoints, the same in every run of the script.
        initial: Value at the beginning of the job: a number, a string, None, or lists, tuples and dicts of
            these. Of a NumPy number or a tensor of one element the number is kept.

    Raises:
        ValueError: the name is empty, or taken by another state.
        TypeError: the value has another type.
    """

    required = False
    part_of_step = True

    def __init__(self, name: str, initial: Any) -> None:
        super().__init__(name)
        self.value = initial
        checkpoint.load_state(self)

    @property
    def value(self) -> Any:
        """The value of the job. Scripts assign it."""
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
            value = value.item()
        if not isinstance(value, _PLAIN):
            raise TypeError(
                f"the value {self.name!r} cannot be a {type(value).__name__}: give a number, a string, None, "
                f"or lists, tuples and dicts of these; a checkpoint.TensorState keeps tensors"
            )
        self._value = value

    def state_dict(self) -> Any:
        """Return the value for a checkpoint."""
        return {"value": self._value}

    def load_state_dict(self, state_dict: Any) -> None:
        """Take the value of a checkpoint, or of another replica."""
        self._value = copy.deepcopy(state_dict["value"])  # a snapshot may be loaded again


class Values:
    """Hold several values of the job as attributes, each an `adl.Value` of that name.

    Args:
        **initial: Names of the values, and what they are at the beginning of the job.

    Raises:
        ValueError: a name is taken by another state.
        TypeError: a value has another type.
    """

    def __init__(self, **initial: Any) -> None:
        vars(self)["_kept"] = {name: Value(name, value) for name, value in initial.items()}

    def _find(self, name: str) -> Value:
        kept: dict[str, Value] = vars(self).get("_kept", {})
        if name not in kept:
            raise AttributeError(f"there is no value {name!r}: give it to adl.Values, as in Values({name}=0)")
        return kept[name]

    def __getattr__(self, name: str) -> Any:
        """Return a value of the job."""
        return self._find(name).value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a value of the job."""
        self._find(name).value = value
