"""What an agent writes, and the name that it holds: against a store in memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from adaptdl_elastic.agent.cluster import store_link
from adaptdl_elastic.agent.cluster.store_link import (
    Connection,
    ConnectionMonitor,
    NameTakenError,
    Registration,
    UserLine,
    Writer,
    wait_for_removal,
)
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import NodeRecord, decode, encode
from adaptdl_elastic.rendezvous.store import follow
from adaptdl_elastic.rendezvous.store.base import (
    Change,
    CompactedError,
    KeyValue,
    StoreAuthError,
    StoreError,
    StoreFullError,
    StoreRefusedError,
    StoreUnavailableError,
    Watch,
)
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

KEYS = Keys("test")
NODE = NodeRecord("here", "job", "run-1", "agent-1", "127.0.0.1", 1, version="1.0", pid=11)
OTHER = replace(NODE, agent="agent-2", host="10.0.0.2", pid=22)
SOON = 100.0  # seconds, for what is only waited for when a test fails


@pytest.fixture
def registration(store: MemoryStore) -> Iterator[Registration]:
    made = Registration(store, KEYS, NODE)
    made.register()
    yield made
    made.close()


def holder(store: MemoryStore) -> NodeRecord:
    found = store.get(KEYS.node("here", "job"))
    assert found is not None
    return decode(NodeRecord, found.value)


def test_an_agent_that_comes_back_leaves_a_name_that_another_has_taken(
    store: MemoryStore, registration: Registration
) -> None:
    theirs = store.client()
    lease, lapsed = theirs.lease(60), registration.lease
    assert lapsed is not None
    with lapsed.shared.changed:  # type: ignore[attr-defined]
        lapsed.revoke()  # as the store does after a pause that was too long
        theirs.put(registration.key, encode(OTHER), lease)
    registration.register_again()
    assert registration.lease is lapsed
    assert holder(store) == OTHER
    with pytest.raises(StoreError, match="lapsed"):
        registration.update(draining=True)
    registration.lease = store.lease(60)  # as if the store's word had not come yet
    with pytest.raises(NameTakenError, match=r"'here' is taken by the agent at 10\.0\.0\.2, process 22"):
        registration.update(draining=True)
    assert holder(store) == OTHER


def test_a_name_that_is_free_again_is_taken_back(store: MemoryStore, registration: Registration) -> None:
    theirs = Registration(store.client(), KEYS, OTHER)
    lapsed = registration.lease
    assert lapsed is not None
    with lapsed.shared.changed:  # type: ignore[attr-defined]
        lapsed.revoke()
        theirs.register()
    with store.watch(registration.key, store.range(registration.key).revision + 1) as watch:
        theirs.close()
        assert [change.kind for _, change in zip(range(2), watch, strict=False)] == ["delete", "put"]
    assert holder(store).agent == "agent-1"


def test_a_record_of_ones_own_and_garbage_are_written_over(
    store: MemoryStore, registration: Registration
) -> None:
    registration.update(draining=True)
    assert holder(store).draining
    store.put(registration.key, "garbage")
    registration.update(at_risk=True)
    assert holder(store) == replace(NODE, draining=True, at_risk=True)


class Heard:
    """What a writer posts."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.monitor = ConnectionMonitor(self.queue.put)
        self.writer = Writer(self.queue.put, self.monitor)
        self.writer.start()

    def next(self) -> object:
        return self.queue.get(timeout=SOON)


@pytest.mark.parametrize(("first", "taken"), [("here/other", False), ("there/other", True), (None, True)])
def test_no_two_agents_of_a_node_keep_the_coordinators(
    store: MemoryStore, registration: Registration, first: str | None, taken: bool
) -> None:
    if first is not None:
        store.put(KEYS.coordinator_host, first)
    registration.claim(KEYS.coordinator_second, "here/me", KEYS.coordinator_host)
    assert (store.get(KEYS.coordinator_second) is not None) == taken


@pytest.fixture
def heard() -> Iterator[Heard]:
    made = Heard()
    yield made
    made.writer.close(SOON)


def failing(*errors: StoreError) -> tuple[Callable[[], None], threading.Event]:
    left, done = list(errors), threading.Event()

    def work() -> None:
        if left:
            raise left.pop(0)
        done.set()

    return work, done


def test_a_write_that_the_store_refuses_is_given_up_and_reported(heard: Heard) -> None:
    work, done = failing(*[StoreRefusedError("a value is too large")] * 2)
    after, later = failing()
    heard.writer.submit(work)
    heard.writer.submit(after)
    said = heard.next()
    assert isinstance(said, UserLine)
    assert "too large" in said.text
    assert later.wait(SOON)
    assert not done.is_set()


