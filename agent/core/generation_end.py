"""Decide what an agent reports when all replicas of its generation have ended."""

from __future__ import annotations

from dataclasses import replace

from adaptdl_elastic.agent.core.states import (
    Action,
    AgentIdentity,
    LocalGeneration,
    Phase,
    Replica,
    State,
    StateChange,
    WriteEnded,
    failure_of,
)
from adaptdl_elastic.protocol.channel import STOPPED
from adaptdl_elastic.rendezvous.schema.records import EndedRecord, Failure, Outcome


def report_end(state: State, held: LocalGeneration, now: float) -> tuple[State, list[Action]]:
    """Report the end of the held generation, and of one that was to follow it in place."""
    record, change = _ended(state.me, held), held.change
    records = [record]
    if change is not None and len(change.plan.ranks(state.me.node)):
        after = replace(record, generation=change.plan.generation)
        if change.switched or held.recovering:  # the failure happened in the new generation
            records = [EndedRecord(state.me.node, held.generation, Outcome.STOPPED, 0), after]
        else:
            outcome = Outcome.DONE if record.outcome is Outcome.DONE else Outcome.ABORTED
            records = [record, replace(after, outcome=outcome, failure=None)]
    elif change is not None and record.outcome is Outcome.DONE and not _over_before(held, change):
        # these replicas left; those of other nodes go on
        records = [replace(record, outcome=Outcome.STOPPED)]
    ended = {**state.ended, **{(r.generation, r.node): r.outcome for r in records}}
    acted = max(state.acted, *(r.generation for r in records))
    last = records[-1].outcome
    state = replace(
        state, held=None, ended=ended, acted=acted, outcome=last, outcome_at=now, unsaved=record.unsaved
    )
    return state, [WriteEnded(r) for r in records]


def _over_before(held: LocalGeneration, change: StateChange) -> bool:
    """Return whether replicas that a change was to leave out came to the end of their script instead."""
    return not change.switched and all(replica.finished for replica in held.replicas)


def _ended(me: AgentIdentity, held: LocalGeneration) -> EndedRecord:
    """Return how the held generation ended on this node."""
    failure = held.failure
    if held.joining:
        # newcomers that did not join: the others go on, so nothing is lost
        outcome, code = Outcome.ABORTED, 0
    elif held.failure is not None:
        failure = _root_cause(held, held.failure)
        outcome, code = Outcome.FAILED, failure.exit_code
    elif held.phase is Phase.KILLING:
        outcome, code = Outcome.ABORTED, -9
    elif held.lost:  # deaths for which no generation without the dead was planned
        first = held.lost[0]
        outcome, code = Outcome.FAILED, first.exit_code or 0
        failure = _failure(first)
    elif any(r.exit_code or r.stopped for r in held.replicas):
        outcome, code = Outcome.STOPPED, STOPPED
    else:
        outcome, code = Outcome.DONE, 0
    return EndedRecord(me.node, held.generation, outcome, code, failure, unsaved=_unsaved(held, failure))


def _unsaved(held: LocalGeneration, failure: Failure | None) -> str:
    """Return why rank 0 could not save when it was asked to stop; "" if it could, or is elsewhere."""
    first = next((r for r in held.replicas if r.rank == 0 and r.library), None)
    if first is None or first.stopping or first.exit_code in (0, STOPPED):
        return "" if first is None else first.unsaved
    if failure is not None and (held.killed or held.phase is Phase.STOPPING):
        return f"replica {failure.rank} failed: {failure.message}"
    return held.killed


def _root_cause(held: LocalGeneration, first: Failure) -> Failure:
    """Return the failure that caused the others: the earliest one that is more than the loss of a peer.

    `first` belongs to the replica whose exit was reported first. Another replica may have raised its error
    earlier, and been killed before it could exit.
    """
    others = [
        _failure(replica)
        for replica in held.replicas
        if replica.exit_code
        and not replica.stopped
        and replica.rank != first.rank
        and (replica.evidence.raised is not None or replica.unsignalled)
    ]
    return min((first, *others), key=lambda failure: (failure.lost_peer, failure.time))


def _failure(replica: Replica) -> Failure:
    evidence, code = replica.evidence, replica.exit_code or 0
    if evidence.raised is not None and code < 0:
        code = evidence.exit_code
    return failure_of(replica.rank, code, replica.message, replica.exited, evidence)
