"""Results of collectives that are kept for replicas that join later."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from adaptdl_elastic._past_results import LARGEST, TOTAL, PastResults


def test_a_newcomer_finds_the_result_of_the_same_call() -> None:
    here, there = PastResults(), PastResults()
    for epoch, loops, what, result in [
        (None, 0, "a", 1),
        (None, 7, "a", 2),
        (4, 1, "a", 3),
        (4, 2, "b", [4]),
    ]:
        here.keep(here.next_call(epoch, loops, what), result)
    there.take(here.to_plain())
    assert there.find(there.next_call(None, 3, "a")) == (True, 1)
    assert there.find(there.next_call(None, 0, "a")) == (True, 2)
    assert there.find(there.next_call(None, 0, "a")) == (False, None)
    assert there.find(there.next_call(4, 2, "b")) == (True, [4])
    assert there.find(there.next_call(4, 1, "a")) == (True, 3)
    assert there.find(there.next_call(5, 1, "a")) == (False, None)


def test_a_kept_result_does_not_change_with_the_scripts_object() -> None:
    results, value = PastResults(), [1]
    call = results.next_call(None, 0, "a")
    results.keep(call, value)
    value.append(2)
    assert results.find(call) == (True, [1])


@pytest.mark.parametrize("result", [threading.Lock(), bytes(LARGEST), list(range(LARGEST)), lambda: None])
def test_a_large_or_unpicklable_result_is_not_kept(result: Any) -> None:
    results = PastResults()
    call = results.next_call(None, 0, "a")
    results.keep(call, result)
    assert results.find(call) == (False, None)


def test_old_epochs_make_room_and_what_came_before_the_epochs_stays() -> None:
    results, value = PastResults(), bytes(LARGEST - 100)
    first = results.next_call(None, 0, "seed")
    results.keep(first, "x")
    calls = []
    for epoch in range(3 * TOTAL // LARGEST):
        calls.append(results.next_call(epoch, 1, "loss"))
        results.keep(calls[-1], value)
        assert sum(len(pickled) for *_, pickled in results.to_plain()) <= TOTAL
    assert results.find(first) == (True, "x")
    assert results.find(calls[-1]) == (True, value)
    assert results.find(calls[0]) == (False, None)


def test_results_before_the_epochs_are_bounded_too() -> None:
    results = PastResults()
    for _ in range(3 * TOTAL // LARGEST):
        results.keep(results.next_call(None, 0, "a"), bytes(LARGEST - 100))
    assert TOTAL // 2 < sum(len(pickled) for *_, pickled in results.to_plain()) <= TOTAL
