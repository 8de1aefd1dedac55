"""The torchrun handler: carries out what `membership` decides."""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable
from typing import NoReturn, cast

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from adaptdl_elastic.protocol.environment import CLUSTER
from adaptdl_elastic.rendezvous.local.addresses import NoPortError, address_towards, listen
from adaptdl_elastic.rendezvous.local.tcp_store import serve
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import MasterRecord
from adaptdl_elastic.rendezvous.store.base import LeaseLostError, Store, StoreError, StoreUnavailableError
from adaptdl_elastic.rendezvous.store.connect import Api, StoreOptions, connect
from adaptdl_elastic.rendezvous.store.store_options import parse_endpoints
from adaptdl_elastic.rendezvous.torchrun import membership as m
from adaptdl_elastic.rendezvous.torchrun.gathering import REACH_SECONDS, Gathering
from adaptdl_elastic.rendezvous.torchrun.handler_options import HandlerOptions
from adaptdl_elastic.rendezvous.torchrun.roster import Roster

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 5.0  # between rounds that did not come together
_MOST_NAMES = 4  # most nodes named in one message


class RunEndedError(RendezvousClosedError, SystemExit):
    """The run has ended well, and this node is no longer needed.

    torchrun then ends with exit code 0 and without a traceback. (`RendezvousGracefulExitError` would make its
    launcher fail with an AttributeError.)
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = 0


class _Deadline:
    """The time at which `next_rendezvous` gives up, in monotonic seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.at = 0.0
        self.restart()

    def restart(self) -> None:
        """Start the full time again from now."""
        self.at = time.monotonic() + self._seconds

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at


