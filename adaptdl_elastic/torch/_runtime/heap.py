"""Find the objects of this process by their type."""

from __future__ import annotations

import gc
from typing import Any


def instances_of(*kinds: type) -> list[Any]:
    """Return all objects of the classes `kinds` and of their subclasses.

    The classes must be written in Python. The objects are found as referrers of their class. The simpler
    `gc.get_objects()` would take references to all objects of the process: finished objects would stay alive,
    and CPython raises SystemError in another thread that is building a tuple if the unfinished tuple is
    referenced from elsewhere.
    """
    wanted: set[type] = set()
    level: set[type] = set(kinds)
    while level:
        wanted |= level
        level = set[type]().union(*map(type.__subclasses__, level)) - wanted
    return [one for one in gc.get_referrers(*wanted) if type(one) in wanted]
