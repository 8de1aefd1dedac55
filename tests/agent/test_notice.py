"""A spot notice on real agents: from EC2's word to a plan, and to training on.

Promised are 5 s and 60 s. How long it takes depends on the machine, so the times are recorded with the
result; asserted is what they are made of: how often the service is asked, that the next plan after the
agent's word is the one without the node (by the coordinator's own clock at once:
test_coordinator_failures.py), and that all of it is over before EC2 takes the node.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable

import pytest
from cluster import JOB, Cluster
from fake_imds import FakeImds

from adaptdl_elastic.agent.machine import interruption
from adaptdl_elastic.rendezvous.schema.records import NodeRecord, Plan, decode

WARNING = 120.0  # seconds from a notice to the end of the node


def next_plan_after_the_word(cluster: Cluster, victim: str) -> int:
    """The generation of the first plan that was written after the agent had said that it leaves."""
    keys, said = cluster.keys, False
    for change in cluster.history():
        if change.key == keys.node(victim, JOB) and change.value is not None:
            said = said or decode(NodeRecord, change.value).draining
        elif said and change.key == keys.job(JOB, "plan") and change.value is not None:
            return decode(Plan, change.value).generation
    raise AssertionError("the agent has not said that it leaves, or nobody has planned")


@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_notice_is_a_plan_within_seconds_and_nothing_is_lost(
    cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    """The node that leaves has rank 0."""
    service = FakeImds("i-first")
    try:
        on_ec2 = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": service.endpoint, "AWS_EC2_METADATA_DISABLED": "false"}
        leaves = cluster.train("first", env=on_ec2)
        leaves.wait_for_event("generation")
        stays = cluster.train("second")
        grown = cluster.scale(2, leaves)
        assert grown["placements"] == {"first": 1, "second": 1}
        seen = len(stays.events)
        notice = time.time()
        service.spot(WARNING)
        after = stays.wait_for_event("generation", after=seen, cause="drain")
        item = cluster.store.get(cluster.keys.job(JOB, "plan"))
        assert item is not None
        plan = decode(Plan, item.value, item.key)
        assert after["placements"] == {"second": 1}
        assert plan.generation == after["generation"]
        record_property("seconds_to_the_plan", plan.created - notice)
        record_property("seconds_to_the_first_step", after["time"] - notice)
        assert after["time"] < notice + WARNING
        assert inspect.signature(interruption.watch).parameters["interval"].default <= 1.0
        assert next_plan_after_the_word(cluster, "first") == plan.generation
        assert leaves.wait() == 0, "it leaves by itself, before its end"
        (drain,) = leaves.of("drain")
        assert "spot interruption: terminate" in drain["reason"]
        cluster.finish(stays)
        cluster.check(replicas=1)
    finally:
        service.close()
