"""The load of a node: how it is measured, and that it stands in the store only while the node does."""

from __future__ import annotations

import threading

from adaptdl_elastic.agent.cluster.usage_reporter import UsageReporter
from adaptdl_elastic.agent.machine.devices import Gpus
from adaptdl_elastic.agent.machine.usage import Usage
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import NodeUsage, decode
from adaptdl_elastic.rendezvous.store.memory import MemoryStore


def test_the_load_of_this_machine_is_possible() -> None:
    usage = Usage("n", Gpus()).read()
    assert usage.node == "n"
    assert 0 < usage.memory_used <= usage.memory


def test_a_report_vanishes_with_the_lease_of_its_node() -> None:
    store, keys = MemoryStore(), Keys()
    lease = store.lease(60.0)
    written = threading.Event()

    def read() -> NodeUsage:
        written.set()
        return NodeUsage("n", 0.5, 1, 2)

    with store.watch(keys.usage) as watch:
        reporter = UsageReporter(store, keys, "n", read, lambda: lease, interval=0.01)
        change = next(iter(watch))
        reporter.close()
    assert written.is_set()
    assert decode(NodeUsage, change.value or "") == NodeUsage("n", 0.5, 1, 2)
    lease.revoke()
    assert store.get(keys.usage_of("n")) is None


def test_without_a_lease_nothing_is_reported() -> None:
    store, keys = MemoryStore(), Keys()
    asked = threading.Event()

    def no_lease() -> None:
        asked.set()

    reporter = UsageReporter(store, keys, "n", lambda: NodeUsage("n", 0.5, 1, 2), no_lease, interval=0.01)
    assert asked.wait(60)
    reporter.close()
    assert store.get(keys.usage_of("n")) is None
