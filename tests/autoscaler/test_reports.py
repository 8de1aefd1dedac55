"""Reports that nobody could calculate with are refused where they are written and where they are read."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from coordinator_pump import Pump, elastic
from fake_agents import hints_of
from pydantic import ValidationError

from adaptdl_elastic import sched_hints
from adaptdl_elastic.sched_hints import JobHints, MalformedHintsError

THETA = [0.1, 0.001, 0.1, 0.01, 0.05, 0.01, 2.0]
ENTRY = {"nodes": 1, "replicas": 1, "atomic_bsz": 32, "accum_step_time": 0.1, "optim_step_time": 0.1}

NONSENSE: dict[str, tuple[dict[str, Any], str]] = {
    "no time passes": ({"perf_params": [0.0] * 7}, "perf_params"),
    "time runs backwards": ({"perf_params": [-1.0, *THETA[1:]]}, "perf_params.0"),
    "gamma below one": ({"perf_params": [*THETA[:6], 0.0]}, "perf_params"),
    "huge gamma": ({"perf_params": [*THETA[:6], 1e308]}, "perf_params"),
    "huge theta": ({"perf_params": [1e308] * 6 + [1.0]}, "perf_params.0"),
    "tiny theta": ({"perf_params": [1e-320] * 6 + [1.0]}, "perf_params"),
    "not a number": ({"perf_params": [float("nan"), *THETA[1:]]}, "perf_params|JSON"),
    "infinite": ({"grad_params": [float("inf"), 1.0]}, "grad_params|JSON"),
    "negative variance": ({"grad_params": [1.0, -1.0]}, "grad_params.1"),
    "huge gradients": ({"grad_params": [1e308, 1e308]}, "grad_params.0"),
    "initial above largest": ({"init_batch_size": 8192}, "max_batch_size"),
    "negative largest": ({"max_batch_size": -4}, "max_batch_size"),
    "no batch": ({"init_batch_size": -1}, "init_batch_size"),
    "bounds reversed": ({"local_bsz_bounds": [512, 16]}, "local_bsz_bounds"),
    "bounds of nothing": ({"local_bsz_bounds": [0, 0]}, "local_bsz_bounds.0"),
    "negative replicas": ({"max_profiled_replicas": -3}, "max_profiled_replicas"),
    "replicas beyond counting": ({"max_profiled_replicas": 10**400}, "max_profiled_replicas"),
    "batch beyond counting": ({"max_batch_size": 10**30}, "max_batch_size"),
    "absurd profile": ({"profile": [{**ENTRY, "replicas": 10**400}]}, "profile.0.replicas"),
    "profile on no node": ({"profile": [{**ENTRY, "nodes": 0}]}, "profile.0.nodes"),
    "profile in no time": ({"profile": [{**ENTRY, "optim_step_time": -1.0}]}, "profile.0.optim_step_time"),
    "profile in all time": ({"profile": [{**ENTRY, "optim_step_time": 1e308}]}, "profile.0.optim_step_time"),
    "more to do than can be": ({"remaining_samples": 1e308}, "remaining_samples"),
    "less than nothing to do": ({"remaining_samples": -1.0}, "remaining_samples"),
    "less than nothing done": ({"samples_done": -1e308}, "samples_done"),
    "absurd forecast": ({"predicted_goodput": 1e300}, "predicted_goodput"),
    "negative goodput": ({"goodput": -1.0}, "goodput"),
    "no replica": ({"replicas": 0}, "replicas"),
}


def text(changes: dict[str, Any]) -> str:
    return json.dumps({**asdict(hints_of("a", 0, 1)), **changes})


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_where_it_is_read_and_where_it_is_written(name: str) -> None:
    changes, where = NONSENSE[name]
    with pytest.raises(MalformedHintsError, match=f"^({where})") as read:
        sched_hints.decode(text(changes))
    assert "\n" not in str(read.value)
    if "profile" not in changes:
        with pytest.raises(ValidationError):
            JobHints(**{**asdict(hints_of("a", 0, 1)), **changes})


@pytest.mark.parametrize("name", NONSENSE)
def test_a_job_keeps_its_last_good_report_and_disturbs_no_other(name: str) -> None:
    pump = Pump()
    elastic(pump)
    pump.job("b")
    for index in range(2):
        pump.node(f"n{index}", "b", 2)
    pump.settle().later(60)
    good = pump.view().jobs["a"].hints
    assert good is not None
    pump.store.put(pump.keys.job("a", "hints"), text(NONSENSE[name][0]))
    placed = pump.placed("a"), pump.placed("b")
    for _ in range(2):
        pump.settle().later(60)
    assert pump.view().jobs["a"].hints == good
    assert (pump.placed("a"), pump.placed("b")) == placed
    (problem,) = pump.keeper.problems()
    assert problem.key == pump.keys.job("a", "hints")
    assert problem.message.endswith("; the last good report is kept")


def test_reports_of_real_jobs_are_accepted() -> None:
    for changes in (
        {},
        {"init_batch_size": 0, "batch_size": 0, "atomic_bsz": 0, "max_batch_size": None},  # says little yet
        {"perf_params": None, "grad_params": None, "local_bsz_bounds": None, "goodput": None},
        {"perf_params": [0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0], "grad_params": [0.0, 0.0]},
        {"remaining_samples": 0.0, "samples_done": 1e12, "progress": 1.0, "gain": 3.0, "lr_factor": 0.5},
    ):
        assert isinstance(sched_hints.decode(text(changes)), JobHints)
