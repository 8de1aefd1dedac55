"""Keep worker processes alive when all processes of a job get SIGTERM.

Slurm (`scancel`, preemption, the end of a time limit) and systemd send SIGTERM to every process of a job.
Then torch's handler ends a data loader's worker, and torch raises an error in the replica, which is about to
save. A worker of a `multiprocessing.Pool` dies with a lock that the replica waits for at its end.

With `guard` such workers ignore SIGTERM. The replica ends them by SIGKILL where torch and `multiprocessing`
send SIGTERM and wait without a limit. Workers whose replica has died are ended by the fork server.
"""

from __future__ import annotations

import functools
import multiprocessing.process
import signal
import sys
from collections.abc import Callable
from typing import Any

_TORCH = "torch.utils.data._utils"
_TARGETS = {
    (f"{_TORCH}.worker", "_worker_loop"),
    ("multiprocessing.pool", "worker"),
    ("concurrent.futures.process", "_process_worker"),
}
"""Module and name of the functions that workers run. Other processes of a script end by SIGTERM as ever."""

_Process: Any = multiprocessing.process.BaseProcess


def guard() -> None:
    """Guard the workers that this process will start; again without effect."""
    start = _Process.start
    if hasattr(start, "_adaptdl"):
        return

    @functools.wraps(start)
    def guarded(self: Any) -> None:
        target: Any = getattr(self, "_target", None)
        worker = (getattr(target, "__module__", ""), getattr(target, "__name__", "")) in _TARGETS
        if worker:
            self._target = functools.partial(run, target)
        start(self)
        if worker:
            self._popen.terminate = self._popen.kill

    guarded._adaptdl = True  # type: ignore[attr-defined]
    _Process.start = guarded


def run(target: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Be a worker that ignores SIGTERM."""

    def ignore() -> None:
        # a function: programs that the worker starts would inherit SIG_IGN
        signal.signal(signal.SIGTERM, lambda number, frame: None)

    ignore()
    torchs: Any = sys.modules.get(f"{_TORCH}.signal_handling")
    if torchs is not None:
        set_handlers = torchs._set_worker_signal_handlers

        def set_all() -> None:
            set_handlers()
            ignore()

        torchs._set_worker_signal_handlers = set_all
    target(*args, **kwargs)
