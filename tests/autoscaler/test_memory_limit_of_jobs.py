"""Jobs with the same script share the largest batch that fits into memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from coordinator_pump import Pump

from adaptdl_elastic.agent.runtime.replica_environment import JobEnvironment, replica_environment
from adaptdl_elastic.autoscaler.coordinator.job_models import Report, curve_of, informed
from adaptdl_elastic.protocol.environment import ReplicaSettings
from adaptdl_elastic.rendezvous.schema.records import MasterRecord
from adaptdl_elastic.sched_hints import JobHints


def hints(job: str, **changes: Any) -> JobHints:
    fields: dict[str, Any] = {
        "generation": 0,
        "nodes": 1,
        "replicas": 1,
        "init_batch_size": 32,
        "batch_size": 32,
        "atomic_bsz": 32,
        "max_batch_size": 512,
        "grad_params": (1.0, 1.0),
        "perf_params": (0.1, 0.01, 0.1, 0.1, 0.1, 0.1, 1.5),
        **changes,
    }
    return JobHints(job=job, **fields)


@pytest.mark.parametrize(
    ("own", "limit", "bounds", "accumulates"),
    [
        ({}, None, None, False),
        ({}, 64, (1, 64), False),
        ({}, 8, (1, 8), True),  # the initial batch on one replica does not fit
        ({"local_bsz_bounds": (16, 128)}, 64, (16, 64), False),
        ({"local_bsz_bounds": (16, 32)}, 64, (16, 32), False),
    ],
)
def test_the_smallest_limit_counts(
    own: dict[str, Any], limit: int | None, bounds: tuple[int, int] | None, accumulates: bool
) -> None:
    mine = hints("mine", **own)
    others = [hints("large", memory_limit=None if limit is None else 256), hints("small", memory_limit=limit)]
    known = curve_of([Report(one.job, one, 0.0) for one in (mine, *others)])
    found = informed("mine", mine, known)
    assert found is not None
    assert (found.local_bsz_bounds, found.gradient_accumulation) == (bounds, accumulates)


@pytest.mark.parametrize(
    ("key", "node_type", "limit"), [("k", "small", 48), ("k", "large", None), ("other", "small", None)]
)
def test_replicas_of_a_new_job_begin_with_what_others_have_learnt(
    key: str, node_type: str, limit: int | None
) -> None:
    pump = Pump()
    pump.job("a", profile_key="k")
    node = pump.node("n0", "a", reports=False)
    node.register(node_type="small")
    pump.settle()
    assert pump.plan("a").memory_limit is None
    node.report(pump.plan("a"), node_type="small", memory_limit=48)
    pump.settle()
    pump.job("b", profile_key=key)
    pump.node("n1", "b", reports=False).register(node_type=node_type)
    pump.settle()
    assert pump.plan("b").memory_limit == limit


def test_the_agent_tells_the_limit_to_its_replicas() -> None:
    pump = Pump()
    pump.job("a")
    pump.node("n0", "a")
    pump.settle()
    plan = pump.plan("a")
    job = JobEnvironment("n0", ReplicaSettings({}), None)
    master = MasterRecord(plan.generation, "127.0.0.1", 1, 2)

    def variables(limit: int | None) -> dict[str, str]:
        return replica_environment(job, replace(plan, memory_limit=limit), master, 0, None, "", {})

    assert variables(48)["ADAPTDL_MEMORY_LIMIT"] == "48"
    assert "ADAPTDL_MEMORY_LIMIT" not in variables(None)
