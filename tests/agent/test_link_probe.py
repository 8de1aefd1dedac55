"""How agents measure the link between their nodes."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

import pytest

from adaptdl_elastic.agent.cluster import link_probe
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    Link,
    NodeRecord,
    Placement,
    Plan,
    Transition,
    encode,
)
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

KEYS = Keys("test")
HERE, KEY = "127.0.0.1", b"of the job's agents"


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def first(store: MemoryStore) -> int:
    """The port of an agent on node `one` that is registered."""
    port = link_probe.serve(HERE, None, KEY)
    register(store, port)
    return port


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a measurement take as long as a busy machine needs."""
    monkeypatch.setattr(link_probe, "SECONDS", 60.0)


def links(store: MemoryStore, known: tuple[Link, ...] = (), key: bytes = KEY) -> tuple[Link, ...]:
    return link_probe.measured_links(store, KEYS, "job", key, "two", known)


def register(store: MemoryStore, port: int) -> None:
    store.put(KEYS.node("one", "job"), encode(NodeRecord("one", "job", "run", "a", HERE, 1, link_port=port)))


@pytest.mark.usefixtures("patient")
def test_a_newcomer_measures_its_link_in_spite_of_a_silent_stranger(store: MemoryStore, first: int) -> None:
    with socket.create_connection((HERE, first)):
        (link,) = links(store)
    assert link.node == "one"
    assert link.bandwidth > 0
    assert links(store, (link,)) == (link,), "it is measured once"


def paced(target: int, rate: float, burst: int) -> int:
    """Return the port of a relay to `target` whose answers have `rate` bytes per second after a burst."""
    listener = socket.create_server((HERE, 0))

    def forward(source: socket.socket, sink: socket.socket, rate: float) -> None:
        sent = 0
        with source, sink, suppress(OSError):
            while data := source.recv(1 << 14):
                sent += len(data)
                if sent > burst:
                    # also after a stall: a relay that catches up would be faster than its rate
                    time.sleep(len(data) / rate)
                sink.sendall(data)

    def relay() -> None:
        with listener, suppress(OSError):
            near = listener.accept()[0]
            far = socket.create_connection((HERE, target))
            threading.Thread(target=forward, args=(near, far, 1e9), daemon=True).start()
            forward(far, near, rate)

    threading.Thread(target=relay, daemon=True).start()
    return int(listener.getsockname()[1])


@pytest.mark.usefixtures("patient")
def test_a_burst_that_a_slow_link_lets_pass_does_not_count(store: MemoryStore, first: int) -> None:
    register(store, paced(first, 12.5e6, link_probe.BYTES // 4))
    (link,) = links(store)
    assert link.bandwidth < 1.1 * 12.5e6


@pytest.mark.parametrize("key", [b"another", b""])
def test_agents_with_another_secret_measure_nothing(store: MemoryStore, first: int, key: bytes) -> None:
    assert links(store, key=key) == ()


def test_an_agent_that_cannot_be_reached_leaves_its_link_unknown(store: MemoryStore) -> None:
    with socket.create_server((HERE, 0)) as deaf:
        register(store, deaf.getsockname()[1])
        assert links(store) == ()
    register(store, 1)
    assert links(store) == ()


def test_nothing_is_measured_while_the_job_trains_on_several_nodes(store: MemoryStore, first: int) -> None:
    both = (Placement("one", 1), Placement("three", 1))
    store.put(
        KEYS.job("job", "plan"), encode(Plan("job", "run", 0, both, Cause.START, Transition.RESTART, ""))
    )
    known = (Link("three", 1e-4, 1e8),)
    assert links(store, known) == known
