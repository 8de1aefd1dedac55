"""The library's own collectives: right, authenticated, and never hanging on who is gone."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

from adaptdl_elastic import _codec, _door, _wire
from adaptdl_elastic.reducer import (
    AGREEMENT,
    LOOPS,
    MAIN,
    CollectiveError,
    CollectiveMismatchError,
    PeerLostError,
    Reducer,
)


class World:
    """Reducers of one world, each in this process."""

    def __init__(self, replicas: int, secret: bytes | None = b"key", **options: Any) -> None:
        self.reducers: list[Any] = [None] * replicas
        port: Future = Future()
        threads = [
            threading.Thread(target=self._connect, args=(rank, port, secret, options))
            for rank in range(replicas)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)

    def _connect(self, rank: int, port: Future, secret: bytes | None, options: Any) -> None:
        replicas = len(self.reducers)
        if rank == 0:
            self.reducers[0] = Reducer(0, replicas, secret=secret, publish=port.set_result, **options)
        else:
            self.reducers[rank] = Reducer(
                rank, replicas, "127.0.0.1", port.result(60), secret=secret, **options
            )

    def everywhere(self, call: Callable[[Reducer], Any]) -> list[Any]:
        """The results, or exceptions, of `call` on every replica at once."""
        results: list[Any] = [None] * len(self.reducers)

        def one(rank: int) -> None:
            try:
                results[rank] = call(self.reducers[rank])
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
            assert not thread.is_alive()
        return results

    def close(self) -> None:
        for reducer in self.reducers:
            if reducer is not None:
                reducer.close()


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(replicas: int, **options: Any) -> World:
        made.append(World(replicas, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_alone_there_are_no_sockets() -> None:
    reducer = Reducer(0, 1)
    assert reducer.allreduce([1]) == [1]
    assert reducer.broadcast("x") == "x"
    assert reducer.port == 0


@pytest.mark.parametrize("replicas", [2, 5])
def test_values_are_combined_in_the_order_of_the_ranks(world: Any, replicas: int) -> None:
    results = world(replicas).everywhere(lambda r: r.allreduce([r.rank]))
    assert results == [list(range(replicas))] * replicas


def test_broadcast_gives_everybody_rank_0s_value(world: Any) -> None:
    assert world(3).everywhere(lambda r: r.broadcast(f"from {r.rank}")) == ["from 0"] * 3


def test_many_calls_may_be_under_way(world: Any) -> None:
    def call(reducer: Reducer) -> list[int]:
        futures = [reducer.allreduce_async(i * reducer.rank) for i in range(100)]
        return [future.result(60) for future in futures]

    assert world(3).everywhere(call) == [[3 * i for i in range(100)]] * 3


def test_replicas_that_have_come_apart_get_an_error_that_names_both_places(world: Any) -> None:
    tags = ["train.py:10", "train.py:10", "train.py:99"]
    for error in world(3).everywhere(lambda r: r.allreduce(1, tag=tags[r.rank])):
        assert isinstance(error, CollectiveMismatchError)
        assert "rank 2 is at train.py:99" in str(error)


def test_replicas_that_have_come_apart_wait_for_nothing_any_more(world: Any) -> None:
    """What one of them has called meanwhile, and what any of them calls later, would never be answered."""
    w, waiting = world(3), []

    def call(reducer: Reducer) -> None:
        first = reducer.allreduce_async(1, tag=f"place {min(reducer.rank, 1)}", stream=LOOPS)
        if reducer.rank != 1:
            waiting.append(reducer.allreduce_async(1, tag="not called by rank 1"))
        first.result(60)

    assert [type(error) for error in w.everywhere(call)] == [CollectiveMismatchError] * 3
    for future in waiting:
        with pytest.raises(CollectiveMismatchError, match="rank 1 is at place 1"):
            future.result(60)
    assert [type(error) for error in w.everywhere(lambda r: r.allreduce(1))] == [CollectiveMismatchError] * 3


def test_an_address_that_is_left_from_an_earlier_round_is_read_again(world: Any) -> None:
    address: list[Any] = [("127.0.0.1", free_port())]  # the kernel gives this port to nobody meanwhile
    asked = threading.Event()
    found: Future = Future()

    def find_root() -> Any:
        asked.set()
        return address[-1]

    def others() -> None:
        found.set_result(Reducer(1, 2, secret=b"key", find_root=find_root))

    thread = threading.Thread(target=others)
    thread.start()
    assert asked.wait(60)  # it has read the old address before rank 0 writes the new one
    made = world(1)  # closes both
    first = Reducer(0, 2, secret=b"key", publish=lambda port: address.append(("127.0.0.1", port)))
    made.reducers += [first, found.result(60)]
    assert first.local_address == "127.0.0.1"
    thread.join()


def test_streams_have_orders_of_their_own(world: Any) -> None:
    def call(reducer: Reducer) -> list[int]:
        streams = (LOOPS, MAIN, AGREEMENT) if reducer.rank else (MAIN, AGREEMENT, LOOPS)
        futures = {s: reducer.allreduce_async(s + reducer.rank, tag=f"stream {s}", stream=s) for s in streams}
        return [futures[stream].result(60) for stream in sorted(futures)]

    assert world(3).everywhere(call) == [[3, 6, 9]] * 3


def test_an_error_in_the_reduction_reaches_everybody(world: Any) -> None:
    def refuse(a: Any, b: Any) -> Any:
        raise KeyError("nothing")

    w = world(2)
    for error in w.everywhere(lambda r: r.allreduce(1, refuse)):
        assert isinstance(error, CollectiveError)
        assert "KeyError" in str(error)
    assert w.everywhere(lambda r: r.allreduce(1)) == [2, 2]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_replica_that_is_gone_fails_what_waits_for_it_at_once(world: Any, victim: int) -> None:
    w = world(3)
    waiting = [w.reducers[rank].allreduce_async(1) for rank in range(3) if rank != victim]
    for sock in w.reducers[victim].peers.values():
        sock.shutdown(socket.SHUT_RDWR)
    for future in waiting:
        with pytest.raises(PeerLostError, match=f"rank {victim} is gone"):
            future.result(60)


def test_a_call_after_the_loss_fails_too(world: Any) -> None:
    lost = threading.Event()
    w = world(2, on_lost=lambda rank: lost.set())
    w.reducers[1].peers[0].shutdown(socket.SHUT_RDWR)
    assert lost.wait(60)
    with pytest.raises(PeerLostError):
        w.reducers[0].allreduce(1)


def test_a_call_when_rank_0_has_ended_because_of_a_loss_names_that_loss(world: Any) -> None:
    """Rank 0 says that the call has failed before rank 2 makes it, and then ends."""
    gone = threading.Event()
    w = world(3)
    w.reducers[2].on_lost = lambda rank: gone.set()
    waiting = w.reducers[0].allreduce_async(1)
    w.reducers[1].peers[0].shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        waiting.result(60)
    w.reducers[0].abort()
    assert gone.wait(60)
    with pytest.raises(PeerLostError, match="rank 1 is gone"):
        w.reducers[2].allreduce(1)
    with pytest.raises(PeerLostError, match="rank 0 is gone"):
        w.reducers[2].allreduce(1)


def test_an_orderly_goodbye_is_no_loss(world: Any) -> None:
    lost: list[int] = []
    w = world(2, on_lost=lost.append)
    w.reducers[1].close()
    with pytest.raises(PeerLostError, match="rank 1 has finished"):
        w.reducers[0].allreduce(1)
    assert lost == []


def test_control_messages_travel_beside_the_collectives(world: Any) -> None:
    got: list[Any] = []
    arrived = threading.Event()

    def on_control(sender: int, message: Any) -> None:
        got.append((sender, message))
        if len(got) == 2:
            arrived.set()

    w = world(3, on_control=on_control)
    w.reducers[1].send_control(0, {"a": 1})
    w.reducers[0].send_control(2, (1, 2))
    assert arrived.wait(60)
    assert sorted(got, key=repr) == [(0, (1, 2)), (1, {"a": 1})]


SECRET = b"right"


class Root:
    """Rank 0 of a world, which listens at `port` until all others have come. Closes all that were met."""

    def __init__(self, replicas: int = 2) -> None:
        port: Future = Future()
        self.replicas, self.made = replicas, list[Any]()
        self.thread = threading.Thread(target=self._listen, args=(port,))
        self.thread.start()
        self.port = port.result(60)

    def _listen(self, port: Future) -> None:
        self.made.append(Reducer(0, self.replicas, secret=SECRET, timeout=60, publish=port.set_result))

    def meet(self, rank: int = 1, port: int = 0, secret: bytes = SECRET) -> Reducer:
        """Return another replica that has connected to it."""
        peer = Reducer(rank, self.replicas, "127.0.0.1", port or self.port, secret=secret)
        self.made.append(peer)
        return peer

    def reducer(self) -> Reducer:
        """Return its own, once all have come."""
        self.thread.join(60)
        return next(one for one in self.made if one.rank == 0)


@pytest.fixture
def root() -> Iterator[Callable[..., Root]]:
    made: list[Root] = []

    def make(replicas: int = 2) -> Root:
        made.append(Root(replicas))
        return made[-1]

    yield make
    for each in made:
        each.thread.join(60)
        for one in each.made:
            one.abort()


def test_a_stranger_is_refused_and_disturbs_no_replica(root: Callable[..., Root]) -> None:
    first = root()
    with pytest.raises(_wire.AuthenticationError):
        first.meet(secret=b"wrong")
    with socket.create_connection(("127.0.0.1", first.port)) as stranger:  # says nothing, or nonsense
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 8)
    first.meet()
    assert first.reducer().rank == 0


def test_silent_connections_and_garbage_delay_no_replica(
    root: Callable[..., Root], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One handshake after the other would take 10 s for each of them."""
    monkeypatch.setattr(_door, "HANDSHAKE_SECONDS", 1000.0)  # no stranger is sent away meanwhile
    first = root(3)
    strangers = [socket.create_connection(("127.0.0.1", first.port)) for _ in range(21)]
    strangers[-1].sendall(os.urandom(4096))
    with ThreadPoolExecutor() as pool:
        met = pool.map(first.meet, (1, 2))
        assert {peer.rank for peer in met} == {1, 2}  # none of the handshakes before has ended
    assert first.reducer().rank == 0
    for each in strangers:
        each.close()


