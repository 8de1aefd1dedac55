"""Jobs of several nodes; nodes, the store or the way to it fail. `Cluster.check` has what must hold."""

from __future__ import annotations

import shutil
import signal
import subprocess
import threading
from pathlib import Path

import psutil
import pytest
from cluster import Cluster
from cutting_proxy import CuttingProxy
from elastic_run import ElasticRun

from adaptdl_elastic.rendezvous.schema.records import JobRequest, JobStatus, decode, encode

WRONG_CLOCK = Path(__file__).parents[1] / "support" / "wrong_clock.c"
pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_pause_of_etcd_evicts_no_node(cluster: Cluster) -> None:
    first, second = cluster.together("first", "second")
    began = len(first.of("generation"))
    cluster.etcd.pause()
    seen = len(first.events)
    threading.Event().wait(10)  # twice the lease
    first.wait_for_event("epoch", after=seen)
    cluster.etcd.resume()
    cluster.finish(first, second)
    assert len(first.of("generation")) == began
    cluster.check(replicas=2)


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
    cluster.check(replicas=2)


@pytest.mark.parametrize("name", ["first", "second"])
def test_an_agent_that_stood_still_comes_back_to_find_another_run_or_its_name_taken(
    cluster: Cluster, name: str
) -> None:
    """With another node the run goes on, and an agent of the same name joins it; else another run begins."""
    goes_on = name == "first"
    stale, *others = cluster.together("first", "other") if goes_on else [cluster.train("first")]
    grown = stale.wait_for_event("generation", replicas=1 + len(others))["generation"]
    stopped = family(stale)
    key = cluster.keys.node("first", "job")
    with cluster.store.watch(key, cluster.store.range(key).revision + 1) as changes:
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        assert any(change.kind == "delete" for change in changes)  # else the next one joins its run
    fresh = cluster.train(name)
    if goes_on:
        both = others[0].wait_for(
            lambda e: e["event"] == "generation" and e["generation"] > grown and e["replicas"] == 2
        )
        assert both["placements"] == {"other": 1, "first": 1}
    else:
        fresh.wait_for_event("generation")
    for process in stopped:
        process.send_signal(signal.SIGCONT)
    assert stale.wait() == 1
    taken = f"'first' was taken by the agent at 127.0.0.1, process {fresh.process.pid}"
    assert (taken if goes_on else "was started again") in stale.text()
    cluster.finish(*others, fresh)
    if goes_on:
        cluster.check(replicas=2)
    else:
        assert len(fresh.of("generation")) == 1
        assert cluster.violations() == []


def family(run: ElasticRun) -> list[psutil.Process]:
    """The processes of a node: its agent, and all that it has started."""
    agent = psutil.Process(run.process.pid)
    return [agent, *agent.children(recursive=True)]


def test_garbage_under_our_prefix_is_ignored(cluster: Cluster) -> None:
    keys = cluster.keys
    root, job = keys.root, keys.job("job")

    def litter() -> None:
        for name in (
            *("nodes/first", "nodes/ghost/job", "nodes/ghost/job/x", "jobs/ghost/plan", "jobs/ghost/spec"),
            *("jobs/job/status", "jobs/job/hints", "jobs/job/checkpoint"),
            *("jobs/job/left/ghost", "jobs/job/left", "reports/job/ghost", "parts/job/x/0"),
            *(
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
    cluster.check(replicas=2)


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
    told = cluster.store.get(cluster.keys.job("job", "status"))
    assert told is not None
    pauses = decode(JobStatus, told.value).pauses
    assert all(0 <= pause < 300 for pause in pauses), pauses
    cluster.check(replicas=2)


def test_a_node_that_does_not_get_ready_in_time_is_planned_without(cluster: Cluster) -> None:
    first = cluster.train("first", "--rescale-timeout=2", "--rescale=restart")
    first.wait_for_event("generation")
    second = cluster.train("second", "--rescale-timeout=2", "--rescale=restart")
    run = cluster.wait_for_node("second", like="first")
    second.process.send_signal(signal.SIGSTOP)
    seen = len(first.events)
    # as `adaptdl scale` writes it, while the lease of the stopped agent still runs
    request = JobRequest(replicas=2, run=run)
    cluster.store.put(cluster.keys.job("job", "request"), encode(request))
    alone = first.wait_for_event("generation", replicas=1, after=seen)
    assert (alone["placements"], alone["cause"]) == ({"first": 1}, "node_lost")
    second.process.send_signal(signal.SIGCONT)
    cluster.finish(first, second)
    assert cluster.violations() == []
