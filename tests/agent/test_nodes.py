"""Several agents on one machine, one etcd: they come late, idle, leave, come back, and die."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from cluster import JOB, Cluster
from elastic_run import marked

from adaptdl_elastic.agent.cluster.store_link import LEASE_SECONDS
from adaptdl_elastic.rendezvous.schema.keys import Keys

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN, PLAIN = str(SCRIPTS / "train.py"), str(SCRIPTS / "plain.py")
LONG = ("60", "0.1")  # epochs, seconds per step
SLACK = 20.0  # seconds of a busy machine
pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_node_comes_late_and_is_drained_and_the_other_goes_on(cluster: Cluster) -> None:
    first = cluster.start("first", TRAIN, *LONG)
    first.wait_for_event("generation", generation=0)
    # not forked: sets have another order on this node
    second = cluster.start("second", TRAIN, *LONG, env={"PYTHONHASHSEED": "7"})
    grown = cluster.scale(2, first)
    assert grown["transition"] == "inplace"
    assert 0 < grown["pause_s"] < 60
    assert grown["placements"] == {"first": 1, "second": 1}
    seen = len(first.events)
    cluster.ask("drain", "second")
    shrunk = first.wait_for_event("generation", replicas=1, after=seen)
    assert shrunk["cause"] == "drain"
    assert second.wait() == 0
    cluster.finish(first)
    assert first.of("failure") == []
    cluster.check(epochs=60, replicas=1)


@pytest.mark.exhaustive
def test_a_node_leaves_and_comes_back_and_another_follows(cluster: Cluster) -> None:
    first = cluster.start("first", TRAIN, *LONG)
    first.wait_for_event("generation")
    second = cluster.start("second", TRAIN, *LONG)
    cluster.scale(2, second)
    for size in (1, 2):
        seen = len(first.events)
        cluster.ask("scale", JOB, "--replicas", str(size))
        first.wait_for_event("generation", replicas=size, after=seen)
    third = cluster.start("third", TRAIN, *LONG)
    grown = cluster.scale(3, second)
    # what each agent says of a change is of this change, also one whose replicas have joined others
    assert grown["time"] > third.wait_for_event("started")["time"]
    assert [e["generation"] for e in second.of("started")] == [1, 3, 4]
    for event in (e for run in (first, second, third) for e in run.of("generation")[1:]):
        assert event["pause_s"] is None or 0 < event["pause_s"] < 60, event
    cluster.finish(first, second, third)
    cluster.check(epochs=60, replicas=3)


def test_an_agent_is_killed_and_the_other_goes_on(cluster: Cluster) -> None:
    first = cluster.start("first", TRAIN, *LONG)
    first.wait_for_event("generation", generation=0)
    second = cluster.start("second", TRAIN, *LONG)
    cluster.scale(2, first)
    seen = len(first.events)
    second.process.kill()
    alone = first.wait_for_event("generation", after=seen)
    assert (alone["replicas"], alone["cause"]) == (1, "node_lost")
    cluster.finish(first)
    cluster.check(epochs=60, replicas=1)


@pytest.mark.exhaustive
def test_a_node_that_comes_when_the_job_is_done_does_not_train_it_again(cluster: Cluster) -> None:
    assert cluster.start("first", PLAIN, nodes="1").wait() == 0
    late = cluster.start("late", PLAIN, nodes="1")
    assert late.wait() == 0
    (line,) = late.text().splitlines()
    assert "job 'job' is done: every replica ended well" in line
    assert "--anew" in line
    assert [event["event"] for event in late.events] == ["exit"]
    again = cluster.start("first", "--anew", PLAIN, nodes="1")
    assert again.wait() == 0
    assert "another run begins" in again.text()
    assert "rank 0 of 1" in again.text()
    assert cluster.violations() == []


@pytest.mark.exhaustive
def test_a_job_whose_only_node_was_killed_is_lost_within_the_lease_and_a_second(cluster: Cluster) -> None:
    only = cluster.start("only", TRAIN, *LONG)
    only.wait_for_event("epoch")
    cluster.wait_for_state("running")
    keys = Keys()
    leased = [keys.node("only", JOB), keys.coordinator_leader]
    revision = cluster.store.range(keys.root).revision
    for process in marked(only.mark):  # all of the machine at once: nobody can say goodbye
        # the fork server's children end with it
        with suppress(psutil.NoSuchProcess):
            process.kill()
    killed = time.monotonic()
    with cluster.store.watch(keys.root, revision + 1) as changes:
        while any(cluster.store.get(key) for key in leased):
            next(iter(changes))
    assert time.monotonic() - killed < LEASE_SECONDS + 1 + SLACK
    (row,) = json.loads(cluster.ask("ls", "--json"))
    assert (row["state"], row["replicas"], row["nodes"]) == ("lost", 0, 0)
    assert row["reason"].startswith("no agent answers (last heard of at ")
    again = cluster.start("only", TRAIN, *LONG)
    again.wait_for_event("epoch")
    cluster.wait_for_state("running")
    cluster.finish(again)
