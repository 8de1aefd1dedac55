"""Who gets which sample: properties of the pure partition code."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from adaptdl_elastic.torch._data.partition import (
    chunks,
    count_chunks,
    count_step_chunks,
    derive_seed,
    order,
    plan_window,
    steps,
    taken,
    windows,
)
from adaptdl_elastic.torch._tuning.batch_size import local_batch

SIZES = st.integers(1, 300)
REPLICAS = st.integers(1, 9)
LOCALS = st.integers(1, 17)
ACCUMULATIONS = st.integers(0, 4)


@given(SIZES, st.lists(st.tuples(REPLICAS, LOCALS, ACCUMULATIONS, st.integers(1, 5)), min_size=1, max_size=6))
def test_any_sequence_of_sizes_hands_out_every_sample_once(
    size: int, schedule: list[tuple[int, int, int, int]]
) -> None:
    """Each generation runs some steps; the last one runs to the end of the pass."""
    samples = order(size, True, seed=3, epoch=1).tolist()
    position, found = 0, list[int]()
    for number, (replicas, local, accum, few) in enumerate(schedule):
        last = number == len(schedule) - 1
        for step, window in enumerate(windows(position, size, replicas, local, accum)):
            if step == few and not last:
                break
            for chunk in window:
                part = samples[position : position + chunk]
                for rank in range(replicas):
                    found += [
                        part[index]
                        for index in taken(chunk, replicas, rank, start=position if last else None)
                    ]
                position += chunk
    assert sorted(found) == list(range(size))


@given(SIZES, REPLICAS, LOCALS, ACCUMULATIONS)
def test_every_replica_has_a_sample_in_every_chunk_unless_the_pass_is_smaller_than_that(
    size: int, replicas: int, local: int, accum: int
) -> None:
    for window in windows(0, size, replicas, local, accum):
        for chunk in window:
            assert chunk >= replicas or chunk == size < replicas


@given(SIZES, REPLICAS, LOCALS, ACCUMULATIONS)
def test_no_batch_is_larger_than_asked_for_except_one_of_a_single_sample_each(
    size: int, replicas: int, local: int, accum: int
) -> None:
    for window in windows(0, size, replicas, local, accum):
        assert len(window) <= accum + 1
        for chunk in window:
            assert len(taken(chunk, replicas, 0, local)) <= max(local, 2 if local == 1 else 0)


def test_the_steps_without_autoscaling_are_those_of_a_dataloader_on_any_number_of_replicas() -> None:
    for batch, size, drop_last in product(range(1, 41), range(1, 131), (False, True)):
        plain = [list(one) for one in BatchSampler(range(size), batch, drop_last)]
        sizes = list(steps(0, size, batch, drop_last))
        assert [len(one) for one in plain] == sizes
        assert all(count_step_chunks(0, size, r, batch, None, drop_last) == len(sizes) for r in (1, 3, 8))


def test_shares_differ_by_one_sample_at_most_and_none_is_a_single_one() -> None:
    for step, replicas in product(range(1, 131), range(1, 9)):
        assert chunks(step, replicas, None) == (step,)
        shares = [taken(step, replicas, rank) for rank in range(replicas)]
        assert sorted(index for mine in shares for index in mine) == list(range(step))
        sizes = [len(mine) for mine in shares if mine]
        assert sizes == [len(mine) for mine in shares[: min(replicas, max(step // 2, 1))]]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) > 1 or step == 1


@given(SIZES, REPLICAS, st.integers(1, 7))
def test_memory_divides_a_step_into_chunks_that_fit(step: int, replicas: int, largest: int) -> None:
    found = chunks(step, replicas, largest)
    assert sum(found) == step
    assert max(found) - min(found) <= 1
    for chunk in found:
        shares = [taken(chunk, replicas, rank, largest) for rank in range(replicas)]
        assert sorted(index for mine in shares for index in mine) == list(range(chunk))
        assert max(map(len, shares)) <= largest


@given(SIZES, REPLICAS)
def test_where_no_replica_needs_a_batch_small_chunks_go_to_all_in_turn(size: int, replicas: int) -> None:
    had = [0] * replicas
    for position in range(size):
        for rank in range(replicas):
            had[rank] += len(taken(1, replicas, rank, start=position))
    assert sum(had) == size
    assert max(had) - min(had) <= 1


@given(SIZES, REPLICAS, LOCALS)
def test_chunks_of_a_window_differ_by_one_sample_at_most(size: int, replicas: int, local: int) -> None:
    for window in windows(0, size, replicas, local, 3):
        assert max(window) - min(window) <= 1


@given(SIZES, REPLICAS, LOCALS, ACCUMULATIONS)
def test_drop_last_leaves_out_only_what_fills_no_window(
    size: int, replicas: int, local: int, accum: int
) -> None:
    full = replicas * local * (accum + 1)
    found = list(windows(0, size, replicas, local, accum, drop_last=True))
    assert found == [(replicas * local,) * (accum + 1)] * (size // full)


@given(SIZES, REPLICAS, LOCALS, ACCUMULATIONS)
def test_full_windows_until_the_last_two(size: int, replicas: int, local: int, accum: int) -> None:
    found = list(windows(0, size, replicas, local, accum))
    full = replicas * local * (accum + 1)
    assert all(sum(window) == full for window in found[:-2])


@given(st.integers(0, 300), SIZES, REPLICAS, LOCALS, ACCUMULATIONS, st.booleans())
def test_the_number_of_batches_is_known_in_advance(
    start: int, size: int, replicas: int, local: int, accum: int, drop_last: bool
) -> None:
    found = windows(start, size, replicas, local, accum, drop_last)
    assert count_chunks(start, size, replicas, local, accum, drop_last) == sum(map(len, found))


@given(st.integers(1, 10**6), REPLICAS)
def test_a_local_batch_is_rounded_up(batch: int, replicas: int) -> None:
    assert 0 <= local_batch(batch, replicas) * replicas - batch < replicas


def test_a_remainder_too_small_for_all_replicas_is_shared_with_the_step_before() -> None:
    assert list(windows(0, 13, 3, 2)) == [(6,), (4,), (3,)]
    assert plan_window(4, 3, 1) == (4,)


def test_the_order_of_a_checkpoint_is_that_of_later_versions() -> None:
    """A job that resumes in the middle of an epoch draws the same order again."""
    assert derive_seed(1, 2, 3) == 6498626229777268288
    assert derive_seed(-1) < 2**63
    assert order(8, True, seed=5, epoch=2).tolist() == [0, 3, 4, 7, 6, 5, 2, 1]
    assert order(8, True, seed=5, epoch=2, number=1).tolist() == [5, 1, 4, 0, 3, 6, 7, 2]


@given(st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 100))
def test_orders_depend_on_seed_epoch_and_pass(seed: int, other: int, epoch: int) -> None:
    first = order(40, True, seed, epoch)
    assert torch.equal(first, order(40, True, seed, epoch))
    assert sorted(first.tolist()) == list(range(40))
    assert not torch.equal(first, order(40, True, seed, epoch + 1))
    assert not torch.equal(first, order(40, True, seed, epoch, number=1))
    assert seed == other or not torch.equal(first, order(40, True, other, epoch))


def test_without_shuffling_the_order_is_the_data_sets() -> None:
    assert order(5, False, 1, 2).tolist() == [0, 1, 2, 3, 4]
