"""What a node says that it holds, and how its agent writes that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from agent_script import Agent

from adaptdl_elastic.agent.cluster.node_reporter import NodeReporter
from adaptdl_elastic.agent.core import states
from adaptdl_elastic.agent.core.held_record import record_of
from adaptdl_elastic.rendezvous.schema.held import Course, GenerationEnd, Held, Left
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    CheckpointRecord,
    JobSpec,
    MasterRecord,
    NodeRecord,
    Outcome,
    decode,
    encode,
)
from adaptdl_elastic.rendezvous.store.base import StoreUnavailableError
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

KEYS = Keys("test")
KEY = KEYS.held("job", "a")
END = GenerationEnd(0, Outcome.STOPPED, ran=True)


def held_by(script: str) -> Held:
    """Return what an agent holds after a script."""
    agent = Agent()
    for line in script.strip().splitlines():
        agent.play_line(line.strip())
    return record_of(agent.state, Held("here", "agent-1"))


def test_an_agent_that_was_told_nothing_writes_nothing() -> None:
    agent = Agent()
    agent.later(60.0)
    assert (agent.state.told, agent.actions) == (None, [])


def test_a_node_in_a_change_holds_two_generations() -> None:
    held = held_by("run 1 resilient; plan 1 here*2 inplace; master; 1 ready")
    assert (held.generation, held.to, held.course, held.ready) == (0, 1, Course.CHANGING, True)
    assert not held.has_left(0, "agent-1")
    assert not held.has_left(1, "agent-1")


def test_a_newcomer_does_not_run_its_generation_before_it_has_joined() -> None:
    script = "plan 1 there*1 here*1 left=there:0 inplace; master; 0 hello; 0 ready"
    held = held_by(script)
    assert (held.generation, held.course, held.runs, held.ready) == (1, Course.JOINING, -1, True)
    assert held_by(f"{script}; 0 switched").runs == 1


def test_a_generation_that_never_started_is_left_without_an_end() -> None:
    held = held_by("plan 1 there*1 here*1; plan 2 there*1")
    assert (held.has_left(1, "agent-1"), held.end_of(1)) == (True, None)
    assert not held.has_left(1, "agent-2"), "that of another agent may have started"


def test_a_node_that_leaves_before_a_generation_starts_says_that_it_has_ended() -> None:
    script = "run 1; plan 1 here*1 there*1 left=here:0; leave SIGTERM; 0 exits 143"
    end = held_by(script).end_of(1)
    assert end is not None
    assert (end.outcome, end.ran) == (Outcome.STOPPED, False)


def test_a_node_that_no_plan_counts_on_writes_nothing() -> None:
    agent = Agent()
    for generation in (3, 4):
        agent.plan(generation, "there*1")
    assert agent.state.told is None


def test_a_death_that_others_survived_is_said_by_the_end_of_its_generation() -> None:
    twice = """
        run 3 resilient; 2 dies; plan 1 here:0,1 recover; master
        1 dies; plan 2 here:0 recover; master; 0 switched"""
    end = held_by(twice).end_of(0)
    assert end is not None
    assert end.lost == (1, 2)
    assert end.failure is not None
    assert (end.outcome, end.failure.message) == (Outcome.STOPPED, "SIGKILL")


class Queue:
    """The writer's queue, which a test empties."""

    def __init__(self) -> None:
        self.works: list[Callable[[], None]] = []
        self.submit = self.works.append

    def submit_latest(self, _: str, work: Callable[[], None]) -> None:
        self.works.append(work)

    def write(self) -> None:
        while self.works:
            self.works[0]()
            self.works.pop(0)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore() as made:
        made.put(KEYS.job("job", "spec"), encode(JobSpec("job", "run-1")))
        made.put(KEYS.node("a", "job"), encode(NodeRecord("a", "job", "run-1", "agent-a", "h", 1)))
        yield made


def reporter_of(store: MemoryStore, queue: Queue, agent: str = "agent-a") -> NodeReporter:
    writer: Any = queue
    return NodeReporter(store, KEYS, writer, states.AgentIdentity("a", agent, JobSpec("job", "run-1")))


def written(store: MemoryStore) -> Held | None:
    found = store.get(KEY)
    return None if found is None else decode(Held, found.value)


def test_only_the_newest_record_is_written_and_behind_what_came_before_it(store: MemoryStore) -> None:
    queue = Queue()
    reporter = reporter_of(store, queue)
    reporter.held(Held("a", "agent-a", 1, 0, generation=0), None)
    reporter.checkpoint(CheckpointRecord("saved", "/saved"))
    reporter.held(Held("a", "agent-a", 2, 0, ends=(END,)), 5.0)
    reporter.held(Held("a", "agent-a", 3, 1, generation=1, ends=(END,)), 5.0)
    queue.works.pop(0)()
    assert written(store) is None, "the newer ones stand behind the checkpoint"
    queue.works.pop(0)()
    assert store.get(KEYS.job("job", "checkpoint")) is not None
    queue.works.pop(0)()
    held = written(store)
    assert held is not None
    (end,) = held.ends
    assert (held.sequence, end.generation, end.last_step) == (2, 0, 5.0), "an end is written by itself"
    queue.write()
    assert written(store) is not None


