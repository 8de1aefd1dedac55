"""Find the replicas of one job that live on after a death. Pure functions.

Agents report a loss when replicas of theirs have died and others live, and when living replicas have noticed
that others are gone. Nothing is decided until the dead are known (a node is lost when its lease expires).
Then the survivors go on in their processes by a plan with transition RECOVER, at once and without using the
restart budget, if they have reported that they can and if they are enough.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from adaptdl_elastic.autoscaler.cluster_view import JobView
from adaptdl_elastic.protocol.messages import Groups
from adaptdl_elastic.rendezvous.schema.records import (
    PART_OF_MODEL,
    Failure,
    Leaving,
    Outcome,
    Placement,
    Plan,
    Rescale,
    Transition,
    devices_by_slot,
    slots_of,
)


@dataclass(frozen=True)
class Losses:
    """What is known of deaths in the running generation."""

    generation: int
    # node → slots whose replica was killed by a signal
    dead: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    said: frozenset[str] = frozenset()  # nodes whose replicas wait for another plan
    since: float = float("inf")  # when the first of their reports came
    survivors: tuple[Placement, ...] = ()  # in the order of their ranks
    able: bool = False  # whether they can go on and are enough
    groups: Groups = ()  # by their ranks to come, groups of which one replica each has to live
    beyond: tuple[int, ...] = ()  # ranks that hold a part of the model which no survivor holds


def present(job: JobView, plan: Plan) -> tuple[int, tuple[Placement, ...]]:
    """Return the generation that runs while `plan` is in force, and its placements."""
    if plan.transition is not Transition.INPLACE or begun(job, plan):
        return plan.generation, plan.placements
    base = before(plan)
    return base, tuple(_placed(one) for one in plan.leaving if one.generation == base)


def said_hello(job: JobView, plan: Plan) -> bool:
    """Return True if all replicas of the generation that runs have said hello: they can change in place."""
    generation, members = present(job, plan)
    records = [job.running.get((generation, member.node)) for member in members]
    return all(seen is not None and seen.record.library for seen in records)


def before(plan: Plan) -> int:
    """Return the generation that a change in place or a recovery follows; -1 if there is none.

    A change that was taken back never ran.
    """
    return plan.base if plan.base >= 0 else min((one.generation for one in plan.leaving), default=-1)


def replicas_before(plan: Plan) -> dict[str, int]:
    """Return the replicas by node that still hold the generation that a change in place follows."""
    base = before(plan)
    return {one.node: one.replicas for one in plan.leaving if one.generation == base}


def begun(job: JobView, plan: Plan) -> bool:
    """Return whether replicas have switched to the generation of a change in place.

    Then failures belong to this generation, not to the previous one. A node counts if it runs the generation,
    or has lost replicas in it, even if that has ended there since.
    """
    at = [(plan.generation, placement.node) for placement in plan.placements]
    return any(one in job.running or one in job.broken for one in at)


def unheard(job: JobView, plan: Plan) -> list[Placement]:
    """Return the nodes of the last generation that ran which have not reported how it ended there.

    Return no nodes if the plan's own generation has run, which the node with rank 0 reports. Otherwise its
    nodes are done because the script ended in the earlier generation. That is certain only if every node of
    the earlier generation has reported its end.
    """
    ran = last_that_ran(job, plan)
    if ran == plan.generation:
        return []
    agents = {node: seen.record.agent for (g, node), seen in job.running.items() if g == ran}
    agents |= {one.node: one.agent for one in plan.leaving if one.generation == ran}
    return [Placement(node, 1, agent) for node, agent in agents.items() if (ran, node) not in job.ended]


def failed_before(job: JobView, plan: Plan) -> list[str]:
    """Return the nodes whose replicas failed in the last generation that ran, if it is not the plan's own."""
    ran = last_that_ran(job, plan)
    return [] if ran == plan.generation else failed_until(job, plan, ran)


def failed_until(job: JobView, plan: Plan, generation: int) -> list[str]:
    """Return the nodes whose replicas failed in a generation, or in the one before that others never left.

    The others were told to go on without them, but came to the end of the script first. So they have not
    taken over what the dead had still to do there, such as saving the model as rank 0.
    """
    generations = {generation}
    for (g, node), seen in job.ended.items():
        if g == generation and seen.record.outcome is Outcome.DONE and not seen.record.ran:
            earlier = (r for r, n in job.running if n == node and plan.first <= r < generation)
            generations.add(max(earlier, default=generation))
    bad = (Outcome.FAILED, Outcome.ABORTED)
    there = {node for g, node in job.running if plan.first <= g <= generation}
    # all replicas of a recovery go on from an earlier generation, whether they have formed its own or not
    known = job.ended if plan.transition is Transition.RECOVER else job.running
    return [node for g, node in known if g in generations and node in there and _outcome(job, g, node) in bad]


