"""Nodes without a replica: none for a job that cannot run, none for long, and their job pays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scaling_cluster import KEYS, Cluster
from scaling_world import World, waiting

from adaptdl_elastic.autoscaler.cluster_view import view_of
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger
from adaptdl_elastic.autoscaler.diagnostics.rows import node_rows
from adaptdl_elastic.autoscaler.policy.policy_types import JobInfo
from adaptdl_elastic.autoscaler.providers.base import Pool, ProviderError
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.autoscaler.scaling.observed_history import shares
from adaptdl_elastic.autoscaler.scaling.scaling_types import NodeUse, Release
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

DEMAND = Pool("demand", desired=0, maximum=10, hourly_price=1.0)
FOUR = JobInfo("train", min_replicas=4, max_replicas=4, min_nodes=4)
MINUTE = 60.0


def idling(world: World, *idle: str) -> None:
    """Leave these nodes without a replica."""
    world.adjust = lambda found: {
        name: replace(use, replicas={}) if name in idle else use for name, use in found.items()
    }


# All or nothing


@pytest.mark.parametrize(
    ("pool", "settings", "limit"),
    [
        (DEMAND, ScalingSettings(max_nodes=3), "--max-nodes (3)"),
        (DEMAND, ScalingSettings(max_hourly_cost=3.5), "--max-hourly-cost (3.5)"),
        (replace(DEMAND, maximum=3), ScalingSettings(), "the Max of a group"),
    ],
)
def test_nothing_is_bought_for_a_job_whose_least_nodes_cannot_be_had(
    pool: Pool, settings: ScalingSettings, limit: str
) -> None:
    world = World(pool, settings=settings)
    world.jobs = (FOUR,)
    world.run(600)
    assert world.provider.launched == 0
    (warning,) = world.tick().warnings
    assert "train: needs 4 nodes to run, and 3 can be had now" in warning
    assert limit in warning


def test_where_they_can_be_had_they_are_bought_and_another_job_takes_none_of_them_away() -> None:
    world = World(DEMAND, settings=ScalingSettings(max_nodes=5))
    world.jobs = (FOUR, replace(FOUR, name="other"), waiting("small", 1))
    world.until_running(5)
    assert next(w for w in world.tick().warnings if "can be had" in w).startswith("other: needs 4 nodes")


@pytest.mark.parametrize(
    "job", [FOUR, JobInfo("train", min_replicas=4, max_replicas=4)], ids=["nodes", "slots of several nodes"]
)
def test_nodes_outside_the_provider_count(job: JobInfo) -> None:
    world = World(DEMAND, settings=ScalingSettings(max_nodes=3))
    world.jobs = (job,)
    world.run(600)
    assert world.provider.launched == 0
    world.others = 1
    world.run(600)
    assert world.provider.launched == 3


def test_two_jobs_of_several_nodes_share_no_node() -> None:
    world = World(replace(DEMAND, slots=4), settings=ScalingSettings(max_nodes=3))
    two = JobInfo("train", min_replicas=2, max_replicas=2, min_nodes=2)
    world.jobs = (two, replace(two, name="other"))
    world.run(600)
    assert "other: needs 2 nodes to run, and 1 can be had now" in " ".join(world.tick().warnings)
    assert world.provider.launched == 2


def test_a_job_that_runs_comes_before_one_that_waits() -> None:
    world = World(DEMAND, settings=ScalingSettings(max_nodes=4))
    world.jobs = (FOUR,)
    world.until_running(4)
    works = world.nodes_in_use()
    world.adjust = lambda _: works
    world.jobs = (JobInfo("new", min_replicas=3, max_replicas=3, min_nodes=3), FOUR)
    world.run(3600, 30)
    assert (world.provider.launched, len(world.running)) == (4, 4)
    (warning,) = world.tick().warnings
    assert warning.startswith("new: needs 3 nodes to run, and 0 can be had now")


def start_together(world: World, job: JobInfo) -> None:
    """Give nodes replicas of `job` half a minute after there are as many as it needs."""
    complete = list[float]()

    def nodes(found: dict[str, NodeUse]) -> dict[str, NodeUse]:
        if job in world.jobs and len(found) >= job.min_nodes:
            complete.append(world.now)
        starts = bool(complete) and world.now - complete[0] >= 30
        return {name: replace(use, replicas={job.name: 1} if starts else {}) for name, use in found.items()}

    world.adjust = nodes


@pytest.mark.parametrize(
    ("pool", "settings"),
    [(DEMAND, ScalingSettings(min_nodes=2)), (replace(DEMAND, minimum=2, desired=2), ScalingSettings())],
    ids=["--min-nodes", "Min"],
)
def test_nodes_that_were_idle_for_long_are_used_by_a_job_that_needs_more(
    pool: Pool, settings: ScalingSettings
) -> None:
    world = World(pool, settings=settings)
    start_together(world, FOUR)
    world.run(1800, 30)
    world.jobs = (FOUR,)
    world.run(150)
    assert [use.replicas for use in world.nodes_in_use().values()] == [{"train": 1}] * 4
    assert world.provider.launched == 4


def test_nodes_that_wait_for_the_boot_of_others_are_not_idle() -> None:
    slow = replace(DEMAND, name="slow", hourly_price=1.1)
    world = World(replace(DEMAND, maximum=2), slow)
    world.provider.boots = {"slow": 420.0}
    start_together(world, FOUR)
    world.jobs = (FOUR,)
    world.run(510)
    assert [use.replicas for use in world.nodes_in_use().values()] == [{"train": 1}] * 4
    assert world.provider.launched == 4


# Not for long


def test_a_node_that_is_idle_within_the_band_is_released() -> None:
    """Seven slots of eight are above the lower bound of the band: such a node stayed for ever."""
    world = World(DEMAND, boot=600)  # the boot does not count
    world.grown(8)
    idle, now = world.running[3], world.now
    idling(world, idle)
    world.want(7).until(lambda: idle not in world.running)
    assert 5 * MINUTE <= world.now - now <= 6 * MINUTE
    (release,) = world.of(Release)
    assert release.reason == "it has had no replica for 5 min (--idle-minutes)"
    world.run(1800, 30)
    assert (world.provider.launched, len(world.running)) == (8, 7)


@pytest.mark.parametrize(
    ("pool", "settings"),
    [
        (DEMAND, ScalingSettings(min_nodes=8)),
        (replace(DEMAND, minimum=8, desired=8), ScalingSettings()),
        (DEMAND, ScalingSettings(idle_after=7200.0)),
    ],
    ids=["--min-nodes", "Min", "--idle-minutes"],
)
def test_nodes_that_a_person_asked_for_stay(pool: Pool, settings: ScalingSettings) -> None:
    world = World(pool, settings=settings).grown(8)
    idling(world, world.running[3])
    world.want(7).run(3600, 30)
    assert (len(world.running), world.provider.launched) == (8, 8)


def test_nodes_on_which_nothing_is_placed_are_bought_again_less_and_less() -> None:
    world = World(DEMAND).want(2)
    idling(world, *(f"demand-{number}" for number in range(100)))
    world.run(8 * 3600, 30)
    assert world.provider.launched == 2 * 8
    assert any("had no replica 8 times in a row" in text for text in world.tick().warnings)
    idling(world)
    world.until(lambda: len(world.running) == 2, seconds=7300)
    world.run(60)
    assert world.memory.vain == {}


def test_a_job_that_runs_keeps_its_nodes_while_no_more_are_bought_for_it() -> None:
    world = World(DEMAND).grown(2)
    idling(world, *(f"demand-{number}" for number in range(3, 100)))
    world.want(4).run(8 * 3600, 30)
    assert world.provider.launched == 2 + 2 * 8
    assert {"demand-1", "demand-2"} <= set(world.running)


def test_a_job_that_was_expected_begins_afresh_when_it_is_submitted() -> None:
    world = World(DEMAND)
    idling(world, *(f"demand-{number}" for number in range(100)))
    world.want(2).run(8000, 40)
    assert world.memory.vain["train"].until > world.now + 1000
    world.runs = {"train": "run"}
    world.run(120)
    assert len(world.running) == 2


def test_nothing_is_bought_from_a_pool_whose_instances_cannot_be_released(store: MemoryStore) -> None:
    cluster = Cluster(store).submit(nodes=2)
    for _ in range(20):
        cluster.provider.errors["release"] = [ProviderError("AccessDenied")] * 2
        cluster.tick(30)
        for name in cluster.instances:
            cluster.register(name)
    assert cluster.provider.launched == 2
    assert "AccessDenied" in cluster.status().warnings
    assert cluster.ruler.memory.pools["workers"].until > cluster.now


def test_a_node_that_cannot_be_released_is_no_fault_of_a_job_that_comes_later(store: MemoryStore) -> None:
    cluster = Cluster(store).submit("first").ticks(1)
    (stuck,) = cluster.instances
    cluster.register(stuck)
    for _ in range(20):
        cluster.provider.errors["release"] = [ProviderError("AccessDenied")]
        cluster.tick(30)
    memory = cluster.ruler.memory
    assert memory.known[stuck].leaving
    assert memory.vain["first"].times
    cluster.submit("second")
    cluster.provider.errors["release"] = [ProviderError("AccessDenied")]
    cluster.tick(30)
    assert cluster.ruler.memory.vain.keys() == {"first"}


# On the bill


def test_a_node_without_a_replica_is_shared_by_the_jobs_that_lack_some() -> None:
    idle, works = NodeUse("a"), NodeUse("b", {"train": 1, "other": 1})
    assert shares(None, {"train": 1, "other": 3}) == {"train": 0.25, "other": 0.75}
    assert shares(idle, {"other": 3}) == {"other": 1.0}
    assert shares(idle, {}) == {}
    assert shares(works, {"third": 1}) == {"train": 0.5, "other": 0.5}


def test_a_job_that_is_never_placed_stops_at_its_limit(store: MemoryStore) -> None:
    cluster = Cluster(store)
    cluster.ruler.change(ScalingSettings(max_job_costs={"train": 1.0}, idle_after=7200.0))
    cluster.submit(nodes=2)
    for _ in range(60):
        cluster.tick(60)
        for name in cluster.instances:
            cluster.register(name)
    item = store.get(KEYS.job("train", "request"))
    assert item is not None
    assert records.decode(records.JobRequest, item.value).stop
    assert cluster.ruler.memory.job_costs["train"] == pytest.approx(1.0, abs=0.1)


def test_the_nodes_that_are_idle_are_shown_with_their_price(store: MemoryStore) -> None:
    cluster = Cluster(store).submit(nodes=2).ticks(1)
    first, second = cluster.instances
    cluster.plan(cluster.register(first))
    cluster.register(second)
    cluster.ticks(4, 60)
    view = view_of(KEYS, store.range(KEYS.root), 0.0, cluster.now)
    states = [row["state"] for row in node_rows(view, Ledger(view))]
    assert states == ["ok", "idle for 3 min, costs 1.00 an hour"]
