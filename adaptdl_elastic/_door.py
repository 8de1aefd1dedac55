"""The door of a forming generation: handshakes of all who connect, side by side.

Whoever connects has `HANDSHAKE_SECONDS` for the handshake. At most `most` handshakes are under way. When
there are more, the oldest is broken off: a replica takes milliseconds, and tries again, so a crowd of
silent strangers delays nobody. One thread does it all, without blocking.
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
"""Handshakes that may be under way beyond those of the expected replicas."""

_TOLD = 3  # refusals of which a warning is logged


class Guest:
    """A connection whose handshake is under way."""

    def __init__(self, sock: socket.socket, address: str, secret: bytes | None, until: float) -> None:
        self.sock, self.address, self.until = sock, address, until
        self._answer = Answer(secret)
        self._heard = bytearray()
        self._proof = b""
        self.keys: FrameKeys | None = None  # of the frames to come; None: the handshake is under way

    def greet(self) -> None:
        """Send our nonce. It fits into the buffer of a new connection."""
        self.sock.setblocking(False)
        self.sock.send(self._answer.nonce)

    def hear(self) -> int | None:
        """Take what has come; the rank once all has. OSError when the handshake has failed."""
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
        """Say that we refuse it."""
        with suppress(OSError):
            self.sock.send(REFUSAL)

    def let_in(self) -> None:
        """Prove that we know the secret, too. From now on the connection is blocking."""
        self.sock.send(self._proof)
        self.sock.settimeout(None)


class Door:
    """Takes connections on `server` until `close`.

    Args:
        server: A listening socket; its owner closes it.
        secret: What both sides must know; None: nothing.
        ranks: Who are to come, each once.
        clock: Monotonic seconds.
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
        """Who has not come in yet."""
        self.keys: dict[int, FrameKeys] = {}
        """Of the frames of each rank that has come in."""
        self._most = len(self.missing) + STRANGERS
        self._guests: dict[socket.socket, Guest] = {}  # the oldest first
        self._refused = 0
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def wait(self, seconds: float) -> list[tuple[int, socket.socket]]:
        """Return who has come in, as (rank, connection), after at most `seconds`; maybe nobody."""
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
        """Break off all handshakes that are under way."""
        for guest in list(self._guests.values()):
            self._forget(guest)
            guest.sock.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, address = self._server.accept()
        except OSError:  # it is gone already, or there is no descriptor left for it
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