def last_that_ran(job: JobView, plan: Plan) -> int:
    """Return the newest generation of the plan's run that ran; -1 if none did.

    The plan's own generation has run if the node with rank 0 reports it. After a death that node also tells
    which one ran before: replicas of other nodes may belong to a generation that they never formed, since
    they had finished all epochs.
    """
    first = plan.placements[0].node if plan.placements else ""
    if not first or (plan.generation, first) in job.running:
        return plan.generation
    ran = [(g, node) for g, node in job.running if plan.first <= g < plan.generation]
    recovered = [g for g, node in ran if node == first and plan.transition is Transition.RECOVER]
    return max(recovered or [g for g, _ in ran], default=-1)


def given_up(plan: Plan) -> tuple[Leaving, ...]:
    """Return the replicas of nodes that were silent when the others went on without them.

    It is unknown whether such a node still exists. It is not used until it has reported that it has ended, or
    has registered again.
    """
    if plan.transition is Transition.RECOVER:
        runs = plan.generation
    elif plan.transition is Transition.INPLACE:
        runs = before(plan)
    else:
        return ()  # a node that has not left delays the plan
    placed = {placement.node for placement in plan.placements}
    return tuple(one for one in plan.leaving if one.generation < runs and one.node not in placed)


def inquire(job: JobView, plan: Plan, gone: Iterable[str], least: int) -> Losses:
    """Return the dead and the survivors, given that the nodes in `gone` cannot be reached.

    With fewer than `least` replicas the survivors are not enough.
    """
    generation, members = present(job, plan)
    said = {node: seen for (g, node), seen in job.broken.items() if g == generation}
    away = set(gone)
    dead: dict[str, tuple[int, ...]] = {}
    survivors = []
    ranks: dict[int, int] = {}  # of survivors, in the order of those to come
    after = 0
    for member in members:
        slots, node = slots_of(member), member.node
        first, after = after, after + len(slots)
        lost = said[node].record.lost if node in said else ()
        if (generation, node) in job.ended:
            if died(job, plan, generation, member):
                dead[node] = slots
            continue
        if fallen := tuple(slot for slot in slots if slot in lost):
            dead[node] = fallen
        left = tuple(slot for slot in slots if slot not in lost)
        if left and node not in away and not _never_came(job, plan, generation, node):
            devices = devices_by_slot(member)
            kept = tuple(number for slot in left for number in devices[slot])
            kept = () if kept == left else kept
            survivors.append(Placement(node, len(left), member.agent, left, kept))
            for slot in left:
                ranks[first + slots.index(slot)] = len(ranks)
    waiting = {node: seen for node, seen in said.items() if (generation, node) not in job.ended}
    spec = job.spec.record if job.spec else None
    said_of = [_needed(job, plan, generation, one.node) for one in survivors]
    groups = tuple(dict.fromkeys(group for needed in said_of for group in needed or ()))
    beyond = next((group for group in groups if ranks.keys().isdisjoint(group)), ())
    able = (
        spec is not None
        and spec.rescale is not Rescale.RESTART
        and bool(survivors)
        and sum(one.replicas for one in survivors) >= least
        and len(survivors) >= spec.min_nodes
        and None not in said_of
        and not beyond
    )
    return Losses(
        generation,
        dead,
        frozenset(waiting),
        min((seen.seen for seen in waiting.values()), default=float("inf")),
        tuple(survivors),
        able,
        tuple(tuple(ranks[rank] for rank in group if rank in ranks) for group in groups) if able else (),
        beyond,
    )


def newcomers(job: JobView, plan: Plan, losses: Losses) -> dict[str, Failure]:
    """Return the failures of nodes on which newcomers of a change in place have died."""
    if plan.transition is not Transition.INPLACE or losses.generation != plan.generation:
        return {}
    base, found = before(plan), dict[str, Failure]()
    old = {one.node: slots_of(_placed(one)) for one in plan.leaving if one.generation == base}
    for node, dead in losses.dead.items():
        if set(dead) - set(old.get(node, ())):
            told = [records.get((plan.generation, node)) for records in (job.broken, job.ended)]
            known = (seen.record.failure for seen in told if seen is not None and seen.record.failure)
            found[node] = next(known, Failure(-1, 1, "a newcomer ended"))
    return found


