"""A plan for many nodes is kept in parts; who reads it sees a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    Leaving,
    MalformedRecordError,
    Placement,
    Plan,
    Transition,
    decode,
    encode,
)
from adaptdl_elastic.rendezvous.store import plan_store
from adaptdl_elastic.rendezvous.store.memory import MemoryStore
from adaptdl_elastic.rendezvous.store.plan_store import PlanStore

KEYS = Keys("c")
KEY = KEYS.job("job", "plan")


def plan_of(
    nodes: int, generation: int = 1, transition: Transition = Transition.RESTART, leaving: int = 0
) -> Plan:
    placements = tuple(Placement(f"n{i}", 1 + i % 3, f"agent-{i}") for i in range(nodes))
    left = tuple(Leaving(f"n{i}", 1, f"agent-{i}", generation - 1 - i % 2) for i in range(leaving))
    return Plan("job", "run", generation, placements, Cause.START, transition, "why", leaving=left)


def read(store: PlanStore) -> Plan:
    item = store.get(KEY)
    assert item is not None
    return decode(Plan, item.value)


@given(st.integers(1, 120), st.integers(0, 120))
def test_what_was_divided_can_be_joined_and_each_node_finds_its_own(nodes: int, leaving: int) -> None:
    plan = plan_of(nodes, leaving=leaving)
    head, parts = plan_store.divide(plan, "name")
    assert plan_store.join(head, list(parts)) == plan
    assert sum(len(part.placements) for part in parts) == nodes
    for placement in (*plan.placements, Placement("stranger", 1)):
        node = placement.node
        seen = plan_store.excerpt(head, parts[plan_store.part_of(node, len(parts))], node)
        assert (seen.replicas, seen.nodes, seen.ranks(node)) == (plan.replicas, plan.nodes, plan.ranks(node))
        assert seen.placements == tuple(p for p in plan.placements if p.node == node)
        assert {one for one in seen.leaving if one.node == node} == {
            one for one in plan.leaving if one.node == node
        }
        newest = max((one.generation for one in plan.leaving), default=None)
        assert max((one.generation for one in seen.leaving), default=None) == newest
        if node != "stranger":
            assert seen.index(node) == plan.index(node)


def test_only_what_ends_every_process_is_divided() -> None:
    assert not plan_store.divisible(plan_of(plan_store.MOST_UNDIVIDED_NODES))
    assert plan_store.divisible(plan_of(plan_store.MOST_UNDIVIDED_NODES + 1))
    assert plan_store.divisible(plan_of(1, leaving=plan_store.MOST_UNDIVIDED_NODES + 1))
    assert plan_store.divisible(plan_of(100, transition=Transition.ABORT))
    assert not plan_store.divisible(plan_of(100, transition=Transition.INPLACE))


@pytest.fixture
def raw() -> MemoryStore:
    return MemoryStore()


def test_readers_see_a_plan_and_the_parts_of_older_ones_go(raw: MemoryStore) -> None:
    leader, agent, first = PlanStore(raw.client()), PlanStore(raw.client(), "n40"), PlanStore(raw, "n0")
    plan = plan_of(100, leaving=100)
    revision = leader.compare_and_swap(KEY, encode(plan), 0)
    assert revision is not None
    assert read(leader) == read(first) == plan
    seen = read(agent)
    assert (seen.ranks("n40"), seen.index("n40"), seen.replicas) == (plan.ranks("n40"), 40, plan.replicas)
    assert len(seen.placements) == 1
    assert len(seen.leaving) == 2
    items = {item.key: item.value for item in leader.range(KEYS.root).items}
    assert decode(Plan, items[KEY]) == plan
    assert len(raw.get(KEY).value) < 800  # type: ignore[union-attr]

    parts = len(raw.range(KEYS.parts("job")).items)
    assert parts == 7
    assert leader.compare_and_swap(KEY, encode(plan_of(100, 2)), revision - 1) is None
    assert read(leader) == plan, "parts without a head mean nothing"
    second = leader.compare_and_swap(KEY, encode(plan_of(50, 2)), revision)
    assert second is not None
    assert len(raw.range(KEYS.parts("job")).items) == 4
    successor = PlanStore(raw.client())
    refenced = replace(read(successor), fence=9)
    third = successor.compare_and_swap(KEY, encode(refenced), second)
    assert read(agent).fence == 9
    assert len(raw.range(KEYS.parts("job")).items) == 4
    assert third is not None
    assert successor.compare_and_swap(KEY, encode(plan_of(3, 3)), third) is not None
    assert read(agent) == plan_of(3, 3)
    assert not raw.range(KEYS.parts("job")).items


class Stopped(MemoryStore):
    """A client that is stopped for a while once it has published a plan: `meanwhile` runs then."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def compare_and_swap(self, key: str, *args: Any, **named: Any) -> int | None:
        done = super().compare_and_swap(key, *args, **named)
        self.meanwhile()
        return done


