"""The public collectives; what carries them is in test_reducer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fresh import Script
from ports import free_port

from adaptdl_elastic import _session, collective
from adaptdl_elastic._secrets import REDUCER, generation_key
from adaptdl_elastic.reducer import CollectiveMismatchError, Reducer

pytestmark = pytest.mark.usefixtures("script")


@pytest.fixture
def other(script: Script) -> Iterator[Callable[[Callable[[Reducer], Any]], threading.Thread]]:
    """This process is rank 0 of two; what is given to it is done by rank 1, in a thread."""
    port = free_port()
    script.restart(
        ADAPTDL_NUM_REPLICAS="2",
        ADAPTDL_REPLICA_RANK="0",
        ADAPTDL_MASTER_ADDR="127.0.0.1",
        ADAPTDL_MASTER_PORT=str(port),
        ADAPTDL_SECRET="s",
    )
    threads: list[threading.Thread] = []
    errors: list[BaseException] = []

    def start(does: Callable[[Reducer], Any]) -> threading.Thread:
        def run() -> None:
            key = generation_key(b"s", REDUCER, "", 0)
            reducer = Reducer(1, 2, "127.0.0.1", port, secret=key)
            try:
                does(reducer)
            except BaseException as error:
                errors.append(error)
            finally:
                reducer.close()

        thread = threading.Thread(target=run)
        threads.append(thread)
        thread.start()
        return thread

    yield start
    if _session.current().reducer is not None:
        collective.teardown()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    assert errors == []


def test_alone_nothing_has_to_be_initialized() -> None:
    assert collective.allreduce([1]) == [1]
    assert collective.broadcast("x") == "x"
    assert collective.allreduce_async(3).result(0) == 3


def test_one_of_several_that_are_not_connected_says_what_to_call(script: Script) -> None:
    script.restart(ADAPTDL_NUM_REPLICAS="2")
    with pytest.raises(RuntimeError, match=r"one of 2 replicas .* not connected: call .*init_process_group"):
        collective.allreduce(1)


def test_to_initialize_twice_or_tear_down_nothing_is_refused() -> None:
    with pytest.raises(RuntimeError, match="not initialized"):
        collective.teardown()
    collective.initialize()
    with pytest.raises(RuntimeError, match=r"initialized already; call teardown\(\)"):
        collective.initialize()
    collective.teardown()
    collective.initialize()
    assert collective.allreduce(2) == 2


def test_by_the_environment_or_by_arguments(other: Any) -> None:
    def sums(reducer: Reducer) -> None:
        assert reducer.allreduce([2], tag="allreduce a", objects=True) == [1, 2]
        assert reducer.broadcast(None, tag="broadcast b", objects=True) == "rank 0's"
        reducer.allreduce(5, max, tag="allreduce c", objects=True)

    other(sums)
    collective.initialize()
    assert collective.allreduce([1], tag="a") == [1, 2]
    assert collective.broadcast("rank 0's", tag="b") == "rank 0's"
    assert collective.allreduce_async(3, max, tag="c").result(100) == 5


def is_apart(tag: str) -> Callable[[Reducer], None]:
    def call(reducer: Reducer) -> None:
        with pytest.raises(CollectiveMismatchError):
            reducer.allreduce(1, tag=tag)

    return call


def test_the_place_in_the_script_is_compared(other: Any) -> None:
    other(is_apart("elsewhere"))
    collective.initialize()
    with pytest.raises(
        CollectiveMismatchError, match=r"at elsewhere while rank 0 is at .* test_coll\w+\.py:\d+"
    ):
        collective.allreduce(1)


def test_the_epoch_is_compared_too(other: Any) -> None:
    other(is_apart("allreduce x in epoch 2"))
    collective.initialize()
    _session.current().epoch = 3
    with pytest.raises(CollectiveMismatchError, match="in epoch 2 while rank 0 is at allreduce x in epoch 3"):
        collective.allreduce(1, tag="x")
