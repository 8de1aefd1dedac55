"""What tests reach into of the training library's objects, each in one place.

Product code has no use for these, so the names stay underscored there.
"""

from __future__ import annotations

from typing import Any


def helper(loader: Any) -> Any:
    """Return what a loader keeps about its passes and its batch size."""
    return loader._elastic


def change_batch_size(loader: Any, local: int) -> None:
    """Choose a local batch size, as rank 0 does for all replicas."""
    helper(loader)._change({"atomic": local, "accumulation": 0})


def start_at_initial_batch_size(loader: Any) -> None:
    """Choose the batch size that a generation begins with."""
    made = helper(loader)
    made._atomic, made._accum = made._initial()


def keep_batch_size(loader: Any) -> None:
    """Let a loader stay at its batch size from now on."""
    helper(loader)._max_batch_size = None


def collect(adp: Any) -> None:
    """Wait for the measurements of the gradient that have been begun, and take them into account."""
    adp._sampler.collect()


def seed_signs(adp: Any, seed: int) -> None:
    """Seed the random signs by which one replica's samples are weighed."""
    adp._sampler._generator.manual_seed(seed)


def measure_no_more(adp: Any) -> None:
    """Put the next measurement of the gradient off beyond the end of the test."""
    adp.gns._next = 1 << 60


def scale_next_batch(adp: Any, scale: float) -> None:
    """Let a model take its present batch for `scale` times the initial one."""
    adp._batch = type(adp._batch)(scale=scale)


def state(accumulator: Any) -> Any:
    """Return the State under which an accumulator is saved."""
    return accumulator._state
