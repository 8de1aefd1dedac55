"""A job moves to other nodes without a restart."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from cluster import Cluster

TRAIN = str(Path(__file__).parent / "scripts" / "train.py")
LONG = ("60", "0.1")  # epochs, seconds per step
pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_only_node_hands_over_to_another_and_leaves(cluster: Cluster) -> None:
    first = cluster.start("first", TRAIN, *LONG)
    first.wait_for_event("checkpoint")
    second = cluster.start("second", TRAIN, *LONG)
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
    cluster.check(epochs=60, replicas=1)