class _Attempts:
    """Counts rounds that did not come together: how long to pause, and what to report."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._pause = _FIRST_PAUSE_SECONDS
        self._unreachable_since: float | None = None
        self._failed = 0
        self.problem = ""

    def failed(self, number: int, problem: str, *, unreachable: bool) -> None:
        """Record a round's failure.

        Args:
            number: number of the round.
            problem: what went wrong.
            unreachable: whether this node could not reach rank 0.

        Raises:
            RendezvousConnectionError: rank 0 has been unreachable for longer than the patience. The other
                nodes may be able to go on without this one, but cannot find out by themselves.
        """
        self.problem = problem
        self._failed += 1
        seldom = self._failed & (self._failed - 1) == 0  # the 1st, 2nd, 4th, 8th … failure
        level = logging.WARNING if seldom else logging.DEBUG
        logger.log(level, "round %d did not come together, trying another: %s", number, problem)
        if not unreachable:
            self._unreachable_since = None
            return
        now = time.monotonic()
        self._unreachable_since = self._unreachable_since or now
        if now - self._unreachable_since >= self._patience:
            raise RendezvousConnectionError(
                f"{problem} (for {self._patience:g} s, --rdzv-conf read_timeout=SECONDS)"
            )

    def pause(self) -> float:
        """Return the seconds until the next attempt; they grow with each call."""
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
        return pause


class _Connection:
    """A handler's connection to the store; closed when the handler is garbage-collected, or at exit."""

    def __init__(self, store: Store, roster: Roster) -> None:
        self.store, self.roster = store, roster
        self._lock = threading.Lock()
        self._open = True
        atexit.register(self.close)  # needed if a signal ends the agent: torch does not call shutdown() then

    def close(self) -> None:
        """Leave the run and close the store."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        atexit.unregister(self.close)
        self.roster.leave()
        self.store.close()

    def collected(self) -> None:
        """Close the connection because the handler was garbage-collected.

        The garbage collector may run in a thread that holds a lock which `close` needs. So a new thread
        closes the connection.
        """
        threading.Thread(target=self.close, name="leave", daemon=True).start()


class AdaptdlEtcdHandler(RendezvousHandler):
    """The handler that torch's agent calls. Its methods may be called from several threads."""

    def __init__(self, params: RendezvousParameters) -> None:
        self._options = HandlerOptions.parse(params.config)
        if (warning := self._options.warning()) is not None:
            logger.warning(warning)
        self._options.ports()
        self._settings = m.MembershipSettings(
            params.min_nodes,
            params.max_nodes,
            min(self._options.last_call, self._options.timeout / 2),
            self._options.grace,
            self._options.leave_timeout,
        )
        self._store_options = StoreOptions.from_environment(
            ca=self._options.ca,
            cert=self._options.cert,
            key=self._options.key,
            timeout=self._options.store_timeout,
        )
        secure = self._store_options.secure or self._options.https
        self.urls = parse_endpoints(params.endpoint, secure)
        self._run_id = params.run_id
        self.keys = Keys(self._options.cluster or os.environ.get(CLUSTER) or "default")
        self.keys.torchrun(self._run_id)
        self._host = params.local_addr
        self._id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.connection: _Connection | None = None
        self._round: m.MembershipRound | None = None
        self._takes_part = False  # in `_round`
        self._ended: m.Closed | None = None  # how the run has ended; final for this handler
        self._lock = threading.Lock()

    def get_backend(self) -> str:
        """Return the registered name."""
        return "adaptdl-etcd"

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the store of rank 0's agent; torch's environment variable can turn it off."""
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def get_run_id(self) -> str:
        """Return the value of `--rdzv-id`."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node is in a round whose members have all come.

        Raises:
            RendezvousClosedError: the run is over.
            RendezvousTimeoutError: no round came together in time.
            RendezvousConnectionError: the store, or the node of rank 0, cannot be reached.
        """
        deadline = _Deadline(self._options.timeout)
        self._takes_part = False
        if self._ended is not None:
            self._over(self._ended)
        roster = self._connected()
        try:
            last = roster.await_end_of_last_run(min(deadline.at, self._close_by()))
            if last is not None:
                self._ended = last
                self.leave()
                raise RendezvousClosedError(
                    f"run {self._run_id} has ended, and not all of its nodes have left"
                )
            return self._next_rendezvous(roster, deadline)
        except StoreError as error:
            roster.withdraw()
            raise RendezvousConnectionError(str(error)) from error
        except BaseException:
            roster.withdraw()
            raise

    def num_nodes_waiting(self) -> int:
        """Return a number above 0 if another round is due because a node came, left or failed."""
        connection = self.connection
        if connection is None or self._round is None:
            return 0
        view = connection.roster.view()
        return m.nodes_waiting(view, self._id, self._round.number, self._settings, time.monotonic())

    def is_closed(self) -> bool:
        """Return whether the run is over."""
        return self._ended is not None or self._connected().view().closed is not None

    def set_closed(self) -> None:
        """End the run for every node.

        Raises:
            RendezvousConnectionError: the end cannot be written to the store.
        """
        if self._ended is not None:
            return
        roster = self._connected()
        try:
            roster.close_run(True, self._close_by(), leaving=False)
        except StoreError as error:
            raise RendezvousConnectionError(f"the run could not be closed: {error}") from error
        self._ended = roster.view().closed

    def shutdown(self) -> bool:
        """End the run because this agent is done; return whether the other nodes can learn of it.

        A node that could not join a round only leaves, since the others may have a round without it.
        """
        # torch calls this in a `finally` clause: an exception under way means that the run failed
        error = sys.exc_info()[1]
        told = self._ended is not None or self._close(ok=error is None)
        self._ended = self._ended or m.Closed(self._id, error is None)
        self.leave()
        return told

    def _close(self, ok: bool) -> bool:
        if not (ok or self._takes_part):
            return False
        try:
            self._connected().close_run(ok, self._close_by(), leaving=True)
        except (StoreError, RendezvousConnectionError) as error:
            logger.warning("the end of run %s could not be announced: %s", self._run_id, error)
            return False
        return True

    def _close_by(self) -> float:
        return time.monotonic() + self._options.close_timeout

    def _connected(self) -> Roster:
        with self._lock:
            if self.connection is not None:
                return self.connection.roster
            api = cast(Api, self._options.api)
            store: Store | None = None
            try:
                store = connect(",".join(self.urls), api=api, options=self._store_options)
                self._host = self._host or address_towards(self.urls)
                member = m.Member(self._id, self._host)
                roster = Roster(store, self.keys, self._run_id, member, self._settings, self._options.lease)
                roster.start()
            except StoreError as error:
                if store is not None:
                    store.close()
                raise RendezvousConnectionError(str(error)) from error
            self.connection = _Connection(store, roster)
            weakref.finalize(self, self.connection.collected).atexit = False
            return roster

    def leave(self) -> None:
        """Close the connection to the store, and so leave the run."""
        with self._lock:
            connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    def _over(self, closed: m.Closed) -> NoReturn:
        self._ended = closed
        self.leave()
        if closed.ok:
            raise RunEndedError(f"run {self._run_id} is done, and this node was not needed")
        raise RendezvousClosedError(f"run {self._run_id} was ended by {closed.by}, which failed")

    def _next_rendezvous(self, roster: Roster, deadline: _Deadline) -> RendezvousInfo:
        attempts = _Attempts(self._options.read_timeout)
        after = self._round.number if self._round else 0
        while True:
            if not roster.register(after, deadline.at):
                raise self._too_late(roster, attempts.problem)
            round_ = self._wait_to_enter(roster, after, deadline, attempts)
            info = self._meet(roster, round_, deadline, attempts)
            if info is not None:
                self._round, self._takes_part = round_, True
                return info
            after = round_.number
            until = min(deadline.at, time.monotonic() + attempts.pause())
            roster.wait_until(lambda: roster.view().closed is not None, until)

    def _wait_to_enter(
        self, roster: Roster, after: int, deadline: _Deadline, attempts: _Attempts
    ) -> m.MembershipRound:
        """Wait for a round that this node is in; propose it if it is this node's turn."""
        while True:
            view = roster.view()
            now = time.monotonic()
            action = m.decide(view, self._id, self._settings, now)
            if self._ended is not None:  # ended by another thread
                self._over(self._ended)
            if isinstance(action, m.Over):
                self._over(action.closed)
            if isinstance(action, m.Enter) and action.round.number > after:
                return action.round
            if m.is_spare(view, self._id, self._settings):
                deadline.restart()
            elif deadline.passed:
                raise self._too_late(roster, attempts.problem)
            until = action.until if isinstance(action, m.Wait) else math.inf
            if isinstance(action, m.Propose):
                try:
                    roster.propose(action.round)
                    continue
                except StoreUnavailableError as error:
                    attempts.problem = str(error)
                    until = time.monotonic() + _FIRST_PAUSE_SECONDS
            roster.wait_for_change(view, min(until, deadline.at))

    def _too_late(self, roster: Roster, problem: str) -> RendezvousTimeoutError:
        view = roster.view()
        waiting, needed = len(m.candidates(view)), self._settings.min_nodes
        said = f"{waiting} of at least {needed} nodes came" if waiting < needed else "no round came together"
        trouble = problem or str(roster.trouble or "")
        why = f"; the last problem: {trouble}" if trouble else ""
        return RendezvousTimeoutError(
            f"{said} within {self._options.timeout:g} s (--rdzv-conf join_timeout=SECONDS){why}"
        )

    def _meet(
        self, roster: Roster, round_: m.MembershipRound, deadline: _Deadline, attempts: _Attempts
    ) -> RendezvousInfo | None:
        """Connect to the round's store and wait for all members; return None if that fails."""

        def coming() -> bool:
            return m.is_coming(roster.view(), round_, self._settings, time.monotonic())

        rank = round_.members.index(self._id)
        server = self._serve(roster, round_, coming, deadline) if rank == 0 else None
        roster.wait_until(lambda: roster.master_of(round_) is not None or not coming(), deadline.at)
        master = roster.master_of(round_)
        if master is None:
            attempts.failed(round_.number, _absent(roster, round_, (0,)), unreachable=False)
            return None
        gathering = Gathering(
            f"/adaptdl/{self._run_id}/{round_.number}",
            rank,
            round_.members,
            (master.host, master.port),
            server,
            self._options.read_timeout,
            roster.notify,
        )
        gathering.start()
        reach_by = min(deadline.at, time.monotonic() + REACH_SECONDS)
        roster.wait_until(lambda: gathering.reached or gathering.ended or not coming(), reach_by)
        if gathering.reached:
            roster.wait_until(lambda: gathering.ended or not coming(), deadline.at)
        store = gathering.store
        if store is None:
            gathering.give_up()
            problem = gathering.problem or _absent(roster, round_, gathering.missing)
            if gathering.forged:
                ranks = ", ".join(map(str, gathering.forged))
                problem += (
                    f"; a stranger has written the keys of ranks {ranks} into the store at {master.host}"
                )
            attempts.failed(round_.number, problem, unreachable=not gathering.reached and coming())
            return None
        if not self.use_agent_store:
            where = RendezvousStoreInfo.build(rank, store, local_addr=self._host)
        else:
            where = RendezvousStoreInfo(master.host, master.port)
        return RendezvousInfo(store, rank, len(round_.members), where)

    def _serve(
        self, roster: Roster, round_: m.MembershipRound, coming: Callable[[], bool], deadline: _Deadline
    ) -> TCPStore:
        """Open the store of a round and publish its address."""
        host = str(self._host)
        try:
            listening = listen(host, self._options.ports())
        except NoPortError as error:
            hint = "with this backend --rdzv-conf port_range=FIRST-LAST"
            raise RendezvousConnectionError(f"{error} ({hint})") from None
        port = int(listening.getsockname()[1])
        server = serve(listening, self._options.read_timeout)
        while coming() and not deadline.passed:
            try:
                roster.publish_master(MasterRecord(round_.number, host, port))
                break
            except (StoreUnavailableError, LeaseLostError) as error:
                logger.debug("round %d: where it meets is not written yet: %s", round_.number, error)
                until = min(deadline.at, time.monotonic() + _FIRST_PAUSE_SECONDS)
                roster.wait_until(lambda: not coming(), until)
        return server


def _absent(roster: Roster, round_: m.MembershipRound, ranks: Iterable[int]) -> str:
    """Return a message that names the absent nodes of a round."""
    members = roster.view().members
    hosts = {rank: members.get(round_.members[rank]) for rank in ranks}
    names = [f"rank {rank} ({'gone' if one is None else one.host})" for rank, one in hosts.items()]
    return f"{', '.join(names[:_MOST_NAMES])} did not come" + (
        " and others" if len(names) > _MOST_NAMES else ""
    )
