"""Objects of the script that nobody gave to the library are saved, and go to newcomers, by default."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_agent
import generations
import loop_script_path
import numpy as np
import pytest
import sharded_cases
import torch
from cycle_scheduler import CycleScheduler, ScheduledOptim
from fresh import Script

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint
from adaptdl_elastic.torch._bootstrap import current_session
from adaptdl_elastic.torch._elastic import script_objects

pytestmark = pytest.mark.usefixtures("script")
EPOCHS = 10
SAVED = ["Trainer.average", "ema", "fit.cycle", "fit.warm_up"]
LINE = (
    "hidden[0] (AveragedModel) changes in training and is in no checkpoint: it has no variable of its "
    "own; keep it in a checkpoint.TensorState"
)


def run(folder: Path, **settings: Any) -> generations.Ended:
    folder.mkdir(exist_ok=True)
    environment = {
        "LOOP": fake_agent.settings(**settings),
        "OUT": str(folder),
        "ADAPTDL_CHECKPOINT_PATH": str(folder / "checkpoints"),
        "ADAPTDL_CHECKPOINT_INTERVAL": "0.05",
    }
    return generations.run_alone(loop_script_path.OBJECTS, folder, **environment)


@pytest.mark.processes
def test_a_resumed_average_and_scheduler_equal_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "a")
    assert undisturbed.code == 0, undisturbed.output
    assert undisturbed.output.count(LINE) == 1
    killed = run(tmp_path / "b", dies=True)
    assert killed.code == -signal.SIGKILL, killed.output
    resumed = run(tmp_path / "b")
    assert resumed.code == 0, resumed.output
    expected, found = (torch.load(tmp_path / name / "result-0") for name in ("a", "b"))
    assert expected["ema"]["n_averaged"] == 40
    assert found.pop("saved") == expected.pop("saved") == SAVED
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.processes
def test_a_newcomer_in_place_gets_the_average_and_the_scheduler(tmp_path: Path) -> None:
    with fake_agent.running(loop_script_path.OBJECTS, tmp_path, 2, epochs=EPOCHS, pace=0.9) as job:
        job.wait_for("step", 2)
        job.rescale(3)
        job.finish()
    first, *others = [torch.load(tmp_path / f"result-{rank}") for rank in range(3)]
    for result in (first, *others):
        assert result["ema"]["n_averaged"] == EPOCHS * 8
        assert result.pop("saved") == SAVED
        for name in ("ema", "average", "registered", "net"):  # running means are each replica's own
            result[name] = {key: one for key, one in result[name].items() if "running" not in key}
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize("passes", [1, 3])
def test_the_step_that_a_death_breaks_off_counts_once_in_the_average(tmp_path: Path, passes: int) -> None:
    often, given = {"ADAPTDL_CHECKPOINT_INTERVAL": "0.1"}, {"epochs": EPOCHS, "pace": 0.6, "passes": passes}
    with fake_agent.running(loop_script_path.OBJECTS, tmp_path, 2, often, **given) as job:
        job.wait_for_all({"resilient": 2, "saved": 3})
        (tmp_path / "break").touch()
        job.bury(1)
        job.survive()
        job.finish()
    result = torch.load(tmp_path / "result-0")
    assert result["ema"]["n_averaged"] == EPOCHS * 8
    assert result["warm_up"][0] == EPOCHS * 8
    assert [phase["n"] for phase in result["cycle"][1]] == [0, EPOCHS * 8 % 50 - 16]


class Holder:
    """An object of a script with a state."""

    def __init__(self, **state: Any) -> None:
        self.state: Any = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.state:
            self.state[name] = state[name]


def saved() -> dict[str, Any]:
    """Save a checkpoint, and return the objects in it by their names."""
    checkpoint.save_all_states()
    states = checkpoint.snapshot_states([script_objects.NAME])[script_objects.NAME]
    return {name: one["state"] for name, one in states.items()}


@pytest.fixture
def group(script: Script) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def test_a_change_through_data_and_in_a_large_array_is_detected(caplog: pytest.LogCaptureFixture) -> None:
    average, same = Holder(w=torch.zeros(5000)), Holder(w=torch.zeros(5000))
    array = Holder(values=np.zeros(5000))
    for _ in adl.remaining_epochs_until(1):
        average.state["w"].data.add_(1.0)
        array.state["values"][2500] = 1.0
        assert [*saved()] == [
            f"{test_a_change_through_data_and_in_a_large_array_is_detected.__name__}.average"
        ]
    assert same.state["w"].sum() == 0
    assert [record.args[0].rpartition(".")[2] for record in caplog.records] == ["array"]  # type: ignore[index]
    assert "numpy.ndarray" in caplog.text


def test_an_object_that_cannot_be_saved_is_not_named_as_saved() -> None:
    good, bad = Holder(n=0), Holder(cfg=SimpleNamespace(rate=1))
    partly = CycleScheduler(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), 0.1, 9)
    for _ in adl.remaining_epochs_until(1):
        named = script_objects.named(current_session())
        assert any(one is good for one in named)
        assert not any(one is bad or one is partly for one in named)


def test_a_kept_object_whose_state_becomes_unsavable_does_not_stop_checkpoints(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second, good = Holder(n=0), Holder(n=0), Holder(n=0)
    for _ in adl.remaining_epochs_until(1):
        first.state["n"] = second.state["n"] = good.state["n"] = 1
        assert len(saved()) == 3
        first.state["n"] = lambda: None
        second.state = None  # dict(None) raises
        for _ in range(2):
            assert [*saved().values()] == [{"n": 1}]
    assert len(caplog.records) == 2
    assert "first (Holder) changes in training and is in no checkpoint" in caplog.text
    assert "its state_dict() fails (TypeError(" in caplog.text


def test_a_state_that_cannot_be_loaded_is_named_and_training_starts(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    strict, good = Holder(n=0), Holder(n=0)
    for _ in adl.remaining_epochs_until(2):
        strict.state["n"] = good.state["n"] = 1
        saved()
        break
    script.restart()
    strict, good = Holder(other=0), Holder(n=0)
    for _ in adl.remaining_epochs_until(2):
        assert good.state == {"n": 1}
        assert len(saved()) == 1
        break
    assert "strict (Holder) changes" in caplog.text
    assert "its saved state cannot be loaded (KeyError(" in caplog.text


def test_an_object_made_in_the_loop_and_one_that_takes_over_a_name_are_saved(
    caplog: pytest.LogCaptureFixture,
) -> None:
    swa, ema = None, Holder(n=0)
    for epoch in adl.remaining_epochs_until(3):
        ema.state["n"] += 1
        if epoch == 1:
            swa = Holder(swa=0)
        if swa is not None:
            swa.state["swa"] += 1
    assert [*saved().values()] == [{"n": 3}, {"swa": 2}]
    ema = Holder(n=100)
    for _ in adl.remaining_epochs_until(4):
        ema.state["n"] += 1
        assert [*saved().values()] == [{"n": 101}, {"swa": 2}]
    assert not caplog.records


def two_loops(last: int) -> tuple[int, int]:
    """Run two loops with an average each, up to epoch `last`; return both averages."""
    averages = []
    for until in (2, 4):
        ema = Holder(n=0)
        for epoch in adl.remaining_epochs_until(until):
            ema.state["n"] += 1
            if epoch == last:
                saved()
                return -1, -1
        averages.append(ema.state["n"])
    return averages[0], averages[1]


@pytest.mark.parametrize(("last", "expected"), [(1, (3, 2)), (3, (0, 3))])
def test_each_of_two_loops_gets_its_own_average_back(
    script: Script, last: int, expected: tuple[int, int]
) -> None:
    """An epoch that was under way comes again, so it counts twice here."""
    two_loops(last)
    script.restart()
    assert two_loops(99) == expected


@pytest.mark.usefixtures("group")
def test_an_object_that_holds_a_model_and_more_is_saved_and_a_part_is_not() -> None:
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    adl.AdaptiveDataParallel(net, optimizer)
    trainer, part = Holder(model=net.weight, ema=torch.zeros(1), best=0), Holder(w=net.weight)
    for _ in adl.remaining_epochs_until(1):
        with torch.no_grad():
            net.weight += 1
        trainer.state["best"] = 1
        current_session().states[script_objects.NAME].collect_for_save()
        states = checkpoint.snapshot_states([script_objects.NAME])[script_objects.NAME]
        assert [name.rpartition(".")[2] for name in states] == ["trainer"]
    assert part.state["w"] is net.weight


def test_objects_that_differ_between_replicas_are_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    average, buffer, alone = Holder(n=0), Holder(samples=[0]), Holder(n=0)
    best, count = adl.Value("best", 0.0), adl.Value("count", np.int64(3))
    others: list[set[tuple[Any, ...]]] = []

    def of_the_other(value: set[tuple[Any, ...]], *_: Any) -> Any:
        others.append({item for item in value if "alone" not in item[0]})
        raise InterruptedError

    def combine(value: set[tuple[Any, ...]], reduce: Any, _: str) -> Any:
        return reduce(value, others[0])

    for _ in adl.remaining_epochs_until(1):
        average.state["n"] = alone.state["n"] = 1
        state = current_session().states[script_objects.NAME]
        with monkeypatch.context() as context:
            buffer.state["samples"] = [2]
            context.setattr(script_objects.collective, "combine", of_the_other)
            with pytest.raises(InterruptedError):
                state.collect_for_save()
            buffer.state["samples"] = [1]
            best.value = torch.tensor(0.5)
            context.setattr(script_objects.collective, "combine", combine)
            state.collect_for_save()
        assert [*saved().values()] == [{"n": 1}]
    assert (best.value, count.value) == (0.5, 3)
    assert len(caplog.records) == 3
    assert "the values of the State 'best' differ between the replicas" in caplog.text
    assert "buffer (Holder) changes in training and is in no checkpoint: it differs between" in caplog.text
    assert "alone (Holder) changes in training and is in no checkpoint: it differs between" in caplog.text


def scheduled(made: Callable[[Any], Any], behind: bool, until: int = 99) -> list[float]:
    """Train at the rates of a scheduler of the script's own until step `until`; return the rates."""
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    model, scheduler, rates = adl.AdaptiveDataParallel(net, optimizer), made(optimizer), list[float]()
    for _ in adl.remaining_epochs_until(3):
        for batch in adl.AdaptiveDataLoader(torch.ones(8, 1), batch_size=2):
            if len(rates) == until:
                checkpoint.save_all_states()
                return rates
            optimizer.zero_grad()
            model(batch).mean().backward()
            if not behind:
                scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if behind and adl.batch_counts():
                scheduler.step()
    return rates


