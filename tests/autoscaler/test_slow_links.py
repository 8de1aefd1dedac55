"""A job on three nodes leaves those whose links are slow, keeps the others, and comes back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fresh import Script
from link_world import LinkWorld

from adaptdl_elastic import _session

GBIT = 125e6

World = Callable[..., LinkWorld]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    script = Script(
        monkeypatch,
        ADAPTDL_CHECKPOINT_PATH=str(tmp_path / "saved"),
        ADAPTDL_CHECKPOINT_INTERVAL="0",
        ADAPTDL_EVENT_LOG=str(tmp_path / "events"),
    )

    def make(parameters: float, *gbits: float) -> LinkWorld:
        script.restart()
        return LinkWorld(
            script, parameters, **{node: GBIT * one for node, one in zip("abcde", gbits, strict=False)}
        )

    yield make
    _session.reset()


def becomes_fast(run: LinkWorld) -> None:
    """Let a job train until it is where it is fast; a node measures again after pauses that double."""
    for _ in range(10):
        run.run(60.0)
        assert run.changes(60.0) <= 3
        if run.rate >= 0.95 * run.best():
            break
    assert run.rate >= 0.95 * run.best()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("parameters", "gbits"),
    [
        *((1e6, gbits) for gbits in [(1, 1, 1), (1, 0.1, 0.1), (0.1, 0.1, 0.1), (10, 10, 1), (10, 1, 1)]),
        *((10e6, gbits) for gbits in [(1, 1, 0.1), (10, 10, 0.1), (10, 10, 1)]),
    ],
)
def test_a_job_takes_the_nodes_whose_links_pay(
    world: World, parameters: float, gbits: tuple[float, ...]
) -> None:
    run = world(parameters, *gbits).measure()
    run.run(30.0)
    assert run.rate >= 0.95 * run.best()
    assert run.changes(30.0) <= 3


@pytest.mark.parametrize(("node", "parameters"), [("a", 10e6), ("c", 1e6)])
def test_a_job_leaves_the_node_whose_link_falls_and_comes_back(
    world: World, node: str, parameters: float
) -> None:
    run = world(parameters, 1, 1, 1).measure()
    run.run(60.0)
    assert run.on == {"a", "b", "c"}
    run.wires[node] = 0.1 * GBIT
    run.run(30.0)
    assert run.on == {"a", "b", "c"} - {node}
    run.wires[node] = GBIT
    run.run(60.0)
    assert run.on == {"a", "b", "c"}
    assert run.changes(90.0) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, 1, 1), (1, 0.1, 0.1)),
        ((1, 1, 1), (0.1, 0.1, 0.1)),
        ((10, 10, 0.1), (10, 0.1, 0.1)),
        ((1, 1, 0.1), (1, 1, 1)),
    ],
)
def test_a_job_goes_where_it_is_fast_whatever_falls_or_rises(
    world: World, before: tuple[float, ...], after: tuple[float, ...]
) -> None:
    run = world(1e6, *before).measure()
    run.run(60.0)
    run.set(*(GBIT * one for one in after))
    becomes_fast(run)


def test_a_job_on_five_nodes_leaves_three_whose_switch_falls(world: World) -> None:
    run = world(10e6, 1, 1, 1, 1, 1).measure()
    run.run(60.0)
    run.wires |= dict.fromkeys("abe", 0.1 * GBIT)
    run.run(90.0)
    assert run.rate >= 0.95 * run.best()
    assert run.changes(90.0) <= 3


def test_a_link_that_falls_while_the_job_changes_is_noticed(world: World) -> None:
    run = world(10e6, 1, 1, 1)
    run.run(30.0)
    run.pump.ask("j", replicas=3)
    run.wires["c"] = 0.1 * GBIT
    run.run(10.0)
    assert len(run.on) == 3
    run.pump.ask("j", replicas=None)
    run.run(30.0)
    assert "c" not in run.on


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(2))
def test_wires_that_change_at_random_cost_few_changes(world: World, seed: int) -> None:
    chance = random.Random(seed)
    run = world(chance.choice([1e6, 10e6]), *(chance.choice([0.1, 1.0]) for _ in range(3))).measure()
    run.run(60.0)
    for _ in range(4):
        run.wires[chance.choice("abc")] = GBIT * chance.choice([0.1, 1.0])
        becomes_fast(run)
