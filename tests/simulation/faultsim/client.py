"""A process's connection to the store: the contract of `rendezvous/store.py` over a network that fails.

An operation is a request, its execution at the server, and an answer. Each takes time, may be lost, and
may come very late: then the operation happens though nobody waits for it any more. As the drivers do, the
client asks again within its time-out, and reads the key after a compare-and-swap that may have been carried
out unheard. A lease is kept alive by the product's own `KeepAlive`. A watch goes on from the last change
that it has yielded, whatever the network did.

Not modelled: the drivers themselves (HTTP, JSON, tokens, several endpoints); they have tests of their own
against a real etcd behind a proxy that cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from adaptdl_elastic.rendezvous.store.base import (
    Change,
    CompactedError,
    KeyValue,
    Lease,
    LeaseLostError,
    Snapshot,
    Store,
    StoreUnavailableError,
    Watch,
)
from adaptdl_elastic.rendezvous.store.keepalive import KeepAlive, KeptLease
from faultsim import threads
from faultsim.etcd import Etcd, LeaseGoneError, Stream
from faultsim.kernel import Kernel, Process
from faultsim.threads import SimpleQueue

T = TypeVar("T")

TIMEOUT_SECONDS = 5.0  # of one operation, as the drivers have it by default
ATTEMPT_SECONDS = 2.5  # after which an answer is asked for again
RETRY_SECONDS = 0.2
RECONNECT_SECONDS = 0.3  # until a watch that was cut off is there again, at most


@dataclass
class Line:
    """The network between one machine and the store, as it is now."""

    cut: bool = False  # nothing gets through
    refused: bool = False  # and one hears so at once, instead of waiting for an answer
    lost_requests: float = 0.0  # probability that a request never arrives
    lost_answers: float = 0.0  # probability that an operation happens and its answer is lost
    late_requests: float = 0.0  # probability that a request happens long after it was given up
    seconds: float = 0.001  # that one way takes, on average
    late_seconds: float = 15.0  # at most


class _Unanswered(Exception):
    """Nobody has answered; `executed`: the operation may have happened."""


class SimClient(Store):
    """One process's client."""

    def __init__(self, etcd: Etcd, line: Line, process: Process, before_write: Callable[[], None]) -> None:
        self._etcd, self._line, self._process = etcd, line, process
        self._kernel: Kernel = process.kernel
        self._before_write = before_write  # a hook at every write: where a process may be killed
        self._keepalive = KeepAlive("leases")
        self._watches: list[SimWatch] = []
        self._closed = False

    # -- operations

    def get(self, key: str) -> KeyValue | None:
        return self._ask(lambda: self._etcd.get(key))

    def range(self, prefix: str) -> Snapshot:
        return self._ask(lambda: self._etcd.range(prefix))

    def put(self, key: str, value: str, lease: Lease | None = None) -> int:
        number = self._number(lease)
        self._before_write()
        return self._ask(lambda: self._etcd.put(key, value, number), lease)

    def compare_and_swap(
        self, key: str, value: str | None, expected_revision: int, lease: Lease | None = None
    ) -> int | None:
        number = self._number(lease)
        self._before_write()
        unheard: list[bool] = []

        def swap() -> tuple[int | KeyValue | None, int, int | None]:
            found = self._etcd.swap(key, value, expected_revision, number)
            holder = self._etcd.holders.get(key)
            return found, self._etcd.revision, None if holder is None else holder.number

        found, revision, holder = self._ask(swap, lease, lambda: unheard.append(True))
        if isinstance(found, int):
            return found
        if not unheard:
            return None
        if value is None:  # an earlier attempt may have been the one that changed it
            return revision if found is None else None
        ours = found is not None and found.value == value and holder == number
        return found.mod_revision if ours and found is not None else None

    def delete(self, key: str) -> bool:
        self._before_write()
        return self._ask(lambda: self._etcd.delete([key])) > 0

    def delete_prefix(self, prefix: str) -> int:
        self._before_write()
        return self._ask(lambda: self._etcd.delete_prefix(prefix))

    def lease(self, ttl: float) -> SimLease:
        asked = threads.Time.monotonic()
        lease = SimLease(self, self._ask(lambda: self._etcd.grant(ttl)), ttl, asked)
        self._keepalive.add(lease)
        return lease

    def watch(self, prefix: str, start_revision: int = 0) -> SimWatch:
        if self._closed:
            raise StoreUnavailableError("this store has been closed")
        start = start_revision or self._ask(lambda: self._etcd.revision) + 1
        watch = SimWatch(self._etcd, self._line, self._process, prefix, start)
        self._watches.append(watch)
        return watch

    def close(self) -> None:
        self._closed = True
        for watch in self._watches:
            watch.close()
        self._keepalive.close(timeout=1.0)

    def _number(self, lease: Lease | None) -> int | None:
        if lease is None:
            return None
        if not isinstance(lease, SimLease) or lease.lost.is_set():
            raise LeaseLostError()
        return lease.number

    # -- asking

    def _ask(
        self,
        operation: Callable[[], T],
        lease: Lease | None = None,
        on_ambiguous: Callable[[], None] = lambda: None,
        timeout: float = TIMEOUT_SECONDS,
        closed: bool = False,
    ) -> T:
        """Have an operation carried out, asking again until `timeout` seconds have passed."""
        if self._closed and not closed:
            raise StoreUnavailableError("this store has been closed")
        until = self._kernel.now + timeout
        while True:
            try:
                return self._attempt(operation, min(ATTEMPT_SECONDS, until - self._kernel.now))
            except LeaseGoneError:
                if lease is not None:
                    lease.lost.set()
                raise LeaseLostError() from None
            except _Unanswered:
                on_ambiguous()
            if self._kernel.now + RETRY_SECONDS >= until:
                raise StoreUnavailableError("no endpoint answered in time")
            self._kernel.sleep(RETRY_SECONDS)

    def _attempt(self, operation: Callable[[], T], timeout: float) -> T:
        kernel, line, chance = self._kernel, self._line, self._kernel.random
        task = kernel.running()
        answers: list[tuple[bool, Any]] = []
        waits = [True]

        def execute(late: bool) -> None:
            if not late and (line.cut or not self._etcd.up):
                return
            if late and not self._etcd.up:
                return
            try:
                result: tuple[bool, Any] = True, operation()
            except LeaseGoneError as error:
                result = False, error
            if waits[0] and not late and chance.random() >= line.lost_answers:
                kernel.after(self._one_way(), answer, result)

        def answer(result: tuple[bool, Any]) -> None:
            if waits[0] and not line.cut:
                answers.append(result)
                kernel.wake(task)

        if line.cut and line.refused:
            kernel.sleep(self._one_way())
            raise _Unanswered
        fate = chance.random()
        if fate < line.late_requests:
            kernel.after(timeout + line.late_seconds * chance.random(), execute, True)
        elif fate >= line.late_requests + line.lost_requests:
            kernel.after(self._one_way(), execute, False)
        kernel.wait(timeout)
        waits[0] = False
        if not answers:
            raise _Unanswered
        fine, found = answers[0]
        if not fine:
            raise found
        result: T = found
        return result

    def _one_way(self) -> float:
        return self._line.seconds * self._kernel.random.expovariate(1.0)


