"""The loop's rules, each held by an error that says what to do; in one process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import insides
import numpy as np
import pytest
import torch
from fresh import Script
from torch.utils.data import IterableDataset, TensorDataset

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session, checkpoint
from adaptdl_elastic._values import BatchSize
from adaptdl_elastic.torch.data import AdaptiveDataLoader, AdaptiveDataLoaderHelper, AdaptiveDataLoaderMixin

pytestmark = pytest.mark.usefixtures("script")


def numbers(size: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def test_data_loops_outside_of_epochs_are_run_whenever_they_are_come_to(script: Script) -> None:
    """Before the first epoch and behind the last, also after a restart, which goes on in mid-epoch."""

    def run(stop: bool) -> list[list[int]]:
        loader = adl.AdaptiveDataLoader(numbers(6), batch_size=2)
        seen = [[int(batch[0]) for (batch,) in loader]]
        for _ in adl.remaining_epochs_until(2):
            seen.append([])
            for (batch,) in loader:
                if stop and adl.current_epoch() == 1 and int(batch[0]) == 2:
                    checkpoint.save_all_states()
                    return seen
                seen[-1].append(int(batch[0]))
        for (batch,) in loader:
            seen.append([int(batch[0])])
            break
        return [*seen, [int(batch[0]) for (batch,) in loader]]

    assert run(stop=True) == [[0, 2, 4], [0, 2, 4], [0]]
    script.restart()
    assert run(stop=False) == [[0, 2, 4], [2, 4], [0], [0, 2, 4]]
    script.restart()
    assert run(stop=False) == [[0, 2, 4], [0], [0, 2, 4]]


def test_a_checkpoint_that_is_saved_in_a_loop_outside_of_epochs_is_of_the_epoch_before(
    script: Script,
) -> None:
    def run(stop: bool) -> list[int]:
        loader = adl.AdaptiveDataLoader(numbers(6), batch_size=2)
        seen = []
        for _ in adl.remaining_epochs_until(1):
            for (batch,) in loader:
                seen.append(int(batch[0]))
                if stop and len(seen) == 2:
                    break
            if stop:
                break
        for _ in loader:
            if stop:
                checkpoint.save_all_states()
        return seen

    assert run(stop=True) == [0, 2]
    script.restart()
    assert run(stop=False) == [2, 4]  # the step of that batch had not ended


def test_training_outside_of_epochs_stops_when_asked_to(script: Script) -> None:
    """As in AdaptDL's tutorial, before it comes to `remaining_epochs_until`."""
    loader, seen = adl.AdaptiveDataLoader(numbers(6), batch_size=2), list[int]()

    def train() -> None:
        for _ in range(3):
            for (batch,) in loader:
                seen.append(int(batch[0]))
                control = _session.current().consensus
                if len(seen) == 5:
                    control.request({"kind": "stop", "reason": "test"})
                    while not control.round_open:
                        time.sleep(0.001)

    with pytest.raises(SystemExit) as stopped:
        train()
    assert stopped.value.code == 143
    assert seen == [0, 2, 4, 0, 2]


def firsts(loader: Any) -> list[int]:
    return [int(batch[0]) for (batch,) in loader]


def test_a_data_loop_inside_another_one_is_run_from_its_start_each_time(script: Script) -> None:
    def run(stop: bool) -> list[Any]:
        outer = adl.AdaptiveDataLoader(numbers(6), batch_size=2)
        inner = adl.AdaptiveDataLoader(numbers(5), batch_size=2)
        stream = adl.AdaptiveDataLoader(Stream(3), batch_size=2)
        seen: list[Any] = []
        for _ in adl.remaining_epochs_until(1):
            for (batch,) in outer:
                seen.append((int(batch[0]), firsts(inner), [int(part[0]) for part in stream]))
                assert adl.current_dataloader() is insides.helper(outer)
                if stop and len(seen) == 2:
                    checkpoint.save_all_states()
                    return seen
        assert adl.current_dataloader() is None
        assert firsts(inner) == [0, 2, 4]
        return seen

    assert run(stop=True) == [(0, [0, 2, 4], [0, 2]), (2, [0, 2, 4], [0, 2])]
    script.restart()
    assert run(stop=False) == [(2, [0, 2, 4], [0, 2]), (4, [0, 2, 4], [0, 2])]