def test_a_crowd_of_strangers_is_bounded_and_a_replica_comes_through(
    root: Callable[..., Root], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_door, "STRANGERS", 5)
    monkeypatch.setattr(_door, "HANDSHAKE_SECONDS", 1000.0)
    first = root()
    strangers = [socket.create_connection(("127.0.0.1", first.port)) for _ in range(20)]
    for stranger in strangers[:14]:  # the oldest, beyond 5 and the one that is expected
        stranger.settimeout(60)
        while stranger.recv(64):
            pass
    first.meet()
    for each in strangers:
        each.close()


def test_a_silent_connection_is_closed_in_time(
    root: Callable[..., Root], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_door, "HANDSHAKE_SECONDS", 0.05)
    first = root()
    with socket.create_connection(("127.0.0.1", first.port), timeout=60) as stranger:
        while stranger.recv(64):  # first a nonce, then the end
            pass
    monkeypatch.undo()
    first.meet()


class Evil:
    """Touches a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def test_a_call_of_the_librarys_own_takes_no_objects_of_others(world: Any, tmp_path: Path) -> None:
    def call(reducer: Reducer) -> Any:
        objects = reducer.rank == 1
        return reducer.allreduce(Evil(tmp_path / "owned") if objects else 1, tag="x", objects=objects)

    for error in world(2).everywhere(call):
        assert isinstance(error, CollectiveError)
        assert "an object where only plain data may come" in str(error)
    assert not (tmp_path / "owned").exists()
    _wire.unpack(_wire.pack(Evil(tmp_path / "owned"), objects=True), objects=True).close()
    assert (tmp_path / "owned").exists(), "it does no harm where it is unpickled"


def test_without_a_secret_objects_are_not_exchanged(world: Any, tmp_path: Path) -> None:
    def call(reducer: Reducer) -> Any:
        evil = Evil(tmp_path / "owned")
        return reducer.allreduce(evil if reducer.rank else 1, lambda a, b: b, objects=True)

    w = world(2, secret=None)
    waiting = w.reducers[0].allreduce_async(1)
    with pytest.raises(TypeError, match=r"Evil is no plain data.*the same ADAPTDL_SECRET"):
        call(w.reducers[1])
    assert w.reducers[1].allreduce(2) == 3
    assert waiting.result(60) == 3
    assert not (tmp_path / "owned").exists()


def test_an_object_of_the_users_travels_where_there_is_a_secret(world: Any) -> None:
    def call(reducer: Reducer) -> Any:
        return reducer.allreduce(Path("a"), lambda a, b: a / b, objects=True)

    assert world(2).everywhere(call) == [Path("a/a")] * 2


def test_replicas_that_do_not_come_are_named() -> None:
    results: list[Any] = []
    port: Future = Future()
    with pytest.raises(CollectiveError, match=r"ranks \[1, 2\] have not connected"):
        Reducer(0, 3, timeout=0.2, publish=port.set_result)
    assert results == []


def test_a_replica_that_connects_before_rank_0_listens_waits_for_moments_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """AdaptDL sleeps five seconds when its first connection is refused."""
    port, me = free_port(), threading.current_thread()
    waited: list[float] = []
    rank_0: list[Reducer] = []
    thread = threading.Thread(target=lambda: rank_0.append(Reducer(0, 2, "127.0.0.1", port)))
    connect, sleep = socket.create_connection, time.sleep

    def refused_thrice(*arguments: Any, **options: Any) -> socket.socket:
        if len(waited) < 3:
            raise ConnectionRefusedError
        if not thread.ident:
            thread.start()
        return connect(*arguments, **options)

    def wait(seconds: float) -> None:
        if threading.current_thread() is me:
            waited.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(socket, "create_connection", refused_thrice)
    monkeypatch.setattr(time, "sleep", wait)
    Reducer(1, 2, "127.0.0.1", port).close()
    thread.join(60)
    rank_0[0].close()
    assert sum(waited[:3]) < 0.1
    assert max(waited) <= 0.5


def test_a_port_that_is_taken_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CollectiveError, match="ADAPTDL_MASTER_PORT to a free port"):
            Reducer(0, 2, "127.0.0.1", port)


def test_the_root_listens_only_on_the_given_address(root: Callable[..., Root]) -> None:
    first = root()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", first.port), timeout=1)
    first.meet()


@pytest.mark.processes
def test_a_forked_child_does_not_keep_a_killed_replicas_connections_open(world: Any) -> None:
    """A loader's worker outlives its replica for seconds; the others must know at once."""
    import multiprocessing

    w = world(2)
    leave = multiprocessing.get_context("fork").Event()
    child = multiprocessing.get_context("fork").Process(target=leave.wait, args=(100,))
    child.start()
    try:
        assert w.everywhere(lambda r: r.allreduce(1)) == [2, 2]  # nothing was closed for us
        waiting = w.reducers[0].allreduce_async(1)
        os.close(w.reducers[1].peers[0].detach())  # what the end of a process does
        with pytest.raises(PeerLostError):
            waiting.result(50)
    finally:
        leave.set()
        child.join()


