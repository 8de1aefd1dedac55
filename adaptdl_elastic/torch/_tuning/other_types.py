"""Keep what was measured on types of nodes that a job has left, for the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from adaptdl_elastic.protocol.hints import TypeProfile
from adaptdl_elastic.torch._tuning.step_times import StepTimes


@dataclass(frozen=True)
class OnType:
    """Hold the measurements on nodes of a type that the job has left."""

    times: list[Any]  # as from `StepTimes.dump`
    profile: TypeProfile


def on_type(node_type: str, saved: dict[str, Any]) -> OnType:
    """Return what `Metrics.dump` or `dumped` saved of a type."""
    times = StepTimes()
    times.load(saved["times"], 0.0)
    theta = saved.get("theta")
    perf_params = None if theta is None else (*theta[:6], theta[6])
    profile = TypeProfile(
        node_type,
        times.entries(),
        perf_params,
        saved["max_profiled"],
        memory_limit=saved.get("memory_limit"),  # a checkpoint of an earlier version has none
    )
    return OnType(saved["times"], profile)


def dumped(one: OnType) -> dict[str, Any]:
    """Return what was measured on a type as JSON, for `on_type`."""
    profile = one.profile
    return {
        "times": one.times,
        "theta": profile.perf_params,
        "max_profiled": profile.max_profiled_replicas,
        "memory_limit": profile.memory_limit,
    }
