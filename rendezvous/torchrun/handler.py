"""The torchrun handler: `membership` decides, this carries it out."""

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
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, cast

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from adaptdl_elastic.rendezvous.local.addresses import NoPortError, address_towards, listen
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import MasterRecord
from adaptdl_elastic.rendezvous.store.base import Store, StoreError
from adaptdl_elastic.rendezvous.store.connect import Api, StoreOptions, connect
from adaptdl_elastic.rendezvous.store.store_options import parse_endpoints
from adaptdl_elastic.rendezvous.torchrun import membership as m
from adaptdl_elastic.rendezvous.torchrun.roster import Roster

logger = logging.getLogger(__name__)

_MAY_BE_ZERO = ("last_call", "grace")
_CHECK_IN = 0.5  # seconds between two looks at the view while the others connect


@dataclass(frozen=True)
class HandlerOptions:
    """`--rdzv-conf key=value,...`; see docs/bare-metal.md."""

    cluster: str = ""
    api: str = "auto"
    timeout: float = 900.0  # until min_nodes have come
    lease: float = 5.0
    last_call: float = 1.0
    grace: float = 2.0
    leave_timeout: float = 60.0
    read_timeout: float = 60.0  # of the TCPStore that agents and workers of a round share
    port_range: str = ""  # FIRST-LAST, for that store
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @classmethod
    def parse(cls, config: dict[str, Any]) -> HandlerOptions:
        """From torch's parameters, whose values are strings."""
        values: dict[str, Any] = {}
        for name, given in config.items():
            if name in ("rank", "read_timeout_seconds"):  # torch puts these in by itself
                continue
            if name not in cls.__dataclass_fields__:
                known = ", ".join(cls.__dataclass_fields__)
                raise ValueError(f"--rdzv-conf has no option {name!r} with this backend; there are {known}")
            default = cls.__dataclass_fields__[name].default
            values[name] = _seconds(name, given) if isinstance(default, float) else str(given)
        return cls(**values)

    def ports(self) -> tuple[int, int] | None:
        """The first and the last port that may be listened on; None: any."""
        if not self.port_range:
            return None
        first, dash, last = self.port_range.partition("-")
        known = first.isdecimal() and (not dash or last.isdecimal())
        if not known or not 1024 <= int(first) <= int(last or first) <= 65535:
            raise ValueError(
                f"--rdzv-conf port_range={self.port_range} is not FIRST-LAST between 1024 and 65535"
            )
        return int(first), int(last or first)


def _seconds(name: str, given: object) -> float:
    try:
        value = float(str(given))
    except ValueError:
        value = math.nan
    if 0 < value < math.inf or (value == 0 and name in _MAY_BE_ZERO):
        return value
    raise ValueError(f"--rdzv-conf {name}={given} is not a finite, positive number of seconds")


