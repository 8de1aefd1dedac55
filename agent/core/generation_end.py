"""Decide what an agent reports when all replicas of its generation have ended."""

from __future__ import annotations

from dataclasses import replace

from adaptdl_elastic.agent.core.states import (
    Changing,
    Ended,
    Joining,
    Killing,
    LocalEnd,
    LocalGeneration,
    Recovering,
    Replica,
    State,
    Step,
    Stopping,
    failure_of,
)
from adaptdl_elastic.protocol.channel import STOPPED
from adaptdl_elastic.rendezvous.schema.held import GenerationEnd
from adaptdl_elastic.rendezvous.schema.records import Failure, Outcome


def report_end(state: State, held: LocalGeneration, now: float) -> Step:
    """Report the end of the held generation, and of one that was to follow it in place."""
    course = held.course
    end = _end(held)
    ends, done = [end], end.outcome is Outcome.DONE
    if isinstance(course, Changing | Recovering) and len(course.plan.ranks(state.me.node)):
        to = course.plan.generation
        ran = isinstance(course, Changing) and bool(course.switched)
        after = replace(end, generation=to, ran=ran, first_step=None, lost=held.dead_in(to))
        if course.switched or isinstance(course, Recovering):  # the failure happened in the new generation
            left = replace(end, outcome=Outcome.STOPPED, exit_code=0, failure=None, unsaved="")
            ends = [left, after]
        else:
            outcome = Outcome.DONE if done else Outcome.ABORTED
            ends = [end, replace(after, outcome=outcome, failure=None)]
    elif isinstance(course, Changing | Recovering) and done and not _over_before(held, course):
        # these replicas left; those of other nodes go on
        ends = [replace(end, outcome=Outcome.STOPPED)]
    last = LocalEnd(ends[-1].outcome, now, end.unsaved)
    state = replace(state, held=None, last=last).add_ends(*ends)
    return state, [Ended(end) for end in ends]


def _over_before(held: LocalGeneration, change: Changing | Recovering) -> bool:
    """Return whether replicas that a change was to leave out came to the end of their script instead."""
    return not change.switched and all(replica.finished for replica in held.replicas)


def _end(held: LocalGeneration) -> GenerationEnd:
    """Return how the held generation ended on this node."""
    end = held.end
    failure = end.failure if isinstance(end, Killing) else None
    if isinstance(held.course, Joining):
        # newcomers that did not join: the others go on, so nothing is lost
        outcome, code = Outcome.ABORTED, 0
    elif failure is not None:
        failure = _root_cause(held, failure)
        outcome, code = Outcome.FAILED, failure.exit_code
    elif isinstance(end, Killing):
        outcome, code = Outcome.ABORTED, -9
    elif held.lost:  # deaths for which no generation without the dead was planned
        failure = _failure(held.lost[0])
        outcome, code = Outcome.FAILED, failure.exit_code
    elif any(r.stopped or (r.exit is not None and r.exit.exit_code) for r in held.replicas):
        outcome, code = Outcome.STOPPED, STOPPED
    else:
        outcome, code = Outcome.DONE, 0
    found = held.end_as(outcome, code, failure, _unsaved(held, failure))
    return replace(found, ran=not isinstance(held.course, Joining))


def _unsaved(held: LocalGeneration, failure: Failure | None) -> str:
    """Return why rank 0 could not save when it was asked to stop; "" if it could, or is elsewhere."""
    first = next((r for r in held.replicas if r.rank == 0 and r.library), None)
    if first is None or first.stopping or (first.exit is not None and first.exit.exit_code in (0, STOPPED)):
        return "" if first is None else first.unsaved
    match held.end:
        case Stopping() | Killing(asked=True) if failure is not None:
            return f"replica {failure.rank} failed: {failure.message}"
        case Killing(why, asked=True):
            return why
    return ""


def _root_cause(held: LocalGeneration, first: Failure) -> Failure:
    """Return the failure that caused the others: the earliest one that is more than the loss of a peer.

    `first` belongs to the replica whose exit was reported first. Another replica may have raised its error
    earlier, and been killed before it could exit.
    """
    others = [
        _failure(replica)
        for replica in held.replicas
        if replica.exit is not None
        and replica.exit.exit_code
        and not replica.stopped
        and replica.rank != first.rank
        and (replica.exit.evidence.raised is not None or not replica.exit.signal_arrived)
    ]
    return min((first, *others), key=lambda failure: (failure.lost_peer, failure.time))


def _failure(replica: Replica) -> Failure:
    assert replica.exit is not None
    failure, evidence = failure_of(replica.rank, replica.exit), replica.exit.evidence
    killed = evidence.raised is not None and failure.exit_code < 0
    return replace(failure, exit_code=evidence.exit_code) if killed else failure
