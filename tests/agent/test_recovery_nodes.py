"""Replicas, agents and nodes of a running job are killed, and the others go on in their processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from cluster import Cluster
from elastic_run import ElasticRun

TRAIN = str(Path(__file__).parent / "scripts" / "train.py")
LONG = ("60", "0.1")  # epochs, seconds per step
pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]


def pids(run: ElasticRun, generation: int) -> dict[int, int]:
    """{rank: pid} of that agent's replicas of a generation."""
    event = run.wait_for_event("started", generation=generation)
    return {int(rank): pid for rank, pid in event["pids"].items()}


@pytest.mark.essential
def test_a_node_that_dies_is_not_missed(cluster: Cluster) -> None:
    first = cluster.start("first", TRAIN, *LONG)
    first.wait_for_event("generation")
    second = cluster.start("second", TRAIN, *LONG)
    whole = cluster.scale(2, first)
    [mine] = pids(first, whole["generation"]).values()
    second.wait_for_event("started", generation=whole["generation"])
    seen = len(first.events)
    second.process.kill()
    alone = first.wait_for_event("generation", replicas=1, after=seen)
    assert (alone["cause"], alone["transition"]) == ("node_lost", "recover")
    assert list(pids(first, alone["generation"]).values()) == [mine]
    cluster.finish(first)
    assert first.of("failure") == []
    cluster.check(epochs=60, replicas=1)


def test_the_node_of_rank_0_and_of_the_coordinator_dies(cluster: Cluster) -> None:
    first = cluster.start("first", TRAIN, *LONG)
    first.wait_for_event("generation")
    second = cluster.start("second", TRAIN, *LONG)
    whole = cluster.scale(2, first)
    [theirs] = pids(second, whole["generation"]).values()
    second.wait_for_event("started", generation=whole["generation"])
    seen = len(second.events)
    first.process.kill()
    alone = second.wait_for_event("generation", replicas=1, after=seen)
    assert (alone["cause"], alone["transition"]) == ("node_lost", "recover")
    assert list(pids(second, alone["generation"]).values()) == [theirs]
    cluster.finish(second)
    cluster.check(epochs=60, replicas=1)


def test_one_replica_of_each_node_dies_at_once(cluster: Cluster) -> None:
    first = cluster.start("first", "--nproc-per-node=1:2", TRAIN, *LONG)
    first.wait_for_event("generation")
    second = cluster.start("second", "--nproc-per-node=1:2", TRAIN, *LONG)
    whole = cluster.scale(4, first)
    here, there = pids(first, whole["generation"]), pids(second, whole["generation"])
    assert (sorted(here), sorted(there)) == ([0, 1], [2, 3])
    seen = len(first.events)
    for pid in (here[0], there[3]):
        os.kill(pid, signal.SIGKILL)
    again = first.wait_for_event("generation", after=seen, replicas=4)  # it was asked for so many
    generations = first.of("generation")
    lost = generations[generations.index(again) - 1]["transition"]
    assert (lost, again["transition"]) == ("recover", "inplace")
    assert pids(first, again["generation"])[0] == here[1]
    assert there[2] in pids(second, again["generation"]).values()
    cluster.finish(first, second)
    assert [*first.of("failure"), *second.of("failure")] == []
    cluster.check(epochs=60, replicas=4)
