"""Serve torch's TCPStore on a socket.

Run as a program, this module serves the socket that it has inherited, until it is killed. It ignores signals
that are sent to all processes of a job.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from adaptdl_elastic.protocol.environment import AGENT_FD

_ERRORS = 2  # torch's level of errors
_JOIN_SECONDS = 30.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def serve(sock: socket.socket, timeout: float) -> TCPStore:
    """Open a TCPStore on a listening socket; torch's own way listens on all addresses.

    The socket belongs to the store, and is closed when the store is garbage-collected.
    """
    host, port = sock.getsockname()[:2]
    with _without_warnings():
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout),
            master_listen_fd=sock.detach(),
        )


def main() -> None:
    """Serve the inherited socket."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    store = serve(socket.socket(fileno=int(os.environ[AGENT_FD])), _JOIN_SECONDS)
    while store is not None:
        signal.pause()


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


if __name__ == "__main__":
    main()
