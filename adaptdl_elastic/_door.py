"""Accept the connections of a forming generation: run the handshakes of all connections side by side.

Each connection has `HANDSHAKE_SECONDS` for its handshake. The number of handshakes at a time is limited. If
there are more, the oldest one is aborted. A replica needs only milliseconds, and tries again if it is
aborted, so many silent connections from elsewhere do not delay it. One thread runs all handshakes without
blocking.
"""

from __future__ import annotations

import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from adaptdl_elastic._wire import (
    HANDSHAKE_SECONDS,
    INTRODUCTION,
    REFUSAL,
    Answer,
    AuthenticationError,
    FrameKeys,
)

log = logging.getLogger(__name__)

STRANGERS = 64
"""Number of handshakes allowed at a time in addition to those of the expected replicas."""

_TOLD = 3  # number of refused connections that are logged


class Guest:
    """Run the handshake of one connection."""

    def __init__(self, sock: socket.socket, address: str, secret: bytes | None, until: float) -> None:
        self.sock, self.address, self.until = sock, address, until
        self._answer = Answer(secret)
        self._heard = bytearray()
        self._proof = b""
        self.keys: FrameKeys | None = None  # of the frames to come; None: the handshake is under way

    def greet(self) -> None:
        """Send the nonce, which fits into the buffer of a new connection."""
        self.sock.setblocking(False)
        self.sock.send(self._answer.nonce)

    def hear(self) -> int | None:
        """Receive the available bytes.

        Returns:
            The peer's rank if the handshake's message is complete, else None.

        Raises:
            OSError: the handshake has failed.
        """
        data = self.sock.recv(INTRODUCTION - len(self._heard))
        if not data:
            raise ConnectionError("the connection was closed")
        self._heard += data
        if len(self._heard) < INTRODUCTION:
            return None
        try:
            rank, proof, self.keys = self._answer.judge(bytes(self._heard))
        except AuthenticationError:
            self.turn_away()
            raise
        self._proof = proof
        return rank

    def turn_away(self) -> None:
        """Tell the peer that its connection is refused."""
        with suppress(OSError):
            self.sock.send(REFUSAL)

    def let_in(self) -> None:
        """Prove to the peer that this side knows the secret, and make the connection blocking."""
        self.sock.send(self._proof)
        self.sock.settimeout(None)


class Door:
    """Accept connections on `server` until `close`.

    Args:
        server: A listening socket; its owner closes it.
        secret: Secret that both sides must know; None: no secret is needed.
        ranks: Ranks that are expected to connect, each once.
        clock: Function that returns monotonic seconds.
    """

    def __init__(
        self,
        server: socket.socket,
        secret: bytes | None,
        ranks: Iterable[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._secret, self._clock = server, secret, clock
        self.missing = set(ranks)
        """Ranks that have not connected yet."""
        self.keys: dict[int, FrameKeys] = {}
        """Keys of the frames of each rank that has connected."""
        self._most = len(self.missing) + STRANGERS
        self._guests: dict[socket.socket, Guest] = {}  # running handshakes, the oldest first
        self._refused = 0
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def wait(self, seconds: float) -> list[tuple[int, socket.socket]]:
        """Return newly accepted replicas as (rank, connection), after at most `seconds`; may be empty."""
        found = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._server:
                self._accept()
                continue
            guest = self._guests.get(key.fileobj)  # type: ignore[call-overload]
            if guest is not None and (rank := self._hear(guest)) is not None:
                found.append((rank, guest.sock))
        self._send_away_the_late()
        return found

    def close(self) -> None:
        """Abort all running handshakes."""
        for guest in list(self._guests.values()):
            self._forget(guest)
            guest.sock.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, address = self._server.accept()
        except OSError:  # the peer has closed the connection, or the process has no free file descriptor
            return
        guest = Guest(sock, str(address[0]), self._secret, self._clock() + HANDSHAKE_SECONDS)
        try:
            guest.greet()
        except OSError as error:
            self._refuse(guest, str(error))
            return
        self._guests[sock] = guest
        self._selector.register(sock, selectors.EVENT_READ)
        if len(self._guests) > self._most:
            self._refuse(next(iter(self._guests.values())), "too many at once")

    def _hear(self, guest: Guest) -> int | None:
        try:
            rank = guest.hear()
            if rank is None:
                return None
            if rank not in self.missing:
                guest.turn_away()
                raise ConnectionError(f"a second rank {rank}, or one too many")
            guest.let_in()
            self._forget(guest)
            assert guest.keys is not None
            self.keys[rank] = guest.keys
            self.missing.remove(rank)
        except BlockingIOError:
            return None
        except OSError as error:
            self._refuse(guest, str(error))
            return None
        return rank

    def _send_away_the_late(self) -> None:
        now = self._clock()
        for guest in [one for one in self._guests.values() if now > one.until]:
            self._refuse(guest, f"it has said nothing for {HANDSHAKE_SECONDS:.0f} s")

    def _refuse(self, guest: Guest, why: str) -> None:
        self._forget(guest)
        guest.sock.close()
        self._refused += 1
        if self._refused <= _TOLD:
            more = "; more of them are not told of" if self._refused == _TOLD else ""
            log.warning("refused a connection from %s: %s%s", guest.address, why, more)

    def _forget(self, guest: Guest) -> None:
        if self._guests.pop(guest.sock, None) is not None:
            self._selector.unregister(guest.sock)
