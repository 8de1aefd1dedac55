"""A port for somebody who starts to listen seconds later."""

from __future__ import annotations

import contextlib
import random
import socket

_HERE = random.SystemRandom()


def free_port() -> int:
    """One that the kernel gives to nobody by itself meanwhile: it is below the range it takes them from."""
    for _ in range(100):
        port = _HERE.randrange(12000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no free port")
