"""Samplers and loaders as a script sees them; positions and loops are in test_partition and test_loops."""

from __future__ import annotations

import pytest
import torch
from fresh import Script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session
from adaptdl_elastic._session import Identity

pytestmark = pytest.mark.usefixtures("script")


def on(replicas: int, rank: int = 0) -> None:
    _session.current().identity = Identity(rank=rank, replicas=replicas)


def shares(sampler: adl.ElasticSampler, replicas: int) -> list[list[int]]:
    """What each replica gets from the sampler's position on."""
    found = []
    for rank in range(replicas):
        on(replicas, rank)
        found.append(list(sampler))
        assert len(sampler) == len(found[-1])
        assert (sampler.num_replicas, sampler.rank) == (replicas, rank)
    return found


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 50), st.integers(1, 7), st.integers(0, 120), st.booleans())
def test_the_replicas_share_what_is_left_of_a_pass(
    size: int, replicas: int, index: int, shuffle: bool
) -> None:
    sampler = adl.ElasticSampler(range(size), shuffle, seed=1)
    sampler.set_epoch(2, index)
    parts = shares(sampler, replicas)
    expected = sampler.order().tolist()[index % size :] if size else []
    assert sorted(index for part in parts for index in part) == sorted(expected)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for rank, part in enumerate(parts):
        assert part == expected[rank::replicas]


def test_a_script_can_say_whose_share_a_sampler_gives() -> None:
    sampler = adl.ElasticSampler(range(7), shuffle=False)
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    sampler.num_replicas, sampler.rank = 3, 1
    assert (sampler.num_replicas, sampler.rank) == (3, 1)
    assert (list(sampler), len(sampler)) == ([1, 4], 2)
    on(2, 0)
    assert list(sampler) == [1, 4]
    with pytest.raises(ValueError, match="num_replicas=0: give an integer of at least 1"):
        sampler.num_replicas = 0
    with pytest.raises(ValueError, match="rank=-1: give an integer of at least 0"):
        sampler.rank = -1


def test_the_order_depends_on_the_scripts_seed_and_not_on_its_draws() -> None:
    def order(seed: int | None, epoch: int, index: int, replicas: int) -> list[int]:
        on(replicas)
        sampler = adl.ElasticSampler(range(40), seed=seed)
        sampler.set_epoch(epoch, index)
        return sampler.order().tolist()

    assert order(1, 0, 0, 1) == order(1, 0, 39, 3)
    assert len({tuple(order(*where, 1)) for where in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 40)]}) == 4
    torch.manual_seed(5)
    mine = order(None, 0, 0, 1)
    torch.rand(3)  # draws of the script's own change nothing
    assert order(None, 0, 0, 2) == mine == order(5, 0, 0, 1)


@pytest.mark.parametrize(
    ("batch", "local"), [(10, (4, 3, 3)), (8, (3, 3, 2)), (5, (3, 2, 2)), (1, (1, 1, 1))]
)
def test_the_batch_size_is_that_of_all_replicas(script: Script, batch: int, local: tuple[int, ...]) -> None:
    """A replica without a share (of 5 samples, and of one) gets samples of another one."""
    for rank in range(3):
        script.restart(ADAPTDL_NUM_REPLICAS="3", ADAPTDL_REPLICA_RANK=str(rank))
        loader = adl.AdaptiveDataLoader(TensorDataset(torch.arange(120.0)), batch_size=batch)
        assert (loader.current_local_bsz, loader.current_batch_size) == (local[rank], batch)
        assert len(loader) == 120 // batch
