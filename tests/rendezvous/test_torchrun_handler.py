"""Several torchrun handlers in one process, on the store in memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest
from compacted import compact
from polling import until
from ports import free_port
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousInfo
from torchrun_clock import TorchrunClock, knows

from adaptdl_elastic.rendezvous import torchrun
from adaptdl_elastic.rendezvous.schema.records import encode
from adaptdl_elastic.rendezvous.store.memory import MemoryStore
from adaptdl_elastic.rendezvous.torchrun import handler as module
from adaptdl_elastic.rendezvous.torchrun import membership as m

PREFIX = "/adaptdl/v1/default/torchrun/job/"
PATIENCE = 120.0  # seconds, for what is only waited for when a test fails


class Group:
    """Handlers, each with a thread in which torch's agent would live."""

    def __init__(self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        monkeypatch.setattr(module, "connect", lambda *_, **__: store.client())
        self.handlers: list[module.AdaptdlEtcdHandler] = []
        self._pool = ThreadPoolExecutor(8)

    def handler(self, nodes: tuple[int, int] = (1, 3), **config: str) -> module.AdaptdlEtcdHandler:
        settings = {"last_call": "0.1", "grace": "0.2", "timeout": f"{PATIENCE:g}", **config}
        made = module.AdaptdlEtcdHandler(
            RendezvousParameters("adaptdl-etcd", "127.0.0.1:1", "job", *nodes, "127.0.0.1", **settings)
        )
        self.handlers.append(made)
        return made

    def enter(self, *handlers: module.AdaptdlEtcdHandler) -> list[Future[RendezvousInfo]]:
        return [self._pool.submit(handler.next_rendezvous) for handler in handlers]

    def ranks(self, futures: list[Future[RendezvousInfo]]) -> list[tuple[int, int]]:
        found = [future.result(PATIENCE) for future in futures]
        for info in found:
            info.store.set(f"x{info.rank}", "1")
        for info in found:
            assert all(info.store.get(f"x{rank}") == b"1" for rank in range(info.world_size))
        return [(info.rank, info.world_size) for info in found]

    def close(self) -> None:
        for handler in self.handlers:
            handler.leave()
        self._pool.shutdown()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    made = Group(MemoryStore(), monkeypatch)
    yield made
    made.close()


def wait_until_waiting(handlers: list[module.AdaptdlEtcdHandler], count: int = 1) -> None:
    until("nobody waits", lambda: all(handler.num_nodes_waiting() >= count for handler in handlers))


def wait_until_closed(handler: module.AdaptdlEtcdHandler) -> None:
    until("the run is not closed", handler.is_closed)


def test_nodes_come_and_go_and_survivors_keep_their_ranks(group: Group):
    one, two, three = group.handler(), group.handler(), group.handler()
    assert group.ranks(group.enter(one)) == [(0, 1)]
    assert one.num_nodes_waiting() == 0
    newcomer = group.enter(two)
    wait_until_waiting([one])
    assert group.ranks(group.enter(one) + newcomer) == [(0, 2), (1, 2)]
    newcomer = group.enter(three)
    wait_until_waiting([one, two])
    assert group.ranks(group.enter(two, one) + newcomer) == [(1, 3), (0, 3), (2, 3)]
    one.leave()  # as at a signal
    wait_until_waiting([two, three])
    assert group.ranks(group.enter(three, two)) == [(1, 2), (0, 2)]


def test_the_whole_of_min_nodes_at_once(group: Group):
    handlers = [group.handler((4, 4)) for _ in range(4)]
    assert sorted(group.ranks(group.enter(*handlers))) == [(rank, 4) for rank in range(4)]


def test_a_failed_node_brings_everybody_back(group: Group):
    handlers = [group.handler((2, 2)) for _ in range(2)]
    before = dict(zip(handlers, group.ranks(group.enter(*handlers)), strict=True))
    failed = group.enter(handlers[1])
    wait_until_waiting([handlers[0]])
    assert group.ranks(group.enter(handlers[0]) + failed) == [before[one] for one in handlers]


def test_garbage_and_compaction_do_no_harm(group: Group):
    for key in ("nodes/x", "round", "closed", "rounds/x/master", "rounds/1/master", "what/ever"):
        group.store.put(PREFIX + key, "\x00 not ours")
    one, two = group.handler(), group.handler()
    assert group.ranks(group.enter(one)) == [(0, 1)]
    compact(group.store)
    newcomer = group.enter(two)
    compact(group.store)
    wait_until_waiting([one])
    assert group.ranks(group.enter(one) + newcomer) == [(0, 2), (1, 2)]
    one.shutdown()
    wait_until_closed(two)


def test_a_round_with_a_ghost_does_not_come_together(group: Group):
    """A member that dies between the round and the meeting: the others find another round."""
    ghost = m.Member("ghost", "127.0.0.1", 0)
    lease = group.store.lease(0.5)
    group.store.put(PREFIX + "nodes/ghost", encode(ghost), lease)
    alone = group.handler((1, 2))
    entering = group.enter(alone)  # the ghost came first, so it is to write the round, and does
    with group.store.watch(PREFIX + "nodes/", 1) as watch:
        name = next(c.key.rpartition("/")[2] for c in watch if not c.key.endswith("ghost"))
    group.store.put(PREFIX + "round", encode(m.MembershipRound(1, (name, "ghost"))))
    lease.abandon()
    group.store.client().watch(PREFIX).close()
    deadline = time.monotonic() + PATIENCE
    while not entering[0].done() and time.monotonic() < deadline:
        group.store.expire()
        time.sleep(0.02)
    assert group.ranks(entering) == [(0, 1)]


def test_a_round_that_was_deleted_is_followed_by_another(group: Group):
    one, two = group.handler(), group.handler()
    assert group.ranks(group.enter(one)) == [(0, 1)]
    with group.store.watch(PREFIX) as watch:
        group.store.delete(PREFIX + "round")
        newcomer = group.enter(two)
        next(change for change in watch if change.key.startswith(PREFIX + "nodes/"))
    wait_until_waiting([one])
    assert group.ranks(group.enter(one) + newcomer) == [(0, 2), (1, 2)]


def test_the_prefix_is_read_once_at_the_start(group: Group, monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    range_ = MemoryStore.range
    monkeypatch.setattr(MemoryStore, "range", lambda *args: [read.append(args[1]), range_(*args)][1])
    assert group.ranks(group.enter(group.handler())) == [(0, 1)]
    assert read == [PREFIX]


def test_the_rounds_store_listens_on_the_nodes_address_only(group: Group):
    handler = group.handler((1, 1))
    (info,) = [future.result(PATIENCE) for future in group.enter(handler)]
    mine = [c for c in psutil.net_connections("inet") if c.pid == psutil.Process().pid]
    found = {c.laddr.ip for c in mine if c.status == psutil.CONN_LISTEN and c.laddr.port == master_port(info)}
    assert found == {"127.0.0.1"}


def test_a_range_of_ports_is_kept_to_and_named_when_it_is_full(group: Group):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        handler = group.handler((1, 1), port_range=str(port))
        with pytest.raises(RendezvousConnectionError, match=f"{port}.*port_range=FIRST-LAST"):
            group.enter(handler)[0].result(PATIENCE)
        handler.leave()
    (info,) = [future.result(PATIENCE) for future in group.enter(group.handler((1, 1), port_range=str(port)))]
    assert master_port(info) == port


def master_port(info: RendezvousInfo) -> int:
    return int(info.bootstrap_store_info.master_port)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lease", value) for value in ("inf", "nan", "-1", "0", "soon")),
        *(
            ("timeout", "inf"),
            ("grace", "-0.5"),
            ("port_range", "9-3"),
            ("port_range", "x"),
            ("is_host", "maybe"),
            ("protocol", "gopher"),
            ("keep_alive_interval", "often"),
            ("join_timeout", "-1"),
        ),
    ],
)
def test_options_that_can_not_be_used_are_named(group: Group, name: str, value: str):
    with pytest.raises(ValueError, match=name) as caught:
        group.handler(**{name: value})
    assert "--rdzv-conf" in str(caught.value)


