"""Lead the rounds in which all replicas agree on a boundary, on rank 0.

`consensus` describes what a round is. This module decides when one is opened, for which commands, and at
which boundary they are carried out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from adaptdl_elastic import env
from adaptdl_elastic._session import Session
from adaptdl_elastic._values import Command, Position
from adaptdl_elastic.reducer import PeerFinishedError

KEPT = ("stop", "checkpoint")
"""Kinds of commands that are repeated after a replica has died."""

_POLLED = "polled_in"  # key of a command that a poll has returned: the generation
_POLL_INTERVAL = 0.2  # seconds between two polls for a better batch size


class Member(Protocol):
    """Define what leading the rounds needs of rank 0's own `consensus`."""

    session: Session
    started: bool
    between: bool
    """Whether the connections of the old generation are closed, and the new ones not yet open."""
    polls: list[Callable[[], Command | None]]
    """Functions that return a command where one is due."""
    clock: Callable[[], float]
    """Monotonic seconds."""

    @property
    def finished(self) -> PeerFinishedError | None:
        """The error of a replica that has ended regularly, if one has."""

    def generation_of_round(self) -> int | None:
        """Return the generation in which a round may be opened now; None between two generations."""

    def tell(self, rank: int, message: Any) -> None:
        """Send a control message to a replica, this one included."""


class RoundCoordinator:
    """Open one round at a time, on rank 0, for all commands that were requested since the last one."""

    def __init__(self, control: Member) -> None:
        self._control = control
        self._number = 0
        self._wanted: list[Command] = []
        self.running: list[Command] | None = None  # commands of the open round
        self._ready: dict[int, Position] = {}
        self._executed: set[int] = set()
        self._next_save: float | None = None
        self._next_poll = 0.0

    def wait(self) -> float | None:
        """Return the seconds until the next timed action; None if there is none. At most 1."""
        control = self._control
        if control.session.rank != 0 or not control.started:
            return None
        now = control.clock()
        if self._next_save is None and env.checkpoint_path():
            interval = env.checkpoint_interval()
            self._next_save = now + interval if interval else float("inf")
        dues = [] if self._next_save is None else [self._next_save]
        if control.polls:
            dues.append(self._next_poll)
        left = min(dues, default=float("inf")) - now
        return None if left == float("inf") else min(max(left, 0.0), 1.0)

    def on_event(self, kind: str, sender: int, body: Any) -> None:
        """Handle a request, a replica's message about the open round, a new generation, or a clock tick."""
        if kind == "want":
            self._want(body)
        elif kind == "renew":
            self._control.between = False  # here, so that no earlier request opens a round before `renew`
            if body:  # the commands of the open round were not carried out
                both = (*(self.running or ()), *self._wanted)
                self._wanted = [c for c in both if c["kind"] in KEPT]
            self.running = None
            self._number += 1  # late messages of the old round are ignored
        elif kind == "ready" and body[0] == self._number:
            self._ready[sender] = tuple(body[1])
            self._decide()
        elif kind == "finished" and self._control.finished is not None:  # not in an earlier generation
            self._dismiss()
        elif kind == "executed" and body[0] == self._number:
            self._executed.add(sender)
            if len(self._executed) == self._control.session.replicas:
                self.running = None
        self._tick()
        control = self._control
        if self.running is None and self._wanted and not control.between and control.finished is None:
            self._open()

    def _dismiss(self) -> None:
        """Drop the open round, because a replica has ended regularly and may not have answered."""
        if self.running is not None and len(self._ready) < self._control.session.replicas:
            for rank in range(self._control.session.replicas):
                self._control.tell(rank, ("dismiss", self._number, None))
            self.running = None

    def _want(self, command: Command) -> None:
        same = [c for c in (*self._wanted, *(self.running or ())) if _covers(c, command)]
        if not same:
            self._wanted.append(command)

    def _tick(self) -> None:
        control, now = self._control, self._control.clock()
        if self._next_save is not None and now >= self._next_save:
            self._next_save = now + env.checkpoint_interval()
            self._want({"kind": "checkpoint"})
        if control.polls and now >= self._next_poll:
            self._next_poll = now + _POLL_INTERVAL
            generation = control.generation_of_round()
            for poll in list(control.polls):
                command = poll()
                if command is not None:
                    self._want({**command, _POLLED: generation})

    def _open(self) -> None:
        generation = self._control.generation_of_round()
        if generation is None:
            return
        # what pays in one generation may not in the next, whose newcomers may not know the loader yet
        wanted = [c for c in self._wanted if c.get(_POLLED, generation) == generation]
        self._wanted = []
        if not wanted:
            return
        self._number += 1
        self.running = wanted
        self._ready, self._executed = {}, set()
        for rank in range(self._control.session.replicas):
            self._control.tell(rank, ("prepare", self._number, generation))

    def _decide(self) -> None:
        if len(self._ready) < self._control.session.replicas:
            return
        after = max(self._ready.values())
        for rank in range(self._control.session.replicas):
            self._control.tell(rank, ("decide", self._number, (after, self.running)))


def _covers(known: Command, new: Command) -> bool:
    """Return whether carrying out `known` makes `new` unnecessary."""
    if known["kind"] != new["kind"]:
        return False
    return known["kind"] == "stop" or known == new
