"""Wait for something that sends no notification."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(what: str, look: Callable[[], T], seconds: float = 120.0, pause: float = 0.01) -> T:
    """Look again and again until there is something, and return it.

    Args:
        what: What is wrong while there is nothing.
        look: Returns something.
        seconds: The limit.
        pause: Seconds between two looks.

    Raises:
        TimeoutError: there is nothing after so many seconds.
    """
    end = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > end:
            raise TimeoutError(f"after {seconds:.0f} s: {what}")
        time.sleep(pause)
    return found
