"""What replicas do in tests/library/test_accumulator.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from adaptdl_elastic import _session, checkpoint, collective
from adaptdl_elastic.torch.accumulator import Accumulator


def rank_one_adds(saved: Path, port: int) -> dict[Any, Any]:
    """Add on rank 1 only, save a checkpoint, and return the sums."""
    os.environ["ADAPTDL_CHECKPOINT_PATH"] = str(saved)
    _session.reset()
    collective.initialize("127.0.0.1", port)
    sums = Accumulator()
    sums["all"] += 1
    if _session.current().rank == 1:
        sums["one"] += 1
    checkpoint.save_all_states()
    checkpoint.flush()
    with sums.synchronized():
        shown = dict(sums)
    collective.teardown()
    return shown