MADE: list[Callable[[Any], Any]] = [
    lambda optimizer: CycleScheduler(optimizer, 0.1, 9),
    lambda optimizer: ScheduledOptim(optimizer, 0.1, 5),
]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize(("behind", "until"), [(True, 2), (True, 4), (True, 7), (False, 5)])
def test_a_scheduler_without_state_dict_goes_on_where_it_was(
    script: Script, caplog: pytest.LogCaptureFixture, made: Callable[[Any], Any], behind: bool, until: int
) -> None:
    before = scheduled(made, behind, until)
    script.restart()
    found = before + scheduled(made, behind)
    script.restart(ADAPTDL_CHECKPOINT_PATH="")
    assert found == scheduled(made, behind)
    assert len(found) == 12
    assert not caplog.records


def warm_up(until: int, counter: str) -> None:
    """Train with a learning rate that follows the number of updates, and save at step `until`."""
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = adl.AdaptiveDataParallel(net, optimizer)
    kept = adl.Value("updates", 0)
    for epoch in adl.remaining_epochs_until(3):
        updates = epoch * 4 if counter == "epoch" else 0
        for batch in adl.AdaptiveDataLoader(torch.ones(8, 1), batch_size=2):
            updates += 1
            kept.value += 1
            rate = 1e-3 * (kept.value if counter == "kept" else updates)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
            if kept.value == until + 1:
                checkpoint.save_all_states()
                return


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("counter", "reports"), [("epoch", ["epoch"]), ("process", ["epoch"]), ("kept", [])])
def test_a_learning_rate_that_begins_again_after_a_restart_is_reported(
    script: Script, caplog: pytest.LogCaptureFixture, counter: str, reports: list[str]
) -> None:
    warm_up(6, counter)
    script.restart()
    warm_up(99, counter)
    assert len(caplog.records) == len(reports)
    assert all(f"the {which}'s first step" in caplog.text for which in reports)


@sharded_cases.needs_tested_torch
@pytest.mark.usefixtures("group")
def test_a_sharded_model_is_no_object_of_the_script(caplog: pytest.LogCaptureFixture) -> None:
    net, optimizer = sharded_cases.sharded()
    model = adl.AdaptiveFSDP(net, optimizer)
    first = net[0]
    for _ in adl.remaining_epochs_until(1):
        sharded_cases.step(model, optimizer)
        current_session().states[script_objects.NAME].collect_for_save()
    assert first is net[0]
    assert not caplog.records
