"""A store in memory for the tests of the autoscaler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from adaptdl_elastic.rendezvous.store.memory import MemoryStore


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore() as memory:
        yield memory
