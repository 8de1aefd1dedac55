"""A device has one owner: the coordinator's division, held against what runs on simulated nodes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from coordinator_pump import Pump
from coordinator_script import play

from adaptdl_elastic.autoscaler.coordinator.slots import Ledger, rooms
from adaptdl_elastic.rendezvous.schema.records import Plan, devices_by_slot

EIGHT = tuple(f"GPU-{number}" for number in range(8))


def join(pump: Pump, node: str, job: str, slots: int = 8, devices: tuple[str, ...] = EIGHT) -> None:
    pump.node(node, job, slots, inplace=True, resilient=True).register(devices=devices)


def of(node: str) -> tuple[str, ...]:
    return tuple(f"{name} of {node}" for name in EIGHT)


def names(plan: Plan, node: str, devices: tuple[str, ...] = EIGHT) -> list[tuple[str, ...]]:
    """The devices of each replica on a node, in the order of the ranks."""
    return [tuple(devices[number] for number in numbers) for numbers in plan.devices(node).values()]


def shared(pump: Pump) -> list[str]:
    """Devices on which replicas of two jobs run."""
    owners = Counter[tuple[str, str]]()
    for agent in pump.agents:
        if agent.running is None or agent.exit_code is not None:
            continue
        plan = next(
            one for one in reversed(pump.plans) if (one.job, one.generation) == (agent.job, agent.running)
        )
        numbers = {number for numbers in plan.devices(agent.node).values() for number in numbers}
        owners.update((agent.node, EIGHT[number]) for number in numbers)
    return [f"{name} of {node}" for (node, name), count in owners.items() if count > 1]


def test_two_jobs_on_a_node_get_different_devices(pump: Pump) -> None:
    for job in "ab":
        play(pump, f"job {job} max_replicas=2 autoscale=False; join n0 {job} 2; ask {job} replicas=2", join)
    pump.settle()
    assert names(pump.plan("a"), "n0") == [("GPU-0",), ("GPU-1",)]
    assert names(pump.plan("b"), "n0") == [("GPU-2",), ("GPU-3",)]
    assert shared(pump) == []


@pytest.mark.parametrize("seed", range(2))
def test_no_device_ever_has_two_owners(seed: int) -> None:
    chance, pump = random.Random(seed), Pump()
    jobs = "abcde"
    for job in jobs:
        pump.job(job, max_replicas=8, max_nodes=2, autoscale=False)
        for node in ("n0", "n1"):
            join(pump, node, job, devices=of(node))
    for _ in range(60):
        job = chance.choice(jobs)
        agent = chance.choice([one for one in pump.agents if one.job == job])
        match chance.choice(["ask", "ask", "ask", "die", "drain", "lead", "restart"]):
            case "ask":
                pump.ask(job, replicas=chance.randint(1, 8))
            case "die" if agent.alive:
                agent.lose(chance.choice(agent.alive))
            case "drain" if agent.exit_code is None:
                agent.leave()
                pump.agents.remove(agent)
                join(pump, agent.node, job, devices=of(agent.node))
            case "lead":
                pump.take_over()
            case _:
                pump.clock.now += chance.random() * 100
        for _ in range(chance.randint(1, 6)):
            pump.decide()
            assert shared(pump) == []
            for one in chance.sample(pump.agents, len(pump.agents)):
                one.step()
                assert shared(pump) == []
    assert len({plan.generation for plan in pump.plans}) > 5, "hardly anything has happened"


def test_survivors_keep_their_devices_and_newcomers_get_others(pump: Pump) -> None:
    for job in "ab":
        play(pump, f"job {job} max_replicas=4 autoscale=False; join n0 {job}; ask {job} replicas=2", join)
        play(pump, "settle; n0 report inplace=True")
    play(pump, "wait 100; ask a replicas=4; settle")
    assert names(pump.plan("a"), "n0") == [("GPU-0",), ("GPU-1",), ("GPU-4",), ("GPU-5",)]
    assert names(pump.plan("b"), "n0") == [("GPU-2",), ("GPU-3",)]


def test_a_device_that_an_agent_may_not_use_is_never_given_to_its_job(pump: Pump) -> None:
    own = EIGHT[6:1:-2]
    pump.job("a", max_replicas=8, autoscale=False)
    join(pump, "n0", "a", 3, own)
    play(pump, "ask a replicas=3; job b max_replicas=8 autoscale=False", join)
    play(pump, "join n0 b; ask b replicas=5; settle", join)
    assert names(pump.plan("a"), "n0", own) == [("GPU-6",), ("GPU-4",), ("GPU-2",)]
    assert sorted(names(pump.plan("b"), "n0")) == [("GPU-0",), ("GPU-1",), ("GPU-3",), ("GPU-5",), ("GPU-7",)]


def test_a_replica_with_several_devices_has_neighbours(pump: Pump) -> None:
    play(pump, "job b max_replicas=1 autoscale=False; join n0 b 1; ask b replicas=1; settle", join)
    play(pump, "job a max_replicas=4 gpus_per_replica=2 autoscale=False; join n0 a 4", join)
    play(pump, "ask a replicas=3; settle")
    found = names(pump.plan("a"), "n0")
    assert found == [("GPU-2", "GPU-3"), ("GPU-4", "GPU-5"), ("GPU-6", "GPU-7")]
    view = pump.view()
    assert Ledger(view).held("a") == {"n0": 6}
    assert rooms(view, view.jobs["b"], Ledger(view))["n0"].most == 1


def test_jobs_whose_replicas_have_two_devices_share_a_node_by_pairs(pump: Pump) -> None:
    for job in "ab":
        play(pump, f"job {job} max_replicas=4 gpus_per_replica=2; join n0 {job} 4", join)
    pump.settle()
    assert [node.slots for node in pump.question().nodes] == [4]
    assert shared(pump) == []
    pairs = [pair for job in "ab" for pair in names(pump.plan(job), "n0")]
    assert len(pairs) >= 2
    assert set(pairs) <= {(EIGHT[i], EIGHT[i + 1]) for i in (0, 2, 4, 6)}


def test_a_gpu_under_two_names_of_its_machine_has_one_owner(pump: Pump) -> None:
    for job, node in (("a", "service"), ("b", "by-hand")):
        play(pump, f"job {job} max_replicas=8 autoscale=False; join {node} {job}", join)
        play(pump, f"ask {job} replicas=5; settle")
    assert len(names(pump.plan("a"), "service")) == 5
    assert "waits for 2 slots on by-hand" in pump.status("b").reason
    play(pump, "ask b replicas=3; settle")
    assert not set(names(pump.plan("a"), "service")) & set(names(pump.plan("b"), "by-hand"))


def test_shares_of_the_cores_are_counted_though_agents_offer_different_numbers(pump: Pump) -> None:
    play(pump, "job a max_replicas=4 autoscale=False; node n0 a 4; ask a replicas=2; settle")
    play(pump, "job b max_replicas=2 autoscale=False; node n0 b 2; ask b replicas=2; settle -> n0=2 b/n0=2")
    assert Ledger(pump.view()).used == 4


def test_a_job_keeps_its_place_though_a_device_of_it_has_become_unusable(pump: Pump) -> None:
    play(pump, "job a max_replicas=8 autoscale=False; join n0 a; ask a replicas=2; settle", join)
    (agent,) = pump.agents
    agent.register(devices=EIGHT, unusable=("GPU-0: it does not answer",))
    ledger = Ledger(pump.view())
    assert (ledger.capacity, ledger.held("a")) == ({"n0": 8}, {"n0": 2})
    play(pump, "ask a replicas=7; settle")
    assert names(pump.plan("a"), "n0") == [(name,) for name in EIGHT[:7]]


def test_an_unusable_device_leaves_the_pool_and_comes_back(pump: Pump) -> None:
    play(pump, "job a max_replicas=8 autoscale=False; join n0 a", join)
    (agent,) = pump.agents
    agent.register(devices=EIGHT, unusable=("GPU-0: it does not answer", "GPU-5: another program has it"))
    play(pump, "ask a replicas=8; settle")
    assert {name for (name,) in names(pump.plan("a"), "n0")} == set(EIGHT) - {"GPU-0", "GPU-5"}
    assert Ledger(pump.view()).capacity == {"n0": 6}
    agent.register(devices=EIGHT)
    play(pump, "wait 100; settle -> n0=8")


def test_devices_belong_to_local_ranks_also_after_a_death(pump: Pump) -> None:
    play(pump, "job a max_replicas=3 min_replicas=1 autoscale=False; join n0 a 3", join)
    play(pump, "ask a replicas=3; settle")
    before = devices_by_slot(pump.plan("a").placements[0])
    play(pump, "job b max_replicas=1 autoscale=False; n0 report inplace=True; n0 lose 1; decide")
    after = devices_by_slot(pump.plan("a").placements[0])
    assert after == {slot: before[slot] for slot in (0, 2)}
    assert replace(pump.plan("a").placements[0], devices=()).slots == (0, 2)