def test_too_few_nodes_in_time(group: Group, monkeypatch: pytest.MonkeyPatch):
    clock = TorchrunClock(monkeypatch)
    lonely = group.handler((2, 2), timeout="599.5")
    (entering,) = group.enter(lonely)
    until("it does not come", lambda: knows(lonely, 1))
    clock.put_on(600)
    with pytest.raises(RendezvousTimeoutError, match=r"1 of at least 2 nodes came within 599\.5 s"):
        entering.result(PATIENCE)


def test_spares_leave_as_the_job_does(group: Group):
    one, spare = group.handler((1, 1)), group.handler((1, 1))
    group.ranks(group.enter(one))
    waiting = group.enter(spare)
    until("the spare does not come", lambda: len(group.store.range(PREFIX + "nodes/").items) >= 2)
    assert one.num_nodes_waiting() == 0
    one.shutdown()
    with pytest.raises(SystemExit) as left:
        waiting[0].result(PATIENCE)
    assert left.value.code == 0


def test_a_failed_job_is_closed_as_failed(group: Group):
    handlers = [group.handler((2, 2)) for _ in range(2)]
    group.ranks(group.enter(*handlers))
    try:
        raise RuntimeError("a worker failed")
    except RuntimeError:
        handlers[0].shutdown()
    wait_until_waiting([handlers[1]])
    assert handlers[1].is_closed()
    with pytest.raises(RendezvousClosedError, match="which failed"):
        handlers[1].next_rendezvous()


def test_a_lapsed_lease_disturbs_nobody(group: Group):
    handlers = [group.handler((2, 2), grace="600") for _ in range(2)]
    group.ranks(group.enter(*handlers))
    roster = handlers[0].connection.roster
    lapsed = roster.lease
    lapsed.revoke()  # as the store does when it has not heard of us
    seen = threading.Event()
    deadline = time.monotonic() + PATIENCE
    while roster.lease is lapsed or len(group.store.range(PREFIX + "nodes/").items) < 2:
        assert time.monotonic() < deadline
        seen.wait(0.01)
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]


@pytest.mark.parametrize(
    ("endpoint", "run_id", "config"),
    [
        ("e:1", "a/b", {}),
        ("host:0", "job", {}),
        ("e:1", "job", {"cluster": "a/b"}),
        ("e:1", "job", {"grace": "y"}),
    ],
)
def test_what_torchrun_can_not_use_ends_it_with_one_line(endpoint: str, run_id: str, config: dict[str, str]):
    found = RendezvousParameters("adaptdl-etcd", endpoint, run_id, 1, 1, **config)
    with pytest.raises(SystemExit) as caught:
        torchrun.create_handler(found)
    assert str(caught.value.code).startswith("torchrun: error: ")
    assert "\n" not in str(caught.value.code)


def test_the_cluster_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ADAPTDL_CLUSTER", "night")
    for config, cluster in (({}, "night"), ({"cluster": "day"}, "day")):
        found = RendezvousParameters("adaptdl-etcd", "e:1", "job", 1, 1, **config)
        assert torchrun.create_handler(found).keys.cluster == cluster
