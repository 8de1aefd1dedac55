"""Replicas that come, go and die at random leave no trace in what is learned.

The seeds below are run always. `make chaos SECONDS=600 SEED=1` tries as many from that one on as it has time
for, and says which failed: what has failed once is added here. `tests/support/chaos.py` says what is drawn,
and what must hold.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import chaos
import pytest

pytestmark = pytest.mark.processes

# chosen from a thousand: they have all faults, actions and pairs of actions, and all settings
SEEDS = [65, 102, 38, 1, 497, 352]
SECONDS = float(os.environ.get("ADAPTDL_CHAOS_SECONDS", "0"))
FIRST = int(os.environ.get("ADAPTDL_CHAOS_SEED", "1"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return chaos.undisturbed(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("seed", SEEDS)
def test_schedule(tmp_path: Path, undisturbed: dict[str, Any], seed: int) -> None:
    chaos.carry_out(seed, tmp_path, undisturbed)


@pytest.mark.skipif(not SECONDS, reason="make chaos SECONDS=...")
def test_more_schedules(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    end, seed, happened, failed = time.monotonic() + SECONDS, FIRST, Counter[str](), list[str]()
    while time.monotonic() < end:
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            happened += chaos.carry_out(seed, folder, undisturbed) + Counter(schedules=1)
            shutil.rmtree(folder)
        except AssertionError as error:
            failed.append(f"seed {seed}: {error}")
            print(failed[-1], flush=True)
        seed += 1
    print(dict(happened))
    assert not failed, "\n".join(text.splitlines()[0] for text in failed)
