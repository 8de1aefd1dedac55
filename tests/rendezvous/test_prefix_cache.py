"""The copy of a prefix of the store ends up right whatever is lost, repeated or unreadable on the way."""

from __future__ import annotations

import random

import pytest

from adaptdl_elastic.rendezvous.store.base import Change, KeyValue, Snapshot
from adaptdl_elastic.rendezvous.store.prefix_cache import Entry, PrefixCache


def cache_of_numbers(refused: list[str]) -> PrefixCache[int]:
    return PrefixCache(lambda item: int(item.value), lambda key, error: refused.append(key))


@pytest.mark.parametrize("seed", range(40))
def test_the_copy_is_the_store_after_gaps_and_repeated_and_old_changes(seed: int) -> None:
    draw, cache = random.Random(seed), cache_of_numbers([])
    items: dict[str, KeyValue] = {}
    known: dict[str, set[int]] = {}  # key → numbers that it has held since it was made
    mirror: dict[str, Entry[int]] = {}
    waiting: list[Change] = []
    revision = 0

    def take(news: Snapshot | Change) -> None:
        for key, before, after in cache.take(news):
            assert mirror.pop(key, None) == before
            if after is not None:
                mirror[key] = after

    def deliver(count: int) -> None:
        for _ in range(count):
            change = waiting.pop(0)
            for _ in range(draw.choice((1, 1, 2))):
                take(change)

    for _ in range(300):
        key, value = draw.choice(("x/a", "x/b", "y/a")), draw.choice(("1", "2", "3", "garbage", None))
        if value is not None or key in items:
            revision += 1
            waiting.append(Change("delete" if value is None else "put", key, value, revision))
        if value is None:
            items.pop(key, None)
            known.pop(key, None)
        else:
            created = items[key].create_revision if key in items else revision
            items[key] = KeyValue(key, value, created, revision)
            known.setdefault(key, set()).update({int(value)} if value.isdigit() else ())
        deliver(draw.randint(0, len(waiting)))
        if draw.random() < 0.1:  # compacted: the changes in between are lost, or come too late
            prefix = draw.choice(("x/", "y/"))
            there = {key: item for key, item in items.items() if key.startswith(prefix)}
            take(Snapshot(tuple(there.values()), revision, prefix))
            missed = [change for change in waiting if change.key.startswith(prefix)]
            for change in draw.sample(missed, draw.randint(0, len(missed))):
                take(change)
            waiting = [change for change in waiting if change not in missed]
            assert {key: entry.item for key, entry in mirror.items() if key.startswith(prefix)} == there
    deliver(len(waiting))
    assert {key: entry.item for key, entry in mirror.items()} == items
    for key, item in items.items():
        entry = cache.get(key)
        assert entry is not None
        assert entry == mirror[key]
        assert entry.readable == item.value.isdigit()
        assert entry.record in ({int(item.value)} if entry.readable else {None, *known[key]})


def test_the_last_readable_record_stays_until_the_key_is_mended_deleted_or_made_again() -> None:
    refused: list[str] = []
    cache = cache_of_numbers(refused)
    cache.take(Snapshot((KeyValue("a", "1", 1, 1), KeyValue("b", "x", 2, 2)), 2, ""))
    assert (cache.record("a"), cache.record("b")) == (1, None)
    cache.take(Change("put", "a", "x", 3))
    cache.take(Change("put", "b", "2", 4))
    assert (cache.record("a"), cache.record("b")) == (1, 2)
    # the same keys after a gap, in which b was deleted and made again
    cache.take(Snapshot((KeyValue("a", "y", 1, 5), KeyValue("b", "y", 7, 7)), 7, ""))
    assert (cache.record("a"), cache.record("b")) == (1, None)
    cache.take(Change("delete", "a", None, 8))
    cache.take(Change("put", "a", "y", 9))
    assert cache.record("a") is None
    # a key that was written back to a store that had lost it, until the store says its revision
    cache.take(Snapshot((KeyValue("c", "3", 0, 0),), 9, ""))
    cache.take(Snapshot((KeyValue("c", "y", 10, 11),), 11, ""))
    assert cache.record("c") == 3
    assert refused == ["b", "a", "a", "b", "a", "c"]


def test_a_snapshot_of_a_store_that_has_lost_its_data_counts() -> None:
    cache = cache_of_numbers([])
    cache.take(Snapshot((KeyValue("a", "1", 90, 90), KeyValue("b", "1", 91, 91)), 99, ""))
    cache.take(Snapshot((KeyValue("a", "2", 1, 1),), 1, ""))
    cache.take(Change("put", "b", "3", 2))
    assert (cache.record("a"), cache.record("b")) == (2, 3)


def test_values_that_cannot_be_read_are_one_line_a_minute_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    cache = PrefixCache[int](lambda item: int(item.value), clock=lambda: now)
    items = tuple(KeyValue(f"x/{n}", "odd", n + 1, n + 1) for n in range(2000))
    cache.take(Snapshot(items, 2000, "x/"))
    cache.take(Change("put", "x/a", "odd", 2001))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("ignored 2000 values in the store: ")
    now = 61.0
    cache.take(Change("put", "x/b", "1", 2002))
    assert len(caplog.messages) == 2
