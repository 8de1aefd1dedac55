"""Tracebacks of processes that a replica has forked and that have outlived it for a moment.

When a replica is killed its data loading processes live on for some milliseconds. A thread of
multiprocessing's in them finds the connection to the replica broken and prints a traceback
(`resource_sharer`, through `sys.excepthook`). It tells nothing that the end of the replica does not, and its
reader cannot do anything about it. So in forked processes such errors are not shown once the replica is gone.

Processes that are not forked (multiprocessing's start methods `spawn` and `forkserver`) are not reached.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

_CONNECTION_ERRORS = (ConnectionError, EOFError)
_DYING_SECONDS = 1.0  # at most from when a process closes its descriptors until it counts as ended

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


class _ForkedHook:
    """In a forked process takes the place of the `sys.excepthook` that it has inherited."""

    def __init__(self, inherited: Hook, parent: int) -> None:
        self.inherited, self._parent = inherited, parent

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (issubclass(kind, _CONNECTION_ERRORS) and self._is_orphan()):
            self.inherited(kind, error, trace)

    def _is_orphan(self) -> bool:
        """Whether the parent has ended, or ends within a moment: its connections break a little before."""
        if os.getppid() != self._parent:
            return True
        try:
            parent = os.pidfd_open(self._parent)
        except OSError:
            return os.getppid() != self._parent
        try:
            return bool(select.select([parent], [], [], _DYING_SECONDS)[0])
        finally:
            os.close(parent)


def silence() -> None:
    """Have forked processes of this one keep quiet about the loss of the process that forked them."""
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    hook = sys.excepthook
    inherited = hook.inherited if isinstance(hook, _ForkedHook) else hook
    sys.excepthook = _ForkedHook(inherited, os.getppid())
