from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from coordinator_pump import Pump
from coordinator_script import play

from adaptdl_elastic.autoscaler.cluster_view import limited
from adaptdl_elastic.autoscaler.diagnostics.explanation import Explanation, as_json, explain, lines
from adaptdl_elastic.autoscaler.diagnostics.rows import job_row
from adaptdl_elastic.autoscaler.policy import allocate
from adaptdl_elastic.autoscaler.policy.policy_types import Decision
from adaptdl_elastic.rendezvous.schema.records import JobState


def explained(pump: Pump, job: str) -> Explanation:
    found = explain(pump.view(), pump.view().jobs[job], allocate, pump.settings)
    json.dumps(as_json(found), allow_nan=False)
    assert all(isinstance(line, str) for line in lines(found))
    return found


def instant(*question: Any) -> Decision:
    """The policy, as if it took no time on the test's clock."""
    return replace(allocate(*question), seconds=0.0)


@pytest.fixture
def pump() -> Pump:
    return Pump(policy=instant)


@pytest.mark.parametrize(
    ("people", "granted", "counts"), [(False, {}, 100.0), (True, {}, 1.0), (True, {"most_weight": 5.0}, 5.0)]
)
def test_a_weight_counts_up_to_its_grant_where_people_submit_jobs(
    pump: Pump, people: bool, granted: dict[str, float], counts: float
) -> None:
    pump.job("a", weight=100.0, **granted)
    pump.node("n0", "a", 4)
    if people:  # of another job: an agent of this one was started by hand, or by an earlier version
        pump.store.put(pump.keys.submission("b"), "signed")
    pump.settle()
    view = pump.view()
    spec = limited(view).jobs["a"].spec
    assert spec is not None
    assert spec.record.weight == counts
    told = job_row(view, view.jobs["a"])["warnings"]
    assert [line[:34] for line in told] == [f"its weight 100 counts as {counts:g}, the mo"] * (counts < 100)
    assert explained(pump, "a").limited_by[: len(told)] == tuple(told)


def test_one_more_and_one_fewer_and_what_they_cost(pump: Pump) -> None:
    play(pump, "job a; node n0 a 4; settle; ask a replicas=2; settle")
    found = explained(pump, "a")
    assert found.replicas == 2
    assert found.now is not None
    assert found.now.goodput
    assert found.one_more is not None
    assert found.one_more.goodput
    assert found.one_more.change
    assert found.one_fewer is not None
    assert found.one_fewer.goodput
    assert found.one_fewer.change
    assert found.one_more.replicas == 3
    assert found.one_more.change > 0 > found.one_fewer.change
    # after `pays_after` seconds the larger one has done what the smaller one has
    assert found.one_more.pays_after is not None
    assert found.pause is not None
    there = (found.one_more.pays_after - found.pause) * found.one_more.goodput
    assert there == pytest.approx(found.one_more.pays_after * found.now.goodput)
    assert any("a person asked for 2" in text for text in found.limited_by)
    assert found.free_slots == 2


def test_explain_names_the_jobs_that_share_the_nodes(pump: Pump) -> None:
    for job in ("a", "b"):
        pump.job(job)
        pump.node("n0", job, 4)
    pump.settle().later(700)
    found = explained(pump, "a")
    assert [rival.job for rival in found.rivals] == ["b"]
    assert found.rivals[0].shared_nodes == ("n0",)
    (shares,) = (line for line in lines(found) if "shares" in line)
    assert shares.startswith("  shares n0 with b: 2 replicas, it would take ")
    assert found.rivals[0].marginal_speedup is not None
    assert found.rivals[0].marginal_speedup > 0
    assert any("another job's" in text for text in found.limited_by)
    assert found.one_more is not None
    assert "needs slots that other jobs have" in found.one_more.note


def test_a_job_that_has_not_reported(pump: Pump) -> None:
    play(pump, "job a; node n0 a 4 reports=False; settle")
    found = explained(pump, "a")
    assert found.now is not None
    assert found.now.goodput is None
    assert any("not been profiled" in text for text in found.limited_by)


def test_a_job_that_waits(pump: Pump) -> None:
    play(pump, "job a min_replicas=9; node n0 a 4; settle")
    found = explained(pump, "a")
    assert (found.replicas, found.now) == (0, None)
    assert "needs at least 9 replicas" in found.reason


def test_a_job_that_has_waited_is_explained_as_one_that_has(pump: Pump) -> None:
    play(
        pump,
        """
        job a preemptible=False; job b min_replicas=4; node n0 a 4; settle; later 700
        node n0 b 4; settle; later 1200""",
    )
    found = explained(pump, "b")
    assert found.policy_wants == 0
    said = re.search(r"waiting for (\d+) s", found.policy_reason)
    assert said is not None, found.policy_reason
    assert 1860 <= int(said[1]) <= 1900, "since it was submitted; its status counts whole minutes"


def test_a_job_that_is_over(pump: Pump) -> None:
    play(pump, "job a; node n0 a 4; settle; n0 finish; settle")
    assert explained(pump, "a").state == JobState.DONE.value


def test_a_job_that_the_coordinator_has_not_seen(pump: Pump) -> None:
    pump.job("a")
    assert explained(pump, "a").state == "pending"