def test_an_old_leader_that_wakes_up_leaves_the_parts_of_its_successor_alone(raw: MemoryStore) -> None:
    old = Stopped(shared=raw.shared)
    successor, agent = PlanStore(raw.client()), PlanStore(raw.client(), "n40")
    plan = plan_of(100)

    def succeed() -> None:
        item = successor.get(KEY)
        assert item is not None
        assert successor.compare_and_swap(KEY, encode(replace(plan, fence=9)), item.mod_revision) is not None

    old.meanwhile = succeed
    assert PlanStore(old).compare_and_swap(KEY, encode(plan), 0) is not None
    assert read(agent).ranks("n40") == plan.ranks("n40")
    assert read(successor) == replace(plan, fence=9)
    assert len(raw.range(KEYS.parts("job")).items) == 7, "those of the old leader's plan are gone"


def test_a_job_that_is_forgotten_takes_its_parts_along(raw: MemoryStore) -> None:
    store = PlanStore(raw)
    store.compare_and_swap(KEY, encode(plan_of(100)), 0)
    store.delete_prefix(KEYS.job("job"))
    assert not raw.range(KEYS.root).items


def test_parts_that_are_gone_make_a_plan_that_can_not_be_read(raw: MemoryStore) -> None:
    store = PlanStore(raw)
    store.compare_and_swap(KEY, encode(plan_of(100)), 0)
    raw.delete_prefix(KEYS.parts("job"))
    for client in (store, PlanStore(raw, "n40")):
        with pytest.raises(MalformedRecordError):
            read(client)
        (item,) = client.range(KEYS.root).items
        with pytest.raises(MalformedRecordError):
            decode(Plan, item.value)


def test_a_change_in_place_finds_the_whole_of_the_plan_before(raw: MemoryStore) -> None:
    leader, agent = PlanStore(raw.client()), PlanStore(raw.client(), "n40")
    before = plan_of(100)
    revision = leader.compare_and_swap(KEY, encode(before), 0)
    held = read(agent)
    assert revision is not None
    refenced = leader.compare_and_swap(KEY, encode(replace(before, fence=7)), revision)
    read(agent)  # which is no newer generation to it
    assert refenced is not None
    after = plan_of(101, 2, Transition.INPLACE)
    assert leader.compare_and_swap(KEY, encode(after), refenced) is not None
    assert read(agent) == after
    assert agent.whole(held).placements == before.placements
    assert agent.whole(after) == after


@pytest.mark.etcd
def test_watches_of_a_real_store_bring_plans(world: Any, collect: Any) -> None:
    if world.kind == "memory":
        pytest.skip("its clients are not made by connect()")
    keys = Keys(f"plans-{world.kind}")
    key = keys.job("job", "plan")
    leader, agent = world.client(), world.client().of_node("n40")
    try:
        whole, own = collect(leader.watch(keys.root)), collect(agent.watch(keys.job("job")))
        first = leader.compare_and_swap(key, encode(plan_of(60)), 0)
        assert first is not None
        own.wait(1)
        changes = [change for change in whole.wait(4 + 1) if change.key == key]
        assert decode(Plan, changes[0].value or "") == plan_of(60)
        assert leader.compare_and_swap(key, encode(plan_of(5, 2)), first) is not None
        texts = [change.value for change in own.wait(2)]
        assert [decode(Plan, text).ranks("n40") for text in texts if text] == [
            plan_of(60).ranks("n40"),
            range(0),
        ]
    finally:
        leader.delete_prefix(keys.root)
