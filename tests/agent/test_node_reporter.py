"""What an agent writes to the store late, because it was cut off from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from adaptdl_elastic.agent.cluster.node_reporter import NodeReporter
from adaptdl_elastic.agent.core.states import AgentIdentity
from adaptdl_elastic.protocol.hints import decode as decode_hints
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    CheckpointRecord,
    JobRequest,
    JobSpec,
    Plan,
    Transition,
    decode,
    encode,
)
from adaptdl_elastic.rendezvous.store.base import StoreUnavailableError
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

KEYS = Keys("test")
KEY = KEYS.job("job", "checkpoint")


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore() as made:
        made.put(KEYS.job("job", "spec"), encode(JobSpec("job", "run-1")))
        yield made


def write(store: MemoryStore, record: CheckpointRecord, run: str = "run-1") -> None:
    """As the agent of that run, which is connected again."""
    writer = Mock()

    def submit(work: Callable[[], None]) -> None:
        work()

    writer.submit = submit
    NodeReporter(store, KEYS, writer, AgentIdentity("a", "agent-a", JobSpec("job", run))).checkpoint(record)


def recorded(store: MemoryStore) -> str | None:
    found = store.get(KEY)
    return decode(CheckpointRecord, found.value).id if found is not None else None


def test_a_late_record_of_an_older_generation_does_not_take_the_place_of_a_newer_one(
    store: MemoryStore,
) -> None:
    write(store, CheckpointRecord("first", "/saved", 3))
    write(store, CheckpointRecord("second", "/saved", 3))
    assert recorded(store) == "second"
    write(store, CheckpointRecord("newer", "/saved", 4))
    write(store, CheckpointRecord("late", "/saved", 3))
    assert recorded(store) == "newer"


def test_a_late_record_of_an_earlier_run_is_left_out(store: MemoryStore) -> None:
    store.put(KEYS.job("job", "spec"), encode(JobSpec("job", "run-2")))
    write(store, CheckpointRecord("late", "/saved", 3))
    assert recorded(store) is None


def test_a_record_that_cannot_be_read_is_replaced(store: MemoryStore) -> None:
    store.put(KEY, "not a record")
    write(store, CheckpointRecord("first", "/saved", 0))
    assert recorded(store) == "first"


def test_the_numbers_of_a_script_travel_with_its_next_report(store: MemoryStore) -> None:
    writer = Mock()
    writer.submit_latest = lambda key, work: work()
    reporter = NodeReporter(store, KEYS, writer, AgentIdentity("a", "agent-a", JobSpec("job", "run")))
    reporter.script_reported({"loss": 0.5, "note": "text", "huge": 10**400, "none": None})
    reporter.script_reported({"loss": 0.25, "accuracy": 1})
    fields = {"job": "job", "generation": 0, "nodes": 1, "replicas": 1, "init_batch_size": 8}
    assert reporter.hints({**fields, "batch_size": 8, "atomic_bsz": 8})
    found = store.get(KEYS.job("job", "hints"))
    assert found is not None
    assert decode_hints(found.value).reported == {"loss": 0.25, "accuracy": 1.0}


def restore(store: MemoryStore, run: JobSpec, generation: int, **others: Any) -> None:
    """As an agent of this run, whose store has lost what it knows."""
    writer = Mock(submit=lambda work: work())
    plan = Plan(run.job, run.run, generation, (), Cause.MANUAL, Transition.RESTART, "")
    records = {**others, "plan": plan, "spec": run}
    reporter = NodeReporter(store, KEYS, writer, AgentIdentity("a", "agent-a", run))
    reporter.restore({KEYS.job(run.job, name): encode(record) for name, record in records.items()})


def test_newer_records_in_a_replaced_store_stay() -> None:
    request, mine = KEYS.job("job", "request"), JobSpec("job", "run-1", created=1.0)
    with MemoryStore() as store:
        store.put(KEY, encode(CheckpointRecord("newer", "/saved", 3, time=20.0)))
        restore(
            store,
            mine,
            5,
            checkpoint=CheckpointRecord("older", "/saved", 3, time=10.0),
            request=JobRequest(2),
        )
        assert recorded(store) == "newer"
        # another agent has written all back, and then a user asks
        store.put(request, encode(JobRequest(7)))
        restore(store, mine, 5, request=JobRequest(2))
        assert store.get(request).value == encode(JobRequest(7))
        # another run of this name has begun after all records were gone
        store.put(KEYS.job("job", "spec"), encode(JobSpec("job", "run-2", created=2.0)))
        store.delete(KEYS.job("job", "plan"))
        restore(store, mine, 6)
        assert store.get(KEYS.job("job", "plan")) is None


def test_a_write_back_that_breaks_off_is_made_again_as_a_whole() -> None:
    class Broken(MemoryStore):
        left = 2

        def compare_and_swap(self, *arguments: Any, **options: Any) -> int | None:
            self.left -= 1
            if self.left < 0:
                raise StoreUnavailableError("away")
            return super().compare_and_swap(*arguments, **options)

    with Broken() as store:
        mine, others = (
            JobSpec("job", "run-1"),
            {"checkpoint": CheckpointRecord("first", "/saved"), "request": JobRequest(2)},
        )
        for left in (0, 1, 2, 3):
            store.left = left
            with pytest.raises(StoreUnavailableError):
                restore(store, mine, 5, **others)
        store.left = 9
        restore(store, mine, 5, **others)
        assert {item.key for item in store.range(KEYS.job("job")).items} == {
            KEYS.job("job", name) for name in (*others, "plan", "spec")
        }
