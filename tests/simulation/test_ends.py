"""A job is done only if every node of its last generation says so, whatever was planned meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from faultsim.agents import Job
from faultsim.replica import Replica, Script
from faultsim.world import World

from adaptdl_elastic.rendezvous.schema.records import (
    JobRequest,
    JobSpec,
    JobState,
    Rescale,
    encode,
)


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize(("rescale", "drained"), [(Rescale.RESTART, True), (Rescale.INPLACE, False)])
def test_a_job_whose_rank_0_is_lost_behind_the_last_epoch_goes_on(
    rescale: Rescale, drained: bool, nodes: int
) -> None:
    def crash(world: World, replica: Replica) -> None:
        replica.machine.crash()

    def notice_first(world: World, replica: Replica) -> None:
        if drained:
            world.kernel.after(0.1, replica.agent.notice, signal.SIGTERM)

    assert_done_after_the_loss_of_rank_0(nodes, rescale, crash, notice_first)


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("rescale", [Rescale.RESTART, Rescale.INPLACE])
@pytest.mark.parametrize("replicas", [None, 1])
def test_a_job_whose_rank_0_is_killed_behind_the_last_epoch_goes_on(
    replicas: int | None, rescale: Rescale, nodes: int
) -> None:
    """Other replicas come to the end of the script, but do not do what rank 0 does there."""

    def kill(world: World, replica: Replica) -> None:
        world.kernel.kill(replica, -signal.SIGKILL, "(the test)")

    def ask_first(world: World, replica: Replica) -> None:
        if replicas is not None:
            ask(world, replicas)

    assert_done_after_the_loss_of_rank_0(nodes, rescale, kill, ask_first)


def ask(world: World, replicas: int) -> None:
    world.etcd.put(world.keys.job("a", "request"), encode(JobRequest(replicas=replicas)), None)


def assert_done_after_the_loss_of_rank_0(
    nodes: int,
    rescale: Rescale,
    lose: Callable[[World, Replica], None],
    before: Callable[[World, Replica], None],
) -> None:
    """Run a job, call `before` with its rank 0 behind the last epoch, and `lose` a second later."""
    world, lost = World(3), list[Replica]()

    def loses(replica: Replica) -> None:
        world.truth.job("a").deaths += 1
        world.truth.excuse()
        lose(world, replica)

    def lose_rank_0() -> None:
        living = [one for found in world.truth.live.values() for one in found if one.alive]
        if lost or len(living) < nodes or not all(one.over for one in living):
            return
        lost.extend(one for one in living if one.rank == 0)
        before(world, lost[0])
        world.kernel.after(1.0, loses, lost[0])

    world.on_script_end.append(lose_rank_0)
    with world.running():
        spec = JobSpec("a", "", max_nodes=nodes, max_replicas=nodes, rescale=rescale, checkpoint_path="/a")
        world.jobs["a"] = Job(spec, Script(steps=120, tail_seconds=12.0))
        for index in range(nodes):
            world.kernel.after(float(index), world.start_agent, world.machine(f"n{index}", 1), "a")
        ask(world, nodes)
        world.kernel.run(400.0)
    assert lost
    assert not lost[0].finished
    assert world.kernel.defects == []
    assert world.history_violations() == []
    job = world.truth.job("a")
    assert job.status is not None
    assert job.status.state is JobState.DONE
    assert job.finished
