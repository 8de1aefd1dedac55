"""What goes wrong inside a round of the torchrun handler: every call of it ends in time, and quietly."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest
from ports import free_port
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.api import RendezvousInfo
from torchrun_clock import knows
from torchrun_group import NODES, PREFIX, ROUND, SOON, AwayStore, Group

from adaptdl_elastic.rendezvous.schema.records import MasterRecord, decode, encode
from adaptdl_elastic.rendezvous.torchrun import gathering as gathering_module
from adaptdl_elastic.rendezvous.torchrun import handler as module
from adaptdl_elastic.rendezvous.torchrun import membership as m

LONG = "600"  # seconds of a time-out that is over when a test has put the clock on
MASTER = PREFIX + "rounds/1/master"


class Ghost:
    """A node that is registered, has rank 0, and does in a round what the test says."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.lease = group.store.lease(0.5)
        self.member = m.Member("ghost", "10.9.9.9")
        self._write()

    def _write(self) -> None:
        self._group.store.put(NODES + "ghost", encode(self.member), self.lease)

    def invite(self, *, port: int | None) -> str:
        """Write a round of this node and the other that is there, and where they meet."""
        group = self._group
        group.wait_for(lambda: len(group.members()) == 2, "the other to come")
        (other,) = set(group.members()) - {"ghost"}
        group.store.put(ROUND, encode(m.MembershipRound(1, ("ghost", other))))
        if port is not None:
            group.store.put(PREFIX + "rounds/1/master", encode(MasterRecord(1, "127.0.0.1", port)))
        return other

    def die(self) -> None:
        """Without a word: its lease runs out."""
        self.lease.abandon()


@contextlib.contextmanager
def silent_port() -> Iterator[socket.socket]:
    """Connections are taken, and nobody ever answers on them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """Nobody listens there, and nobody else gets the port meanwhile."""
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


def outcome(entering: Future[RendezvousInfo]) -> RendezvousError:
    """The error that a call ended with."""
    error = entering.exception(SOON)
    assert isinstance(error, RendezvousError), error
    return error


def outcome_at_the_end(group: Group, entering: Future[RendezvousInfo]) -> RendezvousError:
    """The same of a call with LONG, from whose end on."""
    group.clock.put_on(float(LONG))
    return outcome(entering)


@contextlib.contextmanager
def quiet(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, most: int) -> Iterator[None]:
    """At most so many lines, torch's own from C++ included."""
    with caplog.at_level(logging.INFO):
        yield
    said = capfd.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if line] + caplog.messages
    assert len(lines) <= most, "\n".join(lines[:50])


