"""Find replicas that hang: pure functions, called by `decisions`.

Every replica that uses the library answers a `ping` from a thread of its own, whatever its script does. So a
replica that does not answer is stopped, or some code never releases its interpreter lock. It is killed, and
the others survive its death as usual. Each `Tick` looks for such replicas. A replica is not asked before its
first step, while data and models are loaded; a newcomer is asked as soon as it has joined, because the others
then wait for it in every step.

With `--hang-timeout`, a script whose replicas all answer but take no step is taken to hang, too. The library
finds the replica that the others wait for (`torch/_runtime/hang_watch.py`), and that replica asks its agent
to kill it. If the library cannot tell, all replicas are killed, after a delay in which agents of other nodes
may find the one that does not answer.
"""

from __future__ import annotations

from dataclasses import replace

from adaptdl_elastic.agent.core.states import (
    Action,
    Kill,
    LocalGeneration,
    Ping,
    Recovering,
    Replica,
    Say,
    State,
    Step,
)
from adaptdl_elastic.rendezvous.schema.records import Failure

SILENCE = 60.0  # seconds without an answer after which a replica hangs, if --hang-timeout is not given
MOMENT = 5.0  # seconds in which agents of other nodes may find a replica that does not answer


def _limit(state: State) -> float:
    """Return the seconds that a replica may be silent; 0: without a limit."""
    return SILENCE if state.me.hang_timeout is None else state.me.hang_timeout


def due(state: State, held: LocalGeneration) -> list[float]:
    """Return the times at which to check again."""
    half = _limit(state) / 2
    times = [
        half + (r.heard if r.pinged is None else r.pinged)
        for r in _watched(held)
        if r.heard is not None and half > 0
    ]
    return times + [stepped + _patience(state) for _, stepped in _stepping(state, held)]


def watch(state: State, now: float) -> Step:
    """Ping replicas that have been silent, and kill those that do not answer, or take no step."""
    half, held = _limit(state) / 2, state.held
    if held is None or held.end is not None or half <= 0:
        return state, []
    actions: list[Action] = []
    silent = [r for r in _watched(held) if r.heard is not None and now >= r.heard + half]
    for replica in silent:
        if replica.pinged is not None and now >= replica.pinged + half:
            why = f"does not answer for {_limit(state):g} s: it hangs, or is stopped (--hang-timeout)"
            held = held.update(replica.local_rank, hanging=why)
            actions += [Say(f"replica {replica.rank} {why}"), Kill((replica.local_rank,), why)]
    asked = tuple(replica.local_rank for replica in silent if replica.pinged is None)
    for local_rank in asked:
        held = held.update(local_rank, pinged=now)
    if asked:
        actions.append(Ping(asked))
    patience = _patience(state)
    for replica, stepped in _stepping(state, held):
        # else it is unknown whether it answers: this agent itself may have been stopped for a while
        if replica.heard != stepped and now >= stepped + patience:
            message = f"no step for {patience:g} s after step {replica.step}: it hangs (--hang-timeout)"
            held = held.fail(Failure(replica.rank, -9, message))
            actions.append(Say(f"replica {replica.rank}: {message}"))
            break
    return replace(state, held=held), actions


def kill_reported(state: State, held: LocalGeneration, local_rank: int, reason: str) -> Step:
    """Kill a replica that reports that its script hangs, if `--hang-timeout` is given."""
    replica = next((r for r in _watched(held) if r.local_rank == local_rank), None)
    if replica is None or not state.me.hang_timeout:
        return state, []
    if held.end is not None or replica.epochs_finished:  # it may write a checkpoint, or evaluate
        return state, []
    held = held.update(local_rank, hanging=reason)
    return replace(state, held=held), [Say(f"killed: {reason} (--hang-timeout)"), Kill((local_rank,), reason)]


def _patience(state: State) -> float:
    """Return the seconds that replicas which all answer may go without a step."""
    return (state.me.hang_timeout or 0.0) + MOMENT


def _watched(held: LocalGeneration) -> list[Replica]:
    return [r for r in held.replicas if r.library and r.exit is None and not r.hanging]


def _stepping(state: State, held: LocalGeneration) -> list[tuple[Replica, float]]:
    """Return the replicas that are to take steps, as far as they answer, and when each took its newest."""
    waiting = held.lost_in >= held.generation or isinstance(held.course, Recovering)
    if not state.me.hang_timeout or waiting:
        return []
    return [
        (r, r.stepped)
        for r in _watched(held)
        if r.stepped is not None and r.pinged is None and not r.epochs_finished
    ]
