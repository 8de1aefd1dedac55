"""Small things that AdaptDL's scripts import."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def print_exc(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: print the traceback of whatever `function` raises to stderr, then let it go on.

    For functions whose exceptions are swallowed by who calls them, as in a thread or a callback.
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
