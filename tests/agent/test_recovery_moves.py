"""A job moves to other nodes without a restart."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from cluster import JOB, Cluster

from adaptdl_elastic.rendezvous.keys import Keys
from adaptdl_elastic.rendezvous.records import NodeRecord, decode

TRAIN = str(Path(__file__).parent / "scripts" / "train.py")
LONG = ("60", "0.1")  # epochs, seconds per step
pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]


def wait_for_node(cluster: Cluster, node: str, like: str) -> None:
    """Until its agent has joined the run that the agent of the node `like` is of."""
    keys = Keys()
    known = cluster.store.range(keys.nodes)
    runs = {item.key: decode(NodeRecord, item.value).run for item in known.items}
    wanted = runs[keys.node(like, JOB)]
    if runs.get(keys.node(node, JOB)) == wanted:
        return
    with cluster.store.watch(keys.nodes, known.revision + 1) as changes:
        assert any(
            change.key == keys.node(node, JOB) and decode(NodeRecord, change.value or "").run == wanted
            for change in changes
        )


def test_the_only_node_hands_over_to_another_and_leaves(cluster: Cluster) -> None:
    first = cluster.start("first", TRAIN, *LONG)
    first.wait_for_event("checkpoint")
    second = cluster.start("second", TRAIN, *LONG)
    wait_for_node(cluster, "second", like="first")
    first.process.send_signal(signal.SIGTERM)
    moved = second.wait_for_event("generation", placements={"second": 1})
    assert (moved["cause"], moved["transition"]) == ("drain", "inplace")
    assert first.wait() == 0
    # written when it had a first step there, or at its end
    assert [(g["transition"], g["placements"]) for g in first.of("generation")[1:]] == [
        ("inplace", {"first": 1, "second": 1})
    ]
    cluster.finish(second)
    cluster.check(epochs=60, replicas=1)
