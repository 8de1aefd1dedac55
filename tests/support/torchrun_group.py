"""Handlers of torchrun's rendezvous on one store in memory, each with a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from polling import until
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousInfo
from torchrun_clock import TorchrunClock

from adaptdl_elastic.rendezvous import torchrun
from adaptdl_elastic.rendezvous.schema.records import decode
from adaptdl_elastic.rendezvous.store.base import StoreUnavailableError
from adaptdl_elastic.rendezvous.store.memory import MemoryStore
from adaptdl_elastic.rendezvous.torchrun import gathering as gathering_module
from adaptdl_elastic.rendezvous.torchrun import handler as module
from adaptdl_elastic.rendezvous.torchrun import membership as m
from adaptdl_elastic.rendezvous.torchrun import roster as roster_module

PREFIX = "/adaptdl/v1/default/torchrun/job/"
NODES, ROUND = PREFIX + "nodes/", PREFIX + "round"
SOON = 120.0  # seconds, for what is only waited for when a test fails


class AwayStore(MemoryStore):
    """A client whose writes the store does not answer while it is `away`."""

    away: threading.Event
    asked: int = 0

    def put(self, *arguments: object, **named: object) -> int:
        self._answer()
        return super().put(*arguments, **named)  # type: ignore[arg-type]

    def compare_and_swap(self, *arguments: object, **named: object) -> int | None:
        self._answer()
        return super().compare_and_swap(*arguments, **named)  # type: ignore[arg-type]

    def _answer(self) -> None:
        if self.away.is_set():
            type(self).asked += 1
            raise StoreUnavailableError("nobody answers")


class Group:
    """Handlers on one store, each with a thread in which torch's agent would live."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = MemoryStore()
        self.away = threading.Event()
        monkeypatch.setattr(module, "connect", lambda *_, **__: self._client())
        self.clock = TorchrunClock(monkeypatch)
        self.gatherings: list[gathering_module.Gathering] = []
        monkeypatch.setattr(module, "Gathering", self._gathering)
        self.asks_for_rank_0 = threading.Event()  # a handler is in a round
        monkeypatch.setattr(roster_module.Roster, "master_of", self._asked(roster_module.Roster.master_of))
        self.handlers: list[module.AdaptdlEtcdHandler] = []
        self._pool = ThreadPoolExecutor(8)

    def _client(self) -> AwayStore:
        client = AwayStore(shared=self.store.shared)
        client.away = self.away
        return client

    def handler(self, nodes: tuple[int, int] = (2, 2), **config: str) -> module.AdaptdlEtcdHandler:
        settings = {"last_call": "0.1", "grace": "0.2", "timeout": "200", **config}
        made = torchrun.create_handler(
            RendezvousParameters("adaptdl-etcd", "127.0.0.1:1", "job", *nodes, "127.0.0.1", **settings)
        )
        assert isinstance(made, module.AdaptdlEtcdHandler)
        self.handlers.append(made)
        return made

    def enter(self, *handlers: module.AdaptdlEtcdHandler) -> list[Future[RendezvousInfo]]:
        return [self._pool.submit(handler.next_rendezvous) for handler in handlers]

    def wait_for(self, reached: Callable[[], bool], what: str) -> None:
        until(what, reached, SOON)

    def _gathering(self, *given: Any) -> gathering_module.Gathering:
        self.gatherings.append(gathering_module.Gathering(*given))
        return self.gatherings[-1]

    def _asked(self, master_of: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: (self.asks_for_rank_0.set(), master_of(*given))[1]

    def ranks(self, futures: list[Future[RendezvousInfo]]) -> list[tuple[int, int]]:
        """(rank, size) of each, once all have met at their store."""
        found = [future.result(SOON) for future in futures]
        for info in found:
            info.store.set(f"x{info.rank}", "1")
        for info in found:
            assert all(info.store.get(f"x{rank}") == b"1" for rank in range(info.world_size))
        return [(info.rank, info.world_size) for info in found]

    def members(self) -> dict[str, m.Member]:
        found = self.store.range(NODES).items
        return {item.key.removeprefix(NODES): decode(m.Member, item.value, item.key) for item in found}

    def round(self) -> m.MembershipRound | None:
        found = self.store.get(ROUND)
        return decode(m.MembershipRound, found.value, ROUND) if found else None

    def close(self) -> None:
        for handler in self.handlers:
            handler.shutdown()
        self._pool.shutdown()
