"""Gradient statistics need no copy of the gradients, but for one replica's, which needs one."""

from __future__ import annotations

import functools

import memory_cases
import pytest
import replicas

pytestmark = pytest.mark.processes

NOISE = 0.4
"""Of the gradients, 32 MiB: what is imported later and a bucket's temporary values are 8 MiB. A copy is 1."""


@functools.cache
def ddp(count: int, adam: bool, micro_batches: int) -> float:
    return max(replicas.run(memory_cases.peak, count, False, adam, micro_batches))


def more(count: int, adam: bool = False, micro_batches: int = 1, **options: bool) -> float:
    """What AdaptiveDataParallel takes more than DistributedDataParallel, in units of the gradients."""
    call = functools.partial(memory_cases.peak, **options)
    return max(replicas.run(call, count, True, adam, micro_batches)) - ddp(count, adam, micro_batches)


@pytest.mark.parametrize("adam", [False, True], ids=["sgd", "adamw, preconditioned"])
def test_two_replicas_copy_no_gradients(adam: bool) -> None:
    assert more(2, adam) < NOISE


@pytest.mark.parametrize("count", [1, 2])
def test_accumulation_copies_no_gradients(count: int) -> None:
    assert more(count, micro_batches=2) < NOISE


def test_one_replica_has_one_copy_and_only_while_it_measures() -> None:
    assert more(1, sampled=False) < NOISE
    assert more(1) < 1 + NOISE


def test_a_copy_would_be_seen() -> None:
    assert more(2, waste=True) > 1 - NOISE
