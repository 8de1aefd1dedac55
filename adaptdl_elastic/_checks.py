"""Check arguments of public calls; errors say in one line what was given and what is allowed."""

from __future__ import annotations

import math
import operator
from typing import Any


def integer(value: Any) -> int | None:
    """Return `value` as a Python int if it is an integer, also NumPy's; None for others, also for bools."""
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
    """Return `value` as a Python bool if it is a bool (also NumPy's), 0 or 1, or None, which means False.

    None is the default of `shuffle` in torch's DataLoader. Scripts with integer command-line options give 0
    and 1.

    Raises:
        TypeError: `value` is anything else, such as the string "no", which Python takes as true.
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
    """Return `value` as a Python float if it is a number or a tensor with one element; None for others."""
    if isinstance(value, bool | str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
