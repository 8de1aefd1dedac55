"""The cluster of all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm_cluster import Slurm, missing


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if why := missing():
        pytest.skip(why)
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
