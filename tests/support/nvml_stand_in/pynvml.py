"""Plays NVIDIA's management library: put this folder on PYTHONPATH and name a file in FAKE_NVML.

The file is JSON, a list of GPUs: {"uuid", "model", "total", "used", "load", "mig": [uuid, ...], "error",
"processes": [pid, ...]}. It
is read at each question, so a test can change it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """As the real one."""


def _gpus() -> list[dict[str, Any]]:
    path = os.environ.get("FAKE_NVML")
    if not path:
        raise NVMLError("Driver Not Loaded")
    found: list[dict[str, Any]] = json.loads(Path(path).read_text())
    return found


def _of(handle: Any) -> dict[str, Any]:
    gpu = _gpus()[handle[0]]
    if gpu.get("error"):
        raise NVMLError(gpu["error"])
    return gpu


def nvmlInit() -> None:
    _gpus()


def nvmlDeviceGetCount() -> int:
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> tuple[int, ...]:
    return (index,)


def nvmlDeviceGetUUID(handle: Any) -> bytes:
    gpu = _gpus()[handle[0]]
    return str(gpu["uuid"] if len(handle) == 1 else gpu["mig"][handle[1]]).encode()


def nvmlDeviceGetName(handle: Any) -> str:
    return str(_of(handle).get("model", "Test GPU"))


def nvmlDeviceGetMigMode(handle: Any) -> tuple[int, int]:
    return (1, 1) if "mig" in _of(handle) else (0, 0)


def nvmlDeviceGetMaxMigDeviceCount(handle: Any) -> int:
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle: Any, index: int) -> tuple[int, ...]:
    if index >= len(_of(handle)["mig"]):
        raise NVMLError("Not Found")
    return (handle[0], index)


def nvmlDeviceGetMemoryInfo(handle: Any) -> Any:
    gpu = _of(handle)
    return SimpleNamespace(total=gpu.get("total", 80 << 30), used=gpu.get("used", 0))


def nvmlDeviceGetUtilizationRates(handle: Any) -> Any:
    return SimpleNamespace(gpu=_of(handle).get("load", 0))


def nvmlDeviceGetComputeRunningProcesses(handle: Any) -> list[Any]:
    return [SimpleNamespace(pid=pid) for pid in _of(handle).get("processes", [])]