def died(job: JobView, plan: Plan, generation: int, member: Placement) -> bool:
    """Return whether a node's part of a generation ended because its replicas were killed."""
    if _outcome(job, generation, member.node) not in (Outcome.FAILED, Outcome.ABORTED):
        return False
    broken = job.broken.get((generation, member.node))
    if broken is not None and set(slots_of(member)) <= set(broken.record.lost):
        return True
    return _never_came(job, plan, generation, member.node)


def slots_after(member: Placement | None, replicas: int) -> tuple[int, ...]:
    """Return the LOCAL_RANKs of a node's replicas after a planned change in place; (): 0 to replicas - 1.

    Survivors keep theirs, in their order. Newcomers follow, with the lowest that are free.
    """
    kept = () if member is None else slots_of(member)[:replicas]
    free = (slot for slot in range(len(kept) + replicas) if slot not in kept)
    slots = (*kept, *(next(free) for _ in range(replicas - len(kept))))
    return () if slots == tuple(range(replicas)) else slots


def failures(job: JobView, generation: int) -> list[tuple[float, Failure]]:
    """Return the failures of a generation's dead, with the times at which they were reported."""
    return [
        (seen.seen, seen.record.failure)
        for (g, _), seen in job.broken.items()
        if g == generation and seen.record.failure is not None
    ]


def describe(job: JobView, losses: Losses, lost: Iterable[str]) -> str:
    """Return text for users: what has been lost, and what is left."""
    left = sum(one.replicas for one in losses.survivors)
    what = [f"lost {', '.join(lost)}"] if lost else []
    for _, failure in sorted(failures(job, losses.generation), key=lambda item: (item[0], item[1].rank)):
        what.append(f"lost rank {failure.rank} ({_end(failure)})")
    if not what:
        what.append("replicas have lost each other" if not losses.dead else "lost replicas")
    return f"{'; '.join(what)}; {left} {'goes' if left == 1 else 'go'} on"


def describe_beyond(ranks: tuple[int, ...]) -> str:
    """Return text to follow a reason: the copies, lost with `ranks`, without which nothing goes on."""
    if len(ranks) < 2:
        return f"; the last copy {PART_OF_MODEL} is lost (rank {ranks[0]})" if ranks else ""
    copies = "both copies" if len(ranks) == 2 else f"all {len(ranks)} copies"
    named = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    return f"; {copies} {PART_OF_MODEL} are lost (ranks {named})"


def _end(failure: Failure) -> str:
    try:
        return signal.Signals(-failure.exit_code).name
    except ValueError:
        return failure.message or f"exit code {failure.exit_code}"


def _needed(job: JobView, plan: Plan, generation: int, node: str) -> Groups | None:
    """Return the groups of which one rank each has to live for this node's replicas to go on; None: they end.

    Survivors of a change in place are the processes of the previous generation, so its reports count, too,
    unless they name groups: ranks have changed. Replicas that a restart has started have to report it
    themselves.
    """
    earlier = before(plan) if plan.transition is Transition.INPLACE else generation
    heard = [job.running.get((g, node)) for g in (generation, earlier)]
    said, once = (None if seen is None else seen.record.survives for seen in heard)
    if said is not None or once:
        return said
    if plan.transition is Transition.RECOVER:
        return plan.groups
    return () if once is not None or (generation, node) in job.broken else None


def _never_came(job: JobView, plan: Plan, generation: int, node: str) -> bool:
    """Return whether a node has only newcomers, none of which had joined."""
    if plan.transition is not Transition.INPLACE or generation != plan.generation:
        return False
    stays = any(one.node == node and one.generation == before(plan) for one in plan.leaving)
    return not stays and (generation, node) not in job.running and (generation, node) not in job.broken


def _outcome(job: JobView, generation: int, node: str) -> Outcome | None:
    ended = job.ended.get((generation, node))
    return None if ended is None else ended.record.outcome


def _placed(one: Leaving) -> Placement:
    return Placement(one.node, one.replicas, one.agent, one.slots, one.devices)
