"""Checks of the arguments of public calls: what was given, and what is allowed, in one line."""

from __future__ import annotations

import math
import operator
from typing import Any


def integer(value: Any) -> int | None:
    """`value` as Python's, if it is an integer (NumPy's are); None for anything else, True and False too."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return `value` as a Python integer; ValueError if it is not one from `least` to `most`."""
    number = integer(value)
    if number is None or number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name}={value!r}: give an integer {limits}")
    return number


def flag(name: str, value: Any) -> bool:
    """`value` as Python's, if it is True or False (NumPy's are), 0 or 1, or None, which is False.

    TypeError for anything else, since "no" counts as true. None is what torch's own DataLoader has for
    shuffle, and 0 and 1 are what a command line of integers gives.
    """
    if value is None or isinstance(value, bool):
        return bool(value)
    if getattr(getattr(value, "dtype", None), "kind", "") == "b" and not value.shape:  # has no __index__
        return bool(value)
    number = integer(value)
    if number not in (0, 1):
        raise TypeError(f"{name}={value!r}: give True or False")
    return bool(number)


def positive(name: str, value: Any) -> float:
    """Return `value` as a finite Python number above 0; ValueError if it is not one."""
    number = real(value)
    if number is None or not 0 < number < math.inf:
        raise ValueError(f"{name}={value!r}: give a number above 0")
    return number


def real(value: Any) -> float | None:
    """`value` as Python's, if it is a number (NumPy's and tensors of one are); None for anything else."""
    if isinstance(value, bool | str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
