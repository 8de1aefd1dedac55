"""What a change in the store means for an agent."""

from __future__ import annotations

import itertools
import logging

import pytest

from adaptdl_elastic.agent.cluster.store_view import StoreView
from adaptdl_elastic.agent.core import states as d
from adaptdl_elastic.rendezvous.schema.held import Left, LeftEnd
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    CheckpointRecord,
    DrainRequest,
    JobRequest,
    JobSpec,
    MasterRecord,
    NodeRecord,
    Outcome,
    Plan,
    Transition,
    encode,
)
from adaptdl_elastic.rendezvous.store.base import Change, KeyValue, Snapshot

KEYS = Keys("test")


REVISIONS = itertools.count(1)


def changed(key: str, value: str | None) -> Change:
    return Change("delete" if value is None else "put", key, value, next(REVISIONS))


def snapshot(prefix: str, values: dict[str, str]) -> Snapshot:
    """A copy of a store in which every value was written just now."""
    items = [KeyValue(key, value, now := next(REVISIONS), now) for key, value in values.items()]
    return Snapshot(tuple(items), next(REVISIONS), prefix)


def node(name: str, job: str = "job") -> tuple[str, str]:
    record = NodeRecord(name, job, "run", f"agent-{name}", "127.0.0.1", 1)
    return KEYS.node(name, job), encode(record)


@pytest.fixture
def view() -> StoreView:
    return StoreView(KEYS, "job", "here")


def test_registrations_are_told_all_at_once(view: StoreView) -> None:
    items = dict([node("a"), node("b"), node("b", "another-job")])
    assert list(view.apply(snapshot(KEYS.nodes, items))) == [d.NodesSeen({"a": "agent-a", "b": "agent-b"})]


def test_nodes_that_vanished_between_two_snapshots_are_reported(view: StoreView) -> None:
    list(view.apply(snapshot(KEYS.nodes, dict([node("a"), node("b")]))))
    assert list(view.apply(snapshot(KEYS.nodes, dict([node("b")])))) == [d.NodesSeen({"b": "agent-b"})]
    assert list(view.apply(changed(node("b")[0], None))) == [d.NodesSeen({})]


def test_the_agent_that_has_this_nodes_name_is_reported(view: StoreView) -> None:
    (seen,) = view.apply(changed(*node("here")))
    assert seen == d.NodesSeen({"here": "agent-here"}, "the agent at 127.0.0.1, process 0")


def test_records_of_the_job_become_events(view: StoreView) -> None:
    master = MasterRecord(3, "10.0.0.1", 5, 6)
    left = Left("a", "agent-a", ends=(LeftEnd(2, Outcome.STOPPED, 7.0),))
    told = [
        *view.apply(changed(KEYS.generation("job", 3, "master"), encode(master))),
        *view.apply(changed(KEYS.left("job", "a"), encode(left))),
    ]
    assert told == [d.MasterSeen(master), d.LeftSeen(left)]
    plans = [Plan("job", "run", n, (), Cause.POLICY, Transition.RESTART, "why") for n in (2, 3)]
    assert [view.last_step_before(plan) for plan in plans] == [None, 7.0]


def test_known_values_are_told_again_only_by_a_store_that_was_filled_again(view: StoreView) -> None:
    key, prefix = KEYS.generation("job", 3, "master"), KEYS.job("job")
    texts = [encode(MasterRecord(3, "10.0.0.1", n, 6)) for n in (4, 5)]

    def told(text: str, revision: int) -> int:
        """How many events a copy of the store brings."""
        items = (KeyValue(key, text, min(revision, 1000), revision),)
        return len(list(view.apply(Snapshot(items, revision, prefix))))

    assert len(list(view.apply(Change("put", key, texts[0], 1000)))) == 1
    assert told(texts[0], 1000) == 0
    assert (told(texts[1], 1001), told(texts[1], 1001)) == (1, 0)
    assert (told(texts[1], 3), told(texts[1], 3)) == (1, 0)
    assert len(list(view.apply(Change("put", key, texts[0], 4)))) == 1


def test_changes_of_a_store_to_which_lost_records_were_written_back_count(view: StoreView) -> None:
    job = KEYS.job("job")
    plans = [Plan("job", "run", n, (), Cause.POLICY, Transition.RESTART, "why") for n in (3, 4)]
    records = {f"{job}plan": encode(plans[0]), f"{job}spec": encode(JobSpec("job", "run"))}
    list(view.apply(snapshot(job, records)))
    lost = view.lost_records(Snapshot((), 0, job))
    assert {item.key: item.value for item in lost} == records
    assert list(view.apply(Snapshot(tuple(lost), 0, job))) == []
    assert list(view.apply(Change("put", f"{job}plan", encode(plans[1]), 1))) == [d.PlanSeen(plans[1])]


def test_requests_are_kept(view: StoreView) -> None:
    list(view.apply(changed(KEYS.job("job", "request"), encode(JobRequest(checkpoint=2)))))
    list(view.apply(changed(KEYS.drain("here"), encode(DrainRequest("here", "why")))))
    assert view.request is not None
    assert view.request.checkpoint == 2
    assert view.drain is not None
    list(view.apply(changed(KEYS.drain("here"), None)))
    assert view.drain is None


def test_a_late_checkpoint_of_an_older_generation_does_not_take_the_place_of_a_newer_one(
    view: StoreView,
) -> None:
    key, saved = KEYS.job("job", "checkpoint"), [CheckpointRecord(str(n), "/saved", n) for n in (1, 2, 3)]
    view.saved(saved[0])
    assert view.checkpoint == saved[0]
    list(view.apply(changed(key, encode(saved[1]))))
    view.saved(saved[0])
    assert view.checkpoint == saved[1]
    view.saved(saved[2])
    assert view.checkpoint == saved[2]


@pytest.mark.parametrize("value", ["", "{", "[]", '{"v":1}', "\x00", "null", '{"generation":"x"}'])
@pytest.mark.parametrize("parts", [("plan",), ("status",), ("spec",), ("request",), ("checkpoint",)])
def test_garbage_under_our_prefix_is_ignored(
    view: StoreView, value: str, parts: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    told = list(view.apply(changed(KEYS.job("job", *parts), value)))
    assert told == []


def test_garbage_among_generations_and_nodes_is_ignored(view: StoreView) -> None:
    for key in ("generations/x/ended/a", "generations/1/master", "generations", "left/a"):
        assert list(view.apply(changed(KEYS.job("job", key), "garbage"))) == []
    assert list(view.apply(changed(KEYS.node("a", "job"), "garbage"))) == []
