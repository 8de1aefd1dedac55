from __future__ import annotations

import itertools
import time

import pytest
from coordinator_pump import Pump
from coordinator_script import play
from fake_agents import spec_of
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptdl_elastic.autoscaler.coordinator.slots import Ledger, Room, everything, nearest, resize, smallest
from adaptdl_elastic.autoscaler.coordinator.slots import rooms as job_rooms


@st.composite
def rooms(draw: st.DrawFn, uniform: bool = False) -> dict[str, Room]:
    found = {}
    for name in draw(st.lists(st.sampled_from("abcdef"), unique=True, min_size=1)):
        most = draw(st.integers(1, 5))
        least = 1 if uniform else draw(st.integers(1, most))
        found[name] = Room(name, least, most, f"agent-{name}", draw(st.integers(0, 2)))
    return found


def brute(replicas: int, places: dict[str, Room], min_nodes: int, max_nodes: int) -> bool:
    """Whether any choice of nodes can hold exactly so many."""
    for count in range(min_nodes, min(max_nodes, len(places)) + 1):
        for nodes in itertools.combinations(places.values(), count):
            if sum(room.least for room in nodes) <= replicas <= sum(room.most for room in nodes):
                return True
    return False


@settings(deadline=None)  # a busy machine is no failure
@given(
    places=rooms(),
    replicas=st.integers(1, 20),
    data=st.data(),
    nodes=st.tuples(st.integers(1, 4), st.integers(0, 3)),
)
def test_resize_finds_only_allowed_sizes(
    places: dict[str, Room], replicas: int, data: st.DataObject, nodes: tuple[int, int]
) -> None:
    min_nodes, max_nodes = nodes[0], sum(nodes)
    now = data.draw(st.dictionaries(st.sampled_from("abcxyz"), st.integers(1, 5)))
    found = resize(now, replicas, places, min_nodes=min_nodes, max_nodes=max_nodes)
    if found is None:
        return
    assert sum(found.values()) == replicas
    assert min_nodes <= len(found) <= max_nodes
    assert all(places[node].least <= count <= places[node].most for node, count in found.items())
    assert [n for n in found if n in now] == sorted(
        (n for n in now if n in found), key=lambda n: places[n].preferred
    )


@settings(deadline=None)  # a busy machine is no failure
@given(
    places=rooms(uniform=True),
    replicas=st.integers(1, 20),
    nodes=st.tuples(st.integers(1, 4), st.integers(0, 3)),
)
def test_where_any_part_of_a_node_may_be_used_resize_finds_what_there_is(
    places: dict[str, Room], replicas: int, nodes: tuple[int, int]
) -> None:
    found = resize({}, replicas, places, min_nodes=nodes[0], max_nodes=sum(nodes))
    assert (found is not None) == brute(replicas, places, nodes[0], sum(nodes))


def four(count: int = 4) -> dict[str, Room]:
    return {f"n{i}": Room(f"n{i}", 1, 4, "") for i in range(count)}


def test_shrinking_keeps_rank_0_and_moves_no_other_replica() -> None:
    assert resize({"n1": 4, "n0": 4}, 5, four()) == {"n1": 4, "n0": 1}
    assert resize({"n1": 4, "n0": 4}, 4, four()) == {"n1": 4}


def test_growing_fills_what_it_has_first() -> None:
    assert resize({"n1": 2}, 4, four()) == {"n1": 4}
    assert resize({"n1": 2}, 6, four()) == {"n1": 4, "n0": 2}


def test_nodes_that_only_take_all_or_nothing() -> None:
    places = {"big": Room("big", 4, 4, ""), "small": Room("small", 2, 2, "")}
    assert resize({}, 2, places) == {"small": 2}
    assert resize({}, 3, places) is None
    assert nearest(spec_of("a"), 3, places, {}) == {"small": 2}


def test_nearest_prefers_smaller() -> None:
    places = {"n0": Room("n0", 2, 2, ""), "n1": Room("n1", 2, 2, "")}
    assert nearest(spec_of("a"), 3, places, {}) == {"n0": 2}
    assert nearest(spec_of("a", min_replicas=4), 3, places, {}) == {"n0": 2, "n1": 2}


def test_everything_stops_at_the_bounds() -> None:
    assert everything(spec_of("a", max_nodes=2), four(), {}) == {"n0": 1, "n1": 1}
    assert everything(spec_of("a", max_replicas=3), four(), {"n3": 1}) == {"n3": 1, "n0": 1, "n1": 1}
    assert everything(spec_of("a", min_nodes=9, max_nodes=9), four(), {}) is None


def test_bounds_far_beyond_the_cluster_cost_nothing() -> None:
    spec = spec_of("a", max_replicas=65536, max_nodes=65536)
    started = time.process_time()
    assert smallest(spec_of("a", min_replicas=60000, max_replicas=65536), four()) is None
    found = nearest(spec, 65536, four(1000), {})
    assert found is not None
    assert sum(found.values()) == 4000
    assert time.process_time() - started < 1.0


def test_slots_are_held_once_whatever_the_generations() -> None:
    pump = Pump()
    play(pump, "job a; node n0 a 4; job b; node n0 b 4; settle")
    ledger = Ledger(pump.view())
    assert ledger.used == sum(pump.placed("a").values()) + sum(pump.placed("b").values())
    assert ledger.free_for("b", "n0") == 4 - pump.placed("a")["n0"]


@pytest.mark.parametrize("avoids", [True, False])
def test_a_job_that_avoids_preemptible_nodes_begins_on_another(avoids: bool) -> None:
    pump = Pump()
    pump.job("a", avoid_preemptible_nodes=avoids, max_replicas=1)
    for node, preemptible in (("n0", True), ("n1", False)):
        pump.node(node, "a", 1).register(preemptible=preemptible)
    places = job_rooms(pump.view(), pump.view().jobs["a"], None)
    assert (places["n0"].preferred, places["n1"].preferred) == (2 * avoids, 0)
    assert nearest(spec_of("a", max_replicas=1), 1, places, {}) == {"n1" if avoids else "n0": 1}
