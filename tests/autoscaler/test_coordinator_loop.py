"""The coordinator's loop on a store in memory: a policy that hangs or dies, and a key that others write."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from coordinator_pump import Clock, share_policy
from fake_agents import FakeAgent, spec_of, submit

from adaptdl_elastic.autoscaler.cluster_view import View
from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings, Decided
from adaptdl_elastic.autoscaler.coordinator.policy_adapter import Policy
from adaptdl_elastic.autoscaler.coordinator.process import Coordinator, Term
from adaptdl_elastic.autoscaler.policy.policy_types import Decision
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import LeaderRecord, Plan, decode, encode
from adaptdl_elastic.rendezvous.store.base import Lease
from adaptdl_elastic.rendezvous.store.memory import MemoryStore


class Count:
    """How often was decided."""

    def __init__(self) -> None:
        self.decisions = 0

    def decided(self, view: View, decided: Decided, seconds: float) -> None:
        self.decisions += 1

    def leading(self, leads: bool) -> None:
        pass

    def follows(self, view: View) -> None:
        pass


class Deaf(MemoryStore):
    """Somebody else always writes the plans first, and nobody hears of it."""

    def compare_and_swap(
        self, key: str, value: str | None, expected_revision: int, lease: Lease | None = None
    ) -> int | None:
        if key.endswith("/plan"):
            return None
        return super().compare_and_swap(key, value, expected_revision, lease)


class World:
    """One term of office, stepped by hand; time is what the test says."""

    def __init__(self, policy: Policy, store: type[MemoryStore] = MemoryStore, **settings: Any) -> None:
        self.clock, self.keys, self.count = Clock(), Keys(), Count()
        self.store = store(self.clock)
        self.owner = Coordinator(
            self.store,
            self.keys,
            CoordinatorSettings(**{"min_gap": 0.0, **settings}),
            policy,
            clock=self.clock,
            wall=self.clock,
            observers=[self.count],
        )
        submit(self.store, self.keys, spec_of("a"))
        self.agent = FakeAgent(self.store, self.keys, "n0", "a", 4, clock=self.clock).register()
        fence = self.store.put(self.keys.coordinator_leader, encode(LeaderRecord("this", "host")))
        self.term = Term(self.owner, fence, self.store.lease(1e9))
        self.owner.follower.load()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.owner.follower.wake()  # nothing has happened, and nobody waits for it
            self.term.step()
            while self.agent.step():
                pass

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(1000):
            self.step()
            if done():
                return
        raise AssertionError("it does not come about")

    def heard(self) -> None:
        """Take in what the watch brings for what was written before: it comes from a thread."""
        self.store.put(self.keys.root + "mark", str(self.count.decisions))
        revision = self.store.range(self.keys.root).revision
        while self.term.cache.revision < revision:
            self.term.step()

    def said(self) -> list[str]:
        events = [json.loads(item.value) for item in self.store.range(self.keys.events).items]
        return [event["message"] for event in events if event["event"] == "policy_failed"]

    def placed(self) -> dict[str, int]:
        item = self.store.get(self.keys.job("a", "plan"))
        return {} if item is None else {p.node: p.replicas for p in decode(Plan, item.value).placements}


@pytest.fixture
def made() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(*given: Any, **settings: Any) -> World:
        worlds.append(World(*given, **settings))
        return worlds[-1]

    yield make
    for world in worlds:
        world.term.close()
    # a round may have been begun while the thread of the one before was still ending, perhaps with an error
    for thread in threading.enumerate():
        if thread.name == "coordinator-policy":
            thread.join(120)


def test_a_policy_that_hangs_is_given_up_said_and_not_asked_twice_at_once(made: Callable[..., World]) -> None:
    hangs, entered, running, most = threading.Event(), threading.Semaphore(0), [0], [0]

    def slow(*args: Any) -> Decision:
        running[0] += 1
        most[0] = max(most[0], running[0])
        entered.release()
        assert hangs.wait(120)
        running[0] -= 1
        return share_policy(*args)

    world = made(slow, policy_timeout=30.0, interval=10.0)
    world.step(3)
    assert entered.acquire(timeout=120)
    world.clock.now += 29
    world.step(3)
    assert world.said() == []
    assert world.placed() == {}
    world.clock.now += 2
    world.until(lambda: world.placed() == {"n0": 1})  # the least it can begin with
    late = "no answer after 31 s; jobs keep what they have"
    assert world.said().count(late) == 1
    for _ in range(5):
        world.clock.now += 11
        world.step(3)
    busy = "the round before has not come to an end yet; jobs keep what they have"
    assert set(world.said()) == {late, busy}
    assert most == [1]
    assert world.placed() == {"n0": 1}
    hangs.set()  # it goes on by itself: the next round is an ordinary one
    assert world.owner.computing is not None
    world.owner.computing.join(120)
    before = len(world.said())
    world.clock.now += 400
    world.step(3)
    world.owner.computing.join(120)
    world.step(3)
    assert len(world.said()) == before
    assert most == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("death", [SystemExit, KeyboardInterrupt, MemoryError, GeneratorExit])
def test_a_policy_whose_thread_dies_is_noticed(
    made: Callable[..., World], death: type[BaseException]
) -> None:
    def dies(*_: Any) -> Decision:
        raise death

    world = made(dies)
    world.step(3)
    assert world.owner.computing is not None
    world.owner.computing.join(120)
    world.until(lambda: world.placed() == {"n0": 1})
    assert set(world.said()) == {"MemoryError" if death is MemoryError else "its thread was ended"}


def test_a_plan_that_another_always_writes_first_is_not_tried_at_once(made: Callable[..., World]) -> None:
    world = made(share_policy, Deaf)
    world.step(3)
    world.heard()
    before = world.count.decisions
    world.step(20)
    assert world.count.decisions == before  # no time has passed
    world.clock.now += 1.0
    world.step(20)
    assert world.count.decisions == before + 1
