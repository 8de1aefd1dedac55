"""What `store.Store` promises, held against every driver and server there is."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from compacted import compact, compact_etcd

from adaptdl_elastic.rendezvous.store.base import (
    Change,
    CompactedError,
    Lease,
    LeaseLostError,
    Store,
    StoreUnavailableError,
)
from adaptdl_elastic.rendezvous.store.http import Http
from adaptdl_elastic.rendezvous.store.local_socket import LocalStore
from adaptdl_elastic.rendezvous.store.memory import MemoryLease


@pytest.fixture
def store(world) -> Store:
    return world.client()


def test_a_written_key_is_there_and_revisions_grow(world, store):
    key = world.prefix + "a"
    assert store.get(key) is None
    first = store.put(key, "1")
    second = store.put(key, "2")
    found = store.get(key)
    assert first < second
    assert (found.value, found.mod_revision, found.create_revision) == ("2", second, first)


VALUES = ["", "é ü 漢字 🚀", "\x01 tricky 1\nvalue", "\x01", "a\nb\r\n\tc", '{"v":1}', "%2F+&="]


def test_values_come_back_as_they_were(world, store):
    lease = store.lease(60)
    for number, value in enumerate(VALUES):
        key = f"{world.prefix}{number}"
        store.put(key, value)
        assert store.get(key).value == value
        store.put(key, value, lease)
        assert store.get(key).value == value
    assert [item.value for item in store.range(world.prefix).items] == VALUES


def test_keys_with_odd_characters(world, store):
    keys = sorted(
        world.prefix + name for name in ["a b", "a%2Fb", "a?b=c", "a#b", "é漢", "a+b", "..x", "a:b"]
    )
    for key in keys:
        store.put(key, key)
    assert [item.key for item in store.range(world.prefix).items] == keys
    assert all(store.get(key).value == key for key in keys)


def test_a_megabyte(world, store):
    key = world.prefix + "big"
    value = '{"é":"' + "x" * ((1 << 20) - 9) + '"}'
    assert len(value.encode()) == 1 << 20
    revision = store.put(key, value)
    assert store.get(key).value == value
    with store.watch(world.prefix, revision) as watch:
        assert next(iter(watch)) == Change("put", key, value, revision)


def test_prefixes_end_where_they_end(world, store):
    for name in ["job/plan", "job1/plan", "job10/plan", "job", "jobs", "other/job1"]:
        if name == "job":  # with v2 a key cannot be a directory too
            continue
        store.put(world.prefix + name, name)

    def names(prefix: str) -> list[str]:
        return [item.value for item in store.range(world.prefix + prefix).items]

    assert names("job1/") == ["job1/plan"]
    assert names("job1") == ["job1/plan", "job10/plan"]
    assert names("job") == ["job/plan", "job1/plan", "job10/plan", "jobs"]
    assert names("nothing") == []
    assert store.range(world.prefix + "job1").prefix == world.prefix + "job1"
    assert store.delete_prefix(world.prefix + "job1") == 2
    assert names("") == ["job/plan", "jobs", "other/job1"]
    assert store.delete_prefix(world.prefix + "job1") == 0


def test_a_watch_stays_within_its_prefix(world, store, collect):
    seen = collect(store.watch(world.prefix + "job1/"))
    for name in ["job10/x", "job1/x", "job/x", "job1/y"]:
        store.put(world.prefix + name, name)
    assert [change.value for change in seen.wait(2)] == ["job1/x", "job1/y"]


def test_a_range_and_a_watch_from_it_miss_nothing(world, store, collect):
    done = threading.Event()

    def write() -> None:
        other = world.client()
        for number in range(200):
            other.put(f"{world.prefix}k{number:03}", str(number))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not (snapshot := store.range(world.prefix)).items:
        pass
    seen = collect(store.watch(world.prefix, snapshot.revision + 1))
    writer.join()
    changes = seen.wait(200 - len(snapshot.items))
    assert [item.value for item in snapshot.items] + [change.value for change in changes] == [
        str(number) for number in range(200)
    ]
    revisions = [change.revision for change in changes]
    assert revisions == sorted(set(revisions))


def test_compare_and_swap(world, store):
    key = world.prefix + "a"
    assert store.compare_and_swap(key, "x", 12345678) is None
    first = store.compare_and_swap(key, "1", 0)
    assert first == store.get(key).mod_revision
    assert store.compare_and_swap(key, "x", 0) is None
    assert store.compare_and_swap(key, "x", first - 1) is None
    second = store.compare_and_swap(key, "2", first)
    assert second > first
    assert (store.get(key).value, store.get(key).create_revision) == ("2", first)
    assert store.compare_and_swap(key, None, first) is None
    assert store.compare_and_swap(key, None, second) > 0
    assert store.get(key) is None
    assert store.compare_and_swap(key, None, 0) is not None  # what is not there is deleted already
    assert store.compare_and_swap(key, "3", second) is None
    assert store.compare_and_swap(key, "3", 0)


def test_one_client_wins_of_those_that_saw_the_same_revision(world):
    key, rounds = world.prefix + "counter", 15
    clients = [world.client() for _ in range(4)]
    everybody = threading.Barrier(4)

    def compete(store: Store) -> list[bool]:
        won = []
        for number in range(rounds):
            found = store.get(key)
            everybody.wait(60)
            won.append(
                store.compare_and_swap(key, str(number), found.mod_revision if found else 0) is not None
            )
            everybody.wait(60)
        return won

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(compete, clients))
    assert [sum(winners) for winners in zip(*results, strict=True)] == [1] * rounds


def test_an_abandoned_lease_takes_its_keys_with_it(world, collect):
    store, other = world.client(), world.client()
    ttl = 2 if world.memory is not None else 6  # long enough for a busy machine to put three keys
    lease = store.lease(ttl)
    assert lease.ttl >= ttl
    seen = collect(other.watch(world.prefix))
    store.put(world.prefix + "mine", "1", lease)
    store.put(world.prefix + "also", "1", lease)
    store.put(world.prefix + "stays", "1")
    lease.abandon()
    changes = seen.wait(5)
    assert [change.kind for change in changes] == ["put"] * 3 + ["delete"] * 2
    assert {change.key for change in changes[3:]} == {world.prefix + "mine", world.prefix + "also"}
    assert [item.key for item in other.range(world.prefix).items] == [world.prefix + "stays"]
    assert lease.remaining() == 0


def test_a_kept_lease_outlives_its_time(world, store):
    lease = store.lease(15)  # a busy machine has ten seconds for each renewal
    store.put(world.prefix + "mine", "1", lease)
    assert not lease.lost.wait(16.0 if world.memory is None else 0.01)
    assert store.get(world.prefix + "mine") is not None
    assert 0 < lease.remaining() <= lease.ttl


def test_a_lease_lasts_from_the_request_for_it_however_late_the_answer(world, monkeypatch):
    if world.memory is not None or world.api == "v2":
        pytest.skip("a lease is no request here")
    store, driver = world.client(), LocalStore if world.local is not None else Http
    call = driver.call

    def late(*given, **options):
        answer = call(*given, **options)
        threading.Event().wait(0.5)  # the answer is on its way
        return answer

    monkeypatch.setattr(driver, "call", late)
    lease = store.lease(60)
    assert lease.remaining() <= lease.ttl - 0.5


def test_revoke_takes_the_keys_at_once_and_can_be_repeated(world, store, collect):
    lease = store.lease(60)
    revision = store.put(world.prefix + "mine", "1", lease)
    seen = collect(store.watch(world.prefix, revision))
    lease.revoke()
    assert seen.wait(2, timeout=50)[1].kind == "delete"  # sooner than it would have run out
    lease.revoke()
    assert store.get(world.prefix + "mine") is None
    with pytest.raises(LeaseLostError, match="registers again"):
        store.put(world.prefix + "mine", "1", lease)
    assert store.get(world.prefix + "mine") is None


def test_closing_a_store_revokes_its_leases_only(world):
    one, other = world.client(), world.client()
    one.put(world.prefix + "one", "1", one.lease(60))
    other.put(world.prefix + "other", "1", other.lease(60))
    one.close()
    assert [item.key for item in other.range(world.prefix).items] == [world.prefix + "other"]


def _renew(lease: Lease) -> None:
    """Renew it as its own thread does after a third of its time, which no test need wait for."""
    assert lease.renew() if isinstance(lease, MemoryLease) else lease.renew(60.0)


def test_a_leased_key_keeps_its_revision_while_it_is_kept_alive(world, collect):
    store, other = world.client(), world.client()
    lease = store.lease(60)
    seen = collect(other.watch(world.prefix))
    revision = store.compare_and_swap(world.prefix + "leader", "me", 0, lease)
    _renew(lease)
    assert other.get(world.prefix + "leader").mod_revision == revision
    assert seen.wait(1) == [Change("put", world.prefix + "leader", "me", revision)]
    second = store.compare_and_swap(world.prefix + "leader", "still me", revision, lease)
    assert second is not None
    _renew(lease)
    assert other.compare_and_swap(world.prefix + "leader", None, revision) is None
    assert other.compare_and_swap(world.prefix + "leader", None, second) is not None
    assert [change.kind for change in seen.wait(3)] == ["put", "put", "delete"]


def test_a_put_without_the_lease_takes_the_key_from_it(world, store):
    lease = store.lease(60)
    store.put(world.prefix + "a", "1", lease)
    store.put(world.prefix + "a", "2")
    lease.revoke()
    assert store.get(world.prefix + "a").value == "2"


def test_deleting_a_leased_key_does_not_lose_the_lease(world, store):
    lease = store.lease(60)
    store.put(world.prefix + "a", "1", lease)
    store.put(world.prefix + "b", "1", lease)
    assert store.delete(world.prefix + "a")
    _renew(lease)
    assert not lease.lost.is_set()
    assert [item.key for item in store.range(world.prefix).items] == [world.prefix + "b"]


def test_a_watch_tells_changes_in_order(world, store, collect):
    seen = collect(store.watch(world.prefix))
    revisions = [
        store.put(world.prefix + "a", "1"),
        store.compare_and_swap(world.prefix + "b", "2", 0),
        store.put(world.prefix + "a", "3"),
    ]
    store.delete(world.prefix + "b")
    changes = seen.wait(4)
    assert [(change.kind, change.key[-1], change.value) for change in changes] == [
        ("put", "a", "1"),
        ("put", "b", "2"),
        ("put", "a", "3"),
        ("delete", "b", None),
    ]
    assert [change.revision for change in changes[:3]] == revisions
    assert changes[3].revision > revisions[-1]


def test_a_watch_from_a_revision_repeats_what_was(world, store, collect):
    first = store.put(world.prefix + "a", "1")
    second = store.put(world.prefix + "a", "2")
    assert [c.value for c in collect(store.watch(world.prefix, first)).wait(2)] == ["1", "2"]
    assert [c.value for c in collect(store.watch(world.prefix, second)).wait(1)] == ["2"]


def test_closing_a_watch_ends_one_that_waits(world, store, collect):
    seen = collect(store.watch(world.prefix))
    store.put(world.prefix + "a", "1")
    seen.wait(1)
    seen.watch.close()
    assert seen.wait_end(25) is None, "a request of a watch lasts 30 s"


def test_closing_the_store_ends_its_watches_and_opens_no_connection_again(world, store, collect):
    seen = collect(store.watch(world.prefix))
    store.close()
    assert seen.wait_end() is None
    if world.memory is None:
        # the thread that renews leases may come so late; its connection would never be closed
        with pytest.raises(StoreUnavailableError, match="closed"):
            store.get(world.prefix)


def test_compaction_is_reported_once_and_reading_again_goes_on(world, store, collect):
    revision = store.put(world.prefix + "a", "1")
    for number in range(1100 if world.api == "v2" and not world.memory else 10):
        newest = store.put(world.prefix + "a", str(number))
    if world.memory is not None:
        compact(world.memory)
    elif world.local is not None:
        compact(world.local.store)
    elif world.api == "v3":
        compact_etcd(world.endpoint, newest)
    seen = collect(store.watch(world.prefix, revision))
    assert isinstance(seen.wait_end(), CompactedError)
    snapshot = store.range(world.prefix)
    again = collect(store.watch(world.prefix, snapshot.revision + 1))
    store.put(world.prefix + "b", "new")
    assert again.wait(1)[0].value == "new"


def test_many_threads_use_one_store(world, store):

    def work(number: int) -> None:
        key = f"{world.prefix}{number}"
        for step in range(20):
            store.put(key, str(step))
            assert store.get(key).value == str(step)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(store.range(world.prefix).items) == 8


def test_a_stranger_lease_is_refused(world, store):
    with pytest.raises(LeaseLostError):
        store.put(world.prefix + "a", "1", _Stranger())


class _Stranger(MemoryLease):
    def __init__(self) -> None:
        self.lost = threading.Event()
