"""The autoscaler's whole loop over real HTTP: boto3 talks to moto's server, agents are played by the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from moto_process import Moto, make_group
from thin_aws import AutoScaling

from adaptdl_elastic.autoscaler.providers.ec2.provider import Ec2Provider
from adaptdl_elastic.autoscaler.scaling.autoscaler_loop import Autoscaler
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

pytestmark = pytest.mark.processes

KEYS = Keys("test")


class World:
    """One job on two groups; the time is the test's."""

    def __init__(self, moto: Moto, store: MemoryStore) -> None:
        self.now = 1_000_000.0
        self.store = store
        self.thin = AutoScaling(moto.client("autoscaling"))
        self.provider = Ec2Provider(
            ["spot", "demand"],
            {"g5.xlarge": 1.0},
            clients={"autoscaling": self.thin},
            spot_prices=lambda: {("g5.xlarge", "eu-central-1a"): ((0.0, 0.3),)},
        )
        self.ruler = Autoscaler(
            store, KEYS, self.provider, ScalingSettings(), clock=lambda: self.now, steady=lambda: self.now
        )
        self.ever: set[str] = set()

    def want(self, nodes: int) -> None:
        spec = records.JobSpec(
            "train", "run", min_nodes=nodes, max_nodes=8, min_replicas=nodes, max_replicas=8
        )
        self.store.put(KEYS.job("train", "spec"), records.encode(spec))

    def finish(self) -> None:
        status = records.JobStatus("train", "run", records.JobState.DONE)
        self.store.put(KEYS.job("train", "status"), records.encode(status))

    def tick(self, seconds: float = 20.0) -> None:
        self.now += seconds
        self.ruler.tick()
        self.agents()

    def tick_until(self, counts: dict[str, int]) -> None:
        """Let four minutes pass at most."""
        for _ in range(12):
            self.tick()
            if self.counts == counts:
                return
        raise AssertionError(self.counts)

    def agents(self) -> None:
        """Every instance becomes a node, and its node goes with it."""
        there = {i.id for i in self.provider.capacity().instances}
        self.ever |= there
        for item in self.store.range(KEYS.nodes).items:
            if item.key.split("/")[-2] not in there:
                self.store.delete(item.key)
        for instance in there:
            record = records.NodeRecord(instance, "train", "run", instance, "127.0.0.1", 1, instance=instance)
            self.store.put(KEYS.node(instance, "train"), records.encode(record))

    @property
    def counts(self) -> dict[str, int]:
        return {pool.name: pool.desired for pool in self.provider.capacity().pools}


@pytest.fixture
def world(moto: Moto) -> Iterator[World]:
    make_group(moto, "spot", spot=True)
    make_group(moto, "demand")
    with MemoryStore() as store:
        yield World(moto, store)


def test_from_zero_on_spot_then_on_demand_and_back_to_zero(world: World) -> None:
    world.want(6)
    world.tick()
    assert world.counts == {"spot": 4, "demand": 2}  # the spot group has its Max
    world.tick()
    (item,) = world.store.range(KEYS.autoscaler_status).items
    bill = records.decode(AutoscalerStatus, item.value)
    assert bill.hourly_cost == pytest.approx(4 * 0.3 + 2 * 1.0)
    world.want(4)
    world.tick_until({"spot": 4, "demand": 0})  # the dear ones went
    world.finish()
    world.tick_until({"spot": 0, "demand": 0})
    assert len(world.ever) == 6


def test_ours_are_protected_and_the_reclaimed_are_replaced(world: World, moto: Moto) -> None:
    world.want(2)
    for _ in range(3):
        world.tick()
    now = world.provider.capacity()
    assert all(instance.protected for instance in now.instances)
    victim = now.instances[0].id
    moto.client("ec2").terminate_instances(InstanceIds=[victim])
    for _ in range(2):
        world.tick()
    after = world.provider.capacity()
    assert victim not in {i.id for i in after.instances}
    assert sum(pool.desired for pool in after.pools) == 2
    assert world.ruler.memory.pools["spot"].interruptions == 1
