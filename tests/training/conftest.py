"""A process group of one, for what needs no second replica."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from adaptdl_elastic import _session


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """One replica in this process, with a session of its own and one torch thread."""
    monkeypatch.setenv("ADAPTDL_EVENT_LOG", str(tmp_path / "events"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    _session.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    _session.reset()
    torch.set_num_threads(threads)
