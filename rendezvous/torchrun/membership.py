"""Decide which agents are in a round: the pure core of the torchrun plug-in.

Plain torchrun has no coordinator. Every agent keeps a *member* entry in the store (leased), and all agents
see the same *view*. The first of the waiting agents writes the next *round* by compare-and-swap. A round is
immutable: a number and its members, whose order is their rank.

* A member *waits* if its entry says so for the time after the current round, or if it is in no round yet.
* A member is *lagging* if it is in the current round and still runs although others wait: it has to stop its
  workers.
* A member is *missing* if it is in the round and its entry has vanished. It is *gone* after `grace` seconds;
  within them a member whose lease only lapsed (etcd was away) comes back. A member that announced that it
  leaves is gone at once.
* The next round is written when no member lags. It holds the waiting members, those of the previous round
  first and in their order, so that rank 0 stays on its node if possible.

Times are seconds of the caller's monotonic clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field

from pydantic.dataclasses import dataclass as record_dataclass


@record_dataclass(frozen=True)
class Member:
    """One agent's entry in the store."""

    id: str
    host: str
    after: int = 0  # number of the round after which it waits for another
    leaving: bool = False


@record_dataclass(frozen=True)
class MembershipRound:
    """One fixed membership; the order of the members is their rank."""

    number: int
    members: tuple[str, ...]


@record_dataclass(frozen=True)
class Closed:
    """The end of a run.

    Attributes:
        by: id of the agent that ended it.
        ok: whether it ended well.
        held: whether that agent has not left yet.
    """

    by: str
    ok: bool
    held: bool = False


@plain_dataclass(frozen=True)
class MembershipSettings:
    """`--nnodes=MIN:MAX` and the plug-in's options, in seconds."""

    min_nodes: int
    max_nodes: int
    last_call: float = 30.0  # how long the first round waits for more nodes once min_nodes have come
    grace: float = 2.0  # how long a vanished entry may take to come back
    leave_timeout: float = 60.0  # how long a member may take to stop its workers


@plain_dataclass(frozen=True)
class View:
    """The content of the store, and since when some conditions hold."""

    members: Mapping[str, Member] = field(default_factory=dict)
    order: Mapping[str, int] = field(default_factory=dict)  # id → order of arrival
    round: MembershipRound | None = None
    closed: Closed | None = None
    missing_since: Mapping[str, float] = field(default_factory=dict)  # when entries were seen to vanish
    enough_since: float = math.inf  # since when min_nodes wait
    due_since: float = math.inf  # since when another round is due

    @property
    def number(self) -> int:
        """Number of the current round; 0 if there is none."""
        return self.round.number if self.round else 0


@plain_dataclass(frozen=True)
class Enter:
    """Action: enter this round."""

    round: MembershipRound


@plain_dataclass(frozen=True)
class Propose:
    """Action: write this round if the one in the view is still the newest."""

    round: MembershipRound


@plain_dataclass(frozen=True)
class Wait:
    """Action: wait for a change of the view, at most until this time."""

    until: float = math.inf


@plain_dataclass(frozen=True)
class Over:
    """Action: leave, because the run has ended."""

    closed: Closed


def is_waiting(view: View, member: Member) -> bool:
    """Return whether a member wants to be in the next round."""
    if member.leaving:
        return False
    in_round = view.round is not None and member.id in view.round.members
    return not in_round or member.after >= view.number


def gone(view: View, settings: MembershipSettings, now: float) -> set[str]:
    """Return the members of the round that will not come back."""
    found = set()
    for one in view.round.members if view.round else ():
        member = view.members.get(one)
        vanished = member is None and now - view.missing_since.get(one, -math.inf) >= settings.grace
        if vanished or (member is not None and member.leaving):
            found.add(one)
    return found


def lagging(view: View, settings: MembershipSettings, now: float) -> set[str]:
    """Return the members of the round that still have to stop their workers and wait."""
    absent = gone(view, settings, now)
    return {
        one
        for one in (view.round.members if view.round else ())
        if one not in absent and (one not in view.members or not is_waiting(view, view.members[one]))
    }


