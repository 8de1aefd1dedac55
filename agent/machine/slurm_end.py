"""Leave a job of Slurm before its time limit, and ask for its requeue when its training was left."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable

from adaptdl_elastic.agent.machine.interruption import Notice, NoticeKind
from adaptdl_elastic.agent.machine.slurm import Allocation, ShownJob, is_to_requeue, notice_time, parse_job

MARGIN_SECONDS = 30.0
"""Seconds beside those of a checkpoint: for a plan without this node, and for processes to end."""

_ANSWER_SECONDS = 60.0
_ASK_AGAIN_SECONDS = 60.0
_LONGEST_WAIT = 86_400.0


class JobEnd:
    """The end of a job of Slurm, as one of its agents sees it.

    Args:
        found: What Slurm has given to this task; None: this is none, and nothing is done.
        job: Name of the training that goes on.
        checkpoint_timeout: Seconds that a checkpoint may take.
        say: Prints a line for the user.
    """

    def __init__(
        self, found: Allocation | None, job: str, checkpoint_timeout: float, say: Callable[[str], None]
    ) -> None:
        self._found, self._job, self._say = found, job, say
        self._seconds = checkpoint_timeout + MARGIN_SECONDS
        self._left, self._unfinished = threading.Event(), False

    def watch(self, post: Callable[[object], None]) -> None:
        """Start a thread that posts a notice some time before the time limit."""
        if self._found is not None:
            args = (self._found, post)
            threading.Thread(target=self._watch, args=args, name="slurm-limit", daemon=True).start()

    def left(self, unfinished: bool) -> None:
        """Note that the agent is over, and whether it was made to leave before the training's end."""
        self._unfinished = unfinished
        self._left.set()

    def requeue(self) -> None:
        """Ask Slurm to requeue the job if its training was left for another reason than `scancel`."""
        found = self._found
        if found is None or not (found.first and self._unfinished):
            return
        try:
            if not is_to_requeue(_show(found), found.restarts, self._seconds, time.time()):
                return
            _scontrol("requeue", found.number)
        except (OSError, subprocess.SubprocessError) as error:
            why = (getattr(error, "stderr", None) or str(error)).strip()
            self._say(
                f"not requeued: {why}; --rdzv-id={self._job} in another job goes on from its checkpoint"
            )
        else:
            self._say(f"job {found.number} of Slurm is requeued, and goes on from its checkpoint")

    def _watch(self, found: Allocation, post: Callable[[object], None]) -> None:
        began, end = time.time(), found.end
        due = began if end is None else notice_time(began, end, self._seconds)
        while not self._left.wait(min(max(0.0, due - time.time()), _LONGEST_WAIT)):
            try:
                end = _show(found).end  # a person may have changed the limit
                due = notice_time(began, end, self._seconds)
            except (OSError, subprocess.SubprocessError):
                due = time.time() + _ASK_AGAIN_SECONDS if end is None else due
            if end is not None and due <= time.time():
                post(Notice(NoticeKind.TIME_LIMIT, "the time limit of Slurm's job", end))
                return


def _show(found: Allocation) -> ShownJob:
    return parse_job(_scontrol("show", "job", found.number))


def _scontrol(*words: str) -> str:
    """Return what `scontrol` prints, with times in seconds since the epoch."""
    environment = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    command = ["scontrol", *words]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=_ANSWER_SECONDS
    ).stdout