def test_the_times_of_a_fact_do_not_change_with_later_records(store: MemoryStore) -> None:
    queue = Queue()
    reporter = reporter_of(store, queue)
    reporter.held(Held("a", "agent-a", 1, 0, generation=0), None)
    queue.write()
    began = written(store)
    reporter.held(Held("a", "agent-a", 2, 0, ends=(END,)), 5.0)
    queue.write()
    ended = written(store)
    reporter.held(Held("a", "agent-a", 3, 1, generation=1, ends=(END,)), 7.0)
    queue.write()
    last = written(store)
    assert began is not None
    assert ended is not None
    assert last is not None
    assert ended.ends[0].started == began.started > 0.0
    assert last.ends == ended.ends


def test_a_record_whose_answer_was_lost_is_written_once(store: MemoryStore) -> None:
    queue = Queue()
    reporter = reporter_of(store, queue)
    swap = store.compare_and_swap

    def lose_the_answer(*arguments: Any) -> None:
        swap(*arguments)
        raise StoreUnavailableError("away")

    store.compare_and_swap = Mock(side_effect=lose_the_answer)  # type: ignore[method-assign]
    reporter.held(Held("a", "agent-a", 1, 0, generation=0), None)
    with pytest.raises(StoreUnavailableError):
        queue.write()
    before = store.get(KEY)
    store.compare_and_swap = swap  # type: ignore[method-assign]
    queue.write()
    assert store.get(KEY) == before is not None


def test_a_late_record_does_not_take_the_place_of_a_successors(store: MemoryStore) -> None:
    theirs = Held("a", "agent-a", 7, 3, generation=3)
    queue = Queue()
    reporter_of(store, queue).held(theirs, None)
    queue.write()
    before = {item.key: item.value for item in store.range(KEYS.root).items}
    late = reporter_of(store, queue, "agent-older")
    late.held(Held("a", "agent-older", 1, 2, generation=2), None)
    late.held(Held("a", "agent-older", 2, 2, ends=(replace(END, generation=2),)), None)
    queue.write()
    late.held(Held("a", "agent-older", 3, 3, ends=(replace(END, generation=2),)), None)
    late.repeat()
    queue.write()
    assert {item.key: item.value for item in store.range(KEYS.root).items} == before


def test_an_agent_carries_on_what_its_predecessor_has_said_of_ends(store: MemoryStore) -> None:
    queue = Queue()
    ends = (replace(END, generation=2), GenerationEnd(3, Outcome.ABORTED))
    earlier = Held("a", "agent-older", 9, 4, generation=4, ends=ends, library=True, started=5.0)
    store.put(KEY, encode(earlier))
    reporter = reporter_of(store, queue)
    reporter.held(Held("a", "agent-a", 1, 4), None)
    queue.write()
    first = written(store)
    assert first is not None
    assert first.ends[:2] == ends
    lost = first.ends[2]
    assert (lost.generation, lost.outcome, lost.ran, lost.agent) == (4, Outcome.LOST, True, "agent-older")
    assert (lost.started, lost.last_step) == (5.0, None)
    left = store.get(KEYS.left("job", "a"))
    assert left is not None
    assert decode(Left, left.value).ends == tuple(end.short for end in first.ends)
    reporter.held(Held("a", "agent-a", 2, 5, generation=5), 7.0)
    queue.write()
    second = written(store)
    assert second is not None
    assert second.ends == first.ends, "later records do not change what has ended"


def test_a_first_record_is_written_although_the_registration_has_lapsed(store: MemoryStore) -> None:
    queue = Queue()
    store.put(KEY, encode(Held("a", "agent-older", 9, 4)))
    store.delete(KEYS.node("a", "job"))
    reporter_of(store, queue).held(Held("a", "agent-a", 1, 5), None)
    queue.write()
    found = written(store)
    assert found is not None
    assert found.agent == "agent-a"


def test_agents_are_told_only_what_a_node_has_left(store: MemoryStore) -> None:
    queue = Queue()
    reporter = reporter_of(store, queue)
    changes = []
    with store.watch(KEYS.job("job")) as watch:
        for number, held in enumerate(
            (
                Held("a", "agent-a", acted=0, generation=0),
                Held("a", "agent-a", acted=0, generation=0, library=True),
                Held("a", "agent-a", acted=0, generation=0, library=True, survives=(), first_step=5.0),
                Held("a", "agent-a", acted=0, ends=(END,)),
                Held("a", "agent-a", acted=1, generation=1, ends=(END,)),
            ),
            1,
        ):
            reporter.held(replace(held, sequence=number), None)
            queue.write()
        store.put(KEYS.job("job", "request"), "the last one")
        for change in watch:
            if change.value == "the last one":
                break
            changes.append(decode(Left, change.value or ""))
    said = [(left.up_to, [end.generation for end in left.ends]) for left in changes]
    assert said == [(0, [0])]


def test_what_the_store_has_lost_is_written_again(store: MemoryStore) -> None:
    queue = Queue()
    reporter = reporter_of(store, queue)
    reporter.master(MasterRecord(2, "h", 1))
    reporter.held(Held("a", "agent-a", 1, 2, generation=2, ends=(END,)), None)
    queue.write()
    before = {item.key: item.value for item in store.range(KEYS.root).items}
    for key in (KEY, KEYS.left("job", "a"), KEYS.generation("job", 2, "master")):
        store.delete(key)
        reporter.repeat()
        queue.write()
        assert {item.key: item.value for item in store.range(KEYS.root).items} == before
    revision = store.range(KEYS.root).revision
    reporter.repeat()
    queue.write()
    assert store.range(KEYS.root).revision == revision, "nothing was lost, so nothing is written"
    store.delete(KEY)
    store.put(KEYS.job("job", "spec"), encode(replace(JobSpec("job", "run-1"), run="run-2")))
    reporter.repeat()
    queue.write()
    assert store.get(KEY) is None, "the job belongs to another run"