@pytest.mark.parametrize("make", [lambda size: numbers(size), lambda size: Stream(size)])
def test_a_second_loader_that_is_read_beside_the_first_goes_on_after_a_restart(
    script: Script, make: Any
) -> None:
    def run(stop: bool) -> list[tuple[int, int]]:
        first = adl.AdaptiveDataLoader(numbers(8), batch_size=2)
        second = adl.AdaptiveDataLoader(make(12), batch_size=3)
        seen = []
        for _ in adl.remaining_epochs_until(2):
            for (mine,), other in zip(first, second, strict=True):
                seen.append((int(mine[0]), int(other[0][0] if isinstance(other, list) else other[0]) % 100))
                if stop and len(seen) == 3:
                    checkpoint.save_all_states()
                    return seen
        return seen

    assert run(stop=True) == [(0, 0), (2, 3), (4, 6)]
    script.restart()
    assert run(stop=False) == [(4, 6), (6, 9), (0, 0), (2, 3), (4, 6), (6, 9)]


@pytest.mark.processes
def test_a_stream_goes_on_with_the_worker_whose_turn_it_is_after_a_restart(script: Script) -> None:
    def run(stop: bool) -> list[list[int]]:
        loader = adl.AdaptiveDataLoader(Stream(12), batch_size=2, num_workers=2)
        seen: list[list[int]] = []
        for _ in adl.remaining_epochs_until(1):
            for batch in loader:
                seen.append(batch.tolist())
                if stop and len(seen) == 2:
                    checkpoint.save_all_states()
                    return seen
        return seen

    assert run(stop=True) == [[0, 2], [1, 3]]  # the second one is under way
    script.restart()
    assert run(stop=False) == [[1, 3], [4, 6], [5, 7], [8, 10], [9, 11]]


