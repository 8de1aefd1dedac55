"""Loops that count steps, the progress of the declared training, and the number of batches that are left.

Changes and deaths in loops of steps are in test_loop_grammar.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import insides
import pytest
import torch
from fresh import Script

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session, checkpoint
from adaptdl_elastic.torch._data.loop_progress import Progress, part_done, windows_needed
from adaptdl_elastic.torch.epoch import continue_at

FIRST, LAST = 0.01, 0.0003


pytestmark = pytest.mark.usefixtures("script")


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def cosine(_: int) -> float:
    """The learning rate's factor; the optimizer's own learning rate is 1."""
    return LAST + (FIRST - LAST) * (1 + math.cos(math.pi * adl.progress())) / 2


def training() -> tuple[Any, Any, Any]:
    torch.manual_seed(2)
    adl.init_process_group("gloo")
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
    return adl.AdaptiveDataParallel(net, optimizer, scheduler), optimizer, scheduler


def test_a_schedule_over_progress_ends_at_its_end_while_the_batch_size_adapts() -> None:
    model, optimizer, scheduler = training()
    loader = adl.AdaptiveDataLoader(torch.randn(200, 1), batch_size=4, shuffle=True)
    loader.autoscale_batch_size(40)
    sizes, values, totals = set[int](), [adl.progress()], list[tuple[int, int | None]]()
    for epoch in adl.remaining_epochs_until(3):
        got = 0
        for batch in loader:
            got += 1
            optimizer.zero_grad()
            (model(batch) - batch - torch.randn_like(batch)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            values.append(adl.progress())
            totals.append((got, adl.expected_batches()))
            sizes.add(loader.current_batch_size)
            insides.change_batch_size(loader, 4 + got % 30)
        assert totals[-1] == (got, got)  # the last batch is known to be the last
        assert adl.progress() == pytest.approx((epoch + 1) / 3)
    assert len(sizes) > 5
    assert len({total for _, total in totals}) > 3
    assert values == sorted(values)
    assert values[0] == 0
    assert adl.progress() == 1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LAST, rel=1e-9)


@pytest.mark.parametrize(("samples", "drop_last"), [(200, False), (202, False), (203, True)])
def test_whole_steps_of_a_loop_add_up_to_its_steps_at_the_initial_size(samples: int, drop_last: bool) -> None:
    model, optimizer, _ = training()
    loader = adl.AdaptiveDataLoader(torch.randn(samples, 1), batch_size=4, shuffle=True, drop_last=drop_last)
    loader.autoscale_batch_size(40)
    of = samples // 4 if drop_last else math.ceil(samples / 4)
    for epoch in adl.remaining_epochs_until(3):
        found = list[int]()
        for batch in loader:
            running: Any = adl.current_dataloader()
            assert running.whole_steps() == 0  # not before the optimizer has stepped
            optimizer.zero_grad()
            (model(batch) - batch - torch.randn_like(batch)).square().mean().backward()
            optimizer.step()
            found.append(running.whole_steps())
            insides.change_batch_size(loader, 4 if epoch == 0 else 4 + len(found) % 30)
        assert sum(found) == of
        assert set(found) == {1} if epoch == 0 else max(found) > 1
        assert len(found) == of if epoch == 0 else len(found) < of


@pytest.mark.parametrize(("before", "after"), [(4, 8), (8, 4)])
def test_whole_steps_do_not_count_a_change_of_the_initial_size(
    script: Script, before: int, after: int
) -> None:
    def run(size: int, stop: int) -> list[int]:
        model, optimizer, _ = training()
        loader = adl.AdaptiveDataLoader(torch.randn(64, 1), batch_size=size)
        loader.autoscale_batch_size(32)
        found = list[int]()
        for _ in adl.remaining_epochs_until(2):
            for batch in loader:
                model(batch).mean().backward()
                optimizer.step()
                running: Any = adl.current_dataloader()
                found.append(running.whole_steps())
                if len(found) == stop:
                    return found
        return found

    run(before, 64 // before + 3)
    torch.distributed.destroy_process_group()
    script.resume()
    # a batch of the old size counts two steps of half the size
    assert set(run(after, -1)) <= {0, 1, 2}


def test_whole_steps_of_a_stream_are_its_progress() -> None:
    model, optimizer, _ = training()
    loader = adl.AdaptiveDataLoader(Stream(), batch_size=2)
    loader.autoscale_batch_size(8)
    for _ in adl.remaining_epochs_until(2):
        before, steps = model.progress, 0
        for batch in loader:
            running: Any = adl.current_dataloader()
            model(batch[:, None].float()).mean().backward()
            optimizer.step()
            steps += running.whole_steps()
            assert 0 <= adl.progress() <= 1
            insides.change_batch_size(loader, 4)
        assert steps == math.floor(model.progress - before + 1e-6)


@pytest.mark.parametrize("most", [4, 40])
def test_an_epoch_that_continues_elsewhere_makes_the_progress_that_is_left(most: int) -> None:
    model, optimizer, _ = training()
    loader = adl.AdaptiveDataLoader(torch.randn(40, 1), batch_size=4)
    loader.autoscale_batch_size(most)
    continue_at(1, 24)
    sizes = list[int]()
    for epoch in adl.remaining_epochs_until(3):
        for batch in loader:
            model(batch).mean().backward()
            optimizer.step()
            sizes.append(epoch)
    assert (sizes.count(1), sizes.count(2)) == (4, 10)


@pytest.mark.parametrize("drop_last", [False, True])
def test_progress_counts_samples_without_autoscaling(drop_last: bool) -> None:
    model, optimizer, scheduler = training()
    loader = adl.AdaptiveDataLoader(torch.randn(10, 1), batch_size=4, drop_last=drop_last)
    evaluation = adl.AdaptiveDataLoader(torch.randn(10, 1), batch_size=4)
    used = 8 if drop_last else 10
    before, after = list[float](), list[float]()
    for epoch in adl.remaining_epochs_until(2):
        for _ in evaluation:
            assert adl.progress() == epoch / 2
        for batch in loader:
            before.append(adl.progress())
            model(batch).mean().backward()
            optimizer.step()
            scheduler.step()
            after.append(adl.progress())
        for _ in evaluation:
            assert adl.progress() == (epoch + 1) / 2
    begun = [done / used for done in range(0, used, 4)]
    assert before == pytest.approx([(epoch + part) / 2 for epoch in range(2) for part in begun])
    assert after == pytest.approx([*before[1:], 1.0])
    assert optimizer.param_groups[0]["lr"] == pytest.approx(LAST, rel=1e-9)


def test_progress_is_the_same_after_a_restart_behind_the_training_loop(script: Script) -> None:
    for _ in range(2):
        loader = adl.AdaptiveDataLoader(range(8), batch_size=4)
        evaluation = adl.AdaptiveDataLoader(range(8), batch_size=4)
        for _ in adl.remaining_epochs_until(2):
            for _ in loader:
                counts = adl.batch_counts()
            for _ in evaluation:
                assert adl.progress() == 0.5
                checkpoint.save_all_states()
                break
            break
        script.restart()
    assert not counts  # the second process had no batch of the training loop left


def test_progress_goes_on_after_a_restart_where_a_loop_makes_its_model(script: Script) -> None:
    seen = list[float]()

    def run(stop: int) -> None:
        adl.init_process_group("gloo")
        loader, model = adl.AdaptiveDataLoader(torch.randn(32, 1), batch_size=4, shuffle=True), None
        loader.autoscale_batch_size(4)
        for epoch in adl.remaining_epochs_until(2):
            if epoch == stop:
                checkpoint.save_all_states()
                return
            for batch in loader:
                if model is None:
                    net = torch.nn.Linear(1, 1)
                    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
                    model = adl.AdaptiveDataParallel(net, optimizer)
                model(batch).mean().backward()
                optimizer.step()
                seen.append(adl.progress())

    run(1)
    torch.distributed.destroy_process_group()
    script.restart()
    run(2)
    assert seen == pytest.approx([step / 16 for step in range(1, 17)])


def test_a_step_without_a_loader_is_reported_as_one_sample_on_any_number_of_replicas() -> None:
    model, optimizer, _ = training()
    for _ in adl.steps(2):
        model(torch.ones(1, 1)).mean().backward()
        optimizer.step()
        session = _session.current()
        alone = session.identity
        session.identity = replace(alone, replicas=4)
        hints = session.metrics.hints()  # type: ignore[attr-defined]
        session.identity = alone
        assert (hints.init_batch_size, hints.batch_size) == (1, 1)


@pytest.mark.parametrize("inside", [False, True])
def test_steps_go_on_where_a_checkpoint_was_saved(script: Script, inside: bool) -> None:
    """In an epoch and without one; a loop of steps that is over is not run again."""
    seen = list[tuple[int, float]]()

    def run(stop: int) -> None:
        for _ in adl.remaining_epochs_until(1) if inside else [0]:
            for step in adl.steps(5):
                if not adl.batch_counts():
                    assert (step, adl.progress(), adl.expected_batches()) == (0, 1, None)
                    continue
                if len(seen) == stop:
                    checkpoint.save_all_states()
                    return
                seen.append((step, adl.progress()))
                assert adl.expected_batches() is not None
            assert adl.progress() == 1
        assert adl.finished_epochs() == 1

    for stop in (2, 4, 100):
        run(stop)
        script.restart()
    assert seen == [(step, step / 5) for step in range(5)]
    script.run(lambda: run(100))
    assert len(seen) == 5


def test_names_of_a_loop_of_steps_exist_behind_it_after_a_restart(script: Script) -> None:
    """In the first loop of two, while the second one is running: the first one changes nothing any more."""
    found = list[tuple[int, list[int], bool]]()

    def run(stop: int | None) -> None:
        model, optimizer, _ = training()
        for last in adl.steps(3):  # noqa: B007  # a name that is used behind the loop
            counts = adl.batch_counts()
            optimizer.zero_grad()
            loss = model(torch.ones(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
        assert loss.isfinite()
        before, second = model.module.weight.detach().clone(), list[int]()
        for step in adl.steps(4):
            if step == stop:
                checkpoint.save_all_states()
                break
            if adl.batch_counts():
                second.append(step)
        found.append((last, second, counts))
        assert torch.equal(model.module.weight, before)
        torch.distributed.destroy_process_group()

    for stop in (2, None, None):
        run(stop)
        script.restart()
    assert found == [(2, [0, 1], True), (0, [2, 3], False), (0, [], False)]


def test_steps_expected_after_a_restart_are_those_of_this_process(script: Script) -> None:
    for step in adl.steps(5):
        if step == 3:
            checkpoint.save_all_states()
            break
    script.restart()
    bar = adl.steps(5)
    assert len(bar) == 5
    assert [(step, adl.expected_batches()) for step in bar] == [(3, 2), (4, 2)]


def test_a_second_loop_of_steps_ends_one_that_was_left() -> None:
    first = adl.steps(3)
    for step in first:
        if step == 1:
            break
    assert adl.finished_epochs() == 0
    assert list(adl.steps(2)) == [0, 1]
    assert adl.finished_epochs() == 2
    assert list(adl.remaining_epochs_until(4)) == [2, 3]


def test_progress_does_not_fall_when_a_loop_is_left() -> None:
    """It was 0 behind a `break` out of `steps`, and a schedule began anew."""
    model, optimizer, _ = training()
    values = [adl.progress()]
    for step in adl.steps(10):
        optimizer.zero_grad()
        model(torch.randn(4, 1)).square().mean().backward()
        optimizer.step()
        values.append(adl.progress())
        if step == 4:
            break
    values.append(adl.progress())
    assert values == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0]
    for step in adl.steps(10):
        if step == 0:
            assert adl.progress() == 0.5, "one of two loops"


def test_progress_behind_epochs_that_were_left_counts_the_last_loop() -> None:
    model, optimizer, _ = training()
    loader = adl.AdaptiveDataLoader(torch.randn(8, 1), batch_size=4)
    for epoch in adl.remaining_epochs_until(4):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        if epoch == 1:
            break
    assert adl.progress() == 0.5


def test_steps_inside_a_data_loop_are_refused() -> None:
    for _ in adl.AdaptiveDataLoader(range(4), batch_size=2):
        with pytest.raises(RuntimeError, match=r"adl\.steps\(\) inside a data loop"):
            next(iter(adl.steps(3)))


@pytest.mark.parametrize("count", [0, -1, 2.5, "3"])
def test_a_number_of_steps_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match="give the number of steps, 1 or more"):
        adl.steps(count)


def test_the_expected_batches_are_those_handed_out_and_those_left() -> None:
    assert adl.expected_batches() is None
    loader = adl.AdaptiveDataLoader(range(10), batch_size=3)
    assert [adl.expected_batches() for _ in loader] == [4] * 4
    assert [adl.expected_batches() for _ in adl.AdaptiveDataLoader(Stream(), batch_size=3)] == [None] * 4


def test_a_part_is_done_when_samples_and_progress_are() -> None:
    assert part_done(0, 0) == 0
    assert part_done(6, 8) == 0.75
    assert part_done(9, 8) == 1
    assert part_done(8, 8, Progress(made=5.0, wanted=10.0)) == 0.5
    assert part_done(6, 8, Progress(made=9.6, wanted=10.0)) == pytest.approx(0.96)
    assert part_done(8, 8, Progress(made=9.6, wanted=10.0)) == 1


def test_the_windows_needed_are_those_until_the_loop_ends() -> None:
    assert windows_needed(Progress(0.0, 10.0), gain=1.0, stepped=False) == 9
    assert windows_needed(Progress(1.0, 10.0), gain=1.0, stepped=True) == 9
    assert windows_needed(Progress(4.0, 10.0), gain=2.0, stepped=True) == 3
    assert windows_needed(Progress(9.6, 10.0), gain=2.0, stepped=True) == 0
    assert windows_needed(Progress(9.6, 10.0), gain=2.0, stepped=False) == 0