def candidates(view: View) -> list[str]:
    """Return the waiting members in the order of the next round's ranks."""
    ranks = {one: rank for rank, one in enumerate(view.round.members if view.round else ())}
    waiting = [member.id for member in view.members.values() if is_waiting(view, member)]
    return sorted(waiting, key=lambda one: (ranks.get(one, math.inf), view.order.get(one, 0), one))


def is_due(view: View, settings: MembershipSettings) -> bool:
    """Return whether a waiting member would be in the next round and is not running in this one."""
    members = view.round.members if view.round else ()
    room = len(members) < settings.max_nodes
    return any(room or one in members for one in candidates(view))


def is_enough(view: View, settings: MembershipSettings) -> bool:
    """Return whether enough nodes wait for a round."""
    return len(candidates(view)) >= settings.min_nodes


def is_spare(view: View, me: str, settings: MembershipSettings) -> bool:
    """Return whether this node waits beside a round that is full and runs; it may wait without a limit."""
    if view.round is None or me in view.round.members or len(view.round.members) < settings.max_nodes:
        return False
    return bool(_running(view))


def _running(view: View) -> set[str]:
    """Return the members of the round that neither wait for another one nor leave."""
    members = view.round.members if view.round else ()
    there = {one: view.members[one] for one in members if one in view.members}
    return {one for one, member in there.items() if not member.leaving and not is_waiting(view, member)}


def is_coming(view: View, round_: MembershipRound, settings: MembershipSettings, now: float) -> bool:
    """Return whether a round is still the current one, and every member may still come to it."""
    if view.number != round_.number or view.closed is not None or gone(view, settings, now):
        return False
    return not any(is_waiting(view, view.members[one]) for one in round_.members if one in view.members)


def decide(view: View, me: str, settings: MembershipSettings, now: float) -> Enter | Propose | Wait | Over:
    """Return what a waiting member does next."""
    if view.closed is not None:
        return Over(view.closed)
    mine = view.members.get(me)
    if (
        mine is not None
        and view.round is not None
        and me in view.round.members
        and not is_waiting(view, mine)
    ):
        return Enter(view.round)
    waiting = candidates(view)
    if not waiting or waiting[0] != me or len(waiting) < settings.min_nodes:
        return Wait(_next_gone(view, settings, now))
    patience = view.due_since + settings.leave_timeout
    if lagging(view, settings, now) and now < patience:
        return Wait(min(patience, _next_gone(view, settings, now)))
    first = view.round is None or not any(one in view.members for one in view.round.members)
    last_call = view.enough_since + settings.last_call
    if first and len(waiting) < settings.max_nodes and now < last_call:
        return Wait(last_call)
    return Propose(MembershipRound(view.number + 1, tuple(waiting[: settings.max_nodes])))


def nodes_waiting(view: View, me: str, number: int, settings: MembershipSettings, now: float) -> int:
    """Return the number of waiting nodes that a member of round `number` reports to torch's agent.

    torch's agent restarts its workers if the number is above 0. Members that have left count, too. (torch's
    own handlers count only newcomers, so their runs never get smaller.)
    """
    if view.closed is not None:
        return 0 if view.closed.ok else 1
    if view.round is None:
        return 0
    if view.number != number:
        return 1
    waiting = [one for one in candidates(view) if one != me]
    absent = gone(view, settings, now)
    back = [one for one in waiting if one in view.round.members]
    room = settings.max_nodes - (len(view.round.members) - len(absent))
    newcomers = min(len(waiting) - len(back), max(0, room))
    return len(back) + len(absent) + newcomers


def _next_gone(view: View, settings: MembershipSettings, now: float) -> float:
    ends = [since + settings.grace for since in view.missing_since.values()]
    return min((end for end in ends if end > now), default=math.inf)
