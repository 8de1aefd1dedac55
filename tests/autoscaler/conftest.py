"""A real etcd for those that ask for it, and clusters of their own in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from coordinator_pump import Pump
from etcd_server import EtcdServer

from adaptdl_elastic.rendezvous.schema.keys import Keys

_count = itertools.count()


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture
def keys() -> Keys:
    """A cluster that no other test uses."""
    return Keys(f"c{next(_count)}")


@pytest.fixture
def pump() -> Pump:
    return Pump()
