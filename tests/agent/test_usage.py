"""The load of a node: how it is measured, and that it stands in the store only while the node does."""

from __future__ import annotations

import threading

from adaptdl_elastic.agent.cluster.usage_reporter import UsageReporter
from adaptdl_elastic.agent.machine.devices import Gpus
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import NodeUsage, decode
from adaptdl_elastic.rendezvous.store.memory import MemoryStore


def test_a_report_has_a_possible_load_and_vanishes_with_the_lease_of_its_node() -> None:
    store, keys = MemoryStore(), Keys()
    lease = store.lease(60.0)
    with store.watch(keys.usage) as watch:
        reporter = UsageReporter(store, keys, "n", Gpus(), lambda: lease, interval=0.01)
        change = next(iter(watch))
        reporter.close()
    usage = decode(NodeUsage, change.value or "")
    assert usage.node == "n"
    assert 0 < usage.memory_used <= usage.memory
    lease.revoke()
    assert store.get(keys.usage_of("n")) is None


def test_without_a_lease_nothing_is_reported() -> None:
    store, keys = MemoryStore(), Keys()
    asked = threading.Event()

    def no_lease() -> None:
        asked.set()

    reporter = UsageReporter(store, keys, "n", Gpus(), no_lease, interval=0.01)
    assert asked.wait(60)
    reporter.close()
    assert store.get(keys.usage_of("n")) is None
