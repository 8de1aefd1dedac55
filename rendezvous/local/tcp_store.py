"""Serve torch's TCPStore on one address."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from adaptdl_elastic.rendezvous.local.addresses import Ports, listen

_ERRORS = 2  # torch's level of errors


def serve(host: str, ports: Ports, timeout: float) -> tuple[int, TCPStore]:
    """Open a TCPStore on one address; torch's own way listens on all addresses.

    Returns:
        Its port and the store. The port is closed when the store is garbage-collected.

    Raises:
        NoPortError: no port is free.
    """
    sock = listen(host, ports)
    port = int(sock.getsockname()[1])
    with _without_warnings():
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=sock.detach(),
        )
    return port, store


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep torch's C++ code from warnings: it has one for each address of a network without a name server.

    TORCH_CPP_LOG_LEVEL would count for the whole process, and for its replicas.
    """
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # another build of torch, whose warning is harmless
        level = ctypes.c_int(_ERRORS)
    before, level.value = level.value, max(level.value, _ERRORS)
    try:
        yield
    finally:
        level.value = before
