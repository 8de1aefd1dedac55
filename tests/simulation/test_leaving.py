"""Replicas save and leave in order when other plans come while they change their number in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from faultsim.agents import Job
from faultsim.replica import Script
from faultsim.world import World

from adaptdl_elastic.rendezvous.schema.records import DrainRequest, JobRequest, JobSpec, encode
from adaptdl_elastic.rendezvous.store.base import Change

NODES = ("n0", "n1", "n2")
ASKED = 30.0  # seconds after the beginning
LEFT = 20.0  # seconds until all agents have ended: much less than `checkpoint_timeout`


def ask(world: World, **what: object) -> None:
    world.etcd.put(world.keys.job("a", "request"), encode(JobRequest(**what)), None)


def drain(world: World, node: str) -> None:
    asked = encode(DrainRequest(node, "the autoscaler gives it back", instance=f"i-{node}"))
    world.etcd.put(world.keys.drain(node), asked, None)


def drain_all(world: World) -> None:
    for node in NODES:
        world.kernel.after(world.kernel.random.random(), drain, world, node)


def shrink_and_stop(world: World) -> None:
    ask(world, replicas=2)
    world.kernel.after(1.5 * world.kernel.random.random(), partial(ask, world, replicas=2, stop=True))
    world.stops.add("a")


def grow_and_stop(world: World) -> None:
    def stop(change: Change) -> None:
        if "/reports/" in change.key and '"ready":true' in (change.value or ""):
            when = 1.5 * world.kernel.random.random()
            world.kernel.after(when, partial(ask, world, replicas=3, stop=True))

    ask(world, replicas=3)
    world.etcd.listeners.append(stop)
    world.stops.add("a")


@pytest.mark.parametrize(
    ("replicas", "happens", "seeds"),
    [
        pytest.param(3, drain_all, 6, id="all nodes are drained"),
        pytest.param(3, shrink_and_stop, 4, id="a person stops it while it shrinks"),
        pytest.param(2, grow_and_stop, 4, id="a person stops it while it grows"),
    ],
)
def test_a_job_saves_and_leaves_at_once_while_it_changes_in_place(
    replicas: int, happens: Callable[[World], None], seeds: int
) -> None:
    for seed in range(1, seeds + 1):
        world = World(seed)
        with world.running():
            times = {"rescale_timeout": 20.0, "checkpoint_timeout": 60.0}
            spec = JobSpec("a", "", max_nodes=3, max_replicas=3, checkpoint_path="/a", **times)
            world.jobs["a"] = Job(spec, Script(steps=400), checkpoint_timeout=60.0, checkpoint_interval=200.0)
            for node in NODES:
                world.kernel.after(0.0, world.start_agent, world.machine(node, 1), "a")
            ask(world, replicas=replicas)
            world.kernel.after(ASKED, happens, world)
            world.kernel.run(ASKED + LEFT)
        job = world.truth.job("a")
        assert world.kernel.defects == [], seed
        assert [one.exit_code for one in world.agents if one.alive] == [], seed
        assert job.newest > 10
        assert job.checkpoints, seed
        assert job.checkpoints[-1].step == job.newest, seed
