"""The load of a node: how it is measured, and that it stands in the store only while the node does."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from adaptdl_elastic.agent.cluster.usage_reporter import UsageReporter
from adaptdl_elastic.agent.machine.usage import Gpus, Usage
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import GpuUsage, NodeUsage, decode
from adaptdl_elastic.rendezvous.store.memory import MemoryStore


class Nvml:
    """A management library of two GPUs, of which the second does not answer."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: Any) -> int:
        device._obj.value = 1 + index.value
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: ctypes.c_void_p, load: Any) -> int:
        load._obj.gpu = 30
        return 0 if device.value == 1 else 999

    def nvmlDeviceGetMemoryInfo(self, device: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.total, memory._obj.used = 80 << 30, 5 << 30
        return 0


def test_gpus_that_answer_are_measured() -> None:
    assert Gpus(lambda name: Nvml()).read() == (GpuUsage(0.3, 5 << 30, 80 << 30),)


def test_without_a_driver_there_are_no_gpus() -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert Gpus(missing).read() == ()


def test_the_load_of_this_machine_is_possible() -> None:
    usage = Usage("n", Gpus(lambda name: Nvml())).read()
    assert usage.node == "n"
    assert 0 < usage.memory_used <= usage.memory
    assert len(usage.gpus) == 1


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
