"""The TCPStores at which the replicas of a generation meet, on the node of rank 0.

The agent binds an address and listens there; a child of the fork server, which has torch, serves it. A child
that dies is replaced by another one at the same address. What it knew is lost, and torch's clients do not
connect again: replicas that have not met yet meet in the new one, and those that have met fail if they form
another process group in it. The library's own changes use the store of the next generation.

Every process that reaches its port can read and write it, since torch does not authenticate clients. So it
holds nothing secret, and replicas accept only values that another replica has signed (`signed_store` of the
library).
"""

from __future__ import annotations

import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from adaptdl_elastic.agent.runtime.fork_server import ForkServer
from adaptdl_elastic.agent.runtime.forked_child import Command
from adaptdl_elastic.agent.terminal.run_options import MeetingPoint
from adaptdl_elastic.rendezvous.local.addresses import NoPortError, is_local, listen, reserve
from adaptdl_elastic.rendezvous.schema.records import MasterRecord

_PROGRAM = Command("module", ("adaptdl_elastic.rendezvous.local.tcp_store",), "/")
_MOST_DEATHS = 3  # a store is not served again after so many deaths
_FORGIVEN = 60.0  # seconds after which a death does not count any more


class NoStoreError(RuntimeError):
    """Raised if a generation's store cannot be served."""


@dataclass
class _Served:
    """A store: the socket that its child serves, and one that keeps a port for rank 0."""

    listening: socket.socket
    kept: socket.socket
    deaths: tuple[float, ...] = ()  # monotonic times


class GenerationStore:
    """Has the stores of the newest generations served.

    A child's number at the fork server is -1 less the generation; those of replicas are positive.
    """

    def __init__(self, host: str, ports: tuple[int, int] | None, fork_server: ForkServer) -> None:
        self._host, self._ports, self._fork_server = host, ports, fork_server
        self._stores: dict[int, _Served] = {}

    def open(self, generation: int, wanted: MeetingPoint | None = None) -> MasterRecord:
        """Open the store of a generation and return its address.

        Args:
            generation: number of the generation.
            wanted: address that the user asked for. A host that is another node is ignored: rank 0 is here.

        Raises:
            NoPortError: no port is free.
        """
        host, ports = self._host, self._ports
        if wanted is not None:
            self.forget(generation)  # an older store may use that port
            host = wanted.host if wanted.host is not None and is_local(wanted.host) else host
            ports = (wanted.port, wanted.port)
        try:
            listening = listen(host, ports)
        except NoPortError as error:
            raise NoPortError(f"{wanted}: {error}") if wanted is not None else error from None
        kept = reserve(host, self._ports)  # a port for rank 0, which will listen there when it has started
        self._stores[generation] = _Served(listening, kept)
        self._serve(generation)
        return MasterRecord(generation, host, int(listening.getsockname()[1]), int(kept.getsockname()[1]))

    def _serve(self, generation: int) -> None:
        listening = self._stores[generation].listening.fileno()
        # a fork server that is gone is replaced, and `served_by` is called
        with suppress(OSError):
            self._fork_server.spawn(-1 - generation, _PROGRAM, channel=listening)

    def served_by(self, fork_server: ForkServer) -> None:
        """Have all stores served by children of another fork server; those of the last one have died."""
        self._fork_server = fork_server
        for generation in self._stores:
            self._serve(generation)

    def exited(self, number: int) -> str:
        """Replace a child that has died.

        Args:
            number: its number at the fork server.

        Returns:
            A line for the user; "" if the child served no store that is needed.

        Raises:
            NoStoreError: it has died too often.
        """
        generation = -1 - number
        served = self._stores.get(generation)
        if served is None:
            return ""
        now = time.monotonic()
        served.deaths = (*(when for when in served.deaths if now < when + _FORGIVEN), now)
        text = f"the process that serves the store of generation {generation} died"
        if len(served.deaths) < _MOST_DEATHS:
            self._serve(generation)
            return f"{text}: another one serves it, and a replica that has connected fails if it asks again"
        self.end(generation)
        raise NoStoreError(f"{text} {_MOST_DEATHS} times in {_FORGIVEN:g} s: replicas cannot meet here")

    def end(self, generation: int) -> None:
        """Close the store of a generation, if there is one."""
        served = self._stores.pop(generation, None)
        if served is None:
            return
        self._fork_server.signal(-1 - generation, signal.SIGKILL)
        # further connections are refused, also by the child: the address can be used again at once
        with suppress(OSError):
            served.listening.shutdown(socket.SHUT_RDWR)
        served.listening.close()
        served.kept.close()

    def forget(self, before: int) -> None:
        """Close the stores of generations before `before`."""
        for generation in [g for g in self._stores if g < before]:
            self.end(generation)

    def close(self) -> None:
        """Close all stores."""
        for generation in list(self._stores):
            self.end(generation)