def problems(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Problems that are reported from now on."""
    found: list[str] = []
    monkeypatch.setattr(
        _session.current().metrics,
        "report_problem",
        lambda about, problem, *_, **__: None if problem is None else found.append(problem),
    )
    return found


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_shorter_second_loader_is_told(monkeypatch: pytest.MonkeyPatch, adaptive: bool) -> None:
    """`zip` ends with it, and it was not said that the rest of the first one's samples was left out."""
    told = problems(monkeypatch)
    first = adl.AdaptiveDataLoader(numbers(8), batch_size=2)
    second = adl.AdaptiveDataLoader(numbers(5), batch_size=2)
    if adaptive:
        first.autoscale_batch_size(4)
    for _ in adl.remaining_epochs_until(2):
        assert [int(mine[0]) for (mine,), _ in zip(first, second)] == [0, 2, 4]  # noqa: B905
    assert len(told) == 2
    assert "loader 0 ended after 6 of 8 samples, because loader 1" in told[0]


def test_a_loop_that_is_left_beside_others_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(loader: Any) -> Any:
        while True:
            yield from loader

    told = problems(monkeypatch)
    first = adl.AdaptiveDataLoader(numbers(8), batch_size=2)
    second = adl.AdaptiveDataLoader(numbers(4), batch_size=2)
    same = adl.AdaptiveDataLoader(numbers(8), batch_size=2)
    body = adl.AdaptiveDataLoader(numbers(2), batch_size=2)
    for _ in adl.remaining_epochs_until(1):
        for (batch,), _ in zip(first, endless(second)):  # noqa: B905
            assert firsts(body) == [0]
            if int(batch[0]) == 4:
                break
        assert len([*zip(first, same)]) == 4  # noqa: B905
        for number, _ in enumerate(zip(first, second)):  # noqa: B905
            if number == 1:  # the second one's last batch
                break
    assert not [problem for problem in told if "read beside" in problem]


def test_shuffled_loops_inside_another_one_have_an_order_of_their_own_each() -> None:
    outer = adl.AdaptiveDataLoader(numbers(6), batch_size=2)
    inner = adl.AdaptiveDataLoader(numbers(8), shuffle=True)
    for _ in adl.remaining_epochs_until(1):
        orders = [tuple(firsts(inner)) for _ in outer for _ in range(2)]
    assert len(set(orders)) == 6
    assert all(sorted(order) == list(range(8)) for order in orders)


def test_a_loop_that_cannot_be_inside_a_data_loop_is_refused() -> None:
    outer, adaptive = adl.AdaptiveDataLoader(numbers()), adl.AdaptiveDataLoader(numbers())
    adaptive.autoscale_batch_size(4)
    for _ in adl.remaining_epochs_until(1):
        for _ in outer:
            with pytest.raises(RuntimeError, match="make a second AdaptiveDataLoader"):
                next(iter(outer))
            with pytest.raises(RuntimeError, match="let its loop be the outer one"):
                next(iter(adaptive))
            with pytest.raises(RuntimeError, match="a loader of the script's own"):
                next(iter(Halves()))
        break
    left_open = iter(outer)
    next(left_open)
    with pytest.raises(RuntimeError, match="an iterator of a data loader is open"):
        next(iter(adl.remaining_epochs_until(1)))


@pytest.mark.parametrize("bad", [0, -4, 2.0, None, True])
def test_the_batch_size_is_checked(bad: Any) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        adl.AdaptiveDataLoader(numbers(), batch_size=bad)


def test_bounds_below_the_batch_are_fine_with_accumulation() -> None:
    loader = adl.AdaptiveDataLoader(numbers(), batch_size=8)
    loader.autoscale_batch_size(64, (1, 3), gradient_accumulation=True)
    for _ in adl.remaining_epochs_until(1):
        next(iter(loader))
        assert (loader.current_local_bsz, insides.helper(loader).size.accumulation_steps) == (3, 2)


def test_an_empty_data_set_and_one_smaller_than_a_dropped_batch() -> None:
    for _ in adl.remaining_epochs_until(1):
        assert list(adl.AdaptiveDataLoader(numbers(0), batch_size=4)) == []
        assert list(adl.AdaptiveDataLoader(numbers(3), batch_size=4, drop_last=True)) == []


def test_a_data_set_smaller_than_a_dropped_window_of_several_batches() -> None:
    loader = adl.AdaptiveDataLoader(numbers(50), batch_size=64, drop_last=True)
    loader.autoscale_batch_size(128, (8, 16), gradient_accumulation=True)
    for _ in adl.remaining_epochs_until(2):
        assert list(loader) == []
    assert len(loader) == 0


def test_a_batch_that_has_grown_beyond_the_data_set_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else epochs would go by without a step, unless the batch size was such from the start."""
    loader = adl.AdaptiveDataLoader(numbers(10), batch_size=4, drop_last=True)
    loader.autoscale_batch_size(64)
    for _ in adl.remaining_epochs_until(1):
        iterator = iter(loader)
        assert [len(next(iterator)[0]) for _ in range(2)] == [4, 4]
        insides.change_batch_size(loader, 16)
        monkeypatch.setattr(_session.Session, "progress", 1.0)
        assert len(next(iterator)[0]) == 10


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_says_what_it_was_given(drop_last: bool) -> None:
    """As AdaptDL's; DataLoader itself says None and False where it was given a batch_sampler."""
    for data in (numbers(), Stream()):
        loader = adl.AdaptiveDataLoader(data, batch_size=4, drop_last=drop_last)
        assert (loader.batch_size, loader.drop_last) == (4, drop_last)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert isinstance(adl.AdaptiveDataLoader(numbers(), batch_size=4).sampler, adl.ElasticSampler)


def test_numpys_integers_are_integers() -> None:
    eight: Any = np.int64(8)
    loader = adl.AdaptiveDataLoader(numbers(), batch_size=eight)
    loader.autoscale_batch_size(4 * eight, (eight // 4, 2 * eight))
    assert type(loader.batch_size) is int
    assert insides.helper(loader).local_bsz_bounds == (2, 16)


def test_an_epoch_with_autoscaling_ends_without_optimizer_steps(caplog: pytest.LogCaptureFixture) -> None:
    """It is as long as one pass's progress, and none is made."""
    loader = adl.AdaptiveDataLoader(numbers(), batch_size=4)
    loader.autoscale_batch_size(8)
    for _ in adl.remaining_epochs_until(2):
        assert sum(len(batch[0]) for batch in loader) == 10
    assert caplog.text.count("no optimizer step was taken") == 2


def test_a_loader_that_is_made_in_every_epoch_is_one_loader() -> None:
    """As AdaptDL's BERT example does; what was learnt and chosen is not forgotten."""
    sizes, polls = [], []
    for _ in adl.remaining_epochs_until(3):
        loader = adl.AdaptiveDataLoader(numbers(), batch_size=4)
        loader.autoscale_batch_size(8)
        assert loader.training
        for _ in loader:
            insides.change_batch_size(loader, loader.current_local_bsz + 1)
            break
        sizes.append(loader.current_local_bsz)
        polls.append(len(_session.current().consensus.polls))
        second = adl.AdaptiveDataLoader(numbers(), batch_size=4)
        assert not second.training
        with pytest.raises(RuntimeError, match="another loader"):
            second.autoscale_batch_size(8)
    assert sizes == [5, 6, 7]
    assert polls == [2, 2, 2]  # one for the batch size, one that watches for hangs


def test_a_loader_that_is_made_in_every_epoch_keeps_its_order_through_restarts(script: Script) -> None:
    """Where the script gives no seed every process has another; the one in use is in the checkpoint."""
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}

    def run(seed: int, last: tuple[int, int]) -> None:
        torch.manual_seed(seed)
        for epoch in adl.remaining_epochs_until(3):
            for (batch,) in adl.AdaptiveDataLoader(numbers(12), shuffle=True):
                if (epoch, len(got[epoch])) == last:
                    checkpoint.save_all_states()
                    raise KeyboardInterrupt
                got[epoch] += batch.tolist()

    for seed, last in ((1, (0, 3)), (2, (2, 3)), (3, (2, 7))):
        with pytest.raises(KeyboardInterrupt):
            run(seed, last)
        script.restart()
    run(4, (3, 0))
    assert [sorted(samples) for samples in got.values()] == [list(range(12))] * 3


def test_loaders_that_are_made_when_first_needed_are_not_taken_for_each_other(script: Script) -> None:
    """Neither those made in different epochs, nor several made in one line."""
    made: dict[str, AdaptiveDataLoader[Any]] = {}
    for epoch in adl.remaining_epochs_until(4):
        if epoch == 0:
            made["train"] = adl.AdaptiveDataLoader(numbers())
            insides.helper(made["train"]).train()
        for _ in made["train"]:
            pass
        if epoch == 1:
            made["a"], made["b"] = (adl.AdaptiveDataLoader(numbers()) for _ in "ab")
        for name in ("a", "b") if epoch else ():
            for _ in made[name]:
                assert not made[name].training
        assert made["train"].training
    assert len({insides.helper(loader).key for loader in made.values()}) == 3


def test_break_ends_a_data_loop_for_its_epoch() -> None:
    loader = adl.AdaptiveDataLoader(numbers(), batch_size=2)
    for _ in adl.remaining_epochs_until(2):
        for _ in loader:
            break
        assert next(iter(loader))[0].tolist() == [0, 1]


def failing(seen: list[tuple[int, list[int]]], at: int | None) -> None:
    """Two epochs of two loops; an exception in the body of the `at`-th batch."""
    first, second = (adl.AdaptiveDataLoader(numbers(6), batch_size=2) for _ in range(2))
    for epoch in adl.remaining_epochs_until(2):
        for loader in (first, second):
            for (batch,) in loader:
                if adl.batch_counts():
                    seen.append((epoch, batch.tolist()))
                if len(seen) == at:
                    raise ValueError("out of memory")


ALL = [(epoch, [n, n + 1]) for epoch in range(2) for _ in range(2) for n in (0, 2, 4)]


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 8, 12])
def test_an_exception_does_not_end_a_data_loop(script: Script, at: int, restarts: bool) -> None:
    """Nothing is left out, and that batch comes once more: in this process, or from a checkpoint."""
    seen: list[tuple[int, list[int]]] = []
    with pytest.raises(ValueError, match="out of memory"):
        failing(seen, at)
    seen.pop()
    if restarts:
        script.resume()
    failing(seen, None)
    assert seen == ALL


