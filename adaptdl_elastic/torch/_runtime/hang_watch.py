"""Find the replica that all others wait for without end.

The problem. If one replica hangs, the others wait for it: in the gradients' all-reduce, in a collective, at
the end of a loop. All of them look alike from outside, and threads of all of them still answer.

What is done. When rank 0 has not moved on for some time, it asks every replica, as a control message, where
it is: epoch, data loop, sample and stage of the step (`step_clock`), and for how long. A thread of the
library answers, whatever the script does. The replica that is furthest behind is the one that hangs: whoever
waits for another replica has come as far as that replica or further. A replica that does not answer is
stopped, or in code that never releases the interpreter's lock.

The replica is named with its Python stack. With `--hang-timeout` it is also told, and asks its agent to kill
it, so that the others can go on without it.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from adaptdl_elastic import _frames, env
from adaptdl_elastic._explained import see
from adaptdl_elastic._session import Session
from adaptdl_elastic._values import Command
from adaptdl_elastic.protocol.messages import Hanging
from adaptdl_elastic.torch._runtime.position import script_position
from adaptdl_elastic.torch._runtime.step_clock import DESCRIPTIONS, Stage, StepClock

logger = logging.getLogger(__name__)

PATIENCE = 20.0
"""Seconds without progress after which a replica is named; half of `--hang-timeout` if that is less."""

_ASK_AGAIN = 1.0
"""Seconds between two questions."""

_SILENT = 6.0
"""Seconds without an answer after which a replica counts as one that does not answer."""

_NO_INDEX = 1 << 62
"""Sample index of a replica that is behind the data loop."""

_WAITS_IN = ("/torch/distributed/", "/adaptdl_elastic/reducer.py", "/adaptdl_elastic/collective.py")
"""Parts of file names: a thread in these files waits for other replicas."""

Place = tuple[int, ...]
"""Epoch, data loop, sample, averaged backward passes of its batch, stage: it grows while a script runs."""


class Answer(NamedTuple):
    """Hold a replica's answer: where it is, and whether it waits for others."""

    place: Place
    still: float  # seconds since it has last moved on
    waits: bool  # whether its main thread waits in a collective
    where: str  # description of the place
    host: str
    stack: str  # of the main thread, the innermost call last


def hanging(answers: Mapping[int, Answer], replicas: int, patience: float) -> list[int]:
    """Return the ranks that the others wait for; empty if that cannot be told.

    Args:
        answers: Answer of each replica that has answered, by rank.
        replicas: Number of replicas.
        patience: Seconds that a replica must have been at one place.
    """
    silent = [rank for rank in range(replicas) if rank not in answers]
    if silent:
        return silent
    least = min(answer.place for answer in answers.values())
    behind = [rank for rank in sorted(answers) if answers[rank].place == least]
    if len(behind) > 1:  # of those at the same place, the others wait for one that does not wait itself
        behind = [rank for rank in behind if not answers[rank].waits]
    if len(behind) == replicas or any(answers[rank].still < patience for rank in behind):
        return []
    return behind


def left_before(rank: int, answers: Mapping[int, Answer]) -> list[int]:
    """Return the replicas that left a data loop at another batch: `rank` waits for their gradients in it."""
    answer = answers.get(rank)
    if answer is None or answer.place[2] == _NO_INDEX or answer.place[4] != Stage.GRADIENTS:
        return []
    in_loop = answer.place[:2]
    return [
        other
        for other, one in sorted(answers.items())
        if one.place[:2] > in_loop or (one.place[:2] == in_loop and one.place[2] == _NO_INDEX)
    ]


