"""Measure the load of this machine: CPU and memory by psutil, GPUs by NVML."""

from __future__ import annotations

import time

import psutil

from adaptdl_elastic.agent.machine.devices import Gpus
from adaptdl_elastic.rendezvous.schema.records import NodeUsage


class Usage:
    """The load of this machine since the last reading.

    Args:
        node: Name of the node.
        gpus: Its GPUs.
    """

    def __init__(self, node: str, gpus: Gpus | None = None) -> None:
        self._node, self._gpus = node, gpus or Gpus()
        psutil.cpu_percent()  # the next call measures from here

    def read(self) -> NodeUsage:
        """Return the load since the last call."""
        memory = psutil.virtual_memory()
        cpu = min(1.0, max(0.0, psutil.cpu_percent() / 100))
        used = memory.total - memory.available
        return NodeUsage(self._node, cpu, used, memory.total, self._gpus.usage(), time.time())