@pytest.mark.parametrize(
    ("size", "shuffle", "told"),
    [
        (6, False, []),
        (7, False, ["the data set had 6 samples when this data loop began, and has 7 now: in"]),
        (6, True, ["shuffle was False when this data loop began, and is True now: in"]),
    ],
)
def test_a_data_set_that_is_another_in_mid_epoch_is_told(
    script: Script, caplog: pytest.LogCaptureFixture, size: int, shuffle: bool, told: list[str]
) -> None:
    for _ in adl.remaining_epochs_until(1):
        for number, _ in enumerate(adl.AdaptiveDataLoader(numbers(6), batch_size=2)):
            if number == 1:
                checkpoint.save_all_states()
                break
        break
    script.restart()
    for _ in adl.remaining_epochs_until(2):
        list(adl.AdaptiveDataLoader(numbers(size), batch_size=2, shuffle=shuffle))
    found = [text for text in caplog.messages if "may come twice" in text]
    assert [text.split(" what is left")[0] for text in found] == told


def test_a_data_loop_that_was_left_is_over_once_the_next_is_come_to(script: Script) -> None:
    def run(stop: bool) -> list[int]:
        first, second = (adl.AdaptiveDataLoader(numbers(4), batch_size=2) for _ in range(2))
        seen = []
        for _ in adl.remaining_epochs_until(1):
            for (batch,) in first:
                if adl.batch_counts():
                    seen.append(int(batch[0]))
                break
            for (batch,) in second:
                seen.append(10 + int(batch[0]))
                if stop:
                    checkpoint.save_all_states()
                    return seen
        return seen

    assert run(stop=True) == [0, 10]
    script.restart()
    assert run(stop=False) == [10, 12]


