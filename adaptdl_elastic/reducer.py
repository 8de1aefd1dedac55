"""Run collectives on small Python objects between replicas, independently of torch's.

The connections form a star: rank 0 listens, the others connect. Every call has a sequence number and a tag
(its place in the script). Rank 0 combines the contributions with the same number in the order of ranks, and
sends the result to all. Different tags with the same number mean that the replicas run different code. This
collective and all later ones then raise an error on every replica, instead of giving wrong results or
waiting forever. If a replica is lost, every collective that needs it fails at once.

Each *stream* has its own sequence numbers. Collectives whose order relative to other collectives may differ
between replicas use a stream of their own.

The same connections carry the library's control messages (`send_control`), which any thread may send at any
time. A single replica uses no sockets and no threads.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from adaptdl_elastic import _codec, _wire
from adaptdl_elastic._checks import integer, whole
from adaptdl_elastic._door import Door

log = logging.getLogger(__name__)

ReduceFn = Callable[[Any, Any], Any]
ControlHandler = Callable[[int, Any], None]

MAIN, LOOPS, AGREEMENT = range(3)
"""Streams: most collectives; beginnings and ends of data loops; positions compared by `consensus`."""

_CONTRIBUTION, _RESULT, _FAILURE, _CONTROL, _GOODBYE = range(5)
_TORN_DOWN = "the collectives have been torn down"
CONNECT_TIMEOUT = 120.0  # seconds until all replicas must be connected
_CANCEL_INTERVAL = 0.1  # seconds between two calls of `cancelled`


class CollectiveError(RuntimeError):
    """Raised if a collective has failed."""


class PeerLostError(CollectiveError):
    """Raised if the connection to a replica that the collective needs is lost."""


class PeerFinishedError(PeerLostError):
    """Raised if a replica that the collective needs has ended regularly."""


class CollectiveMismatchError(CollectiveError):
    """Raised if the replicas called different collectives."""


def default_reduce_fn(a: Any, b: Any) -> Any:
    """Return `a + b`."""
    return a + b


class Future:
    """Hold the result of a collective that may not have finished yet."""

    def __init__(self, objects: bool = False) -> None:
        self.objects = objects  # the result may be an object of the script, of any type
        self._done = threading.Event()
        self._value: Any = None
        self._error: Exception | None = None

    def done(self) -> bool:
        """Return whether the collective has finished, so that `result` returns at once."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result, and return it.

        Raises:
            TimeoutError: the collective has not finished within `timeout` seconds.
            CollectiveError: the collective has failed.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the other replicas did not answer within {timeout} s")
        if self._error is not None:
            raise self._error
        return self._value

    def _set(self, value: Any = None, error: Exception | None = None) -> None:
        if not self._done.is_set():
            self._value, self._error = value, error
            self._done.set()


class _Call:
    """Hold one collective on rank 0 until all contributions have arrived."""

    def __init__(self) -> None:
        self.contributions: dict[int, bytes] = {}
        self.reduce_fn: ReduceFn | None = None
        self.own: Any = None
        self.objects = False  # its values may be objects of the script, of any type
        self.tag: str | None = None  # None: rank 0 itself has not called yet
        self.future = Future()


