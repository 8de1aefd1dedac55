"""A training function as a trainable of Ray Tune, whose trials are elastic jobs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.tune import PlacementGroupFactory, Trainable
from ray.tune.result import DONE, RESULT_DUPLICATE

from adaptdl_elastic.tune import node_store, run_function
from adaptdl_elastic.tune.job_process import slot_options
from adaptdl_elastic.tune.trial_job import TrialJob

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = ("group", "num_workers_per_host", "timeout_s")  # of AdaptDL's, where replicas did not move


def AdaptDLTrainableCreator(
    func: Callable[..., None],
    num_workers: int = 1,
    num_cpus_per_worker: int = 1,
    backend: str = "gloo",
    use_gpu: bool = False,
    max_workers: int | None = None,
    **of_adaptdl: Any,
) -> type[Trainable]:
    """Make a trainable of a function that trains with `adaptdl_elastic.torch`.

    Each trial is a job of the node on which Ray places it. Ray reserves `num_workers` replicas for it. The
    slots of the node that are left are shared among its trials by goodput, in place. So nothing else should
    run on these nodes.

    Args:
        func: Called as `func(config)` on every replica, with the process group made. It reports by
            `adaptdl_elastic.tune.report(mean_accuracy=...)`.
        num_workers: Replicas that a trial has at least.
        num_cpus_per_worker: CPUs of a replica.
        backend: Of the process group.
        use_gpu: Whether each replica has a GPU of its own.
        max_workers: Replicas that a trial has at most; None: all slots of its node.
        of_adaptdl: Further arguments of AdaptDL's function; they have no effect.

    Raises:
        TypeError: an argument is unknown.
    """
    for name in of_adaptdl:
        if name not in _WITHOUT_EFFECT:
            raise TypeError(f"AdaptDLTrainableCreator() got an unexpected argument {name!r}")
        logger.warning("AdaptDLTrainableCreator: %s has no effect; leave it away", name)
    per_replica = ("GPU", 1) if use_gpu else ("CPU", num_cpus_per_worker)

    class AdaptDLTrainable(Trainable):
        """A trial of Ray Tune as an elastic job."""

        @classmethod
        def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:
            """Return what Ray reserves: the replicas that a trial has at least."""
            bundle = {"CPU": num_workers * num_cpus_per_worker}
            return PlacementGroupFactory([{**bundle, "GPU": num_workers} if use_gpu else bundle])

        def setup(self, config: dict[str, Any]) -> None:
            """Prepare the trial's job; the first step starts it."""
            folder = Path(self.logdir) / "adaptdl"
            folder.mkdir(parents=True, exist_ok=True)
            function = folder / "function.pkl"
            function.write_bytes(cloudpickle.dumps((func, config, backend)))
            endpoint, self._store = node_store.enter()
            environment = {**os.environ, "PYTHONPATH": _module_path()}
            if use_gpu:  # Ray shows this process the reserved GPUs only
                environment.pop("CUDA_VISIBLE_DEVICES", None)
            self._job = TrialJob(
                self.trial_id,
                folder,
                [run_function.__file__, str(function)],
                slot_options(endpoint, _slots(*per_replica), num_workers, max_workers),
                endpoint,
                environment,
            )

        def step(self) -> dict[str, Any]:
            """Wait for the job's next report and return it."""
            report = self._job.next()
            return {RESULT_DUPLICATE: True, DONE: True} if report is None else report

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            """Save the job's state while it goes on."""
            self._job.save(Path(checkpoint_dir))

        def load_checkpoint(self, checkpoint_dir: str | None) -> None:
            """Go on from a saved state, at any number of replicas."""
            assert checkpoint_dir is not None
            self._job.resume(Path(checkpoint_dir))

        def cleanup(self) -> None:
            """End the job and leave the node's store."""
            self._job.end()
            node_store.leave(self._store)

    AdaptDLTrainable.__name__ = AdaptDLTrainable.__qualname__ = getattr(func, "__name__", "AdaptDLTrainable")
    return AdaptDLTrainable


def _module_path() -> str:
    """Return the directories from which this process imports, without those of its installation.

    Ray adds the directory of the driver's script, whose modules the function may need.
    """
    installed = (sys.prefix, sys.base_prefix)
    return os.pathsep.join(place for place in sys.path if place and not place.startswith(installed))


def _slots(resource: str, each: int) -> int:
    """Return how many replicas this node has room for, by what Ray knows of it."""
    node = ray.get_runtime_context().get_node_id()
    (here,) = (found for found in ray.nodes() if found["NodeID"] == node)
    return int(here["Resources"].get(resource, 0) // each)