def test_shuffling_depends_on_the_users_seed_or_generator_only(script: Script) -> None:
    def orders(seed: int, **options: Any) -> list[list[int]]:
        torch.manual_seed(seed)
        loader = adl.AdaptiveDataLoader(numbers(30), batch_size=30, shuffle=True, **options)
        found = [next(iter(loader))[0].tolist() for _ in adl.remaining_epochs_until(2)]
        checkpoint.flush()
        script.restart(ADAPTDL_CHECKPOINT_PATH="")
        return found

    first = orders(1)
    assert first == orders(1)
    assert first[0] != first[1]
    assert first != orders(2)
    generator = torch.Generator().manual_seed(7)
    assert orders(1, generator=generator) == orders(2, generator=generator)


class Stream(IterableDataset[int]):
    def __init__(self, size: int = 10) -> None:
        self.size, self.epoch = size, -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.epoch * 100, self.epoch * 100 + self.size))


def test_a_stream_is_told_the_epoch() -> None:
    loader = adl.AdaptiveDataLoader(Stream(5), batch_size=2)
    found = [[batch.tolist() for batch in loader] for _ in adl.remaining_epochs_until(2)]
    assert found == [[[0, 1], [2, 3], [4]], [[100, 101], [102, 103], [104]]]


def test_collate_fn_is_the_users() -> None:
    for data in (numbers(4), Stream(4)):
        loader = adl.AdaptiveDataLoader(data, batch_size=2, collate_fn=lambda batch: len(batch))
        for _ in adl.remaining_epochs_until(adl.finished_epochs() + 1):
            assert list(loader) == [2, 2]


class Halves(AdaptiveDataLoaderMixin):
    """A loader of one's own, as AdaptDL's documentation has it."""

    def __init__(self) -> None:
        super().__init__(4)

    def __iter__(self) -> Iterator[int]:
        helper = self._elastic
        with helper.context():
            if helper.skipdone():
                return
            helper.end_index = 12
            while helper.current_index < helper.end_index:
                with helper.profile(helper.current_index > 0):
                    yield helper.current_index
                    helper.current_index += helper.current_batch_size


def test_a_loader_of_ones_own_goes_on_where_it_was_and_knows_where_it_ends(script: Script) -> None:
    loader = Halves()
    for _ in adl.remaining_epochs_until(1):
        for index in loader:
            if index == 4:
                checkpoint.save_all_states()
                break
        break
    script.restart()
    loader, other = Halves(), AdaptiveDataLoaderHelper(4)
    assert (insides.helper(loader).end_index, other.end_index) == (12, 0)
    assert other.index_trained == 4  # a death may be noticed before its loop is entered
    for _ in adl.remaining_epochs_until(1):
        assert list(loader) == [4, 8]
    with pytest.raises(ValueError, match="end_index=-1: give an integer of at least 0"):
        other.end_index = -1


