"""The batch size that a job begins with, within what its loader was given."""

from __future__ import annotations

import logging

import insides
import pytest
import torch
from fresh import Script
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session, checkpoint, collective
from adaptdl_elastic._session import Identity
from adaptdl_elastic._values import Limits
from adaptdl_elastic.goodput import GoodputFunction, GradParams, PerfParams
from adaptdl_elastic.torch._tuning.batch_size import initial, local_batch, misfit

SIZES = st.integers(1, 300)


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    init = draw(SIZES)
    low = draw(st.integers(1, init))
    return Limits(init, draw(st.integers(init, 600)), (low, draw(st.integers(low, 600))), draw(st.booleans()))


@given(limits(), st.integers(1, 16))
def test_no_batch_is_larger_than_allowed(given: Limits, replicas: int) -> None:
    chosen = initial(given, replicas)
    assert given.bounds is not None
    assert given.maximum is not None
    low, high = given.bounds
    passes = chosen.accumulation_steps + 1
    assert 1 <= chosen.atomic_bsz <= high
    assert given.accumulation or passes == 1
    # equal shares are rounded up
    assert chosen.atomic_bsz <= local_batch(given.maximum, replicas * passes)
    if misfit(given, replicas) is None:
        assert chosen.atomic_bsz >= low
        if low <= local_batch(given.init, replicas * passes):
            assert replicas * passes * chosen.atomic_bsz >= given.init or passes < -(-given.init // high)


@given(limits(), st.integers(1, 16))
def test_a_size_that_does_not_fit_has_no_goodput(given: Limits, replicas: int) -> None:
    """So the coordinator, which has the limits from the hints, does not choose that number of replicas."""
    assume(misfit(given, replicas) is not None)
    function = GoodputFunction(PerfParams(0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.2), GradParams(1, 5), given.init)
    goodput, _, _ = function.optimize(1, replicas, given.maximum, given.bounds, given.accumulation)
    assert goodput == 0


@given(limits(), st.integers(1, 16))
def test_no_chosen_batch_is_larger_than_allowed(given: Limits, replicas: int) -> None:
    assert given.maximum is not None
    assert given.bounds is not None
    function = GoodputFunction(PerfParams(0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.2), GradParams(1, 5), given.init)
    goodput, atomic, accum = function.optimize(1, replicas, given.maximum, given.bounds, given.accumulation)
    if goodput:
        assert given.bounds[0] <= atomic <= given.bounds[1]
        assert atomic <= local_batch(given.maximum, replicas * (accum + 1))


def test_as_given_where_nothing_bounds_it() -> None:
    assert initial(Limits(10, None, None, False), 3).atomic_bsz == 4
    assert misfit(Limits(10, 20, None, False), 3) is None


def loader(batch: int, largest: int, bounds: tuple[int, int]) -> adl.AdaptiveDataLoader[object]:
    made = adl.AdaptiveDataLoader(TensorDataset(torch.zeros(512)), batch_size=batch)
    made.autoscale_batch_size(largest, bounds)
    return made


def on(replicas: int, batch: int, largest: int, bounds: tuple[int, int]) -> int:
    """The batch size of a replica alone that takes itself for one of several."""
    made = loader(batch, largest, bounds)
    insides.start_at_initial_batch_size(made)
    return made.current_batch_size


def test_a_job_does_not_begin_with_what_does_not_fit(script: Script) -> None:
    with pytest.raises(ValueError, match=r"128 is 128 on each of 1 replicas, above the largest"):
        loader(128, 256, (16, 64))
    script.restart(ADAPTDL_NUM_REPLICAS="4")
    with pytest.raises(
        ValueError, match=r"the smallest on each of 4 replicas is 64, above max_batch_size=40"
    ):
        loader(32, 40, (16, 32))


@pytest.mark.parametrize("how", ["in place", "generation", "checkpoint"])
def test_after_a_loss_it_goes_on_within_the_limits_and_says_so(
    script: Script, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    caplog.set_level(logging.WARNING)
    script.restart(ADAPTDL_NUM_REPLICAS="2")
    train = loader(128, 256, (16, 64))
    if how == "in place":
        monkeypatch.setenv("ADAPTDL_NUM_RESTARTS", "1")  # as the plan's message says it
        _session.current().identity = Identity(rank=0, replicas=1, generation=1)
    else:
        checkpoint.save_all_states()
        generation = {"ADAPTDL_NUM_RESTARTS": "1"} if how == "generation" else {}
        script.restart(ADAPTDL_NUM_REPLICAS="1", **generation)
        if how == "generation":
            script.restart(ADAPTDL_CHECKPOINT_PATH="")
        train = loader(128, 256, (16, 64))
    for _ in adl.remaining_epochs_until(1):
        (first,) = next(iter(train))
        assert len(first) == 64
        assert (train.current_batch_size, train.accumulation_steps) == (64, 0)
    assert caplog.text.count("above the largest; raise it") == 1
    assert "until there are others, a batch is 64" in caplog.text


def test_the_smallest_gives_way_to_the_maximum(script: Script) -> None:
    script.restart(ADAPTDL_NUM_REPLICAS="4", ADAPTDL_NUM_RESTARTS="1")
    assert on(4, 32, 40, (16, 32)) == 32
    script.restart()
    assert on(4, 32, 64, (16, 32)) == 64


def test_the_size_in_use_is_reported_until_another_is_agreed_on(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reporter's thread may read it while the replicas of a new generation agree."""
    train, seen = loader(16, 64, (1, 64)), list[int]()
    insides.change_batch_size(train, 32)

    def share(chosen: object, tag: str = "") -> object:
        if tag == "batch size":
            seen.append(_session.current().metrics.hints().batch_size)  # type: ignore[attr-defined]
            return (32, 0)
        return chosen

    monkeypatch.setattr(collective, "share", share)
    _session.current().identity = Identity(rank=0, replicas=1, generation=1)
    assert insides.helper(train).sync_local_bsz() == 32
    assert seen == [32]


def test_the_memory_limit_is_restored_where_training_begins(script: Script) -> None:
    """Not in the reporter's thread, which would register a State while the loop reads them."""
    insides.helper(adl.AdaptiveDataLoader(TensorDataset(torch.zeros(8)), batch_size=4)).train()
    assert "adaptdl-memory" in _session.current().states
