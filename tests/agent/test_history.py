"""The history checker finds what must not be, and nothing in what may."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from history import violations

from adaptdl_elastic.rendezvous.schema.held import GenerationEnd, Held
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    LeaderRecord,
    Leaving,
    NodeRecord,
    Outcome,
    Placement,
    Plan,
    Transition,
    encode,
)
from adaptdl_elastic.rendezvous.store.base import Change

KEYS = Keys()
FIRST = Plan("job", "run", 0, (Placement("a", 1, "agent-a"),), Cause.START, Transition.RESTART, "", fence=1)
SECOND = Plan(
    "job",
    "run",
    1,
    (Placement("a", 1, "agent-a"), Placement("b", 2, "agent-b")),
    Cause.MANUAL,
    Transition.RESTART,
    "",
    fence=1,
    leaving=(Leaving("a", 1, "agent-a", 0),),
)
LOGS = {
    "a": [
        {"event": "started", "generation": 0, "pids": {"0": 10}},
        {"event": "started", "generation": 1, "pids": {"0": 11}},
    ],
    "b": [{"event": "started", "generation": 1, "pids": {"1": 12, "2": 13}}],
}


def leader(name: str) -> tuple[str, str]:
    return KEYS.coordinator_leader, encode(LeaderRecord(name))


def plan(one: Plan) -> tuple[str, str]:
    return KEYS.job("job", "plan"), encode(one)


def node(name: str, agent: str = "") -> tuple[str, str]:
    return KEYS.node(name, "job"), encode(
        NodeRecord(name, "job", "run", agent or f"agent-{name}", "127.0.0.1", 2)
    )


def running(name: str, generation: int, agent: str = "", sequence: int = 2) -> tuple[str, str]:
    held = Held(name, agent or f"agent-{name}", sequence, generation, generation=generation)
    return KEYS.held("job", name), encode(held)


def ended(name: str, generation: int) -> tuple[str, str]:
    ends = (GenerationEnd(generation, Outcome.STOPPED, ran=True),)
    return KEYS.held("job", name), encode(Held(name, f"agent-{name}", 2, generation, ends=ends))


def history(*steps: tuple[str, str | None]) -> list[Change]:
    return [
        Change("delete" if value is None else "put", key, value, revision)
        for revision, (key, value) in enumerate(steps, 1)
    ]


GOOD = (
    leader("one"),
    node("a"),
    node("b"),
    plan(FIRST),
    running("a", 0),
    plan(SECOND),
    ended("a", 0),
    running("a", 1),
    running("b", 1),
)


def test_a_good_history_is_one() -> None:
    assert violations(history(*GOOD), logs=LOGS) == []


def test_a_successor_is_fine_and_so_is_garbage() -> None:
    steps = [*GOOD, (KEYS.coordinator_leader, None), leader("two")]
    refenced = replace(SECOND, fence=len(steps), created=5.0)
    line = (f"{KEYS.events}1-a", json.dumps({"fence": len(steps), "event": "leader"}))
    names = ("x", "jobs/job/plan", "events/0", "reports/job/a", "jobs/job/generations/x/master")
    garbage = [(KEYS.root + name, "[garbage]") for name in names]
    assert violations(history(*steps, plan(refenced), line, *garbage), logs=LOGS) == []


def test_a_late_word_of_an_agent_is_no_violation() -> None:
    """It was stopped as it was about to say so, and has lost its name since."""
    late = [(KEYS.node("a", "job"), None), node("a", "agent-new"), running("a", 1)]
    assert violations(history(*GOOD, *late)) == []


def test_a_lost_node_counts_as_left() -> None:
    steps = [step for step in GOOD if step != ended("a", 0)]
    steps.insert(6, (KEYS.node("a", "job"), None))
    assert violations(history(*steps)) == []


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([*GOOD, leader("two")], "still leads"),
        ([*GOOD, plan(replace(SECOND, generation=2, fence=5))], "nobody has won"),
        ([*GOOD, (f"{KEYS.events}1-a", '{"fence": 7}')], "an event with fence 7"),
        (
            [
                *GOOD,
                (KEYS.coordinator_leader, None),
                leader("two"),
                plan(replace(SECOND, fence=11)),
                plan(replace(SECOND, generation=2)),
            ],
            "fence 1 after one with fence 11",
        ),
        ([*GOOD, plan(FIRST)], "generation 0 after 1"),
        ([*GOOD, plan(replace(SECOND, placements=FIRST.placements))], "planned twice"),
        ([*GOOD, running("b", 0)], "no place for it"),
        ([*GOOD, running("a", 7)], "nobody has planned"),
        ([*GOOD[:-1], running("b", 1, "agent-of-another")], "another agent"),
        ([*GOOD, running("b", 1, sequence=1)], "record 1 of node b after 2"),
        ([*GOOD[:6], running("b", 1)], "a has not left"),
    ],
)
def test_the_history_check_finds_each_violation(steps: list[tuple[str, str | None]], words: str) -> None:
    (found,) = violations(history(*steps))
    assert words in found


@pytest.mark.parametrize(
    ("logs", "words"),
    [
        ({**LOGS, "b": [{"event": "started", "generation": 0, "pids": {"1": 1}}]}, "planned []"),
        ({**LOGS, "b": [{"event": "started", "generation": 1, "pids": {"0": 1, "1": 2}}]}, "on a and b"),
        ({**LOGS, "a": LOGS["a"][::-1]}, "starts generation 0 after 1"),
    ],
)
def test_the_history_check_finds_replicas_that_train_unplanned(logs: dict[str, object], words: str) -> None:
    assert any(words in found for found in violations(history(*GOOD), logs=logs))  # type: ignore[arg-type]
