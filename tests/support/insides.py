"""What tests reach into of the training library's objects, each in one place.

Product code has no use for these, so the names stay underscored there.
"""

from __future__ import annotations

from typing import Any

from adaptdl_elastic.torch._gradient.accumulation import Batch
from adaptdl_elastic.torch._gradient.out_of_memory import Samples


def helper(loader: Any) -> Any:
    """Return what a loader keeps about its passes and its batch size."""
    return loader._elastic


def change_batch_size(loader: Any, local: int) -> None:
    """Choose a local batch size, as rank 0 does for all replicas."""
    helper(loader)._change({"atomic": local, "accumulation": 0})


def start_at_initial_batch_size(loader: Any) -> None:
    """Choose the batch size that a generation begins with."""
    made = helper(loader)
    made.size = made._initial()


def keep_batch_size(loader: Any) -> None:
    """Let a loader stay at its batch size from now on."""
    helper(loader)._max_batch_size = None


def sampler(adp: Any) -> Any:
    """Return what measures the gradients of a model."""
    return adp._sampler


def collect(adp: Any) -> None:
    """Wait for the measurements of the gradient that have been begun, and take them into account."""
    sampler(adp).collect()


def estimator(adp: Any) -> str:
    """Return the name of the estimator of the last measurement."""
    name: str = sampler(adp).estimator
    return name


def seed_signs(adp: Any, seed: int) -> None:
    """Seed the random signs by which one replica's samples are weighed."""
    sampler(adp)._generator.manual_seed(seed)


def walk_only(adp: Any) -> None:
    """Let one replica measure by walks through the whole graph, never from the rows of a few samples."""
    sampler(adp)._rows = lambda *_: None


def run_halves(adp: Any) -> None:
    """Let one replica measure its gradient by running the model on half of a batch."""
    sampler(adp).can_not_split("for a test")


def compare_successive_gradients(adp: Any) -> None:
    """Let one replica measure its gradient by comparing it with its predecessor."""
    sampler(adp).can_not_halve("for a test")


def measure_no_more(adp: Any) -> None:
    """Put the next measurement of the gradient off beyond the end of the test."""
    adp.gns._next = 1 << 60


def scale_next_batch(adp: Any, scale: float) -> None:
    """Let a model take its present batch for `scale` times the initial one."""
    adp._batch = Batch(scale=scale)


def state(owner: Any) -> Any:
    """Return the State under which an accumulator or a sharded model is saved."""
    return owner._state


def say_samples(adp: Any, count: int) -> None:
    """Let out-of-memory handling take the current batch for one of a data loader's."""
    adp._memory.batch = lambda: Samples(local=count, trains=True)


def lead(consensus: Any, kind: str, body: Any) -> None:
    """Let rank 0's control thread handle an event."""
    consensus.leader.on_event(kind, 0, body)


def running_commands(consensus: Any) -> Any:
    """Return the commands of the round that is open on rank 0."""
    return consensus.leader.running
