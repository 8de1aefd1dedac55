"""Replicas draw random numbers of their own, among real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fake_agent
import generations
import pytest
import torch
from fresh import Script

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint

SCRIPT = Path(__file__).parents[1] / "support" / "random_script.py"
STEPS = [(epoch, index) for epoch in range(2) for index in range(0, 48, 12)]

Drawn = dict[tuple[int, int], Any]
"""What was drawn, by epoch and index."""


def run(folder: Path, replicas: int, code: int = 0, **settings: Any) -> None:
    folder.mkdir(exist_ok=True)
    generations.run_settings(SCRIPT, replicas, folder, code, **settings)


def drawn(folder: Path, rank: int) -> Drawn:
    """What that rank drew in the steps, the last time that it made each."""
    return {
        (line["epoch"], line["index"]): (line["drawn"], line["mask"])
        for line in generations.records(folder)
        if line["what"] == "step" and line["rank"] == rank
    }


def of(folder: Path, what: str, field: str) -> list[Any]:
    return [line[field] for line in generations.records(folder) if line["what"] == what]


@pytest.mark.processes
def test_replicas_draw_their_own_numbers_in_data_loops_only(tmp_path: Path) -> None:
    run(tmp_path, 3)
    ranks = [drawn(tmp_path, rank) for rank in range(3)]
    assert [sorted(rank) for rank in ranks] == [STEPS] * 3
    numbers = [number for rank in ranks for step in rank.values() for number in step[0]]
    assert len(set(numbers)) == len(numbers), "a number came twice"
    assert len({json.dumps(rank[step][1]) for rank in ranks for step in STEPS}) > 16  # of 24 masks of 8 bits
    models = of(tmp_path, "model", "initial")
    assert models == [models[0]] * 3
    between = [line["drawn"] for line in generations.records(tmp_path) if line["what"] == "between"]
    assert len({json.dumps(one) for one in between}) == 2  # one in each epoch, the same on all replicas


@pytest.mark.exhaustive
@pytest.mark.processes
def test_the_seed_decides(tmp_path: Path) -> None:
    for name, seed in (("one", 5), ("again", 5), ("other", 6)):
        run(tmp_path / name, 2, seed=seed)
    one, again, other = (drawn(tmp_path / name, 1) for name in ("one", "again", "other"))
    assert one == again
    assert all(one[step][0] != other[step][0] for step in STEPS)


@pytest.mark.exhaustive
@pytest.mark.processes
def test_all_draw_the_same_where_the_script_says_so(tmp_path: Path) -> None:
    run(tmp_path, 2, own=False)
    assert drawn(tmp_path, 0) == drawn(tmp_path, 1)


@pytest.mark.processes
def test_a_resumed_job_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    run(whole, 2)
    run(resumed, 2, code=143, stop=[1, 12])
    assert (1, 24) not in drawn(resumed, 0)
    run(resumed, 2)
    for rank in range(2):
        assert drawn(resumed, rank) == drawn(whole, rank)
    assert of(resumed, "between", "drawn")[-1] == of(whole, "between", "drawn")[-1]


@pytest.mark.processes
def test_one_replica_draws_what_plain_torch_draws(tmp_path: Path) -> None:
    run(tmp_path, 1, epochs=1)
    torch.manual_seed(5)
    torch.randn(48, 4)
    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    mask = torch.nn.functional.dropout(torch.ones(8)).tolist()
    assert drawn(tmp_path, 0)[0, 0][1] == mask


@pytest.mark.slow
def test_numbers_are_kept_over_a_death_and_a_newcomer(tmp_path: Path) -> None:
    """In the step that is done again, and in those after it, each rank draws what it always draws there."""
    (tmp_path / "calm").mkdir()
    run(tmp_path / "calm", 2, epochs=2)
    calm = [drawn(tmp_path / "calm", rank) for rank in range(2)]
    with fake_agent.running(SCRIPT, tmp_path, 3, hold=[0, 24]) as job:
        for rank in range(3):
            job.wait_for_file(f"held-{rank}")
        job.kill(2)
        (tmp_path / "go").touch()
        job.survive()
        job.finish()
    for rank in range(2):
        again = drawn(tmp_path, rank)
        later = [step for step in STEPS if step >= (0, 24)]
        assert [again[step] for step in later] == [calm[rank][step] for step in later]


def test_the_script_s_streams_go_on_after_a_restart(script: Script) -> None:
    torch.manual_seed(1)
    found: list[float] = []

    def epoch() -> None:
        for _ in adl.remaining_epochs_until(1):
            for _ in adl.AdaptiveDataLoader(range(4), batch_size=1):
                found.append(torch.rand(()).item())
                if len(found) == 2:
                    checkpoint.save_all_states()
                    return

    epoch()
    expected = torch.rand(3).tolist()
    script.restart()
    torch.manual_seed(1)
    epoch()
    assert found[2:] == expected[: len(found) - 2]


@pytest.mark.parametrize(("seeds", "continues"), [((7, 7), True), ((7, 8), False)])
def test_a_generator_is_put_back_where_it_began_as_here(
    script: Script, seeds: tuple[int, int], continues: bool
) -> None:
    drawn = []
    for seed in seeds:  # of its rank: the second process has another one
        own = torch.Generator().manual_seed(seed)
        for _ in adl.remaining_epochs_until(2):
            drawn.append(torch.rand(1, generator=own).item())
            for _ in adl.AdaptiveDataLoader(torch.ones(4, 1), batch_size=2):
                pass
            if len(drawn) == 1:
                torch.rand(5, generator=own)
                checkpoint.save_all_states()
                break
        script.resume()
    plain = torch.Generator().manual_seed(seeds[1])
    assert drawn[1] == torch.rand(1, generator=plain).item()
    assert continues == (drawn[0] == drawn[1])
