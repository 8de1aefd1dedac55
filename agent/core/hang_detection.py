"""Which replica hangs: pure, like `decisions`, which calls it.

Every replica with the library answers a `ping` from a thread of its own, whatever its script does. So one
that does not answer is stopped, or its interpreter is held by something that does not let go: it is killed,
and the others survive its death like any other. Before its first step, while data are loaded and models
made, nobody is asked; a newcomer is from when it has joined the others, who wait for its part of every step
from then on. A script whose replicas all answer, but take no step
(`--hang-timeout`), waits for something that nobody can tell: all of them are killed, after a moment in
which the agents of other nodes may find the culprit there.
"""

from __future__ import annotations

from dataclasses import replace

from adaptdl_elastic.agent.core.states import Action, Kill, LocalGeneration, Phase, Ping, Replica, Say, State
from adaptdl_elastic.rendezvous.schema.records import Failure

SILENCE = 60.0  # seconds without an answer after which a replica is taken to hang, without --hang-timeout
MOMENT = 5.0  # seconds for the agents of other nodes to find who hangs there

Step = tuple[State, list[Action]]


def limit(state: State) -> float:
    """Seconds that a replica may be silent; 0: for ever."""
    return SILENCE if state.me.hang_timeout is None else state.me.hang_timeout


def due(state: State, held: LocalGeneration) -> list[float]:
    """When to look next."""
    half = limit(state) / 2
    if half <= 0 or held.phase is not Phase.RUNNING:
        return []
    times = [
        half + (r.heard if r.pinged is None else r.pinged) for r in _watched(held) if r.heard is not None
    ]
    if state.me.hang_timeout and held.broken < held.generation and not held.recovering:
        patience = state.me.hang_timeout + MOMENT
        times += [
            r.stepped + patience
            for r in _watched(held)
            if r.stepped is not None and r.pinged is None and not r.over
        ]
    return times


def told(state: State) -> str:
    """What is said of a replica that was killed because it hangs."""
    return f"does not answer for {limit(state):g} s: it hangs, or is stopped (--hang-timeout)"


def watch(state: State, held: LocalGeneration, now: float) -> Step | None:
    """Ask who has been silent for long, kill who does not answer; None: there is nothing to do now."""
    half = limit(state) / 2
    if half <= 0:
        return None
    silent = [r for r in _watched(held) if r.heard is not None and now >= r.heard + half]
    for replica in silent:
        if replica.pinged is not None and now >= replica.pinged + half:
            why = told(state)
            held = _mark(held, replica, hanging=True)
            action = Kill((replica.local_rank,), why)
            return replace(state, held=held), [Say(f"replica {replica.rank} {why}"), action]
    asked = [replica for replica in silent if replica.pinged is None]
    if asked:
        for replica in asked:
            held = _mark(held, replica, pinged=now)
        return replace(state, held=held), [Ping(tuple(r.local_rank for r in asked))]
    patience = (state.me.hang_timeout or 0.0) + MOMENT
    if not state.me.hang_timeout or held.broken >= held.generation or held.recovering:
        return None
    for replica in _watched(held):
        if replica.stepped is None or replica.pinged is not None or replica.over:
            continue
        if replica.heard == replica.stepped:
            continue  # whether it answers is not known yet: we may have been stopped ourselves
        if now >= replica.stepped + patience:
            message = f"no step for {patience:g} s after step {replica.step}: it hangs (--hang-timeout)"
            held = replace(held, failure=Failure(replica.rank, -9, message))
            return replace(state, held=held), [Say(f"replica {replica.rank}: {message}")]
    return None


def _watched(held: LocalGeneration) -> list[Replica]:
    return [r for r in held.replicas if r.library and r.exit_code is None and not r.hanging]


def _mark(held: LocalGeneration, one: Replica, **fields: object) -> LocalGeneration:
    changed = (replace(r, **fields) if r.local_rank == one.local_rank else r for r in held.replicas)  # type: ignore[arg-type]
    return replace(held, replicas=tuple(changed))
