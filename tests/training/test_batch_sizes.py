"""Which batch size statistics are in units of, where a job goes on from a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import insides
import parallel_cases as cases
import pytest
from fake_loader import FakeLoader

from adaptdl_elastic import _session, checkpoint
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel

Sizes = dict[str, int]


def begin() -> AdaptiveDataParallel:
    """A process, from the checkpoint there is."""
    _session.reset()
    adp = cases.adaptive(rate=0.0)
    cases.measure_always(adp)
    return adp


def train(adp: AdaptiveDataParallel, sizes: Sizes) -> None:
    """Four steps with each of these loaders: their keys and batch sizes."""
    for key, size in sizes.items():
        with FakeLoader([[size]], size, size, key=key):
            for step in range(4):
                x, _ = cases.samples(size, step * size)
                adp.zero_grad()
                (adp(x) - 3.0).square().mean().backward()
                adp.optimizer.step()
    insides.collect(adp)


def run(*sizes: Sizes, kind: Any = "request") -> AdaptiveDataParallel:
    adp = begin()
    for each in sizes:
        train(adp, each)
    checkpoint.save_all_states(kind=kind)
    return adp


@pytest.fixture(autouse=True)
def _kept(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTDL_CHECKPOINT_PATH", str(tmp_path / "checkpoints"))


def test_two_loaders_of_two_sizes_are_no_changed_job(caplog: pytest.LogCaptureFixture) -> None:
    both = {"0": 8, "1": 16}
    for restarts in range(3):
        assert run(both, both).gns.get_progress() == 16.0 * (restarts + 1)
    assert run({"1": 16}).gns.get_progress() == 52.0
    assert run({}).gns.get_progress() == 52.0, "it may end before it has trained"
    assert run({"0": 8}).gns.get_progress() == 56.0
    assert "batch_size" not in caplog.text


def test_a_loader_that_is_made_in_another_place_may_have_a_known_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run({"train.py:7": 8, "train.py:8": 16})
    assert run({"train.py:9": 8, "train.py:10": 16}).gns.get_progress() == 16.0
    assert "batch_size" not in caplog.text


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"0": 8}, {"0": 16}, "batch_size=8, and it is 16"),
        ({"0": 8}, {"1": 16}, "batch_size=8, and it is 16"),
        ({"0": 8, "1": 16}, {"0": 8, "1": 32}, "batch_size=16, and it is 32"),
        ({"0": 8, "1": 16}, {"0": 16, "1": 32}, "batch_size=8, and it is 16"),
        ({"0": 8, "1": 16}, {"0": 4}, "batch_size=8, and it is 4"),
    ],
)
def test_another_size_is_told_and_reckoned_with_once(
    before: Sizes, after: Sizes, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    known = run(before).gns
    changed = run(after)
    assert told in caplog.text
    assert caplog.text.count("the checkpoint is of batch_size=") == 1
    old, new = (int(number) for number in re.findall(r"\d+", told))
    progress = changed.gns.get_progress()
    assert progress != known.get_progress() + 4 * len(after)
    if next(iter(after.values())) == new:
        assert progress == pytest.approx(known.get_progress() / known.gain(new / old) + 4 * len(after))
    assert run(after).gns.get_progress() == changed.gns.get_progress() + 4 * len(after)
    assert caplog.text.count("the checkpoint is of batch_size=") == 1


def test_a_newcomer_decides_as_the_older_replicas(caplog: pytest.LogCaptureFixture) -> None:
    """It has their state, and its first batch is of a loader that nobody has used before."""
    there = begin()
    train(there, {"0": 8})
    snapshots = checkpoint.snapshot_states()
    train(there, {"1": 16})
    _session.reset()
    checkpoint.restore_states(snapshots)
    newcomer = cases.adaptive(rate=0.0)
    cases.measure_always(newcomer)
    train(newcomer, {"1": 16})
    assert newcomer.gns.get_progress() == there.gns.get_progress() == 8.0
    assert "batch_size" not in caplog.text


def test_a_checkpoint_without_the_sizes_of_the_loaders_can_be_loaded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from adaptdl_elastic.torch._gradient.model_state import ModelState

    complete = ModelState.state_dict

    def old(self: Any) -> Any:
        return {key: value for key, value in complete(self).items() if "batch_sizes" not in key}

    with monkeypatch.context() as patch:
        patch.setattr(ModelState, "state_dict", old)
        run({"0": 8})
    assert run({"0": 8}).gns.get_progress() == 8.0
    assert "batch_size" not in caplog.text
    run({"0": 8})
    with monkeypatch.context() as patch:
        patch.setattr(ModelState, "state_dict", old)
        run({"0": 8})
    run({"0": 16})
    assert "batch_size=8, and it is 16" in caplog.text
