"""Which agents keep a coordinator: two of them, on different nodes, and none where a service leads."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from adaptdl_elastic.agent.coordinator_host import CLAIM_AGAIN_AFTER, CoordinatorHost, Holder
from adaptdl_elastic.rendezvous.keys import Keys

KEYS = Keys()
FIRST, SECOND = KEYS.coordinator_host, KEYS.coordinator_second
ME, NEIGHBOUR, FAR = Holder("here", "me"), Holder("here", "other"), Holder("there", "far")
SETTLED = 100.0


class Child:
    """A coordinator that is none."""

    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


@dataclass
class World:
    """One agent, a clock, and what it does."""

    now: float = 0.0
    claims: list[str] = field(default_factory=list)
    children: list[Child] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.host = CoordinatorHost(ME, KEYS, self._child, self._claim, SETTLED, lambda: self.now)  # type: ignore[arg-type]

    def _child(self) -> Child:
        self.children.append(Child())
        return self.children[-1]

    def _claim(self, key: str, other: str) -> None:
        assert {key, other} == {FIRST, SECOND}
        self.claims.append(key)

    def mind(self, first: Holder | None, second: Holder | None, leads: bool) -> list[str]:
        """What is claimed now."""
        self.claims.clear()
        self.host.mind(first and str(first), second and str(second), "somebody" if leads else None)
        return list(self.claims)


def test_nobody_keeps_one_so_we_do_at_once() -> None:
    world = World()
    assert world.mind(None, None, leads=False) == [FIRST]
    assert world.mind(None, None, leads=False) == []
    assert world.host.due == CLAIM_AGAIN_AFTER
    world.now = CLAIM_AGAIN_AFTER
    assert world.mind(None, None, leads=False) == [FIRST]
    assert world.mind(ME, None, leads=False) == []
    assert len(world.children) == 1
    assert world.mind(ME, FAR, leads=True) == []
    assert len(world.children) == 1
    assert world.host.due is None


def test_where_a_service_leads_nobody_tries() -> None:
    world = World(now=SETTLED)
    assert world.mind(None, None, leads=True) == []
    assert world.host.due is None


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        (FAR, None, [SECOND]),
        (None, FAR, [FIRST]),
        (NEIGHBOUR, None, []),  # they would be lost together
        (None, NEIGHBOUR, []),
        (FAR, NEIGHBOUR, []),
        (ME, None, []),
        (None, ME, []),
    ],
)
def test_one_of_another_node_stands_by(
    first: Holder | None, second: Holder | None, wanted: list[str]
) -> None:
    world = World(now=SETTLED)
    assert world.mind(first, second, leads=True) == wanted


def test_one_stands_by_only_when_the_start_is_over() -> None:
    world = World()
    assert world.mind(FAR, None, leads=True) == []
    assert world.host.due == SETTLED
    world.now = SETTLED
    assert world.mind(FAR, None, leads=True) == [SECOND]


def test_who_has_lost_its_place_claims_it_again_while_its_coordinator_goes_on() -> None:
    """The store was away for longer than our lease; the coordinator has its own."""
    world = World(now=SETTLED)
    world.mind(ME, None, leads=True)
    assert world.mind(None, None, leads=True) == [FIRST]
    world.now += CLAIM_AGAIN_AFTER
    assert world.mind(FAR, None, leads=True) == [SECOND]
    (child,) = world.children
    assert not child.closed


def test_a_third_coordinator_is_ended() -> None:
    world = World(now=SETTLED)
    world.mind(ME, None, leads=True)
    ended = world.children[0]
    world.mind(FAR, Holder("elsewhere", "third"), leads=True)
    assert world.host._child is None
    world.mind(FAR, ME, leads=True)
    assert len(world.children) == 2
    world.host.close()
    assert world.children[1].closed
    assert ended is not world.children[1]


def test_what_nobody_can_read_is_somebody() -> None:
    assert Holder.parse("garbage") == Holder("", "garbage")
    assert Holder.parse(None) is None
    assert Holder.parse(str(FAR)) == FAR
