"""Which objects of the process are found by their type, and that looking keeps none alive."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

from adaptdl_elastic.torch._runtime.heap import instances_of


class Kind:
    """What is looked for."""


class Derived(Kind):
    """Also what is looked for."""


class Slotted(Derived):
    """One without a dictionary of its own."""

    __slots__ = ("value",)


def test_objects_of_a_class_and_of_derived_ones_are_found() -> None:
    ours = [Kind(), Derived(), Slotted()]
    found = instances_of(Kind)
    assert len(found) == 3
    assert all(one in found for one in ours)
    assert instances_of(Slotted) == [ours[2]]


def test_looking_keeps_nothing_alive() -> None:
    """Without the collector: a generator that its loop has left is closed at once, before and after."""
    closed = []

    def batches() -> Iterator[int]:
        try:
            yield from range(3)
        finally:
            closed.append(True)

    one = Kind()
    gone = weakref.ref(one)
    gc.disable()
    try:
        for _ in batches():
            instances_of(Kind)
            break
        assert closed == [True]
        del one
        assert gone() is None
    finally:
        gc.enable()


def test_tuples_that_other_threads_are_building_do_not_break() -> None:
    """CPython raises SystemError if anybody else holds on to a tuple that is not finished."""
    broken, stop = [], threading.Event()

    def build() -> None:
        while not stop.is_set():
            try:
                tuple(str(i) for i in range(100))
            except SystemError as error:
                broken.append(error)

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        instances_of(Kind)
    stop.set()
    for thread in threads:
        thread.join()
    assert not broken
