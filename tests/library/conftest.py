"""A script's process, for what needs no second one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from fresh import Script

from adaptdl_elastic import _session


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Script]:
    """Return a script with its checkpoints in `saved`, none of them periodic, and its events in `events`."""
    yield Script(
        monkeypatch,
        ADAPTDL_CHECKPOINT_PATH=str(tmp_path / "saved"),
        ADAPTDL_CHECKPOINT_INTERVAL="0",
        ADAPTDL_EVENT_LOG=str(tmp_path / "events"),
    )
    _session.reset()
    if dist.is_initialized():
        dist.destroy_process_group()
