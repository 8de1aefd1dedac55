"""The pure core of the torchrun plug-in: properties that hold whatever comes and goes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptdl_elastic.rendezvous.torchrun.membership import (
    Closed,
    Enter,
    Member,
    MembershipRound,
    MembershipSettings,
    Over,
    Propose,
    View,
    Wait,
    candidates,
    decide,
    gone,
    is_due,
    is_spare,
    nodes_waiting,
)

ONE = MembershipSettings(min_nodes=1, max_nodes=3, last_call=1.0, grace=2.0, leave_timeout=60.0)
NAMES = ["a", "b", "c", "d", "e"]


def view(
    round_: MembershipRound | None = None, missing: dict[str, float] | None = None, **after: int
) -> View:
    members = {name: Member(name, "host", number) for name, number in after.items()}
    return View(members, {name: at for at, name in enumerate(members)}, round_, missing_since=missing or {})


def test_the_first_waits_for_a_last_call_and_proposes():
    alone = replace(view(a=0), enough_since=10.0)
    assert decide(alone, "a", ONE, 10.5) == Wait(11.0)
    assert decide(alone, "a", ONE, 11.0) == Propose(MembershipRound(1, ("a",)))


def test_a_full_house_needs_no_last_call_and_spares_stay_out():
    full = replace(view(a=0, b=0, c=0, d=0), enough_since=10.0)
    assert decide(full, "a", ONE, 10.0) == Propose(MembershipRound(1, ("a", "b", "c")))
    assert decide(full, "b", ONE, 10.0) == Wait(math.inf)
    running = replace(full, round=MembershipRound(1, ("a", "b", "c")))
    assert decide(running, "b", ONE, 10.0) == Enter(MembershipRound(1, ("a", "b", "c")))
    assert isinstance(decide(running, "d", ONE, 10.0), Wait)
    assert nodes_waiting(running, "a", 1, ONE, 10.0) == 0


def test_nodes_that_come_during_the_last_call_do_not_make_it_longer():
    two = replace(view(a=0, b=0), enough_since=10.0)
    assert decide(two, "a", ONE, 10.9) == Wait(11.0)
    assert decide(two, "a", ONE, 11.0) == Propose(MembershipRound(1, ("a", "b")))


def test_only_a_node_beside_a_full_round_that_runs_is_a_spare():
    full = MembershipRound(1, ("a", "b", "c"))
    assert is_spare(view(full, a=0, b=0, c=0, d=1), "d", ONE)
    assert not is_spare(view(full, a=1, b=1, c=1, d=1), "d", ONE), "all of them wait for another round"
    assert not is_spare(view(full, d=1), "d", ONE), "nobody of them is there"
    assert not is_spare(view(MembershipRound(1, ("a",)), a=0, d=1), "d", ONE), "there is room"


def test_too_few_wait():
    two = MembershipSettings(2, 3)
    assert isinstance(decide(view(a=0), "a", two, 1e6), Wait)


def test_a_newcomer_makes_the_others_stop_and_they_keep_their_ranks():
    came = view(MembershipRound(4, ("b", "a")), a=3, b=3, c=4)
    assert nodes_waiting(came, "a", 4, ONE, 0.0) == 1
    assert decide(came, "c", ONE, 0.0) == Wait(math.inf)  # a and b still run
    stopped = replace(view(MembershipRound(4, ("b", "a")), a=4, b=4, c=4), due_since=0.0)
    assert decide(stopped, "b", ONE, 0.0) == Propose(MembershipRound(5, ("b", "a", "c")))


def test_a_straggler_is_left_behind_in_the_end():
    waits = replace(view(MembershipRound(4, ("a", "b")), a=3, b=4), due_since=100.0)
    assert decide(waits, "b", ONE, 159.0) == Wait(160.0)
    assert decide(waits, "b", ONE, 160.0) == Propose(MembershipRound(5, ("b",)))
    assert nodes_waiting(replace(waits, round=MembershipRound(5, ("b",))), "a", 4, ONE, 0.0) == 1


def test_the_departed_are_noticed_after_a_grace_and_leavers_at_once():
    missing = view(MembershipRound(1, ("a", "b")), missing={"b": 10.0}, a=0)
    assert nodes_waiting(missing, "a", 1, ONE, 11.9) == 0
    assert nodes_waiting(missing, "a", 1, ONE, 12.0) == 1
    back = view(MembershipRound(1, ("a", "b")), a=0, b=0)
    assert nodes_waiting(back, "a", 1, ONE, 99.0) == 0
    leaving = replace(back, members={**back.members, "b": Member("b", "host", 0, leaving=True)})
    assert gone(leaving, ONE, 0.0) == {"b"}
    assert nodes_waiting(leaving, "a", 1, ONE, 0.0) == 1
    entered = replace(missing, members={"a": Member("a", "host", 1)}, due_since=10.0)
    assert decide(entered, "a", ONE, 11.0) == Wait(12.0)
    assert decide(entered, "a", ONE, 12.0) == Propose(MembershipRound(2, ("a",)))


def test_the_end():
    over = replace(view(MembershipRound(1, ("a",)), a=0, b=1), closed=Closed("a", ok=True))
    assert decide(over, "b", ONE, 0.0) == Over(Closed("a", ok=True))
    assert nodes_waiting(over, "a", 1, ONE, 0.0) == 0
    assert nodes_waiting(replace(over, closed=Closed("b", ok=False)), "a", 1, ONE, 0.0) == 1


@st.composite
def views(draw: st.DrawFn) -> View:
    number = draw(st.integers(0, 3))
    ranks = draw(st.permutations(NAMES))[: draw(st.integers(1, 3))]
    live = draw(st.lists(st.sampled_from(NAMES), unique=True))
    members = {name: Member(name, "host", draw(st.integers(0, number)), draw(st.booleans())) for name in live}
    times = st.floats(0, 100)
    return View(
        members,
        {name: draw(st.integers(0, 9)) for name in live},
        MembershipRound(number, tuple(ranks)) if number else None,
        None,
        {name: draw(times) for name in NAMES if name not in live and draw(st.booleans())},
        draw(times),
        draw(times),
    )


@given(views(), st.floats(0, 300))
def test_at_most_one_proposes_and_only_what_may_be(seen: View, now: float):
    actions = {name: decide(seen, name, ONE, now) for name in seen.members}
    proposed = [action.round for action in actions.values() if isinstance(action, Propose)]
    assert len(proposed) <= 1
    for round_ in proposed:
        assert round_.number == seen.number + 1
        assert ONE.min_nodes <= len(round_.members) <= ONE.max_nodes
        assert len(set(round_.members)) == len(round_.members)
        assert set(round_.members) <= set(candidates(seen))
        assert not any(seen.members[name].leaving for name in round_.members)
    for name, action in actions.items():
        assert not isinstance(action, Enter) or name in action.round.members


@given(views(), st.floats(0, 300))
def test_every_waiting_node_is_served_in_the_end(seen: View, now: float):
    """With nothing new happening, the waiting get a round, or are spares of one that runs undisturbed."""
    far = now + 1e4
    waiting = candidates(seen)
    running = [name for name in (seen.round.members if seen.round else ()) if name in seen.members]
    if not waiting or not is_due(seen, ONE):
        return
    proposes = [name for name in seen.members if isinstance(decide(seen, name, ONE, far), Propose)]
    assert proposes == [waiting[0]]
    for name in running:
        if name not in waiting and not seen.members[name].leaving:
            assert nodes_waiting(seen, name, seen.number, ONE, far) > 0, "it must be asked to stop"


@pytest.mark.parametrize("number", [2, 9])
def test_a_round_that_was_superseded_is_left(number: int):
    assert nodes_waiting(view(MembershipRound(3, ("a",)), a=0), "a", number, ONE, 0.0) == 1
