"""A spot notice on real agents: how long it takes from EC2's word to a plan, and to training on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cluster import JOB, Cluster
from fake_imds import FakeImds

from adaptdl_elastic.rendezvous.keys import Keys
from adaptdl_elastic.rendezvous.records import Plan, decode

TRAIN = str(Path(__file__).parent / "scripts" / "train.py")
LONG = ("60", "0.1")  # epochs, seconds per step
PLANNED, TRAINING = (
    5.0,
    60.0,
)  # seconds that a notice may take to a plan, and to the first step without the node


@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["first", "second"])
def test_a_notice_is_a_plan_within_seconds_and_nothing_is_lost(cluster: Cluster, victim: str) -> None:
    """`first` has rank 0: a checkpoint and a restart. Without `second` it goes on in place."""
    services = {name: FakeImds(f"i-{name}") for name in ("first", "second")}
    try:
        runs = {
            name: cluster.start(
                name,
                TRAIN,
                *LONG,
                env={
                    "AWS_EC2_METADATA_SERVICE_ENDPOINT": services[name].endpoint,
                    "AWS_EC2_METADATA_DISABLED": "false",
                },
            )
            for name in services
        }
        runs["first"].wait_for_event("generation")
        grown = cluster.scale(2, runs["first"])
        assert grown["placements"] == {"first": 1, "second": 1}
        (survivor,) = set(runs) - {victim}
        seen = len(runs[survivor].events)
        notice = time.time()
        services[victim].spot(120)
        after = runs[survivor].wait_for_event("generation", after=seen, cause="drain")
        item = cluster.store.get(Keys("default").job(JOB, "plan"))
        assert item is not None
        plan = decode(Plan, item.value, item.key)
        assert after["placements"] == {survivor: 1}
        assert plan.generation == after["generation"]
        assert plan.created - notice <= PLANNED
        assert after["time"] - notice <= TRAINING
        assert runs[victim].wait() == 0, "it leaves by itself, before its end"
        (drain,) = runs[victim].of("drain")
        assert "spot interruption: terminate" in drain["reason"]
        cluster.finish(runs[survivor])
        cluster.check(epochs=60, replicas=1)
    finally:
        for service in services.values():
            service.close()
