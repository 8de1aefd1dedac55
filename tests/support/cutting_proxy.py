"""A TCP proxy on loopback that stands for a bad network.

with CuttingProxy("127.0.0.1:2379") as proxy:
    connect(proxy.endpoint)
    proxy.cut()          # connections are reset, new ones refused at once
    proxy.freeze()       # connections stay open, nothing gets through (a partition)
    proxy.swallow()      # requests arrive, answers are lost with their connection
    proxy.lose(2)        # only the answer to the second HTTP request from now on that writes is lost so
    proxy.heal()
    proxy.bytes, proxy.connections
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading


class CuttingProxy:
    """Pass bytes on, or cut them; `bytes` and `connections` count those of both directions."""

    def __init__(self, target: str, listen: str = "127.0.0.1") -> None:
        host, _, port = target.rpartition("//")[2].rpartition(":")
        self._target = (host, int(port))
        self._secure = target.startswith("https://")
        self._listener = socket.create_server((listen, 0), backlog=1024)
        self._lock = threading.Lock()
        self._mode = "pass"
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._peer: dict[socket.socket, tuple[socket.socket, bool]] = {}  # where to, and whether upstream
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._changes = threading.Condition(self._lock)
        self._closed = False
        self._writes_left = 0  # until the one whose answer is lost
        self._doomed: set[socket.socket] = set()  # servers whose next answer is lost
        self.bytes = 0
        self.connections = 0
        self._thread = threading.Thread(target=self._run, name="cutting-proxy", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """What to connect to."""
        host, port = self._listener.getsockname()
        return f"{'https://' if self._secure else ''}{host}:{port}"

    def cut(self) -> None:
        """Reset every connection and refuse new ones."""
        self._set("cut")

    def freeze(self) -> None:
        """Let nothing through; connections stay as they are."""
        self._set("freeze")

    def swallow(self) -> None:
        """Deliver requests, and instead of the answer reset the connection."""
        self._set("swallow")

    def lose(self, nth: int) -> None:
        """Lose the answer to the `nth` write (PUT, POST or DELETE) from now on, with its connection."""
        self._writes_left = nth

    def heal(self) -> None:
        """Let everything through again, also what was held back."""
        self._set("pass")

    def close(self) -> None:
        """Reset everything and end."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):  # the thread has woken by itself, and has closed everything
            self._wake.send(b"x")
        self._thread.join()

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _set(self, mode: str) -> None:
        with self._changes:
            self._mode = mode
            self._wake.send(b"x")
            assert self._changes.wait_for(lambda: self._applied == mode, timeout=60)

    _applied = "pass"

    def _run(self) -> None:
        try:
            while not self._closed:
                for key, _ in self._selector.select():
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    if sock is self._woken:
                        sock.recv(4096)
                        self._apply()
                    elif sock is self._listener:
                        self._accept()
                    elif sock in self._peer:
                        self._forward(sock)
        finally:
            for client, server in list(self._pairs):
                self._drop(client, server)
            for one in (self._listener, self._wake, self._woken):
                one.close()
            self._selector.close()

    def _apply(self) -> None:
        with self._changes:
            mode = self._mode
        if mode == "cut":
            for client, server in list(self._pairs):
                self._drop(client, server)
        for sock in list(self._peer):
            watched = sock in self._selector.get_map()
            if mode == "freeze" and watched:
                self._selector.unregister(sock)
            elif mode != "freeze" and not watched:
                self._selector.register(sock, selectors.EVENT_READ)
        with self._changes:
            self._applied = mode
            self._changes.notify_all()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self._applied == "cut":
            _reset(client)
            return
        try:
            server = socket.create_connection(self._target, 5)
        except OSError:
            _reset(client)
            return
        self.connections += 1
        self._pairs.add((client, server))
        self._peer[client], self._peer[server] = (server, True), (client, False)
        if self._applied != "freeze":
            self._selector.register(client, selectors.EVENT_READ)
            self._selector.register(server, selectors.EVENT_READ)

    def _forward(self, sock: socket.socket) -> None:
        other, upstream = self._peer[sock]
        orderly = False
        try:
            data = sock.recv(1 << 16)
            if upstream and data.startswith((b"PUT ", b"POST ", b"DELETE ")):
                self._writes_left -= 1
                if self._writes_left == 0:
                    self._doomed.add(other)
            lost = self._applied == "swallow" or sock in self._doomed
            if data and (upstream or not lost or data.startswith(b"HTTP/1.1 100 ")):  # that is no answer yet
                other.sendall(data)
                self.bytes += len(data)
                return
            orderly = not data and not lost  # a reset would take what the other end has not read yet with it
        except OSError:
            pass
        client, server = (sock, other) if upstream else (other, sock)
        self._drop(client, server, orderly)

    def _drop(self, client: socket.socket, server: socket.socket, orderly: bool = False) -> None:
        self._pairs.discard((client, server))
        for sock in (client, server):
            self._peer.pop(sock, None)
            self._doomed.discard(sock)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
            if orderly:
                sock.close()
            else:
                _reset(sock)


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
