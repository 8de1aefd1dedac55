"""Measure the load of this machine: CPU and memory by psutil, GPUs by NVIDIA's management library.

The library (NVML) comes with the driver. It is asked without a CUDA context, so no GPU memory is taken.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import psutil

from adaptdl_elastic.rendezvous.schema.records import GpuUsage, NodeUsage

_LIBRARY = "libnvidia-ml.so.1"


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Gpus:
    """The GPUs of this machine; none where the driver is not installed or does not answer.

    Args:
        load: Loads a shared library.
    """

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._nvml: Any = None
        self._count = 0
        try:
            nvml = load(_LIBRARY)
            count = ctypes.c_uint()
            if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
                self._nvml, self._count = nvml, count.value
        except (OSError, AttributeError):
            return

    def read(self) -> tuple[GpuUsage, ...]:
        """Return the load of each GPU; those that do not answer are left out."""
        found = []
        for index in range(self._count):
            device, load, memory = ctypes.c_void_p(), _Utilization(), _Memory()
            answers = (
                self._nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device))
                or self._nvml.nvmlDeviceGetUtilizationRates(device, ctypes.byref(load))
                or self._nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
            )
            if answers == 0:
                found.append(GpuUsage(min(1.0, load.gpu / 100), memory.used, memory.total))
        return tuple(found)


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
        return NodeUsage(self._node, cpu, used, memory.total, self._gpus.read(), time.time())
