"""Nodes of one job that bring different numbers of slots, in whatever order they come."""

from __future__ import annotations

import itertools

import pytest
from coordinator_pump import Pump
from coordinator_script import play

from adaptdl_elastic.agent.own_records import job_spec
from adaptdl_elastic.agent.terminal import run_options
from adaptdl_elastic.autoscaler.coordinator.slots import fewest
from adaptdl_elastic.autoscaler.policy import allocate
from adaptdl_elastic.rendezvous.schema.records import JobState


@pytest.fixture
def pump() -> Pump:
    return Pump(policy=allocate)


def submitted(pump: Pump, nnodes: str, slots: int) -> None:
    """The job as the first agent, with so many slots, makes it."""
    command = [f"--nnodes={nnodes}", f"--nproc-per-node={slots}", "--etcd=e:1", "--rdzv-id=a", __file__]
    spec = job_spec(run_options.parse(command, {}))
    names = ("min_nodes", "max_nodes", "min_replicas", "max_replicas")
    pump.job("a", **{name: getattr(spec, name) for name in names})


@pytest.mark.parametrize("slots", [*itertools.permutations((2, 1)), *itertools.permutations((4, 2, 1))])
def test_a_job_of_exactly_these_nodes_begins_with_all_of_their_slots(
    pump: Pump, slots: tuple[int, ...]
) -> None:
    submitted(pump, f"{len(slots)}:{len(slots)}", slots[0])
    for index, count in enumerate(slots):
        assert pump.status("a").state is JobState.PENDING if index else True
        pump.node(f"n{index}", "a", count, min_slots=count)
        pump.settle()
    assert pump.placed("a") == {f"n{index}": count for index, count in enumerate(slots)}


@pytest.mark.parametrize("slots", [(4, 1), (1, 4)])
def test_a_job_that_can_do_with_one_node_begins_with_the_first(pump: Pump, slots: tuple[int, ...]) -> None:
    submitted(pump, "1:2", slots[0])
    play(pump, f"node n0 a {slots[0]} min_slots={slots[0]}; settle -> n0={slots[0]}")


def test_where_the_small_node_is_taken_the_job_waits_and_says_for_how_much(pump: Pump) -> None:
    submitted(pump, "2:2", 2)
    play(
        pump,
        """
        job other max_replicas=1 preemptible=False; node n1 other 1; settle; node n0 a 2 min_slots=2; settle
        -> "waits for nodes: needs at least 2 replicas on 2 nodes, registered: 1 node with 2 slots"
        node n1 a 1; settle -> "waits for slots: needs 3 replicas on 2 nodes, 2 free, other jobs have 1\"""",
    )


@pytest.mark.parametrize(("nnodes", "fewest_there_can_be"), [("1:2", 4), ("2:2", 6)])
def test_a_node_that_takes_all_or_nothing_bounds_the_job(
    pump: Pump, nnodes: str, fewest_there_can_be: int
) -> None:
    submitted(pump, nnodes, 4)
    pump.node("n0", "a", 4, min_slots=4, reports=False)
    pump.node("n1", "a", 8, min_slots=2 if nnodes == "2:2" else 8, reports=False)
    pump.settle()
    assert pump.plan("a").replicas == fewest_there_can_be
    assert fewest(pump.view(), pump.view().jobs["a"]) == fewest_there_can_be


def test_survivors_on_a_node_that_takes_all_or_nothing_are_not_enough(pump: Pump) -> None:
    submitted(pump, "1:1", 2)
    play(pump, "node n0 a 2 min_slots=2 resilient=True; settle; n0 lose 0; settle -> abort n0=2")
