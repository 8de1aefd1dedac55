"""The TCPStore at which the replicas of a generation meet, served by the agent of rank 0.

Every process that reaches its port can read and write it, since torch does not authenticate clients. So it
holds nothing secret, and replicas accept only values that another replica has signed (`signed_store` of the
library).
"""

from __future__ import annotations

import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from adaptdl_elastic.agent.terminal.run_options import MeetingPoint
from adaptdl_elastic.rendezvous.local.addresses import NoPortError, is_local, reserve
from adaptdl_elastic.rendezvous.local.tcp_store import serve
from adaptdl_elastic.rendezvous.schema.records import MasterRecord

_JOIN_SECONDS = 30.0


class GenerationStore:
    """Serves the stores of the newest generations."""

    def __init__(self, host: str, ports: tuple[int, int] | None) -> None:
        self._host, self._ports = host, ports
        self._stores: dict[int, tuple[TCPStore, socket.socket]] = {}

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
            port, store = serve(host, ports, _JOIN_SECONDS)
        except NoPortError as error:
            raise NoPortError(f"{wanted}: {error}") if wanted is not None else error from None
        kept = reserve(host, self._ports)  # a port for rank 0, which will listen there when it has started
        self._stores[generation] = store, kept
        return MasterRecord(generation, host, port, int(kept.getsockname()[1]))

    def forget(self, before: int) -> None:
        """Close the stores of generations before `before`."""
        for generation in [g for g in self._stores if g < before]:
            _, kept = self._stores.pop(generation)
            kept.close()

    def close(self) -> None:
        """Close all stores."""
        self.forget(max(self._stores, default=0) + 1)
