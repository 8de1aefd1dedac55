"""Decide when a node of a cloud ends itself, because nothing is left that could give it back.

Nodes cost money until the autoscaler gives them back. If the machine with etcd and the autoscaler is lost, or
the autoscaler alone is, nodes would be paid for until a person notices. So each node looks regularly whether
it is still accounted for, and leaves after a long uninterrupted silence.

A node is accounted for while an autoscaler holds its lease in the store. Without one it is so while a
coordinator leads and replicas run on the node: that job is in order, and the node is of use until it ends.

A node on which no job makes a step for as long is of no use, also while an autoscaler holds its lease. A job
that has never reported a step is left alone, and so is a node without a replica that the autoscaler keeps.

What must not end a node: a restart of etcd or of the autoscaler, a partition that heals (one look at which
all is well begins the count again), a clock that is set (the clock is monotonic), and a process that did
not run for hours (time counts only as far as looks have confirmed the silence).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

DEFAULT_SECONDS = 3600.0
"""Default of the silence, or of the time without a step, after which a node ends itself."""

LEAST_SECONDS = 600.0
"""The shortest silence that may be chosen: longer than a head needs to boot again."""

INTERVAL_SECONDS = 30.0
"""Seconds between two looks."""

_MOST_INTERVALS = 3.0  # a longer time between two looks counts as so many intervals


@dataclass(frozen=True)
class Look:
    """What one look has shown.

    Attributes:
        trouble: why the store could not be read; "": it was read.
        autoscaler: an autoscaler holds its lease.
        coordinator: a coordinator holds its lease.
        at_work: the newest plan of a job has replicas on this node, and its agent is registered.
        steps: the last reported step of every job on this node; None: one of them has reported none. On a
            node without a replica the autoscaler's decisions to keep it count as steps.
    """

    trouble: str = ""
    autoscaler: bool = False
    coordinator: bool = False
    at_work: bool = False
    steps: tuple[tuple[str, int], ...] | None = None

    @property
    def missing(self) -> str:
        """Return what is missing for this node to be accounted for; "": nothing."""
        if self.trouble:
            return f"the store cannot be read ({self.trouble})"
        if self.autoscaler or (self.coordinator and self.at_work):
            return ""
        if self.coordinator:
            return "the store answers, but no autoscaler has its lease there, and this node has no work"
        return "the store answers, but neither autoscaler nor coordinator has its lease there"


@dataclass(frozen=True)
class Silence:
    """How long nothing has been heard, and how long no step was made.

    Attributes:
        seconds: confirmed seconds without an interruption.
        stalled: confirmed seconds in which no job on this node made a step.
        steps: the steps at the last look that could read them.
        looked: when the last look was taken, in monotonic seconds; None: there was none.
    """

    seconds: float = 0.0
    looked: float | None = None
    stalled: float = 0.0
    steps: tuple[tuple[str, int], ...] | None = None


@dataclass(frozen=True)
class Decision:
    """What follows from a look.

    Attributes:
        silence: what is known after it.
        leave: the node ends itself now.
        line: for the log; "": there is nothing new to say.
    """

    silence: Silence
    leave: bool = False
    line: str = ""


def decide(before: Silence, look: Look, now: float, limit: float, interval: float) -> Decision:
    """Return what follows from a look.

    Args:
        before: what was known before it.
        look: what it has shown.
        now: monotonic seconds.
        limit: the silence, or time without a step, after which the node leaves, in seconds.
        interval: seconds between two looks.
    """
    since = 0.0 if before.looked is None else now - before.looked
    passed = min(max(0.0, since), _MOST_INTERVALS * interval)
    steps = before.steps if look.trouble else look.steps
    stalled = before.stalled + passed if steps is not None and steps == before.steps else 0.0
    so_far = f"no job has made a step on it for {stalled / 60:.0f} min"
    if stalled >= limit:
        return Decision(
            Silence(before.seconds, now, stalled, steps), True, f"this node ends itself: {so_far}"
        )
    if not look.missing:
        again = before.looked is not None and before.seconds > 0
        line = "heard again: this node stays" if again else ""
        if before.stalled < limit / 2 <= stalled:
            line = f"this node ends itself in {(limit - stalled) / 60:.0f} min: {so_far}"
        return Decision(Silence(0.0, now, stalled, steps), line=line)
    seconds = before.seconds + passed
    silence = Silence(seconds, now, stalled, steps)
    so_far = f"nothing has accounted for it for {seconds / 60:.0f} min: {look.missing}"
    if seconds >= limit:
        return Decision(silence, True, f"this node ends itself: {so_far}")
    if before.seconds < limit / 2 <= seconds:
        left = (limit - seconds) / 60
        return Decision(silence, line=f"this node ends itself in {left:.0f} min: {so_far}")
    if before.seconds == 0 < seconds:
        return Decision(
            silence, line=f"{look.missing}; this node ends itself after {limit / 60:.0f} min of that"
        )
    return Decision(silence)


def watch(
    look: Callable[[], Look],
    say: Callable[[str], None],
    clock: Callable[[], float],
    wait: Callable[[float], None],
    limit: float = DEFAULT_SECONDS,
    interval: float = INTERVAL_SECONDS,
) -> str:
    """Look until the node has to leave; return why.

    Args:
        look: takes one look; raises nothing.
        say: called with lines for the log.
        clock: monotonic seconds.
        wait: called with the seconds between two looks.
        limit: the silence, or time without a step, after which the node leaves, in seconds.
        interval: seconds between two looks.
    """
    silence = Silence()
    while True:
        decision = decide(silence, look(), clock(), limit, interval)
        if decision.line:
            say(decision.line)
        if decision.leave:
            return decision.line
        silence = decision.silence
        wait(interval)
