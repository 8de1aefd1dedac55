"""Jobs of several nodes; nodes, the store or the way to it fail. `Cluster.check` has what must hold."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
from pathlib import Path

import psutil
import pytest
from cluster import PLAIN, Cluster
from cutting_proxy import CuttingProxy

from adaptdl_elastic.rendezvous.schema.records import JobRequest, JobStatus, LeaderRecord, decode, encode

WRONG_CLOCK = Path(__file__).parents[1] / "support" / "wrong_clock.c"
pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.essential
def test_the_coordinators_node_is_killed_and_who_stood_by_leads(cluster: Cluster) -> None:
    first, *others = cluster.together("first", "second", "third")
    keys = cluster.recorder.keys
    prefix = keys.coordinator_standby("")
    with cluster.store.watch(prefix, 1) as changes:  # from the first change that there was
        assert any(one.value is not None for one in changes)
    place = cluster.store.get(keys.coordinator_host)
    assert place is not None
    assert place.value.split("/")[0] == "first"
    seen = len(others[0].events)
    # all stand still before the first one ends, so that none reacts to that
    family = [first.process, *_family(first.process.pid)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in family:
            process.send_signal(number)
    others[0].wait_for_event("generation", after=seen, replicas=2)
    leader = cluster.store.get(keys.coordinator_leader)
    assert leader is not None
    # the first to stand by, or one that another agent has started since
    stood_by = {one.key.removeprefix(prefix) for one in cluster.history() if one.key.startswith(prefix)}
    assert decode(LeaderRecord, leader.value).id in stood_by
    cluster.finish(*others)
    assert others[0].of("failure") == others[1].of("failure") == []
    cluster.check(epochs=60, replicas=2)


def test_a_node_comes_back_under_its_name(cluster: Cluster) -> None:
    first, second = cluster.together("first", "second")
    seen = len(first.events)
    second.process.kill()
    again = cluster.train("second")
    # alone at first, or at once with the new one
    first.wait_for_event("generation", cause="node_lost", after=seen)
    again.wait_for_event("generation", replicas=2, placements={"first": 1, "second": 1})
    cluster.finish(first, again)
    cluster.check(epochs=60, replicas=2)


def test_a_pause_of_etcd_evicts_nobody(cluster: Cluster) -> None:
    first, second = cluster.together("first", "second")
    began = len(first.of("generation"))
    cluster.etcd.pause()
    seen = len(first.events)
    threading.Event().wait(10)  # twice the lease
    first.wait_for_event("epoch", after=seen)
    cluster.etcd.resume()
    cluster.finish(first, second)
    assert len(first.of("generation")) == began
    cluster.check(epochs=60, replicas=2)


def test_a_node_that_is_cut_off_is_planned_without_and_used_again(cluster: Cluster) -> None:
    with CuttingProxy(cluster.etcd.endpoint) as proxy:
        first = cluster.train("first")
        first.wait_for_event("generation")
        second = cluster.train("second", endpoint=proxy.endpoint)
        cluster.scale(2, first)
        seen = len(first.events)
        proxy.freeze()
        alone = first.wait_for_event("generation", replicas=1, after=seen)
        assert (alone["cause"], alone["placements"]) == ("node_lost", {"first": 1})
        proxy.heal()
        first.wait_for_event("generation", replicas=2, after=seen)
        cluster.finish(first, second)
    cluster.check(epochs=60, replicas=2)


def test_an_agent_of_an_earlier_run_is_harmless(cluster: Cluster) -> None:
    stale = cluster.train("first")
    stale.wait_for_event("generation")
    stopped = [stale.process, *(child for child in _family(stale.process.pid))]
    key = cluster.recorder.keys.node("first", "job")
    with cluster.store.watch(key, cluster.store.range(key).revision + 1) as changes:
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        assert any(change.kind == "delete" for change in changes)  # else the second one joins its run
    fresh = cluster.train("second")
    fresh.wait_for_event("generation")
    for process in stopped:
        process.send_signal(signal.SIGCONT)
    assert stale.wait() == 1
    assert "was started again" in stale.text()
    cluster.hurry()
    assert fresh.wait() == 0
    assert len(fresh.of("generation")) == 1
    assert cluster.violations() == []


def _family(pid: int) -> list[psutil.Process]:
    return list(psutil.Process(pid).children(recursive=True))


def test_garbage_under_our_prefix_is_ignored(cluster: Cluster) -> None:
    keys = cluster.recorder.keys
    root, job = keys.root, keys.job("job")

    def litter() -> None:
        for name in (
            *("nodes/first", "nodes/ghost/job", "nodes/ghost/job/x", "jobs/ghost/plan", "jobs/ghost/spec"),
            *("jobs/job/status", "jobs/job/hints", "jobs/job/checkpoint"),
            *("reports", "reports/", "reports/job", "reports/job/x/running/first", "parts/job/x/0"),
            *(
                "jobs/job/generations/0/ended/ghost",
                "jobs/job/generations/x",
                "jobs/job/generations/9/master",
            ),
            *("events/0", "drains/first", "coordinator/x", "autoscaler/status", "x"),
        ):
            cluster.store.put(root + name, '{"v": 1, "no": "record"}' if len(name) % 2 else "\x00garbage")

    litter()
    first = cluster.train("first")
    first.wait_for_event("generation")
    second = cluster.train("second")
    litter()
    cluster.store.put(f"{job}plan", "garbage")
    cluster.scale(2, first)
    litter()
    cluster.finish(first, second)
    cluster.check(epochs=60, replicas=2)


@pytest.mark.parametrize("wrong", ["first", "second"])
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here to make a wrong clock with")
def test_clocks_that_differ_by_minutes_decide_nothing(cluster: Cluster, wrong: str, tmp_path: Path) -> None:
    library = tmp_path / "wrong_clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, WRONG_CLOCK, "-ldl"], check=True)
    skew = {"LD_PRELOAD": str(library), "WRONG_CLOCK": "420"}
    first = cluster.train("first", env=skew if wrong == "first" else None)
    began = first.wait_for_event("generation")
    second = cluster.train("second", env=skew if wrong == "second" else None)
    cluster.scale(2, first)
    theirs = second.wait_for_event("started")
    # by one clock the first is earlier
    assert (began["time"] > theirs["time"]) == (wrong == "first"), "the clocks do differ"
    cluster.finish(first, second)
    assert [g["cause"] for g in first.of("generation")] == ["start", "manual"]
    told = cluster.store.get(cluster.recorder.keys.job("job", "status"))
    assert told is not None
    pauses = decode(JobStatus, told.value).pauses
    assert all(0 <= pause < 300 for pause in pauses), pauses
    cluster.check(epochs=60, replicas=2)


def test_clusters_that_share_an_etcd_do_not_meet(cluster: Cluster) -> None:
    runs = [cluster.start("node", f"--cluster={name}", PLAIN, nodes="1") for name in ("one", "two")]
    assert [run.wait() for run in runs] == [0, 0]
    for run in runs:
        assert run.text().count("rank 0 of 1") == 1
        assert "is done" not in run.text()


def test_a_node_that_does_not_get_ready_in_time_is_planned_without(cluster: Cluster) -> None:
    first = cluster.train("first", "--rescale-timeout=2", "--rescale=restart")
    first.wait_for_event("generation")
    second = cluster.train("second", "--rescale-timeout=2", "--rescale=restart")
    run = cluster.wait_for_node("second", like="first")
    second.process.send_signal(signal.SIGSTOP)
    seen = len(first.events)
    # as `adaptdl scale` writes it, while the lease of the stopped agent still runs
    request = JobRequest(replicas=2, run=run)
    cluster.store.put(cluster.recorder.keys.job("job", "request"), encode(request))
    alone = first.wait_for_event("generation", replicas=1, after=seen)
    assert (alone["placements"], alone["cause"]) == ({"first": 1}, "node_lost")
    second.process.send_signal(signal.SIGCONT)
    cluster.finish(first, second)
    assert cluster.violations() == []
