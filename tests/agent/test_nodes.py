"""Several agents on one machine, one etcd: nodes come late, leave, come back, move a job, and die."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress

import psutil
import pytest
from cluster import JOB, Cluster
from elastic_run import marked

from adaptdl_elastic.rendezvous.schema.records import LeaderRecord, decode

pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.essential
def test_a_node_comes_late_and_is_drained_and_the_other_goes_on(cluster: Cluster) -> None:
    first = cluster.train("first")
    first.wait_for_event("generation", generation=0)
    # not forked: sets have another order on this node
    cluster.train("second", env={"PYTHONHASHSEED": "7"})
    grown = cluster.scale(2, first)
    assert grown["transition"] == "inplace"
    assert 0 < grown["pause_s"] < 60
    assert grown["placements"] == {"first": 1, "second": 1}
    seen = len(first.events)
    cluster.ask("drain", "second")
    shrunk = first.wait_for_event("generation", replicas=1, after=seen)
    assert shrunk["cause"] == "drain"
    assert cluster.agents["second"].wait() == 0
    cluster.finish(first)
    assert first.of("failure") == []
    cluster.check(replicas=1)


def test_a_node_leaves_and_comes_back_and_another_follows(cluster: Cluster) -> None:
    first, second = cluster.together("first", "second")
    for size in (1, 2):
        seen = len(first.events)
        cluster.ask("scale", JOB, "--replicas", str(size))
        first.wait_for_event("generation", replicas=size, after=seen)
    third = cluster.train("third")
    grown = cluster.scale(3, second)
    # what each agent says of a change is of this change, also one whose replicas have joined others
    assert grown["time"] > third.wait_for_event("started")["time"]
    assert [e["generation"] for e in second.of("started")] == [1, 3, 4]
    for event in (e for run in (first, second, third) for e in run.of("generation")[1:]):
        assert event["pause_s"] is None or 0 < event["pause_s"] < 60, event
    cluster.finish(first, second, third)
    cluster.check(replicas=3)


def test_the_only_node_hands_over_to_another_and_leaves(cluster: Cluster) -> None:
    first = cluster.train("first")
    first.wait_for_event("checkpoint")
    second = cluster.train("second")
    cluster.wait_for_node("second", like="first")
    first.process.send_signal(signal.SIGTERM)
    moved = second.wait_for_event("generation", placements={"second": 1})
    assert (moved["cause"], moved["transition"]) == ("drain", "inplace")
    assert first.wait() == 0
    # written when it had a first step there, or at its end
    assert [(g["transition"], g["placements"]) for g in first.of("generation")[1:]] == [
        ("inplace", {"first": 1, "second": 1})
    ]
    cluster.finish(second)
    cluster.check(replicas=1)


@pytest.mark.essential
@pytest.mark.parametrize(
    ("left", "killed", "what"),
    [
        # rank 0 and the coordinator are on the first
        pytest.param(("second", "third"), ("first",), "all processes", id="the coordinator's node"),
        pytest.param(("third",), ("first", "second"), "agents", id="all agents but one"),
        pytest.param(("first",), ("second",), "agents, and one comes back", id="an agent that comes back"),
    ],
)
def test_the_nodes_that_die_are_not_missed(
    cluster: Cluster, left: tuple[str, ...], killed: tuple[str, ...], what: str
) -> None:
    names = sorted([*left, *killed])
    runs = dict(zip(names, cluster.together(*names), strict=True))
    others, dead = [runs[name] for name in left], [runs[name] for name in killed]
    mine = [run.of("started")[-1]["pids"] for run in others]
    standby = cluster.keys.coordinator_standby("")
    if len(left) > 1:
        with cluster.store.watch(standby, 1) as changes:  # from the first change that there was
            assert any(one.value is not None for one in changes)
        place = cluster.store.get(cluster.keys.coordinator_host)
        assert place is not None
        assert place.value.split("/")[0] == "first"
    seen = len(others[0].events)
    dying = [psutil.Process(run.process.pid) for run in dead]
    if what == "all processes":
        dying += [child for agent in dying for child in agent.children(recursive=True)]
    # all stand still before the first one ends, so that none reacts to that
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in dying:
            process.send_signal(number)
    if what == "agents, and one comes back":
        others.append(cluster.train("second"))
        # alone at first, or at once with the new one
        others[0].wait_for_event("generation", after=seen, cause="node_lost")
        others[-1].wait_for_event("generation", placements={"first": 1, "second": 1})
    else:
        lost = others[0].wait_for_event("generation", after=seen, replicas=len(left))
        assert (lost["cause"], lost["transition"]) == ("node_lost", "recover")
        for run, before in zip(others, mine, strict=True):
            started = run.wait_for_event("started", generation=lost["generation"])
            assert list(started["pids"].values()) == list(before.values()), "in its process"
    if len(left) > 1:
        leader = cluster.store.get(cluster.keys.coordinator_leader)
        assert leader is not None
        # the first to stand by, or one that another agent has started since
        stood_by = {one.key.removeprefix(standby) for one in cluster.history() if one.key.startswith(standby)}
        assert decode(LeaderRecord, leader.value).id in stood_by
    cluster.finish(*others)
    assert [run.of("failure") for run in others] == [[] for _ in others]
    cluster.check(replicas=len(others))


def test_one_replica_of_each_node_dies_at_once(cluster: Cluster) -> None:
    first, second = (cluster.train(name, "--nproc-per-node=1:2") for name in ("first", "second"))
    first.wait_for_event("generation")
    whole = cluster.scale(4, first)
    names = {run: name for name, run in cluster.agents.items()}
    before = {run: run.pids(whole["generation"]) for run in names}
    assert sorted(rank for ranks in before.values() for rank in ranks) == [0, 1, 2, 3]
    seen = len(first.events)
    dead = {run: ranks[min(ranks)] for run, ranks in before.items()}
    for pid in dead.values():
        os.kill(pid, signal.SIGKILL)
    again = first.wait_for_event("generation", after=seen, replicas=4)  # it was asked for so many
    generations = first.of("generation")
    lost = generations[generations.index(again) - 1]["transition"]
    assert (lost, again["transition"]) == ("recover", "inplace")
    for run, ranks in before.items():
        assert set(ranks.values()) - {dead[run]} <= set(run.pids(again["generation"]).values())
    cluster.finish(first, second)
    assert [*first.of("failure"), *second.of("failure")] == []
    cluster.check(replicas=4)


def test_a_job_whose_only_node_was_killed_is_lost_when_its_lease_has_run_out(cluster: Cluster) -> None:
    only = cluster.train("only")
    only.wait_for_event("epoch")
    cluster.wait_for_state("running")
    keys = cluster.keys
    leased = [keys.node("only", JOB), keys.coordinator_leader]
    revision = cluster.store.range(keys.root).revision
    for process in marked(only.mark):  # all of the machine at once: nobody can say goodbye
        # the fork server's children end with it
        with suppress(psutil.NoSuchProcess):
            process.kill()
    with cluster.store.watch(keys.root, revision + 1) as changes:
        while any(cluster.store.get(key) for key in leased):
            next(iter(changes))
    (row,) = json.loads(cluster.ask("ls", "--json"))
    assert (row["state"], row["replicas"], row["nodes"]) == ("lost", 0, 0)
    assert row["reason"].startswith("no agent answers (last heard of at ")
    again = cluster.train("only")
    again.wait_for_event("epoch")
    cluster.wait_for_state("running")
    cluster.finish(again)
