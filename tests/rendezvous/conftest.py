"""One store after the other: in memory, behind a socket, and every etcd and API that this machine can run."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from etcd_binaries import etcd_binary
from etcd_server import EtcdServer

from adaptdl_elastic.rendezvous.local.store_server import LocalServer
from adaptdl_elastic.rendezvous.store.base import Change, Store, Watch
from adaptdl_elastic.rendezvous.store.connect import Api, StoreOptions, connect
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

IN_MEMORY = ["memory", "local"]
SERVERS = ["v3-3.5", "v2-3.5", "v3-3.4", "v2-3.4"]
KINDS = [*IN_MEMORY, *SERVERS]
_count = itertools.count()


@dataclass
class World:
    """A store that several clients can connect to."""

    kind: str
    server: EtcdServer | None
    memory: MemoryStore | None
    local: LocalServer | None = None
    prefix: str = ""
    clients: list[Store] = field(default_factory=list)

    @property
    def api(self) -> Api:
        return "v2" if self.kind.startswith("v2") else "v3"

    @property
    def real(self) -> EtcdServer:
        assert self.server is not None
        return self.server

    @property
    def endpoint(self) -> str:
        return self.local.endpoint if self.local is not None else self.real.endpoint

    def client(self, endpoint: str = "", **options: object) -> Store:
        store: Store
        if self.memory is not None:
            store = self.memory.client()
        else:
            wanted = StoreOptions(**{"timeout": 60.0, **options})  # type: ignore[arg-type]
            store = connect(endpoint or self.endpoint, api=self.api, options=wanted)
        self.clients.append(store)
        return store

    def fresh(self) -> World:
        return World(self.kind, self.server, self.memory, self.local, f"/adaptdl/v1/t{next(_count)}/")

    def close(self) -> None:
        for one in self.clients:
            one.close()


def start(kind: str) -> World:
    if kind == "memory":
        return World(kind, None, MemoryStore())
    if kind == "local":
        return World(kind, None, None, LocalServer())
    version = kind.partition("-")[2]
    binary = etcd_binary(version)
    if binary is None:
        pytest.skip(f"no etcd {version} here: it comes from Debian's etcd-server package, unpacked as root")
    return World(kind, EtcdServer(binary=binary, v2=kind.startswith("v2")).start(), None)


def _etcd(kind: str) -> object:
    return kind if kind in IN_MEMORY else pytest.param(kind, marks=pytest.mark.etcd)


@pytest.fixture(scope="session", params=[_etcd(kind) for kind in KINDS])
def _shared_world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = start(request.param)
    yield world
    if world.server:
        world.server.stop()
    if world.local:
        world.local.close()


@pytest.fixture
def world(_shared_world: World) -> Iterator[World]:
    """A prefix of one's own in a store that other tests use too."""
    mine = _shared_world.fresh()
    yield mine
    mine.close()


@pytest.fixture(params=[_etcd(kind) for kind in SERVERS])
def own_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """An etcd of one's own, to be ill-treated."""
    mine = start(request.param).fresh()
    yield mine
    if mine.real.running:
        mine.real.resume()
    mine.close()
    mine.real.stop()


class Collector:
    """Reads a watch in a thread; wait for what must come with a deadline."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.changes: list[Change] = []
        self.error: BaseException | None = None
        self.ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for change in self.watch:
                with self._changed:
                    self.changes.append(change)
                    self._changed.notify_all()
        except BaseException as error:
            self.error = error
        with self._changed:
            self.ended = True
            self._changed.notify_all()

    def wait(self, count: int, timeout: float = 60.0) -> list[Change]:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.changes) >= count or self.ended, timeout):
                pytest.fail(f"{len(self.changes)} of {count} changes came: {self.changes[-3:]}")
            if self.error:
                raise self.error
            return list(self.changes)

    def wait_end(self, timeout: float = 60.0) -> BaseException | None:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the watch did not end"
        return self.error


@pytest.fixture
def collect() -> Iterator[type[Collector]]:
    made: list[Collector] = []

    class Kept(Collector):
        def __init__(self, watch: Watch) -> None:
            super().__init__(watch)
            made.append(self)

    yield Kept
    for one in made:
        one.watch.close()
        one.wait_end()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Handlers of torchrun's rendezvous; the module is imported here, because it needs torch."""
    from torchrun_group import Group

    made = Group(monkeypatch)
    yield made
    made.close()
