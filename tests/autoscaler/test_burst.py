"""A round of the policy that changes many jobs does not keep the loop from one that asks for something."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from coordinator_pump import share_policy
from fake_agents import FakeAgent, spec_of, submit

from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
from adaptdl_elastic.autoscaler.coordinator.process import Coordinator
from adaptdl_elastic.autoscaler.policy.policy_types import Decision
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobRequest, NodeRecord, Plan
from adaptdl_elastic.rendezvous.store.base import Lease
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

CROWD = 20


class Store(MemoryStore):
    """Calls `before` before every compare-and-swap."""

    before: Callable[[str, str], None] = staticmethod(lambda key, value: None)

    def compare_and_swap(
        self, key: str, value: str, expected_revision: int, lease: Lease | None = None
    ) -> int | None:
        self.before(key, value)
        return super().compare_and_swap(key, value, expected_revision, lease)


def all_or_none(*question: Any) -> Decision:
    """Gives the crowd nothing until it is complete, so that all of it starts in one round."""
    jobs, *rest = question
    crowd = [job.name for job in jobs if job.name != "a"]
    decision = share_policy([job for job in jobs if job.name == "a" or len(crowd) == CROWD], *rest)
    return Decision({**{name: {} for name in crowd}, **decision.allocations}, decision.reasons)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_person_is_served_in_the_middle_of_a_burst_of_plans(stack: ExitStack) -> None:
    keys, shared = Keys(), MemoryStore()
    order: list[str] = []
    all_written, offset = threading.Event(), [0.0]
    store = Store(shared=shared.shared)
    coordinator = Coordinator(
        store,
        keys,
        CoordinatorSettings(interval=60.0, min_gap=0.0),
        all_or_none,
        clock=lambda: time.monotonic() + offset[0],
    )

    def before(key: str, value: str) -> None:
        if not key.endswith("/plan") or not (plan := records.decode(Plan, value)).placements:
            return
        order.append(plan.job)
        if len(order) == 3:
            shared.put(keys.job("a", "request"), records.encode(JobRequest(replicas=1)))
        if len(order) >= 3:
            offset[0] += 1.0  # as if it took a second to write one
            # the watch brings the request; once that is served nothing may come any more
            while not coordinator.follower.pending and "a" not in order:
                threading.Event().wait(0.001)
        if set(order) >= {f"j{i}" for i in range(CROWD)}:
            all_written.set()

    store.before = before  # type: ignore[method-assign]
    submit(shared, keys, spec_of("a"))
    agent = FakeAgent(shared.client(), keys, "n0", "a", 2, clock=time.time).register().follow()
    stack.callback(agent.stop)
    thread = threading.Thread(target=coordinator.run, daemon=True)
    thread.start()
    stack.callback(thread.join, 60)
    stack.callback(coordinator.stop)
    with shared.watch(keys.root) as watch:
        for _ in watch:
            if agent.history[-1:] == [(1, 2)]:
                break
    del order[:]
    for index in range(CROWD):
        job, node = f"j{index}", f"m{index}"
        submit(shared, keys, spec_of(job))
        record = NodeRecord(node, job, f"{job}-1", f"{node}-{job}", "127.0.0.1", 1)
        shared.put(keys.node(node, job), records.encode(record))
    assert all_written.wait(200)
    assert order.index("a") < CROWD, order
