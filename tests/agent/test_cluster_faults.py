"""Jobs of several nodes; nodes, the store or the way to it fail. `Cluster.check` has what must hold."""

from __future__ import annotations

import signal
import threading

import psutil
import pytest
from cluster import Cluster
from cutting_proxy import CuttingProxy
from elastic_run import ElasticRun

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


def test_an_agent_that_stood_still_comes_back_to_find_its_name_taken(cluster: Cluster) -> None:
    """With another node the run has gone on, and an agent of the same name has joined it."""
    stale, other = cluster.together("first", "other")
    grown = stale.wait_for_event("generation", replicas=2)["generation"]
    stopped = family(stale)
    key = cluster.keys.node("first", "job")
    with cluster.store.watch(key, cluster.store.range(key).revision + 1) as changes:
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        assert any(change.kind == "delete" for change in changes)
    fresh = cluster.train("first")
    both = other.wait_for(
        lambda e: e["event"] == "generation" and e["generation"] > grown and e["replicas"] == 2
    )
    assert both["placements"] == {"other": 1, "first": 1}
    for process in stopped:
        process.send_signal(signal.SIGCONT)
    assert stale.wait() == 1
    assert f"'first' was taken by the agent at 127.0.0.1, process {fresh.process.pid}" in stale.text()
    cluster.finish(other, fresh)
    cluster.check(replicas=2)


def family(run: ElasticRun) -> list[psutil.Process]:
    """The processes of a node: its agent, and all that it has started."""
    agent = psutil.Process(run.process.pid)
    return [agent, *agent.children(recursive=True)]
