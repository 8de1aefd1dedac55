"""Fork the fork servers of a node's jobs from one process that has imported torch.

Otherwise each job would import torch again, which takes seconds, and would have a copy of its own in memory.
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
from collections.abc import Mapping
from pathlib import Path

from adaptdl_elastic.agent.runtime.fork_server import ForkServer
from adaptdl_elastic.agent.runtime.forked_child import SERVER, Command

_READ_EARLY = (
    *("LD_", "PYTHON", "OMP_", "GOMP_", "MKL_", "KMP_", "OPENBLAS", "BLIS", "NUMEXPR", "NPY_", "NUMPY"),
    *("TORCH", "PYTORCH_", "DNNL_", "ONEDNN_", "KINETO", "NVIDIA_", "CUDA", "MALLOC", "GLIBC"),
    *("TZ", "LC_", "LANG", "TMPDIR", "TEMP", "TMP"),
)
"""Beginnings of the names of variables that Python, torch or the C library read when they are loaded."""


def can_fork(given: Mapping[str, str]) -> bool:
    """Return whether the fork server of a job with these variables can be a fork."""
    return not any(name.startswith(_READ_EARLY) for name in given)


class ServerForker:
    """The process that forks fork servers, which outlive it. It is started again if it dies.

    Args:
        environment: Of that process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {"OMP_NUM_THREADS": "1", **environment}
        self._lock = threading.Lock()
        self._process: ForkServer | None = None
        self._numbers = itertools.count()

    def prepare(self) -> None:
        """Start the process, which then imports torch."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the process; what it has forked goes on."""
        with self._lock:
            if self._process is not None:
                self._process.close()

    def fork(self, work: Path, log: Path) -> socket.socket:
        """Request a fork server and return the connection to it, which ends if it cannot be forked.

        Args:
            work: Its working directory.
            log: The file to which its output is appended.

        Raises:
            OSError: the file cannot be written.
        """
        ours, theirs = socket.socketpair()
        log.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, theirs, log.open("ab") as output:
            command, streams = Command(SERVER, (), str(work)), (output.fileno(), output.fileno())
            self._running().spawn(next(self._numbers), command, *streams, theirs.fileno())
        return ours

    def _running(self) -> ForkServer:
        # what it has to say is read, because it would wait, but tells nothing that is not known otherwise
        while (process := self._process) is not None and select.select([process], [], [], 0)[0]:
            if process.receive() is None:
                process.close()
                self._process = None
        if self._process is None:
            self._process = ForkServer.start(self._environment, lasting=True)
        return self._process