class HangWatch:
    """Answer rank 0's questions; on rank 0, ask them. One object per session."""

    def __init__(self, session: Session, clock: StepClock, now: Callable[[], float] = time.monotonic) -> None:
        self._session, self._clock, self._now = session, clock, now
        timeout = env.hang_timeout()
        self._timeout = timeout
        self._patience = PATIENCE if timeout is None else min(PATIENCE, timeout / 2)
        self._host = socket.gethostname()
        # on rank 0
        self._number = 0  # of the present episode without progress
        self._asked_at: float | None = None  # when the episode's first question was asked
        self._again_at = 0.0
        self._answers: dict[int, tuple[float, Answer]] = {}
        self._named: list[int] = []
        self._told: set[int] = set()
        consensus = session.consensus
        consensus.listen("where are you", self._on_question)
        consensus.listen("here", self._on_answer)
        consensus.listen("you hang", self._on_verdict)
        consensus.polls.append(self.poll)
        consensus.poll_soon()

    # -- every replica -----------------------------------------------------------------------------

    def _place(self) -> Place:
        state, stage = script_position(), self._clock.stage
        if not state.looping:
            return state.finished, state.entered, _NO_INDEX, 0, 0
        return state.finished, state.entered, state.index, self._clock.passes, int(stage)

    def _where(self) -> str:
        state = script_position()
        if not state.looping:
            return "between data loops"
        return DESCRIPTIONS[self._clock.stage]

    def _on_question(self, sender: int, number: int, body: Any) -> None:
        """Answer rank 0. Runs in the thread that receives control messages."""
        session = self._session
        stack, files = _frames.main_thread_stack()
        waits = any(part in file for file in files for part in _WAITS_IN)
        waits |= self._clock.stage is Stage.GRADIENTS
        answer = [list(self._place()), self._now() - self._clock.changed, waits, self._where(), self._host]
        if session.reducer is not None:
            session.reducer.send_control(0, ("here", number, [*answer, stack]))

    def _on_verdict(self, sender: int, number: int, body: Any) -> None:
        """Ask the agent to kill this replica, which hangs."""
        generation, reason = body
        if generation == self._session.generation:
            self._session.send(Hanging(str(reason)))

    # -- rank 0 ------------------------------------------------------------------------------------

    def poll(self) -> Command | None:
        """Ask all replicas where they are if rank 0 makes no progress. Runs in the control thread."""
        session, now = self._session, self._now()
        reducer = session.reducer
        still = now - self._clock.changed
        watched = reducer is not None and session.replicas > 1 and session.last_step_time is not None
        consensus = session.consensus
        elsewhere = consensus.loops_over or consensus.between or consensus.saving or session.recovery.waiting
        if not watched or still < self._patience or elsewhere:
            self._end()
            return None
        assert reducer is not None
        if self._asked_at is None:
            self._number += 1
            self._asked_at, self._again_at, self._answers = now, now, {}
        if now >= self._again_at:
            self._again_at = now + _ASK_AGAIN
            for rank in range(session.replicas):
                reducer.send_control(rank, ("where are you", self._number, None))
        self._judge(now)
        return None

    def _on_answer(self, sender: int, number: int, body: Any) -> None:
        if number == self._number:
            place, still, waits, where, host, stack = body
            answer = Answer(tuple(place), float(still), bool(waits), str(where), str(host), str(stack))
            self._answers = {**self._answers, sender: (self._now(), answer)}

    def _judge(self, now: float) -> None:
        assert self._asked_at is not None
        replicas = self._session.replicas
        fresh = {rank: answer for rank, (at, answer) in self._answers.items() if now - at < _SILENT}
        if len(fresh) < replicas and now - self._asked_at < _SILENT:
            return  # some have not had the time to answer
        found = hanging(fresh, replicas, self._patience)
        if found != self._named:
            self._say(found, fresh)
        for rank in found:
            answer, timeout = fresh.get(rank), self._timeout
            if answer is not None and timeout and answer.still >= timeout and rank not in self._told:
                self._told.add(rank)
                self._tell(rank, answer)

    def _say(self, found: list[int], answers: Mapping[int, Answer]) -> None:
        """Name the replicas `found`, and withdraw what was said before."""
        session = self._session
        for rank in self._named:
            session.metrics.report_problem(_about(rank), None, every_time=True)
        self._named = found
        for rank in found:
            answer = answers.get(rank)
            message = describe(rank, answer, left_before(rank, answers))
            session.metrics.report_problem(_about(rank), message, every_time=True)
            host, stack = (answer.host, answer.stack) if answer else ("", "")
            session.emit("hang", rank=rank, host=host, message=message, stack=stack, step=session.step)
            if stack:
                logger.warning("replica %d is at (innermost call last):\n%s", rank, stack)

    def _tell(self, rank: int, answer: Answer) -> None:
        session = self._session
        if session.reducer is not None:
            body = [session.generation, describe(rank, answer)]
            session.reducer.send_control(rank, ("you hang", self._number, body))

    def _end(self) -> None:
        if self._asked_at is not None:
            self._asked_at, self._answers, self._told = None, {}, set()
            self._say([], {})


def describe(rank: int, answer: Answer | None, left: Sequence[int] = ()) -> str:
    """Return what is known about a replica that hangs.

    Args:
        rank: The replica.
        answer: Its answer, if it has answered.
        left: Replicas that have left its data loop.
    """
    if answer is None:
        return (
            f"the others wait for replica {rank}, which does not answer: its process is stopped, or runs "
            f"code that never releases the interpreter's lock"
        )
    if left:
        message = (
            f"replica {rank} on {answer.host} waits for gradients of replicas that have left its data loop "
            f"({', '.join(map(str, left))}): all have to leave it at the same batch, and a newcomer's "
            f"counters begin at 0, so decide it by adl.current_dataloader().current_index"
        )
        return message + see(message)
    return (
        f"the others wait for replica {rank} on {answer.host}, which has not moved on for "
        f"{answer.still:.0f} s: it is {answer.where}, {_frames.innermost(answer.stack)}"
    )


def _about(rank: int) -> str:
    return f"the progress of replica {rank}"
