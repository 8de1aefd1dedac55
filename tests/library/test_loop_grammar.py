"""Random scripts learn with changes, deaths, checkpoints and resumes at any batch what plain torch learns.

Names that a loop's body sets are used behind the loop in all of them. The seeds below are run always;
`make chaos` tries more.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import loop_cases
import loop_events
import pytest
from fresh import Script
from loop_grammar import Spec

# chosen from a thousand: they have all kinds of loops, and each event in all of them, at their ends, and
# after others. The last one: a death in the first batch of the second loop that trains.
SEEDS = [4, 816, 181, 15, 145, 0, 26, 695, 1, 7, 2301359]
ALONE = range(100, 103)
SECONDS = float(os.environ.get("ADAPTDL_CHAOS_SECONDS", "0"))
FIRST = int(os.environ.get("ADAPTDL_CHAOS_SEED", "1"))


@pytest.mark.processes
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_script_is_as_in_plain_torch(tmp_path: Path, seed: int) -> None:
    loop_cases.carry_out(seed, tmp_path)


@pytest.mark.skipif(not SECONDS, reason="make chaos SECONDS=...")
def test_more_random_scripts(tmp_path: Path) -> None:
    end, seed, failed = time.monotonic() + SECONDS, 1000 * FIRST, list[str]()
    while time.monotonic() < end:
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            loop_cases.carry_out(seed, folder)
            shutil.rmtree(folder)
        except AssertionError as error:
            failed.append(f"seed {seed}: {error}")
            print(failed[-1], flush=True)
        seed += 1
    print(f"{seed - 1000 * FIRST} scripts")
    assert not failed, "\n".join(text.splitlines()[0] for text in failed)


@pytest.mark.processes
@pytest.mark.parametrize("seed", ALONE)
@pytest.mark.exhaustive
def test_a_random_script_is_stopped_and_resumed_at_every_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    """On one replica, each run of the script is stopped behind its first batch."""
    script = Script(monkeypatch, OUT=str(tmp_path), EVENTS="[]", ADAPTDL_CHECKPOINT_INTERVAL="0")
    script.set(ADAPTDL_CHECKPOINT_PATH=str(tmp_path / "checkpoints"))
    monkeypatch.setattr(loop_events, "OUT", tmp_path)
    monkeypatch.setattr(loop_events, "here", loop_events.stop_at_the_next_boundary)
    loop_events.totals.clear()
    spec = Spec.drawn(seed)
    for _ in spec.boundaries():
        loop_cases.run_here(spec.source(), script)
    loop_cases.run_here(spec.source(), script)  # the last boundary is behind it
    loop_cases.check(spec, tmp_path, lost=())
