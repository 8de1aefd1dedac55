"""Make the record of what this node holds: pure functions, called by `decisions`.

The record is written whenever it differs from the last one. Writes may coalesce, because the newest record
says all that an earlier one has said of an end, its failure and a switch: see `ends` and `generation`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from adaptdl_elastic.agent.core.states import (
    Action,
    Changing,
    Exit,
    Joining,
    Killing,
    LocalGeneration,
    Recovering,
    State,
    Step,
    Stopping,
    WriteHeld,
)
from adaptdl_elastic.rendezvous.schema.held import MOST_ENDS, Course, GenerationEnd, Held
from adaptdl_elastic.rendezvous.schema.records import Outcome


def report(state: State, actions: list[Action]) -> Step:
    """Return a step with the report of what this node holds now, if that differs from the last report.

    A node that has neither held nor dealt with anything reports nothing.
    """
    before = state.told or Held(state.me.node, state.me.agent)
    found = record_of(state, before)
    if found == before:
        return state, actions
    found = replace(found, sequence=before.sequence + 1)
    at = next((i for i, action in enumerate(actions) if isinstance(action, Exit)), len(actions))
    return replace(state, told=found), [*actions[:at], WriteHeld(found), *actions[at:]]


def record_of(state: State, before: Held) -> Held:
    """Return what this node holds, with the sequence number of the record `before`."""
    found = Held(state.me.node, state.me.agent, before.sequence, state.acted, ends=state.ends)
    held = state.held
    if held is None:
        return found
    return replace(
        found,
        generation=held.generation,
        course=_course(held),
        to=held.course.plan.generation if isinstance(held.course, Changing | Recovering) else -1,
        ready=_newcomers_are_ready(held),
        library=held.library,
        survives=held.survives,
        first_step=held.first_step,
        loss=held.loss,
    )


def _course(held: LocalGeneration) -> Course:
    """Return the course; newcomers that are ended before they have joined are still joining."""
    match held.course, held.end:
        case Joining(), _:
            return Course.JOINING
        case _, Stopping():
            return Course.STOPPING
        case _, Killing():
            return Course.KILLING
        case Changing(), _:
            return Course.CHANGING
        case Recovering(), _:
            return Course.RECOVERING
    return Course.TRAINING


def _newcomers_are_ready(held: LocalGeneration) -> bool:
    match held.course:
        case Joining(until):
            return until == math.inf
        case Changing(newcomers=fresh, until=until):
            return bool(fresh) and until == math.inf
    return False


def ends_of_predecessor(found: Held) -> tuple[GenerationEnd, ...]:
    """Return the ends that another agent of this node has reported; what it held is lost."""
    if found.runs < 0:
        return found.ends
    lost = GenerationEnd(
        found.runs,
        Outcome.LOST,
        ran=True,
        library=found.library,
        survives=found.survives,
        first_step=found.first_step,
        lost=() if found.loss is None else found.loss.lost,
        failure=None if found.loss is None else found.loss.failure,
        agent=found.agent,
        started=found.started,
    )
    return (*found.ends, lost)[-MOST_ENDS:]