def test_a_store_that_is_away_or_refuses_us_is_asked_again_and_each_is_said_once(heard: Heard) -> None:
    away, refused = StoreUnavailableError("no answer"), StoreAuthError("wrong password")
    work, done = failing(away, away, refused, refused)
    heard.writer.submit(work)
    assert done.wait(SOON)
    told = [heard.next() for _ in range(3)]
    assert told == [
        Connection(False, "no answer"),
        Connection(False, "wrong password", refused=True),
        Connection(True, refused=True),
    ]
    assert [str(one) for one in told] == [
        "the store is away, training goes on: no answer",
        "the store refuses us, training goes on: wrong password",
        "the store lets us in again",
    ]
    assert heard.queue.empty()


@pytest.mark.parametrize("newer", [False, True])
def test_the_latest_value_is_written_after_an_error_and_the_store_is_not_back_before(
    heard: Heard, newer: bool
) -> None:
    first, done = failing(*[StoreFullError("etcd is full")] * 2)
    second, later = failing()
    once = [lambda: heard.writer.submit_latest("hints", second)] if newer else []
    heard.writer.submit_latest("hints", lambda: (once and once.pop()(), first())[1])
    assert (later if newer else done).wait(SOON)
    assert [str(heard.next()) for _ in range(2)] == [
        "the store takes no writes, training goes on: etcd is full",
        "the store is back",
    ]
    heard.writer.submit_latest("hints", second)
    assert later.wait(SOON)
    assert done.is_set() != newer
    assert heard.queue.empty()


def test_a_store_that_was_only_away_is_back(heard: Heard) -> None:
    work, done = failing(StoreUnavailableError("no answer"))
    heard.writer.submit(work)
    assert done.wait(SOON)
    assert [str(heard.next()) for _ in range(2)][1] == "the store is back"


def test_one_working_connection_hides_no_trouble_of_another(heard: Heard) -> None:
    away, back = Connection(False, "no answer"), Connection(True)
    heard.monitor.note("writer", away)
    heard.monitor.note("registration", back)
    heard.monitor.note("registration", Connection(False, "no", refused=True))
    heard.monitor.note("registration", back)
    heard.monitor.note("writer", back)
    heard.monitor.note("writer", back)
    assert [heard.next() for _ in range(2)] == [away, back]
    assert heard.queue.empty()


class Refusing(MemoryStore):
    """Refuses reads while `refuses` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = threading.Event()

    def get(self, key: str) -> KeyValue | None:
        if self.refuses.is_set():
            raise StoreAuthError("wrong password")
        return super().get(key)


def test_an_agent_that_has_nothing_to_write_notices_that_it_is_refused(
    heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_link, "CHECK_SECONDS", 0.01)
    store = Refusing()
    registration = Registration(store, KEYS, NODE)
    registration.monitor = heard.monitor
    registration.register()
    store.refuses.set()
    assert heard.next() == Connection(False, "wrong password", refused=True)
    store.refuses.clear()
    assert heard.next() == Connection(True, refused=True)
    registration.close()


class Scripted(MemoryStore):
    """A store with one watch, which yields what the test says."""

    def __init__(self, *changes: Change) -> None:
        super().__init__()
        self.left = list(changes)

    def watch(self, prefix: str, start_revision: int = 0) -> Watch:
        changes = self.left

        class Scripted(Watch):
            def __iter__(self) -> Iterator[Change]:
                while changes:
                    yield changes.pop(0)
                raise StoreError("waited although the key is gone")

            def close(self) -> None:
                pass

        return Scripted()


def test_waiting_for_the_removal_of_a_key_ignores_longer_keys() -> None:
    with Scripted() as gone:
        gone.put("archiving/job-2", "")
        wait_for_removal(gone, "archiving/job", SOON)
    removals = [Change("delete", key, None, 9) for key in ("archiving/job-2", "archiving/job")]
    with Scripted(*removals) as there:
        there.put("archiving/job", "")
        wait_for_removal(there, "archiving/job", SOON)
        assert not there.left


@pytest.mark.parametrize("error", [CompactedError("forgotten"), StoreUnavailableError("no")])
def test_a_watch_that_breaks_each_time_is_made_later_each_time(
    store: MemoryStore, error: StoreError, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[float | None] = []

    class Closing(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            delays.append(timeout)
            if len(delays) == 4:
                self.set()
            return False

    monkeypatch.setattr(follow, "threading", SimpleNamespace(Event=Closing))
    monkeypatch.setattr(store, "watch", Mock(side_effect=error))
    assert len(list(follow.Follow(store, "/", lambda error: None))) == 4
    assert delays == [0.05, 0.1, 0.2, 0.4]
