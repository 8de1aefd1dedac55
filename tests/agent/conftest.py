"""What tests of several agents share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster import Cluster
from etcd_server import EtcdServer


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """An etcd, and agents on it; all of it is gone at the end."""
    with EtcdServer() as etcd, ExitStack() as stack:
        made = Cluster(etcd, tmp_path, stack)
        yield made
        made.write_history()
        for name, run in made.agents.items():  # pytest shows it when the test has failed
            print(f"--- {name}, exit code {run.process.poll()}\n{run.text()}")
