"""What tests of several agents share."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster import Cluster
from etcd_server import EtcdServer

from adaptdl_elastic.rendezvous.store.memory import MemoryStore


@pytest.fixture(scope="session")
def shared_etcd() -> Iterator[EtcdServer]:
    """An etcd that stays up; each test has a cluster of its own in it."""
    with EtcdServer() as etcd:
        yield etcd


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def cluster(shared_etcd: EtcdServer, tmp_path: Path) -> Iterator[Cluster]:
    """Agents on an etcd; all of them are gone at the end."""
    with ExitStack() as stack:
        made = Cluster(shared_etcd, tmp_path, stack, name=f"of-{uuid.uuid4()}")
        yield made
        shared_etcd.resume()  # a test that has paused it may have failed
        made.write_history()
        for name, run in made.agents.items():  # pytest shows it when the test has failed
            print(f"--- {name}, exit code {run.process.poll()}\n{run.text()}")
