"""How agents measure the link between their nodes."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from adaptdl_elastic.agent.cluster import link_probe
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    JobState,
    JobStatus,
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


def record(node: str, links: tuple[Link, ...] = (), since: int = -1) -> NodeRecord:
    host = f"host of {node}"
    return NodeRecord(node, "job", "run", "a", host, 1, link_port=1, links=links, links_since=since)


class Watched:
    """What measures the links of node `one`, whose link to node `two` has `rate` bytes a second now."""

    def __init__(self, rate: float, since: int = -1) -> None:
        self.record = record("one", (Link("two", 1e-4, rate),), since)
        self.rate, self.measured = rate, 0
        self.status: JobStatus | None = None
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self.watch = link_probe.LinkWatch(self._measure, self, self._calls.put, lambda write: write())  # type: ignore[arg-type]

    def _measure(self, known: Sequence[Link]) -> tuple[Link, ...]:
        self.measured += 1
        return (Link("two", 1e-4, self.rate * (0.3 if self.measured == 1 else 1.0)),)

    def update(self, **fields: Any) -> None:
        self.record = replace(self.record, **fields)

    def looks(self, now: float, idle: bool = True) -> None:
        agents = {
            "one": self.record,
            "two": record("two", (Link("three", 1e-4, 1e8),)),
            "three": record("three"),
        }
        self.watch.look(agents, PLAN, self.status, idle, now)
        self.finish()

    def steps_change(self) -> None:
        self.watch.measure({"one": self.record, "two": record("two")}, PLAN)
        self.watch.measure({"one": self.record, "two": record("two")}, PLAN)
        self.finish()

    def finish(self) -> None:
        if self.watch.measuring:
            self._calls.get(timeout=30)()


PLAN = Plan("job", "run", 7, (Placement("one", 1), Placement("two", 1)), Cause.START, Transition.RESTART, "")


@pytest.mark.parametrize(("rate", "since"), [(1e8, -1), (1.2e8, -1), (1e7, 7), (1e9, 7)])
def test_links_are_measured_again_when_steps_change_and_the_best_of_three_counts(
    rate: float, since: int
) -> None:
    watched = Watched(1e8)
    watched.rate = rate
    watched.steps_change()
    assert watched.record.links == (Link("two", 1e-4, rate),)
    assert watched.record.links_since == since
    assert watched.measured == link_probe.ROUNDS


def test_steps_that_are_slower_than_predicted_lead_to_one_measurement_in_a_generation() -> None:
    watched = Watched(1e8)
    told = JobStatus("job", "run", JobState.RUNNING, PLAN.generation, prediction_error=-0.3)
    for status, measured in (
        (None, 0),
        (told, 0),
        (replace(told, generation=6, prediction_error=-0.5), 0),
        (replace(told, prediction_error=-0.5), link_probe.ROUNDS),
        (replace(told, prediction_error=-0.9), link_probe.ROUNDS),
    ):
        watched.status = status
        watched.looks(0.0, idle=False)
        assert watched.measured == measured


def test_a_node_that_waits_with_slow_links_measures_ever_less_often_until_they_change() -> None:
    watched = Watched(1e7)
    watched.measured, times = 1, list[int]()
    for now in range(7600):
        watched.rate = 1e8 if now > 4000 else 1e7
        before = watched.measured
        watched.looks(float(now))
        times += [now] * (watched.measured - before)
    assert times == [30, 90, 210, 450, 930, 1890, 3810, 7410, 7441, 7501]
    assert watched.record.links_since == 7
    watched.looks(7800.0, idle=False)
    assert watched.watch.due is None


def test_a_node_with_replicas_or_with_fast_links_measures_nothing_by_itself() -> None:
    for rate, idle in ((1e8, True), (1e7, False)):
        watched = Watched(rate)
        for now in range(100):
            watched.looks(float(now), idle)
        assert not watched.measured


@pytest.mark.usefixtures("patient")
def test_links_are_measured_again_while_the_job_trains_on_several_nodes(store: MemoryStore) -> None:
    key = b"of another job's agents"
    register(store, link_probe.serve(HERE, None, key))
    both = (Placement("one", 1), Placement("two", 1))
    plan = Plan("job", "run", 0, both, Cause.START, Transition.RESTART, "")
    store.put(KEYS.job("job", "plan"), encode(plan))
    (link,) = link_probe.measured_links(store, KEYS, "job", key, "two", again=True)
    assert link.node == "one"