class AdaptdlEtcdHandler(RendezvousHandler):
    """What torch's agent talks to. Its methods are called from the agent's one thread."""

    def __init__(self, params: RendezvousParameters) -> None:
        self._options = HandlerOptions.parse(dict(params.config))
        self._options.ports()
        self._settings = m.MembershipSettings(
            params.min_nodes,
            params.max_nodes,
            self._options.last_call,
            self._options.grace,
            self._options.leave_timeout,
        )
        self._endpoint = params.endpoint
        self._store_options = StoreOptions.from_environment(
            ca=self._options.ca, cert=self._options.cert, key=self._options.key
        )
        parse_endpoints(self._endpoint, self._store_options.secure)
        self._run_id = params.run_id
        self._keys = Keys(self._options.cluster or os.environ.get("ADAPTDL_CLUSTER") or "default")
        self._keys.torchrun(self._run_id)
        self._host = params.local_addr
        self._id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._store: Store | None = None
        self._roster: Roster | None = None
        self._round: m.MembershipRound | None = None
        self._lock = threading.Lock()

    def get_backend(self) -> str:
        """The registered name."""
        return "adaptdl-etcd"

    @property
    def use_agent_store(self) -> bool:
        """Workers meet at the store of their round's rank-0 agent."""
        return True

    def get_run_id(self) -> str:
        """`--rdzv-id`."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node is in a round whose members have all come."""
        try:
            roster = self._connected()
            roster.wait_for_round(after=self._round.number if self._round else 0)
            while True:
                round_ = self._wait_to_enter(roster)
                info = self._meet(roster, round_)
                if info is not None:
                    self._round = round_
                    return info
                logger.info("round %d did not come together, waiting for another", round_.number)
                roster.wait_for_round(after=round_.number)
        except StoreError as error:
            raise RendezvousConnectionError(str(error)) from error

    def num_nodes_waiting(self) -> int:
        """Above 0 when there is a better round to be had: somebody came, left, or failed."""
        if self._roster is None or self._round is None:
            return 0
        view = self._roster.view()
        return m.nodes_waiting(view, self._id, self._round.number, self._settings, time.monotonic())

    def is_closed(self) -> bool:
        """Whether the run is over."""
        return self._roster is not None and self._roster.view().closed is not None

    def set_closed(self) -> None:
        """End the run for every node."""
        self._close_run(ok=True)

    def shutdown(self) -> bool:
        """This agent is done: so is the run, well or not."""
        # torch calls this from a `finally`: an exception under way is how the run failed
        error = sys.exc_info()[1]
        closed = self._close_run(ok=error is None)
        self._leave()
        return closed

    def _connected(self) -> Roster:
        if self._roster is not None:
            return self._roster
        api = cast(Api, self._options.api)
        self._store = connect(self._endpoint, api=api, options=self._store_options)
        urls = parse_endpoints(self._endpoint, self._store_options.secure)
        self._host = self._host or address_towards(urls)
        member = m.Member(self._id, self._host)
        self._roster = Roster(
            self._store, self._keys, self._run_id, member, self._settings, self._options.lease
        )
        self._roster.start()
        atexit.register(self._leave)  # when a signal ends the agent, torch does not call shutdown()
        return self._roster

    def _wait_to_enter(self, roster: Roster) -> m.MembershipRound:
        deadline = time.monotonic() + self._options.timeout
        while True:
            view = roster.view()
            now = time.monotonic()
            action = m.decide(view, self._id, self._settings, now)
            if isinstance(action, m.Enter):
                return action.round
            if isinstance(action, m.Over):
                self._over(action.closed)
            if isinstance(action, m.Propose):
                roster.propose(action.round)
                continue
            until = min(action.until, deadline)
            if not roster.wait_for_change(view, until) and now >= deadline:
                deadline = self._extend(view)

    def _extend(self, view: m.View) -> float:
        """A node that is not needed waits for ever; one that waits for others does not."""
        if view.round is not None and any(one in view.members for one in view.round.members):
            return math.inf
        raise RendezvousTimeoutError(
            f"{len(m.candidates(view))} of at least {self._settings.min_nodes} nodes came within "
            f"{self._options.timeout:g} s (--rdzv-conf timeout=SECONDS)"
        )

    def _over(self, closed: m.Closed) -> NoReturn:
        self._leave()
        if closed.ok:
            # RendezvousGracefulExitError would be meant for this; with it torch's launcher fails on
            # `result.is_failed()` of a result that is None
            logger.info("run %s is done, and this node was not needed", self._run_id)
            raise SystemExit(0)
        raise RendezvousClosedError(f"run {self._run_id} was ended by {closed.by}, which failed")

    def _meet(self, roster: Roster, round_: m.MembershipRound) -> RendezvousInfo | None:
        """Connect to the round's own store and see everybody there; None when that will not happen."""
        rank, size = round_.members.index(self._id), len(round_.members)
        try:
            if rank == 0:
                master, tcp = self._serve(round_.number)
                roster.publish_master(master)
            else:
                found = roster.wait_for_master(round_)
                if found is None:
                    return None
                master = found
                tcp = TCPStore(master.host, master.port, is_master=False, timeout=timedelta(seconds=10))
                tcp.set_timeout(timedelta(seconds=self._options.read_timeout))
            store = PrefixStore(f"/adaptdl/{self._run_id}/{round_.number}", tcp)
            store.set(f"here/{rank}", "1")
            if not self._everybody_is_here(roster, round_, store, size):
                return None
        except (DistError, OSError) as error:
            logger.warning("round %d: %s", round_.number, error)
            return None
        return RendezvousInfo(store, rank, size, RendezvousStoreInfo(master.host, master.port))

    def _everybody_is_here(
        self, roster: Roster, round_: m.MembershipRound, store: PrefixStore, size: int
    ) -> bool:
        keys = [f"here/{rank}" for rank in range(size)]
        while True:
            try:
                store.wait(keys, timedelta(seconds=_CHECK_IN))
                return True
            except DistError:
                if not roster.is_whole(round_):
                    return False

    def _serve(self, number: int) -> tuple[MasterRecord, TCPStore]:
        host = str(self._host)
        # torch's own listens on every interface
        try:
            sock = listen(host, self._options.ports())
        except NoPortError as error:
            hint = "with this backend --rdzv-conf port_range=FIRST-LAST"
            raise RendezvousConnectionError(f"{error} ({hint})") from None
        port = int(sock.getsockname()[1])
        tcp = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._options.read_timeout),
            master_listen_fd=sock.detach(),
        )
        return MasterRecord(number, host, port), tcp

    def _close_run(self, ok: bool) -> bool:
        if self._roster is None:
            return False
        try:
            self._roster.close_run(ok)
        except StoreError as error:
            logger.warning("the end of run %s could not be announced: %s", self._run_id, error)
            return False
        return True

    def _leave(self) -> None:
        with self._lock:
            roster, self._roster = self._roster, None
            store, self._store = self._store, None
        if roster is not None:
            atexit.unregister(self._leave)
            roster.leave()
        if store is not None:
            store.close()
