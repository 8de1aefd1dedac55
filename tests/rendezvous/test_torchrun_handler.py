"""Several torchrun handlers in one process, on the store in memory."""

from __future__ import annotations

import socket

import psutil
import pytest
from compacted import compact
from polling import until
from ports import free_port
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousInfo
from torchrun_group import PREFIX, SOON, Group

from adaptdl_elastic.rendezvous import torchrun
from adaptdl_elastic.rendezvous.store.memory import MemoryStore
from adaptdl_elastic.rendezvous.torchrun.handler import AdaptdlEtcdHandler


def wait_until_waiting(handlers: list[AdaptdlEtcdHandler], count: int = 1) -> None:
    until("nobody waits", lambda: all(handler.num_nodes_waiting() >= count for handler in handlers))


def wait_until_closed(handler: AdaptdlEtcdHandler) -> None:
    until("the run is not closed", handler.is_closed)


def test_nodes_come_and_go_and_survivors_keep_their_ranks(group: Group):
    one, two, three = group.handler((1, 3)), group.handler((1, 3)), group.handler((1, 3))
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


def test_a_failed_node_brings_everybody_back(group: Group):
    handlers = [group.handler((2, 2)) for _ in range(2)]
    before = dict(zip(handlers, group.ranks(group.enter(*handlers)), strict=True))
    failed = group.enter(handlers[1])
    wait_until_waiting([handlers[0]])
    assert group.ranks(group.enter(handlers[0]) + failed) == [before[one] for one in handlers]


def test_garbage_and_compaction_do_no_harm(group: Group):
    for key in ("nodes/x", "round", "closed", "rounds/x/master", "rounds/1/master", "what/ever"):
        group.store.put(PREFIX + key, "\x00 not ours")
    one, two = group.handler((1, 3)), group.handler((1, 3))
    assert group.ranks(group.enter(one)) == [(0, 1)]
    compact(group.store)
    newcomer = group.enter(two)
    compact(group.store)
    wait_until_waiting([one])
    assert group.ranks(group.enter(one) + newcomer) == [(0, 2), (1, 2)]
    one.shutdown()
    wait_until_closed(two)


def test_a_round_that_was_deleted_is_followed_by_another(group: Group):
    one, two = group.handler((1, 3)), group.handler((1, 3))
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
    assert group.ranks(group.enter(group.handler((1, 3)))) == [(0, 1)]
    assert read == [PREFIX]


def test_the_rounds_store_listens_on_the_nodes_address_only(group: Group):
    handler = group.handler((1, 1))
    (info,) = [future.result(SOON) for future in group.enter(handler)]
    mine = [c for c in psutil.net_connections("inet") if c.pid == psutil.Process().pid]
    found = {c.laddr.ip for c in mine if c.status == psutil.CONN_LISTEN and c.laddr.port == master_port(info)}
    assert found == {"127.0.0.1"}


def test_a_range_of_ports_is_kept_to_and_named_when_it_is_full(group: Group):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        handler = group.handler((1, 1), port_range=str(port))
        with pytest.raises(RendezvousConnectionError, match=f"{port}.*port_range=FIRST-LAST"):
            group.enter(handler)[0].result(SOON)
        handler.leave()
    (info,) = [future.result(SOON) for future in group.enter(group.handler((1, 1), port_range=str(port)))]
    assert master_port(info) == port


def master_port(info: RendezvousInfo) -> int:
    return int(info.bootstrap_store_info.master_port)


def test_a_lapsed_lease_disturbs_no_node(group: Group):
    handlers = [group.handler((2, 2), grace="600") for _ in range(2)]
    group.ranks(group.enter(*handlers))
    roster = handlers[0].connection.roster
    lapsed = roster.lease
    lapsed.revoke()  # as the store does when it has not heard of us
    nodes = PREFIX + "nodes/"
    until(
        "it is not registered again",
        lambda: roster.lease is not lapsed and len(group.store.range(nodes).items) == 2,
    )
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]


def test_the_cluster_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ADAPTDL_CLUSTER", "night")
    for config, cluster in (({}, "night"), ({"cluster": "day"}, "day")):
        found = RendezvousParameters("adaptdl-etcd", "e:1", "job", 1, 1, **config)
        assert torchrun.create_handler(found).keys.cluster == cluster
