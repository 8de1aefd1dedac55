"""Where the replicas of a generation meet: a TCPStore that the agent of rank 0 keeps.

The key that the library's collectives authenticate with is never in etcd. It is `ADAPTDL_SECRET` where
the agents' environment says it, and then it does not leave the nodes. Else it is made by the first agent of
rank 0 and travels in that TCPStore, which torch opens to whoever can connect. It stays the same for the
run, because replicas that go over to another generation in place keep theirs.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from adaptdl_elastic.agent.core.states import StartReplicas
from adaptdl_elastic.agent.runtime.agent_config import MeetingPoint
from adaptdl_elastic.protocol import environment
from adaptdl_elastic.rendezvous.local.addresses import NoPortError, is_local, listen, reserve
from adaptdl_elastic.rendezvous.schema.records import MasterRecord

_SECRET = "adaptdl/secret"
_JOIN_SECONDS = 30.0


@dataclass(frozen=True)
class Joined:
    """The secret of a generation came, or did not."""

    start: StartReplicas
    secret: str | None
    why: str = ""


class GenerationStore:
    """Keeps the stores of the newest generations, and the secret."""

    def __init__(self, host: str, ports: tuple[int, int] | None, post: Callable[[object], None]) -> None:
        self._host, self._ports, self._post = host, ports, post
        self._stores: dict[int, tuple[TCPStore, socket.socket]] = {}
        self.secret = os.environ.get(environment.SECRET) or None
        self._given = self.secret is not None

    def open(self, generation: int, wanted: MeetingPoint | None = None) -> MasterRecord:
        """Keep the store of a generation; NoPortError when nothing is free to listen on.

        Args:
            generation: Its number.
            wanted: Where it should be. An address of another node is passed over: rank 0 is here.
        """
        host, ports = self._host, self._ports
        if wanted is not None:
            self.forget(generation)  # the one before may have been there
            host = wanted.host if wanted.host is not None and is_local(wanted.host) else host
            ports = (wanted.port, wanted.port)
        try:
            sock = listen(host, ports)
        except NoPortError as error:
            raise NoPortError(f"{wanted}: {error}") if wanted is not None else error from None
        port = int(sock.getsockname()[1])
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_JOIN_SECONDS),
            master_listen_fd=sock.detach(),
        )
        self.secret = self.secret or secrets.token_hex(16)
        store.set(_SECRET, "" if self._given else self.secret)
        kept = reserve(host, self._ports)  # for rank 0, which will listen there when it has started
        self._stores[generation] = store, kept
        return MasterRecord(generation, host, port, int(kept.getsockname()[1]))

    def join(self, start: StartReplicas) -> None:
        """Post `Joined` once the secret is known: at once, or from a thread that asks rank 0's node."""
        if self.secret is not None:
            self._post(Joined(start, self.secret))
        else:
            threading.Thread(target=self._ask, args=(start,), name="join", daemon=True).start()

    def _ask(self, start: StartReplicas) -> None:
        master = start.master
        try:
            store = TCPStore(
                master.host, master.port, is_master=False, timeout=timedelta(seconds=_JOIN_SECONDS)
            )
            secret = store.get(_SECRET).decode()
        except RuntimeError as error:  # torch's DistError and its kin
            why = str(error).splitlines()[0]
            where = f"{master.host}:{master.port}"
            self._post(Joined(start, None, f"can not reach rank 0's node at {where}: {why}"))
        else:
            self.secret = secret or None
            given = f"rank 0's node ({master.host}) has an ADAPTDL_SECRET: set the same on this node"
            self._post(Joined(start, self.secret, "" if secret else given))

    def forget(self, before: int) -> None:
        """Close the stores of older generations."""
        for generation in [g for g in self._stores if g < before]:
            _, kept = self._stores.pop(generation)
            kept.close()

    def close(self) -> None:
        """Close them all."""
        self.forget(max(self._stores, default=0) + 1)
