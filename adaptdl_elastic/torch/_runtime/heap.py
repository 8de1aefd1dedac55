"""Objects of this process by their type."""

from __future__ import annotations

import gc
from typing import Any


def instances_of(*kinds: type) -> list[Any]:
    """All tracked objects of these classes, which are written in Python, and of those derived from them.

    By who refers to the class, as each object of it does: `gc.get_objects()` would hold on to everything
    there is. That keeps alive what has just ended, and another thread may be in the middle of `tuple(...)`,
    where CPython raises SystemError if anybody holds on to the unfinished tuple.
    """
    wanted: set[type] = set()
    level: set[type] = set(kinds)
    while level:
        wanted |= level
        level = set[type]().union(*map(type.__subclasses__, level)) - wanted
    return [one for one in gc.get_referrers(*wanted) if type(one) in wanted]