def test_an_aborted_replica_has_lost_the_others_in_calls_before_and_after_it() -> None:
    """A collective that begins after `abort` ends as those that it found under way: both are survived."""
    world = World(2)
    one = world.reducers[1]
    waiting = one.allreduce_async(1)
    one.abort()
    with pytest.raises(PeerLostError):
        waiting.result(60)
    with pytest.raises(PeerLostError):
        one.allreduce(2)
    world.reducers[0].close()


class Relay:
    """Stands between one replica and rank 0, lets the handshake pass, and then sends what a test says."""

    def __init__(self, root: int, sends: Callable[[socket.socket], bytes]) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._root, self._sends, self._ended = root, sends, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join(60)

    def _run(self) -> None:
        with (
            self._server,
            self._server.accept()[0] as peer,
            socket.create_connection(("127.0.0.1", self._root)) as root,
        ):
            for source, target, size in (
                (root, peer, 16),
                (peer, root, _wire.INTRODUCTION),
                (root, peer, 32),
            ):
                data = source.recv(size, socket.MSG_WAITALL)
                target.sendall(data)
            root.sendall(self._sends(peer))
            self._ended.wait(60)


def forged(path: Path) -> bytes:
    """Return a contribution to the first call, as a stranger would write it."""
    payload = (0).to_bytes(8, "big") + _codec.encode(("x", _wire.pack(Evil(path), objects=True)))
    return len(payload).to_bytes(8, "big") + bytes([0]) + payload + bytes(16)


def test_a_stranger_between_two_replicas_puts_no_frame_into_their_connection(
    root: Callable[..., Root], tmp_path: Path
) -> None:
    owned, first = tmp_path / "owned", root()
    with Relay(first.port, lambda peer: forged(owned)) as relay:
        first.meet(port=relay.port)
        with pytest.raises(PeerLostError, match="tampered with"):
            first.reducer().allreduce(1, tag="x", objects=True)
    assert not owned.exists()


def test_a_frame_that_is_sent_twice_ends_the_connection(root: Callable[..., Root]) -> None:
    got, lost, first = list[Any](), threading.Event(), root()
    with Relay(first.port, lambda peer: 2 * peer.recv(65536)) as relay:
        peer, reducer = first.meet(port=relay.port), first.reducer()
        reducer.on_control = lambda sender, message: got.append(message)
        reducer.on_lost = lambda rank: lost.set()
        peer.send_control(0, "only once")
        assert lost.wait(60)
    assert got == ["only once"]
