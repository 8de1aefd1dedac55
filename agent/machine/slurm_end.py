"""Leave a job of Slurm before its time limit, and ask for its requeue when its training was left."""

from __future__ import annotations

import math
import os
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial

from adaptdl_elastic.agent.machine import slurm
from adaptdl_elastic.agent.machine.interruption import Notice, NoticeKind

MARGIN_SECONDS = 30.0
"""Seconds beside those of a checkpoint: for a plan without this node, and for processes to end."""

_ANSWER_SECONDS = 60.0

_LOOK_SECONDS = 3600.0
"""Longest time between two looks at the limit, which a person may change."""


def watch(found: slurm.Allocation | None, seconds: float, post: Callable[[object], None]) -> threading.Event:
    """Start a thread that posts a notice some time before the time limit.

    Args:
        found: What Slurm has given to this task; None: nothing, and no thread is started.
        seconds: How long a checkpoint may take.
        post: Takes the notice.

    Returns:
        An event that ends the thread when it is set.
    """
    due, over = partial(slurm.notice_time, time.time(), seconds=seconds + MARGIN_SECONDS), threading.Event()

    def run(found: slurm.Allocation) -> None:
        end = found.end
        while not over.wait(min(max(0.0, due(end) - time.time()), _LOOK_SECONDS)):
            try:
                end = slurm.limit_of(_scontrol("show", "job", found.number))
            except (OSError, subprocess.SubprocessError):
                end = end or math.inf
            if due(end) <= time.time():
                post(Notice(NoticeKind.TIME_LIMIT, "the time limit of Slurm's job", end))
                return

    if found is not None:
        threading.Thread(target=run, args=(found,), name="slurm-limit", daemon=True).start()
    return over


def requeue(found: slurm.Allocation, job: str, seconds: float, say: Callable[[str], None]) -> None:
    """Ask Slurm to requeue a job whose training was left, unless a person has ended it.

    Args:
        found: What Slurm has given to this task.
        job: Name of the training.
        seconds: How long a checkpoint may take.
        say: Prints one line for the user.
    """
    try:
        shown = _scontrol("show", "job", found.number)
        if slurm.is_to_requeue(shown, found.restarts, seconds + MARGIN_SECONDS, time.time()):
            _scontrol("requeue", found.number)
            say(f"job {found.number} of Slurm is requeued, and goes on from its checkpoint")
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()
        say(f"not requeued: {why}; --rdzv-id={job} in another job goes on from its checkpoint")


def _scontrol(*words: str) -> dict[str, str]:
    """Return what `scontrol` says, by name, with times in seconds since the epoch."""
    environ, pipe = {**os.environ, "SLURM_TIME_FORMAT": "%s"}, subprocess.PIPE
    command = ["scontrol", *words]
    said = subprocess.check_output(command, env=environ, stderr=pipe, text=True, timeout=_ANSWER_SECONDS)
    return slurm.parse_job(said)
