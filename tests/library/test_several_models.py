"""Several models after each other, as in a cross-validation or a sweep, each with epochs of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_agent
import loop_script_path
import pytest
import torch
from fresh import Script

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint

pytestmark = pytest.mark.usefixtures("script")


def test_a_loop_with_a_name_has_a_count_of_its_own() -> None:
    found = []
    for name, until in [("a", 2), ("b", 1), ("a", 3), ("a", 3), ("b", 3), (None, 7), ("c", 0), ("c", 1)]:
        epochs = []
        for epoch in adl.remaining_epochs_until(until, name=name):
            epochs.append((epoch, adl.current_epoch(), round(adl.progress() * until, 6)))
        found.append([epoch for epoch, *others in epochs if others == [epoch, epoch]])
    assert found == [[0, 1], [0], [2], [], [1, 2], [6], [], [0]]
    assert adl.finished_epochs() == 8


@pytest.mark.parametrize(("name", "lines"), [(None, 1), ("fold", 0)])
def test_a_loop_without_an_epoch_of_its_own_says_what_to_write(
    script: Script, caplog: pytest.LogCaptureFixture, name: str | None, lines: int
) -> None:
    for resumed in (False, True):
        for fold in range(3):
            for _ in adl.remaining_epochs_until(2, name=name and f"{name} {fold}"):
                pass
        # a finished job that runs again has no epoch left in any loop
        assert len(caplog.records) == lines
        assert not lines or "test_several_models.py" in caplog.text
        assert not lines or "remaining_epochs_until(2, name=...)" in caplog.text
        if not resumed:
            script.resume()


SAMPLES, FOLDS, EPOCHS = torch.arange(48.0).view(24, 2) / 48, 3, 3


def folds(early: bool, stop: int = 99) -> dict[str, Any]:
    """Train a model for each fold, and return their weights and rates; save and return at batch `stop`."""
    found, batches = dict[str, Any](), 0
    for fold in range(FOLDS):
        torch.manual_seed(fold)
        net = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        model = adl.AdaptiveDataParallel(net, optimizer, scheduler, name=f"fold {fold}")
        held_out = torch.arange(24) % FOLDS == fold
        training = adl.AdaptiveDataLoader(SAMPLES[~held_out], batch_size=4, shuffle=True)
        best = adl.Value(f"best {fold}", 0.0)
        for epoch in adl.remaining_epochs_until(EPOCHS, name=f"fold {fold}"):
            for batch in training:
                if batches == stop:
                    checkpoint.save_all_states()
                    return {}
                batches += 1
                optimizer.zero_grad()
                model(batch + 0.1 * torch.randn(batch.shape)).square().mean().backward()
                optimizer.step()
                optimizer.param_groups[0]["lr"] = 0.1 * (1 - adl.progress())
            scheduler.step()
            best.value += 1.0
            if early and epoch == fold:
                break
        found[f"fold {fold}"] = [*net.parameters(), model(SAMPLES[held_out]).mean(), best.value]
    return found


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("stops", [(2,), (9,), (13, 1), (18,), (20, 2)])
def test_folds_after_a_resume_are_those_of_an_undisturbed_run(
    script: Script, stops: tuple[int, ...], early: bool
) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    for stop in stops:
        assert folds(early, stop) == {}
        script.restart()
    found = folds(early)
    script.restart(ADAPTDL_CHECKPOINT_PATH="")
    torch.testing.assert_close(found, folds(early), rtol=0, atol=0)
    assert len({one[0][0, 0].item() for one in found.values()}) == FOLDS


@pytest.mark.processes
def test_a_newcomer_in_the_second_fold_trains_the_models_of_the_others(tmp_path: Path) -> None:
    found = []
    for replicas in (1, 2):
        folder = tmp_path / str(replicas)
        folder.mkdir()
        with fake_agent.running(loop_script_path.FOLDS, folder, replicas) as job:
            job.wait_for("second", 3)
            if replicas == 2:
                job.rescale(3)
            job.finish()
        found += [torch.load(path) for path in sorted(folder.glob("result-*"))]
    assert len(found) == 4
    for scores, finished in found[1:]:
        assert finished == 29
        torch.testing.assert_close(scores, found[0][0], rtol=1e-5, atol=1e-7)


def test_a_name_whose_epochs_an_earlier_loop_has_run_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        for _ in adl.remaining_epochs_until(2, name="fold"):
            pass
    assert caplog.text.count("an earlier loop of this name ran as many") == 1


def test_the_rest_of_a_loop_that_was_left_ends_at_once_however_long_it_is() -> None:
    for _ in adl.remaining_epochs_until(10**9, name="a"):
        break
    assert list(adl.remaining_epochs_until(1, name="b")) == [0]
    assert adl.finished_epochs() == 10**9 + 1
