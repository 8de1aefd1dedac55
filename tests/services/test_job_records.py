"""What a node service follows of all jobs."""

from __future__ import annotations

import threading

from adaptdl_elastic.agent.service.job_records import JobRecords
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    CheckpointRecord,
    JobState,
    JobStatus,
    Placement,
    Plan,
    Transition,
    encode,
)
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

KEYS = Keys("lab")


def test_plans_and_ends_wake_the_service_and_other_news_do_not() -> None:
    woken = threading.Event()
    plan = Plan("job", "run", 3, (Placement("n1", 1, "agent"),), Cause.START, Transition.RESTART, "why")
    with MemoryStore() as store:
        store.put(KEYS.job("job", "plan"), encode(plan))
        records = JobRecords(store, KEYS, woken.set)
        try:
            assert woken.wait(60)
            assert records.ready
            assert records.read(Plan, "job", "plan") == plan
            assert records.read(CheckpointRecord, "job", "checkpoint") is None
            woken.clear()
            running = JobStatus("job", "run", JobState.RUNNING)
            store.put(KEYS.job("job", "status"), encode(running))
            store.put(f"{KEYS.jobs}/status", "of no job")
            store.put(KEYS.job("job", "hints"), "x" * 1000)
            store.put(KEYS.job("job", "generations", "3", "plan"), "is no plan of a job")
            store.put(KEYS.job("job", "checkpoint"), "broken")
            store.put(KEYS.job("last", "checkpoint"), "")
            while records.get(KEYS.job("last", "checkpoint")) is None:
                assert not woken.wait(0.01)
            assert records.read(JobStatus, "job", "status") == running
            assert records.get(KEYS.job("job", "hints")) is None
            assert records.read(CheckpointRecord, "job", "checkpoint") is None
            store.put(KEYS.job("job", "status"), encode(JobStatus("job", "run", JobState.DONE)))
            assert woken.wait(60)
        finally:
            records.close()
