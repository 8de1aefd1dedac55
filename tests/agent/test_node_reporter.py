"""What an agent writes to the store late, because it was cut off from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest

from adaptdl_elastic.agent.cluster.node_reporter import NodeReporter
from adaptdl_elastic.agent.core.states import AgentIdentity
from adaptdl_elastic.protocol.hints import decode as decode_hints
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import CheckpointRecord, JobSpec, decode, encode
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
    NodeReporter(store, KEYS, writer, AgentIdentity("a", "agent-a", "job", run)).checkpoint(record)


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
    reporter = NodeReporter(store, KEYS, writer, AgentIdentity("a", "agent-a", "job", "run"))
    reporter.script_reported({"loss": 0.5, "note": "text", "huge": 10**400, "none": None})
    reporter.script_reported({"loss": 0.25, "accuracy": 1})
    fields = {"job": "job", "generation": 0, "nodes": 1, "replicas": 1, "init_batch_size": 8}
    assert reporter.hints({**fields, "batch_size": 8, "atomic_bsz": 8})
    found = store.get(KEYS.job("job", "hints"))
    assert found is not None
    assert decode_hints(found.value).reported == {"loss": 0.25, "accuracy": 1.0}
