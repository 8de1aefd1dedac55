"""Provide small helpers that scripts written for AdaptDL import."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def print_exc(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate `function` to print the traceback of its exceptions to stderr, then raise them.

    Meant for functions whose caller swallows exceptions, such as threads and callbacks.
    """
    if not callable(function):
        raise TypeError(f"print_exc decorates a function, got {function!r}")

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            raise

    return wrapper