def test_report_lands_in_the_event_log(tmp_path: Path) -> None:
    import json

    for _ in adl.remaining_epochs_until(1):
        adl.report(accuracy=torch.tensor(0.5), loss=float("nan"), note="x")
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    found = next(event for event in events if event["event"] == "metrics")
    assert (found["epoch"], found["accuracy"], found["loss"], found["note"]) == (0, 0.5, "nan", "x")
    with pytest.raises(TypeError, match="report\\(model"):
        adl.report(model=object())


def test_the_batch_size_changes_in_mid_epoch_without_a_checkpoint_path(script: Script) -> None:
    """What the background thread found is agreed on and used, though nothing else wakes the control."""
    script.restart(ADAPTDL_CHECKPOINT_PATH="")
    loader = adl.AdaptiveDataLoader(numbers(100_000), batch_size=4)
    loader.autoscale_batch_size(32)
    metrics, sizes = _session.current().metrics, Counter[int]()
    deadline = time.monotonic() + 100
    for _ in adl.remaining_epochs_until(1):
        for (batch,) in loader:
            metrics._suggestion = BatchSize(16, 0)
            sizes[len(batch)] += 1
            if len(batch) == 16 or time.monotonic() > deadline:
                break
            time.sleep(0.005)
    assert sizes[16] == 1
    assert loader.current_batch_size == 16


def test_no_batch_size_is_suggested_before_the_training_loop_is_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replica that joins in an evaluation loop cannot carry the command out before its training loop."""
    loader = adl.AdaptiveDataLoader(numbers(), batch_size=4)
    loader.autoscale_batch_size(32)
    session = _session.current()

    def suggested() -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(session.metrics, "suggestion", lambda: BatchSize(16, 0))
            return [command for poll in session.consensus.polls if (command := poll()) is not None]

    for _ in adl.remaining_epochs_until(2):
        for _ in loader:
            assert suggested() == [{"kind": "batch_size", "atomic": 16, "accumulation": 0}]
            break
        # The replicas change in a loop of another loader.
        session.identity = replace(session.identity, generation=session.generation + 1)
        assert suggested() == []


def test_with_autoscaling_no_sample_comes_twice_within_one_pass(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch is over when the progress of one pass is made; a further pass has another order."""
    script.restart(ADAPTDL_CHECKPOINT_PATH="")
    loader = adl.AdaptiveDataLoader(numbers(40), batch_size=4, shuffle=True)
    loader.autoscale_batch_size(8)
    session = _session.current()
    seen: list[int] = []
    for _ in adl.remaining_epochs_until(1):
        for (batch,) in loader:
            seen += batch.tolist()
            # each step is worth half a small one
            monkeypatch.setattr(_session.Session, "progress", session.progress + 0.5)
    assert len(seen) == 80 - 4  # 10 steps' progress, the last one rounded
    assert sorted(seen[:40]) == list(range(40))
    assert len(set(seen[40:])) == len(seen[40:])
    assert seen[:36] != seen[40:]


def test_remaining_samples_count_progress_where_batches_are_worth_less(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one pass over the data, worth half a pass at the initial size, half of the job is left."""
    script.restart(ADAPTDL_CHECKPOINT_PATH="")
    loader = adl.AdaptiveDataLoader(numbers(40), batch_size=4)
    loader.autoscale_batch_size(8)
    session = _session.current()
    left: list[float | None] = []
    for _ in adl.remaining_epochs_until(2):
        for _ in loader:
            left.append(session.metrics.hints().remaining_samples)
            monkeypatch.setattr(_session.Session, "progress", session.progress + 0.5)
    # one report a step, of the step before; an epoch is 19 steps, the last half step is rounded
    assert left[1:20] == [78.0 - 2.0 * step for step in range(18)] + [42.0]
    assert left[20:] == [38.0 - 2.0 * step for step in range(18)]


def test_batches_are_weighed_by_samples_again_when_items_are_no_longer_counted() -> None:
    loader = AdaptiveDataLoader(numbers(6), batch_size=6)
    loader.autoscale_batch_size(6, local_bsz_bounds=(1, 4), gradient_accumulation=True)
    insides.helper(loader).train()
    for epoch in adl.remaining_epochs_until(2):
        loader.weigh_by((lambda batch: float(batch[0][0] == 0)) if epoch == 0 else None)  # type: ignore[arg-type]
        weights = [insides.helper(loader).gradient_weight for _ in loader]
        assert weights == ([2, 0] if epoch == 0 else [1, 1])
