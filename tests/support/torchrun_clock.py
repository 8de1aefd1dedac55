"""Let a test put on the clock of the torchrun handlers of its process."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from adaptdl_elastic.rendezvous.torchrun import handler as handler_module
from adaptdl_elastic.rendezvous.torchrun import roster as roster_module


class TorchrunClock:
    """The monotonic clock of all handlers, which look at it twice a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ahead = 0.0
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + self._ahead)
        for user in (handler_module, roster_module):
            monkeypatch.setattr(user, "time", clock)

    def put_on(self, seconds: float) -> None:
        """Make all time-outs that many seconds older."""
        self._ahead += seconds


def knows(handler: handler_module.AdaptdlEtcdHandler, members: int) -> bool:
    """Return whether a handler has seen that so many nodes are there."""
    return handler.connection is not None and len(handler.connection.roster.view().members) == members
