"""Objects of this process by their type."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import chain, compress, starmap, tee
from typing import Any


def instances_of(*kinds: type) -> list[Any]:
    """All tracked objects of these types and those derived from them.

    Never in Python's own loop: another thread may be in the middle of `tuple(...)`, and CPython raises
    SystemError there if anybody holds on to the unfinished tuple when that thread goes on. No thread goes
    on within one call of `set` or `list`.
    """
    wanted = {kind for kind in set(map(type, _everything())) if issubclass(kind, kinds)}
    objects, again = tee(_everything())
    return list(compress(objects, map(wanted.__contains__, map(type, again))))


def _everything() -> Iterator[Any]:
    return chain.from_iterable(starmap(gc.get_objects, [()]))
