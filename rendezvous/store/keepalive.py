"""Renew leases in one background thread per store."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import abstractmethod

from adaptdl_elastic.rendezvous.store.base import Lease, StoreError, StoreUnavailableError

logger = logging.getLogger(__name__)

_RETRY = 0.2  # seconds after a failed attempt, but at most a third of the time to live


class KeptLease(Lease):
    """A lease that a `KeepAlive` renews; drivers implement the requests."""

    def __init__(self, keeper: KeepAlive, ttl: float, asked: float) -> None:
        """Count the lease's time from the moment at which the server was asked for it.

        The server counts from a later moment, so the lease never ends there before it ends here.

        Args:
            keeper: renews the lease.
            ttl: time to live in seconds.
            asked: monotonic seconds, taken before the request for the lease was sent.
        """
        self.ttl = ttl
        self.lost = threading.Event()
        self.due = asked + ttl / 3
        self._held_until = asked + ttl
        self._keeper = keeper
        self._trouble: type[Exception] | None = None  # type of the last attempt's error

    @abstractmethod
    def renew(self, timeout: float) -> bool:
        """Ask the server to renew the lease; return False if the server no longer has it.

        Raises:
            StoreError: the server does not answer.
        """

    @abstractmethod
    def let_go(self, timeout: float) -> None:
        """Revoke the lease on the server."""

    def attempt(self) -> None:
        """Renew the lease once and set the time of the next attempt.

        Sets `lost` if the server no longer has the lease.
        """
        sent = time.monotonic()
        try:
            # limit the time, so that a server that hangs leaves time for another attempt
            alive = self.renew(timeout=max(self.ttl / 3, 1.0))
        # after any error the other leases are renewed, and this one is tried again
        except Exception as error:
            known = isinstance(error, StoreUnavailableError) or type(error) is self._trouble
            logger.log(logging.DEBUG if known else logging.WARNING, "lease not renewed: %s", error)
            self._trouble = type(error)
            self.due = time.monotonic() + min(_RETRY, self.ttl / 3)
            return
        self.due, self._trouble = sent + self.ttl / 3, None
        if alive:
            self._held_until = sent + self.ttl
        else:
            logger.warning("a lease of %g s was lost: the store did not hear of us in time", self.ttl)
            self.lost.set()

    def remaining(self) -> float:
        """Return the seconds for which the lease is certain to last; 0 if it is lost."""
        return 0.0 if self.lost.is_set() else max(0.0, self._held_until - time.monotonic())

    def revoke(self) -> None:
        """End the lease and delete its keys. If the server does not answer, they expire."""
        if self._keeper.remove(self) and not self.lost.is_set():
            self._revoke(timeout=2.0)

    def _revoke(self, timeout: float) -> None:
        with contextlib.suppress(StoreError):
            self.let_go(timeout)
        self.lost.set()

    def abandon(self) -> None:
        """Stop renewing the lease without telling the server, as if this process had died."""
        self._keeper.remove(self)


class KeepAlive:
    """A thread that renews every lease after a third of its time to live."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._leases: list[KeptLease] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, lease: KeptLease) -> None:
        """Renew this lease from now on."""
        with self._changed:
            self._leases.append(lease)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def remove(self, lease: KeptLease) -> bool:
        """Stop renewing this lease; return whether it was renewed until now."""
        with self._changed:
            if lease not in self._leases:
                return False
            self._leases.remove(lease)
            return True

    def close(self, timeout: float) -> None:
        """Revoke all leases, waiting at most `timeout` seconds for the server, and end the thread."""
        with self._changed:
            self._closed = True
            leases, self._leases = self._leases, []
            self._changed.notify_all()
        deadline = time.monotonic() + timeout
        for lease in leases:
            left = deadline - time.monotonic()
            if left > 0 and not lease.lost.is_set():
                lease._revoke(left)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                lease = min(self._leases, key=lambda one: one.due, default=None)
                wait = None if lease is None else lease.due - time.monotonic()
                if lease is None or (wait is not None and wait > 0):
                    self._changed.wait(wait)
                    continue
            lease.attempt()
            if lease.lost.is_set():
                self.remove(lease)
