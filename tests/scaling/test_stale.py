"""What is shown of a group lags behind what was done to it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fake_provider import FakeProvider
from scaling_world import World

from adaptdl_elastic.autoscaler.providers.base import Capacity, Instance, Pool
from adaptdl_elastic.autoscaler.scaling.scaling_types import Release, Request

DEMAND = Pool("demand", desired=0, maximum=10, hourly_price=1.0)


class Stale(FakeProvider):
    """Shows what was released as it was for `looks` looks more; the lowered capacity at once."""

    looks = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ghosts: dict[str, tuple[Instance, int]] = {}

    def release(self, instance: str, replace: bool = False) -> None:
        if instance in self._ghosts:
            return  # as the EC2 provider does
        found = self.instances.get(instance)
        super().release(instance, replace)
        if found is not None:
            self._ghosts[instance] = (found, self.looks)

    def shown(self) -> Capacity:
        """What one look of the autoscaler sees."""
        true = self.capacity()
        there = {i.id: i for i in true.instances}
        for name, (instance, left) in self._ghosts.items():
            if left > 0 and name not in there:
                there[name] = instance
                self._ghosts[name] = (instance, left - 1)
        return Capacity(true.pools, tuple(there.values()))


class StaleWorld(World):
    def __init__(self, pool: Pool, looks: int) -> None:
        super().__init__(pool)
        self.stale = Stale({pool.name: pool}, lambda: self.now, 60.0)
        self.stale.looks = looks
        self.provider = self.stale

    def look(self) -> Capacity:
        return self.stale.shown()


@pytest.mark.parametrize("looks", [0, 2, 30])
def test_a_released_instance_that_is_still_shown_is_not_bought_back(looks: int) -> None:
    world = StaleWorld(DEMAND, looks)
    world.want(4).run(120)
    world.want(2).run(1800, every=5)
    assert world.provider.launched == 4
    assert len({action.instance for action in world.of(Release)}) == 2
    assert world.desired == {"demand": 2}
    world.want(0).run(1800, every=5)
    assert (world.provider.launched, world.desired) == (4, {"demand": 0})


def test_a_group_lowered_by_hand_while_what_was_released_is_shown_keeps_its_nodes_at_work() -> None:
    world = StaleWorld(DEMAND, 3)
    world.want(4).run(120)
    world.want(3).until(lambda: bool(world.of(Release)))
    world.provider.set_desired("demand", 1)
    world.run(60)
    assert (world.desired, world.provider.launched) == ({"demand": 3}, 4)


def test_demand_that_returns_while_what_was_released_is_shown_buys_as_many_as_are_missing() -> None:
    world = StaleWorld(DEMAND, 5)
    world.want(4).run(120)
    world.want(2).until(lambda: bool(world.of(Release)))
    world.want(4).run(300, every=5)
    assert (world.desired, world.provider.launched) == ({"demand": 4}, 6)


def test_a_release_that_went_nowhere_is_said_again_after_a_minute() -> None:
    world = World(DEMAND).want(2).run(120).want(1)
    really, said = world.provider.release, []
    world.provider.release = lambda instance, replace=False: said.append(world.now)  # type: ignore[method-assign]
    world.run(300)
    assert len(said) > 1
    assert all(60 <= later - earlier < 80 for earlier, later in pairwise(said))
    world.provider.release = really  # type: ignore[method-assign]
    world.run(120)
    assert world.desired == {"demand": 1}
    assert not [a for a in world.of(Request) if "fewer" in a.reason]