class SimLease(KeptLease):
    """A lease that the product's own thread keeps alive."""

    def __init__(self, client: SimClient, number: int, ttl: float, asked: float) -> None:
        super().__init__(client._keepalive, ttl, asked)
        self.number, self._client = number, client

    def renew(self, timeout: float) -> bool:
        client, number = self._client, self.number
        return client._ask(lambda: client._etcd.keep_alive(number), timeout=timeout)

    def let_go(self, timeout: float) -> None:
        client, number = self._client, self.number
        client._ask(lambda: client._etcd.revoke(number), timeout=timeout, closed=True)


class _Compacted:
    """In a watch's queue: what it asked for is forgotten."""


class SimWatch(Watch):
    """A stream from the server that comes back by itself after the network has failed."""

    def __init__(self, etcd: Etcd, line: Line, process: Process, prefix: str, start: int) -> None:
        self._etcd, self._line, self._process = etcd, line, process
        self._kernel = process.kernel
        self._prefix, self._next = prefix, start  # the first revision that has not been received
        self._queue: SimpleQueue[Change | _Compacted | None] = SimpleQueue()
        self._stream: Stream | None = None
        self._arrival = 0.0  # of the last message: they do not overtake each other
        self._closed = False
        process.at_end.append(self._end)
        self._connect()

    def _connect(self) -> None:
        """Begin to receive from where this watch has come to; again in a moment if that can not be."""
        if self._closed or self._stream is not None:
            return
        if not self._process.alive:
            self._closed = True
            return
        if self._line.cut or not self._etcd.up:
            self._kernel.after(RECONNECT_SECONDS * self._kernel.random.random(), self._connect)
            return
        if self._next <= self._etcd.compacted:
            self._queue.put(_Compacted())
            return
        self._stream = Stream(self._prefix, self._next, self._send)
        self._etcd.streams.append(self._stream)
        missed = self._etcd.changes(self._prefix, self._next)
        if missed:
            self._send(missed)

    def _send(self, changes: list[Change]) -> None:
        delay = self._line.seconds * self._kernel.random.expovariate(1.0)
        self._arrival = max(self._arrival, self._kernel.now + delay)
        self._kernel.at(self._arrival, self._receive, self._stream, changes)

    def _receive(self, stream: Stream, changes: list[Change]) -> None:
        if stream is not self._stream or self._closed:
            return
        if self._line.cut or not self._etcd.up:
            self._end()
            self._kernel.after(RECONNECT_SECONDS * self._kernel.random.random(), self._connect)
            return
        self._next = changes[-1].revision + 1
        for change in changes:
            self._queue.put(change)

    def _end(self) -> None:
        if self._stream is not None:
            self._etcd.streams.remove(self._stream)
            self._stream = None

    def __iter__(self) -> Iterator[Change]:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Compacted):
                raise CompactedError(f"changes of {self._prefix!r}: the store has forgotten them")
            if self._closed:
                return
            yield item

    def close(self) -> None:
        """End the iteration."""
        self._closed = True
        self._end()
        self._queue.put(None)