class Reducer:
    """Connect one replica with the others, and run collectives.

    Args:
        rank: Rank of this replica.
        replicas: Number of replicas.
        root_host: Host on which rank 0 listens.
        root_port: Port on which rank 0 listens; 0 on rank 0: a free port, which `port` returns.
        secret: Key that both sides must know; None: only plain data can be exchanged.
        timeout: Seconds until all replicas must be connected.
        on_control: Called with (sender's rank, message) for every control message, in the reader thread.
        on_lost: Called with the rank of a replica whose connection was lost, in the reader thread.
        on_finished: Called with the rank of a replica that has ended regularly, in the reader thread.
        publish: Called with the port on rank 0, before it waits for the others.
        find_root: Returns host and port of rank 0 on the other ranks, where they may change: what a store
            says may be left from an earlier round. Called before each attempt to connect.
        cancelled: Called repeatedly while connecting; if it returns True, connecting fails.

    Raises:
        CollectiveError: the replicas did not connect within `timeout`, or `cancelled` returned True.
        AuthenticationError: this replica and rank 0 do not have the same secret.
    """

    def __init__(
        self,
        rank: int,
        replicas: int,
        root_host: str = "127.0.0.1",
        root_port: int = 0,
        *,
        secret: bytes | None = None,
        timeout: float = CONNECT_TIMEOUT,
        on_control: ControlHandler | None = None,
        on_lost: Callable[[int], None] | None = None,
        on_finished: Callable[[int], None] | None = None,
        publish: Callable[[int], None] | None = None,
        find_root: Callable[[], tuple[str, int]] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        place, count = integer(rank), integer(replicas)
        if place is None or count is None or not 0 <= place < count:
            raise ValueError(f"rank {rank!r} of {replicas!r} replicas: a rank counts from 0")
        rank, replicas, root_port = place, count, whole("root_port", root_port, 0, 65535)
        if not isinstance(root_host, str):
            raise TypeError(f"root_host={root_host!r}: give the name or address of rank 0's machine")
        self.rank, self.replicas, self.port = rank, replicas, root_port
        self.on_control, self.on_lost, self.on_finished = on_control, on_lost, on_finished
        self.local_address = root_host
        """Address of this machine on its connections to the other replicas."""
        self._trusted = secret is not None
        self._cancelled = cancelled
        self._reader: threading.Thread | None = None
        self._lock = threading.Lock()
        self._sequences = [stream << 56 for stream in (MAIN, LOOPS, AGREEMENT)]  # number of the next call
        self._apart: CollectiveMismatchError | None = None  # set once the replicas have run different code
        self.calls: dict[int, _Call] = {}  # on rank 0: unfinished calls by their numbers
        self._futures: dict[int, Future] = {}  # on other ranks: unfinished calls by their numbers
        self._failed: dict[
            int, CollectiveError
        ] = {}  # there: calls that failed before this replica made them
        self._lost: dict[int, PeerLostError] = {}
        self._closing = self._aborted = False
        self._send_locks: dict[int, threading.Lock] = {}
        self.peers: dict[int, socket.socket] = {}
        self._keys: dict[int, _wire.FrameKeys] = {}  # of the frames of each
        if replicas == 1:
            return
        if rank == 0:
            self._listen(root_host, root_port, secret, timeout, publish)
        else:
            self._connect(find_root or (lambda: (root_host, root_port)), secret, timeout)
        self._send_locks = {peer: threading.Lock() for peer in self.peers}
        _forget_in_children(self)
        self._reader = threading.Thread(target=self._read_loop, name="adaptdl-reducer", daemon=True)
        self._reader.start()

    # -- connecting --------------------------------------------------------------------------------

    def _listen(
        self,
        host: str,
        port: int,
        secret: bytes | None,
        timeout: float,
        publish: Callable[[int], None] | None,
    ) -> None:
        deadline = time.monotonic() + timeout
        with _bind(host, port, self.replicas) as server:
            self.port = server.getsockname()[1]
            if publish is not None:
                publish(self.port)
            self.local_address = server.getsockname()[0]
            door = Door(server, secret, range(1, self.replicas))
            with contextlib.closing(door):
                while door.missing:
                    left = deadline - time.monotonic()
                    for rank, sock in door.wait(min(max(left, 0.001), _CANCEL_INTERVAL)):
                        self.peers[rank], self._keys[rank] = _tuned(sock), door.keys[rank]
                    self._check_cancelled()
                    if left > 0:
                        continue
                    if door.missing:
                        raise CollectiveError(
                            f"ranks {sorted(door.missing)} have not connected to {host}:{self.port} within "
                            f"{timeout:.0f} s"
                        )

    def _check_cancelled(self) -> None:
        if self._cancelled():
            for sock in self.peers.values():
                sock.close()
            raise CollectiveError("connecting was given up")

    def _connect(
        self, find_root: Callable[[], tuple[str, int]], secret: bytes | None, timeout: float
    ) -> None:
        deadline, delay = time.monotonic() + timeout, 0.005
        while True:
            self._check_cancelled()
            host, port = find_root()
            try:
                sock = socket.create_connection((host, port), timeout=min(timeout, 10.0))
                try:
                    keys = _wire.introduce(sock, secret, self.rank, min(timeout, _wire.HANDSHAKE_SECONDS))
                except BaseException:
                    sock.close()
                    raise
            except _wire.AuthenticationError:
                raise
            except OSError as error:
                if time.monotonic() + delay > deadline:
                    raise CollectiveError(
                        f"rank 0 does not answer at {host}:{port} within {timeout:.0f} s ({error}); "
                        f"ADAPTDL_MASTER_ADDR and ADAPTDL_MASTER_PORT say where it is"
                    ) from None
                time.sleep(delay)
                delay = min(delay * 1.5, 0.5)
            else:
                self.peers[0], self._keys[0] = _tuned(sock), keys
                self.local_address = sock.getsockname()[0]
                return

    # -- collectives -------------------------------------------------------------------------------

    def allreduce(
        self,
        obj: Any,
        reduce_fn: ReduceFn = default_reduce_fn,
        tag: str = "",
        stream: int = MAIN,
        objects: bool = False,
    ) -> Any:
        """Return the `obj` of all replicas combined in the order of ranks, when it has arrived."""
        return self.allreduce_async(obj, reduce_fn, tag, stream, objects).result()

    def allreduce_async(
        self,
        obj: Any,
        reduce_fn: ReduceFn = default_reduce_fn,
        tag: str = "",
        stream: int = MAIN,
        objects: bool = False,
    ) -> Future:
        """Start to combine the `obj` of all replicas, and return a Future of the result.

        Args:
            obj: Numbers, strings, bytes, arrays, tensors and containers of them; any object if `objects`.
            reduce_fn: Function that combines two values into one; runs on rank 0.
            tag: Place of the call in the script, which must be the same on all replicas.
            stream: Stream of the call.
            objects: Whether `obj` and the result may be objects of any type that can be pickled.
        """
        if not callable(reduce_fn):
            raise TypeError(f"reduce_fn combines two values into one, got {reduce_fn!r}")
        if self.replicas == 1:
            future = Future()
            future._set(obj)
            return future
        payload = b"" if self.rank == 0 else _codec.encode((tag, self._pack(obj, objects)))
        with self._lock:
            if self._closing:  # after `abort`, the same error as for the collectives that it ended
                raise (PeerLostError if self._aborted else CollectiveError)(_TORN_DOWN)
            if self._apart is not None:
                future = Future()
                future._set(error=self._apart)
                return future
            sequence = self._sequences[stream]
            self._sequences[stream] += 1
            if self.rank != 0:
                future = self._futures[sequence] = Future(objects)
                # what has failed earlier tells who was lost first: rank 0 may have ended because of that
                lost = self._failed.pop(sequence, None) or self._lost.get(0)
            else:
                call = self.calls.setdefault(sequence, _Call())
                call.own, call.reduce_fn, call.tag, call.objects = obj, reduce_fn, tag, objects
                future, lost = call.future, None
        if self.rank == 0:
            self._advance(sequence)
        elif lost is not None:
            future._set(error=lost)
        else:
            self._send(0, _CONTRIBUTION, sequence.to_bytes(8, "big") + payload)
        return future

    def broadcast(self, obj: Any, tag: str = "", objects: bool = False) -> Any:
        """Return rank 0's `obj` on every replica. `tag` and `objects` as for `allreduce_async`."""
        return self.allreduce(obj if self.rank == 0 else None, _first, tag, objects=objects)

    def barrier(self, tag: str = "") -> None:
        """Return once every replica has called it."""
        self.broadcast(None, tag)

    def _pack(self, value: Any, objects: bool) -> bytes:
        return _wire.pack(value, objects) if self._trusted or not objects else _wire.pack_for_strangers(value)

    def _advance(self, sequence: int) -> None:
        """Finish a call on rank 0 if all contributions have arrived, or a missing one cannot arrive."""
        with self._lock:
            call = self.calls.get(sequence)
            if call is None or call.tag is None:
                return
            missing = set(range(1, self.replicas)) - set(call.contributions)
            lost = sorted(missing & set(self._lost))
            if missing and not lost:
                return
            del self.calls[sequence]
        try:
            if lost:
                raise self._lost[lost[0]]
            value = self.combine(call)
            payload = self._pack(value, call.objects)
        except Exception as error:  # also from the script's reduce_fn: all replicas must get the error
            failure = error if isinstance(error, CollectiveError) else CollectiveError(f"{error!r}")
            failure.__cause__ = None if failure is error else error
            self.spread(_FAILURE, sequence, _wire.pack((type(failure).__name__, str(failure))))
            call.future._set(error=failure)
            self.come_apart(failure)
        else:
            self.spread(_RESULT, sequence, payload)
            call.future._set(value)

    def combine(self, call: _Call) -> Any:
        """Return the result of a collective whose contributions are complete."""
        assert call.reduce_fn is not None
        value = call.own
        for rank in range(1, self.replicas):
            tag, packed = _codec.decode(call.contributions[rank])
            if tag != call.tag:
                raise CollectiveMismatchError(
                    f"rank {rank} is at {tag or 'an unnamed collective'} while rank 0 is at "
                    f"{call.tag or 'an unnamed collective'}: every replica must call the same collectives "
                    f"in the same order (is one of them under a condition that differs between replicas?)"
                )
            value = call.reduce_fn(value, _wire.unpack(packed, call.objects and self._trusted))
        return value

    def come_apart(self, failure: CollectiveError) -> None:
        """Let all unfinished and later collectives fail if `failure` is a mismatch."""
        if not isinstance(failure, CollectiveMismatchError):
            return
        with self._lock:
            self._apart = self._apart or failure
            waiting = [*self._futures.values(), *(call.future for call in self.calls.values())]
            self._futures.clear()
            self.calls.clear()
        for future in waiting:
            future._set(error=failure)

    def spread(self, kind: int, sequence: int, payload: bytes) -> None:
        """Send a frame to every peer."""
        for peer in list(self.peers):
            self._send(peer, kind, sequence.to_bytes(8, "big") + payload)

    # -- control messages --------------------------------------------------------------------------

    def send_control(self, rank: int, message: Any) -> None:
        """Send `message` to rank 0, or from rank 0 to `rank`. A message to itself is delivered at once."""
        if rank == self.rank:
            if self.on_control is not None:
                self.on_control(self.rank, message)
        elif rank in self.peers:
            self._send(rank, _CONTROL, _codec.encode(message))

    def _send(self, peer: int, kind: int, payload: bytes) -> None:
        try:
            with self._send_locks[peer]:
                _wire.send_frame(self.peers[peer], self._keys[peer], kind, payload)
        except (OSError, KeyError):
            pass  # the reader thread detects the lost peer and reports it

    # -- receiving ---------------------------------------------------------------------------------

    def _read_loop(self) -> None:
        """Read from all connections, and close them at the end. Only this thread does so."""
        with selectors.DefaultSelector() as selector:
            for peer, sock in self.peers.items():
                selector.register(sock, selectors.EVENT_READ, peer)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._read(key.data):
                        selector.unregister(key.fileobj)
        for sock in self.peers.values():
            sock.close()

    def _read(self, peer: int) -> bool:
        """Read one frame from a peer, and return whether more may follow."""
        try:
            kind, payload = _wire.receive_frame(self.peers[peer], self._keys[peer])
        except (OSError, ValueError) as error:
            self._on_lost(peer, str(error))
            return False
        try:
            return self._on_frame(peer, kind, payload)
        except Exception:  # an error in a control handler must not end the reader thread
            log.exception("control message from rank %d", peer)
            return True

    def _on_frame(self, peer: int, kind: int, payload: bytes) -> bool:
        if kind == _CONTRIBUTION:
            sequence = int.from_bytes(payload[:8], "big")
            with self._lock:
                self.calls.setdefault(sequence, _Call()).contributions[peer] = payload[8:]
            self._advance(sequence)
        elif kind in (_RESULT, _FAILURE):
            self._finish(int.from_bytes(payload[:8], "big"), kind, payload[8:])
        elif kind == _CONTROL and self.on_control is not None:
            self.on_control(peer, _codec.decode(payload))
        elif kind == _GOODBYE:
            self._gone(
                peer,
                PeerFinishedError(
                    f"rank {peer} has finished, and this replica has not: every replica must run the same "
                    f"loops (is it for a variable that differs between replicas?)"
                ),
            )
            if self.on_finished is not None:
                self.on_finished(peer)
            return False
        return True

    def _finish(self, sequence: int, kind: int, payload: bytes) -> None:
        with self._lock:
            future = self._futures.pop(sequence, None)
            if future is None:
                if kind == _FAILURE:
                    self._failed[sequence] = _failure(payload)
                return
        try:
            if kind == _RESULT:
                future._set(_wire.unpack(payload, future.objects and self._trusted))
                return
            failure = _failure(payload)
        except Exception as error:
            future._set(error=CollectiveError(str(error)))
            return
        future._set(error=failure)
        self.come_apart(failure)

    def _on_lost(self, peer: int, reason: str) -> None:
        with self._lock:
            closing = self._closing
        if closing:
            return
        self._gone(peer, PeerLostError(f"rank {peer} is gone ({reason})"))
        if self.on_lost is not None:
            self.on_lost(peer)

    def _gone(self, peer: int, reason: PeerLostError) -> None:
        with self._lock:
            self._lost[peer] = reason
            waiting = list(self.calls)
            futures = list(self._futures.values())
            self._futures.clear()
        for future in futures:
            future._set(error=reason)
        for sequence in waiting:
            self._advance(sequence)

    @property
    def finished(self) -> PeerFinishedError | None:
        """Error of a replica that has ended regularly while this replica has not; None if there is none."""
        with self._lock:
            ended = [error for error in self._lost.values() if isinstance(error, PeerFinishedError)]
            return ended[0] if ended and not self._closing else None

    def close(self) -> None:
        """Tell the others that this replica ends regularly, and disconnect.

        Unfinished collectives of this replica fail with a CollectiveError.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        for peer in list(self.peers):
            self._send(peer, _GOODBYE, b"")
        self._hang_up()
        self._fail_waiting(CollectiveError)

    def abort(self) -> None:
        """Disconnect at once, so that the others treat this replica as lost and do not wait for it.

        After the return, no message of the others is delivered any more.
        """
        with self._lock:
            self._closing = self._aborted = True
        self._hang_up()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join()
        self._fail_waiting(PeerLostError)

    def _hang_up(self) -> None:
        for sock in self.peers.values():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the reader, which closes it

    def _fail_waiting(self, kind: type[CollectiveError]) -> None:
        with self._lock:
            waiting = [*self._futures.values(), *(call.future for call in self.calls.values())]
        for future in waiting:
            future._set(error=kind(_TORN_DOWN))


_ERRORS: dict[str, type[CollectiveError]] = {
    kind.__name__: kind
    for kind in (CollectiveError, PeerLostError, PeerFinishedError, CollectiveMismatchError)
}


def _failure(payload: bytes) -> CollectiveError:
    """Return the error that rank 0 has sent."""
    kind, text = _wire.unpack(payload)
    return _ERRORS.get(kind, CollectiveError)(text)


_open: weakref.WeakSet[Reducer] = weakref.WeakSet()


def _forget_in_children(reducer: Reducer) -> None:
    """Close the connections in forked children, so that a loader's worker does not keep them open."""
    _register()
    _open.add(reducer)


@cache
def _register() -> None:
    os.register_at_fork(after_in_child=_close_copies)


def _close_copies() -> None:
    for reducer in list(_open):
        for sock in reducer.peers.values():
            sock.close()  # closes the child's copy; the parent's connection stays open
        reducer.peers = {}


def _first(a: Any, b: Any) -> Any:
    return a


def _bind(host: str, port: int, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=max(backlog, 16))
    except OSError as error:
        raise CollectiveError(
            f"rank 0 cannot listen on {host}:{port} ({error.strerror or error}); set ADAPTDL_MASTER_ADDR to "
            f"an address of this machine and ADAPTDL_MASTER_PORT to a free port"
        ) from None


def _tuned(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return sock
