"""The GPUs of this machine: which there are, how busy they are, and which cannot be used.

NVIDIA's management library (NVML) is asked. It comes with the driver, needs no CUDA context, and so takes no
memory of a GPU. A GPU that is divided (MIG) counts as its instances.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from adaptdl_elastic.agent.machine import device_locks
from adaptdl_elastic.rendezvous.schema.records import GpuUsage

logger = logging.getLogger(__name__)

MIG = "MIG-"
FILLED = 0.1  # fraction of a GPU's memory that a program of others must have to keep jobs away


@dataclass(frozen=True)
class Device:
    """A GPU, or an instance of a divided one."""

    name: str  # its UUID, as CUDA_VISIBLE_DEVICES takes it
    model: str
    handle: Any


@dataclass(frozen=True)
class DevicesSeen:
    """Which devices cannot be used, as `NodeRecord.unusable`, and which of these lines are new."""

    unusable: tuple[str, ...]
    new: tuple[str, ...]


class Gpus:
    """The GPUs of this machine; none where the driver is not installed or does not answer.

    Args:
        visible: `CUDA_VISIBLE_DEVICES`, which bounds them: numbers, or beginnings of UUIDs; None: all.
    """

    def __init__(self, visible: str | None = None) -> None:
        self._nvml: Any = None
        with suppress(ImportError):
            import pynvml

            try:
                pynvml.nvmlInit()
                self._nvml = pynvml
            except pynvml.NVMLError as error:
                logger.debug("no GPUs: %s", error)
        found = self._enumerated()
        self.devices = found if visible is None else _bounded(found, visible)
        """In NVML's order, or in that of the bounds."""

    def _whole(self) -> Iterator[Any]:
        if self._nvml is None:
            return
        count = 0
        with suppress(self._nvml.NVMLError):
            count = self._nvml.nvmlDeviceGetCount()
        for index in range(count):
            with suppress(self._nvml.NVMLError):
                yield self._nvml.nvmlDeviceGetHandleByIndex(index)

    def _parts(self, gpu: Any) -> list[Any]:
        """Return the instances of a GPU; the GPU itself if it is not divided."""
        nvml, found = self._nvml, []
        try:
            if not nvml.nvmlDeviceGetMigMode(gpu)[0]:
                return [gpu]
        except nvml.NVMLError:
            return [gpu]
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            with suppress(nvml.NVMLError):
                found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index))
        return found

    def _enumerated(self) -> tuple[Device, ...]:
        found = []
        for gpu in self._whole():
            with suppress(self._nvml.NVMLError):
                model = _text(self._nvml.nvmlDeviceGetName(gpu))
                for one in self._parts(gpu):
                    found.append(Device(_text(self._nvml.nvmlDeviceGetUUID(one)), model, one))
        return tuple(found)

    def usage(self) -> tuple[GpuUsage, ...]:
        """Return the load of each GPU; those that do not answer are left out."""
        found = []
        for gpu in self._whole():
            with suppress(self._nvml.NVMLError):
                memory = self._nvml.nvmlDeviceGetMemoryInfo(gpu)
                load = self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu
                found.append(GpuUsage(min(1.0, load / 100), memory.used, memory.total))
        return tuple(found)

    def users(self, name: str) -> tuple[int, ...]:
        """Return the ids of the processes that compute on a device; none where that is not known."""
        for device in self.devices:
            with suppress(self._nvml.NVMLError):
                if device.name == name:
                    listed = self._nvml.nvmlDeviceGetComputeRunningProcesses(device.handle)
                    return tuple(process.pid for process in listed)
        return ()

    def unusable(self) -> tuple[str, ...]:
        """Return the devices that cannot be used, as `NodeRecord.unusable`.

        Such a device does not answer, or a program that is no replica has filled it. One more line says why
        devices cannot be locked.
        """
        found = []
        for device in self.devices:
            try:
                memory = self._nvml.nvmlDeviceGetMemoryInfo(device.handle)
                locked = device_locks.is_locked(device.name)
            except self._nvml.NVMLError as error:
                found.append(f"{device.name}: it does not answer ({error})")
                continue
            except OSError as error:
                found.append(f"{device_locks.FOLDER}: replicas lock no devices there ({error.strerror})")
                continue
            if memory.used > FILLED * memory.total and not locked:
                sizes = f"{memory.used / 2**30:.0f} of its {memory.total / 2**30:.0f} GiB"
                found.append(f"{device.name}: another program has {sizes}")
        return tuple(dict.fromkeys(found))


class DeviceWatch:
    """Tells the agent when devices become unusable, and when they can be used again.

    The lock of a replica that ends is free before its memory is. So a device counts as unusable if two looks
    in a row, which are seconds apart, find it so.

    Args:
        gpus: The devices that the agent may use.
        post: Hands an event to the agent.
        registered: What the first look has found. The node's record has it; nobody has been told yet.
    """

    def __init__(self, gpus: Gpus, post: Callable[[object], None], registered: tuple[str, ...] = ()) -> None:
        self._gpus, self._post = gpus, post
        self._seen = registered
        self._told: tuple[str, ...] | None = None if registered else ()

    def look(self) -> None:
        """Ask NVML, and tell what has changed since the last call."""
        before, self._seen = {_device(line) for line in self._seen}, self._gpus.unusable()
        unusable = tuple(line for line in self._seen if _device(line) in before)
        if unusable != self._told:
            told, self._told = self._told or (), unusable
            self._post(DevicesSeen(unusable, tuple(line for line in unusable if line not in told)))


def _device(line: str) -> str:
    return line.partition(":")[0]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _bounded(devices: Sequence[Device], visible: str) -> tuple[Device, ...]:
    """Return the devices that CUDA_VISIBLE_DEVICES names; as for CUDA, the first unknown name ends them."""
    found: list[Device] = []
    for part in (text.strip() for text in visible.split(",")):
        named = [
            device
            for number, device in enumerate(devices)
            if part == str(number) or (part and not part.isdigit() and device.name.startswith(part))
        ]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return tuple(found)
