"""Find replicas that hang: pure functions, called by `decisions`.

Every replica that uses the library answers a `ping` from a thread of its own, whatever its script does. So a
replica that does not answer is stopped, or some code never releases its interpreter lock. It is killed, and
the others survive its death as usual. A replica is not asked before its first step, while data and models are
loaded; a newcomer is asked as soon as it has joined, because the others then wait for it in every step.

With `--hang-timeout`, a script whose replicas all answer but take no step is taken to hang, too. The library
finds the replica that the others wait for (`torch/_runtime/hang_watch.py`), and that replica asks its agent
to kill it. If the library cannot tell, all replicas are killed, after a delay in which agents of other nodes
may find the one that does not answer.
"""

from __future__ import annotations

from dataclasses import replace

from adaptdl_elastic.agent.core.states import Action, Kill, LocalGeneration, Phase, Ping, Replica, Say, State
from adaptdl_elastic.rendezvous.schema.records import Failure

SILENCE = 60.0  # seconds without an answer after which a replica hangs, if --hang-timeout is not given
MOMENT = 5.0  # seconds in which agents of other nodes may find a replica that does not answer

Step = tuple[State, list[Action]]


def limit(state: State) -> float:
    """Return the seconds that a replica may be silent; 0: without a limit."""
    return SILENCE if state.me.hang_timeout is None else state.me.hang_timeout


def due(state: State, held: LocalGeneration) -> list[float]:
    """Return the times at which to check again."""
    half = limit(state) / 2
    if half <= 0 or held.phase is not Phase.RUNNING:
        return []
    times = [
        half + (r.heard if r.pinged is None else r.pinged) for r in _watched(held) if r.heard is not None
    ]
    if state.me.hang_timeout and held.loss_reported < held.generation and not held.recovering:
        patience = state.me.hang_timeout + MOMENT
        times += [
            r.stepped + patience
            for r in _watched(held)
            if r.stepped is not None and r.pinged is None and not r.epochs_finished
        ]
    return times


def hang_message(state: State) -> str:
    """Return the message about a replica that was killed because it hangs."""
    return f"does not answer for {limit(state):g} s: it hangs, or is stopped (--hang-timeout)"


def watch(state: State, held: LocalGeneration, now: float) -> Step | None:
    """Ping replicas that have been silent, kill those that do not answer; None: nothing to do now."""
    half = limit(state) / 2
    if half <= 0:
        return None
    silent = [r for r in _watched(held) if r.heard is not None and now >= r.heard + half]
    for replica in silent:
        if replica.pinged is not None and now >= replica.pinged + half:
            why = hang_message(state)
            held = _mark(held, replica, hanging=True)
            action = Kill((replica.local_rank,), why)
            return replace(state, held=held), [Say(f"replica {replica.rank} {why}"), action]
    asked = [replica for replica in silent if replica.pinged is None]
    if asked:
        for replica in asked:
            held = _mark(held, replica, pinged=now)
        return replace(state, held=held), [Ping(tuple(r.local_rank for r in asked))]
    patience = (state.me.hang_timeout or 0.0) + MOMENT
    if not state.me.hang_timeout or held.loss_reported >= held.generation or held.recovering:
        return None
    for replica in _watched(held):
        if replica.stepped is None or replica.pinged is not None or replica.epochs_finished:
            continue
        if replica.heard == replica.stepped:
            continue  # it is unknown whether it answers: this agent itself may have been stopped for a while
        if now >= replica.stepped + patience:
            message = f"no step for {patience:g} s after step {replica.step}: it hangs (--hang-timeout)"
            held = replace(held, failure=Failure(replica.rank, -9, message))
            return replace(state, held=held), [Say(f"replica {replica.rank}: {message}")]
    return None


def kill_reported(
    state: State, held: LocalGeneration, local_rank: int, reason: str
) -> tuple[LocalGeneration, list[Action]]:
    """Kill a replica that reports that its script hangs, if `--hang-timeout` is given."""
    replica = next((r for r in _watched(held) if r.local_rank == local_rank), None)
    if replica is None or not state.me.hang_timeout:
        return held, []
    if held.phase is not Phase.RUNNING or replica.epochs_finished:  # it may write a checkpoint, or evaluate
        return held, []
    held = _mark(held, replica, hanging=True, hang_reason=reason)
    return held, [Say(f"killed: {reason} (--hang-timeout)"), Kill((local_rank,), reason)]


def _watched(held: LocalGeneration) -> list[Replica]:
    return [r for r in held.replicas if r.library and r.exit_code is None and not r.hanging]


def _mark(held: LocalGeneration, one: Replica, **fields: object) -> LocalGeneration:
    changed = (replace(r, **fields) if r.local_rank == one.local_rank else r for r in held.replicas)  # type: ignore[arg-type]
    return replace(held, replicas=tuple(changed))
