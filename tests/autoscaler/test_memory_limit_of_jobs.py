"""Jobs with the same script share the largest batch that fits into memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from coordinator_pump import Pump
from coordinator_script import play

from adaptdl_elastic.agent.runtime.replica_environment import JobEnvironment, replica_environment
from adaptdl_elastic.autoscaler.coordinator.job_models import Report, curve_of, informed
from adaptdl_elastic.protocol.environment import ReplicaSettings
from adaptdl_elastic.rendezvous.schema.records import MasterRecord
from adaptdl_elastic.sched_hints import JobHints


def hints(job: str, **changes: Any) -> JobHints:
    theta = (0.1, 0.01, 0.1, 0.1, 0.1, 0.1, 1.5)
    found = JobHints(job, 0, 1, 1, 32, 32, 32, max_batch_size=512, grad_params=(1.0, 1.0), perf_params=theta)
    return replace(found, **changes)


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
    pump: Pump, key: str, node_type: str, limit: int | None
) -> None:
    play(
        pump,
        f"""
        job a profile_key=k; node n0 a reports=False; n0 register node_type=small; settle -> memory_limit=None
        n0 report node_type=small memory_limit=48; settle
        job b profile_key={key}; node n1 b reports=False; n1 register node_type={node_type}; settle
        -> b/memory_limit={limit}""",
    )


def test_the_agent_tells_the_limit_to_its_replicas(pump: Pump) -> None:
    play(pump, "job a; node n0 a; settle")
    plan = pump.plan("a")
    job = JobEnvironment("n0", ReplicaSettings({}), None)
    master = MasterRecord(plan.generation, "127.0.0.1", 1, 2)

    def variables(limit: int | None) -> dict[str, str]:
        return replica_environment(job, replace(plan, memory_limit=limit), master, 0, None, "", {})

    assert variables(48)["ADAPTDL_MEMORY_LIMIT"] == "48"
    assert "ADAPTDL_MEMORY_LIMIT" not in variables(None)