def test_the_store_of_a_living_rank_0_vanishes(
    group: Group, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    """Seen before: 193 s and 90,000 lines."""
    ghost = Ghost(group)
    handler = group.handler(timeout="15")
    with quiet(capfd, caplog, most=100):  # torch prints one backtrace
        (entering,) = group.enter(handler)
        servers = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
        ghost.invite(port=servers[0].port)
        key = "/adaptdl/job/1/here/1"
        group.wait_for(lambda: servers[0].check([key]), "the other to come to the store")
        servers.clear()
        error = outcome(entering)
    assert isinstance(error, RendezvousTimeoutError)
    assert re.search(r"within 15 s .*rank 0's node cannot be reached at 127\.0\.0\.1", str(error))


def test_a_port_that_takes_connections_and_never_answers(
    group: Group, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    ghost = Ghost(group)
    handler = group.handler(timeout=LONG)
    with silent_port() as server, quiet(capfd, caplog, most=10):
        port = server.getsockname()[1]
        (entering,) = group.enter(handler)
        ghost.invite(port=port)
        server.accept()[0].close()
        error = outcome_at_the_end(group, entering)
    assert isinstance(error, RendezvousTimeoutError)
    assert f"rank 0's node does not answer at 127.0.0.1:{port}" in str(error)


def test_rank_0_never_says_where_it_is(group: Group):
    ghost = Ghost(group)
    (entering,) = group.enter(group.handler(timeout=LONG))
    ghost.invite(port=None)
    assert group.asks_for_rank_0.wait(SOON)
    error = outcome_at_the_end(group, entering)
    assert isinstance(error, RendezvousTimeoutError)
    assert "rank 0 (10.9.9.9) did not come" in str(error)


@pytest.mark.parametrize("stranger", [False, True])
def test_an_absent_member_is_waited_for_in_vain_though_a_stranger_writes_its_keys(
    group: Group, stranger: bool
):
    """This node has rank 0, and waits for the other one's connection."""
    (entering,) = group.enter(group.handler(timeout=LONG))
    group.wait_for(lambda: len(group.members()) == 1, "the handler to come")
    lease = group.store.lease(60)
    group.store.put(NODES + "late", encode(m.Member("late", "10.9.9.9")), lease)
    said = "rank 1 (10.9.9.9) did not come"
    if stranger:
        group.wait_for(lambda: group.store.get(MASTER) is not None, "the handler to serve a store")
        master = decode(MasterRecord, group.store.get(MASTER).value, MASTER)
        client = TCPStore(master.host, master.port, is_master=False, wait_for_workers=False)
        client.set("/adaptdl/job/1/here/1", "1")
        group.wait_for(lambda: group.gatherings[-1].forged == (1,), "what the stranger wrote to be seen")
        said += "; a stranger has written the keys of ranks 1"
    else:
        group.wait_for(lambda: any(one.reached for one in group.gatherings), "the handler to be there itself")
    error = outcome_at_the_end(group, entering)
    assert isinstance(error, RendezvousTimeoutError)
    assert said in str(error)


def test_a_port_behind_a_wall_ends_all_members_in_time(
    group: Group,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    """Seen before: both still inside after 120 s of timeout=8, round after round."""
    with closed_port() as wall, quiet(capfd, caplog, most=60):
        monkeypatch.setattr(module, "MasterRecord", lambda number, host, _: MasterRecord(number, host, wall))
        handlers = [group.handler(timeout="15") for _ in range(2)]
        errors = [outcome(entering) for entering in group.enter(*handlers)]
    assert all(isinstance(error, RendezvousTimeoutError) for error in errors), errors
    last = group.round()
    assert last is not None
    assert last.number < 15, "the pauses between attempts grow"


def test_a_node_that_cannot_reach_rank_0_gives_up_so_that_others_go_on(
    group: Group, monkeypatch: pytest.MonkeyPatch
):
    """The others have no way to find out that it is the one."""
    alone = group.handler((1, 2))
    (info,) = [entering.result(SOON) for entering in group.enter(alone)]
    assert info.world_size == 1
    monkeypatch.setattr(module, "REACH_SECONDS", 0.3)
    connect = gathering_module.Gathering.connect

    def refused(self: gathering_module.Gathering) -> TCPStore:
        if self._rank == 1:
            raise ConnectionRefusedError("behind a wall")
        return connect(self)

    monkeypatch.setattr(gathering_module.Gathering, "connect", refused)
    (entering,) = group.enter(misfit := group.handler((1, 2), read_timeout="1", timeout="600"))
    group.wait_for(lambda: alone.num_nodes_waiting() > 0, "the newcomer to be noticed")
    (again,) = group.enter(alone)
    with pytest.raises(RendezvousConnectionError, match=r"cannot be reached at .*behind a wall \(for 1 s"):
        entering.result(SOON)
    try:
        raise RendezvousConnectionError("as torch's launcher does")
    except RendezvousConnectionError:
        misfit.shutdown()
    info = again.result(SOON)
    assert (info.rank, info.world_size) == (0, 1)
    assert not alone.is_closed()


def test_rank_0_dies_between_saying_where_and_the_connection(group: Group):
    ghost = Ghost(group)
    (entering,) = group.enter(group.handler((1, 2)))
    with closed_port() as port:
        ghost.invite(port=port)
        ghost.die()
        group.wait_for(lambda: group.store.expire() or entering.done(), "a round without the dead")
    info = entering.result(1)
    assert (info.rank, info.world_size) == (0, 1)


def test_a_slow_member_is_waited_for(group: Group, monkeypatch: pytest.MonkeyPatch):
    release, connect = threading.Event(), gathering_module.Gathering.connect

    def slowly(self: gathering_module.Gathering) -> TCPStore:
        assert release.wait(SOON)
        return connect(self)

    monkeypatch.setattr(gathering_module.Gathering, "connect", slowly)
    entering = group.enter(*(group.handler() for _ in range(2)))
    group.wait_for(lambda: group.round() is not None, "a round")
    assert not any(one.done() for one in entering)
    release.set()
    assert sorted(one.result(SOON).rank for one in entering) == [0, 1]
    assert group.round() == replace(group.round(), number=1), "one round was enough"


def test_a_node_that_gave_up_is_not_waited_for_and_can_come_again(group: Group):
    first = group.handler(timeout=LONG)
    (entering,) = group.enter(first)
    group.wait_for(lambda: knows(first, 1), "it to come")
    group.clock.put_on(float(LONG))
    with pytest.raises(RendezvousTimeoutError, match="1 of at least 2 nodes"):
        entering.result(SOON)
    group.wait_for(lambda: all(one.leaving for one in group.members().values()), "it to say so")
    pair = [group.handler(), group.handler()]
    assert sorted(one.result(SOON).rank for one in group.enter(*pair)) == [0, 1]
    for handler in pair:
        handler.set_closed()
    with pytest.raises(RendezvousClosedError):
        first.next_rendezvous()


def test_a_store_that_goes_away_while_nodes_wait_and_comes_back(
    group: Group, caplog: pytest.LogCaptureFixture
):
    one = group.handler()
    (first,) = group.enter(one)
    group.wait_for(lambda: len(group.members()) == 1, "the first to come")
    group.away.set()
    with caplog.at_level(logging.WARNING):
        (second,) = group.enter(group.handler())
        AwayStore.asked = 0
        group.wait_for(lambda: AwayStore.asked >= 5, "the store to be asked again")
    assert sum("asking again" in line for line in caplog.messages) == 1
    assert not first.done()
    assert not second.done()
    group.away.clear()
    assert sorted(entering.result(SOON).rank for entering in (first, second)) == [0, 1]


def test_a_store_that_stays_away_is_the_reason(group: Group):
    handler = group.handler((1, 1), timeout=LONG)
    handler.is_closed()  # it has a connection
    group.away.set()
    (entering,) = group.enter(handler)
    group.wait_for(lambda: handler.connection.roster.trouble is not None, "the store to be asked")
    error = outcome_at_the_end(group, entering)
    assert isinstance(error, RendezvousTimeoutError)
    assert "nobody answers" in str(error)
    group.away.clear()


def test_nodes_that_trickle_in_share_the_first_round(group: Group):
    handlers = [group.handler((1, 4), last_call="600", timeout="2000") for _ in range(3)]
    entering = []
    for count, handler in enumerate(handlers, 1):
        entering += group.enter(handler)
        group.wait_for(lambda count=count: len(group.members()) == count, "it to come")
    group.wait_for(lambda: all(knows(handler, 3) for handler in handlers), "each to know of all")
    group.clock.put_on(700)
    infos = [one.result(SOON) for one in entering]
    assert sorted((info.rank, info.world_size) for info in infos) == [(0, 3), (1, 3), (2, 3)]


def test_the_last_call_ends_before_the_time_does(group: Group):
    handler = group.handler((1, 4), last_call="600", timeout=LONG)
    (entering,) = group.enter(handler)
    group.wait_for(lambda: knows(handler, 1), "it to come")
    group.clock.put_on(0.6 * float(LONG))
    assert entering.result(SOON).world_size == 1


# The end of a run --------------------------------------------------------------------------------


def test_a_handler_is_closed_after_its_shutdown(group: Group):
    handler = group.handler((1, 1))
    group.enter(handler)[0].result(SOON)
    assert not handler.is_closed()
    assert handler.shutdown()
    assert handler.is_closed()
    assert handler.shutdown()
    assert handler.num_nodes_waiting() == 0
    with pytest.raises(RendezvousClosedError):
        handler.next_rendezvous()


def test_a_run_that_is_closed_before_the_first_round_is_closed_for_everybody(group: Group):
    waiting = group.handler()
    (entering,) = group.enter(waiting)
    group.wait_for(lambda: len(group.members()) == 1, "it to wait")
    closer = group.handler()
    closer.set_closed()
    assert closer.is_closed()
    with pytest.raises(RendezvousClosedError):
        entering.result(SOON)
    assert waiting.is_closed()
    late = group.handler((1, 1), close_timeout="0.5")
    assert late.is_closed()
    with pytest.raises(RendezvousClosedError, match="not all of its nodes have left"):
        late.next_rendezvous()
    with pytest.raises(RendezvousClosedError):
        closer.next_rendezvous()


def test_a_closed_run_raises_torchs_exception_which_ends_torchrun_with_0(group: Group):
    one, spare = group.handler((1, 1)), group.handler((1, 1))
    group.enter(one)[0].result(SOON)
    (waiting,) = group.enter(spare)
    group.wait_for(lambda: len(group.members()) == 2, "the spare to come")
    assert one.num_nodes_waiting() == 0
    one.shutdown()
    error = waiting.exception(SOON)
    assert isinstance(error, RendezvousClosedError)
    assert isinstance(error, SystemExit)
    assert error.code == 0


def test_a_failed_run_is_no_quiet_exit(group: Group):
    pair = [group.handler(), group.handler()]
    for one in group.enter(*pair):
        one.result(SOON)
    try:
        raise RuntimeError("a worker failed")
    except RuntimeError:
        pair[0].shutdown()
    group.wait_for(lambda: pair[1].num_nodes_waiting() > 0, "the other to be told")
    assert pair[1].is_closed()
    with pytest.raises(RendezvousClosedError, match="which failed") as caught:
        pair[1].next_rendezvous()
    assert not isinstance(caught.value, SystemExit)


def test_the_end_is_announced_though_the_store_was_away(group: Group):
    pair = [group.handler(close_timeout="200"), group.handler()]
    for one in group.enter(*pair):
        one.result(SOON)
    group.away.set()
    AwayStore.asked = 0
    closing = threading.Thread(target=pair[0].set_closed)
    closing.start()
    group.wait_for(lambda: AwayStore.asked >= 3, "the store to be asked again")
    group.away.clear()
    closing.join(SOON)
    group.wait_for(pair[1].is_closed, "the other to be told")


def test_a_run_that_cannot_be_closed_says_so_in_time(group: Group):
    handler = group.handler((1, 1), close_timeout="0.5")
    group.enter(handler)[0].result(SOON)
    group.away.set()
    with pytest.raises(RendezvousConnectionError, match="could not be closed: nobody answers"):
        handler.set_closed()
    assert not handler.shutdown()
    group.away.clear()


def test_an_id_is_used_again_in_the_same_process(group: Group):
    for _ in range(3):
        handler = group.handler((1, 1))
        assert group.enter(handler)[0].result(SOON).world_size == 1
        handler.shutdown()


def test_a_handler_that_is_dropped_leaves_the_run(group: Group):
    """As when a script catches torch's SignalException and launches again: nobody calls shutdown()."""
    dropped = group.handler((1, 1))
    dropped.next_rendezvous()
    group.handlers.clear()
    del dropped
    gc.collect()
    assert group.enter(group.handler((1, 1), leave_timeout="600"))[0].result(SOON).world_size == 1


def test_workers_may_be_told_to_keep_a_store_of_their_own(group: Group, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # torch's own would be given to anybody as soon as it has been closed
    monkeypatch.setattr("torch.distributed.elastic.rendezvous.api.get_free_port", free_port)
    pair = [group.handler(), group.handler()]
    infos = [one.result(SOON) for one in group.enter(*pair)]
    assert not any(handler.use_agent_store for handler in pair)
    where = {(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in infos}
    ((host, port),) = where
    with socket.create_server((host, port)):
        assert os.getpid()  # nobody else listens there
