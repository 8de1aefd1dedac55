"""A script's life, generation after generation, in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from adaptdl_elastic import _session, checkpoint


class Script:
    """Restarting forgets everything that a process would forget."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
        self._monkeypatch = monkeypatch
        self.set(**environment)
        _session.reset()

    def set(self, **environment: str) -> None:
        for name, value in environment.items():
            self._monkeypatch.setenv(name, value)

    def restart(self, **environment: str) -> None:
        self.set(**environment)
        _session.reset()

    def resume(self, **environment: str) -> None:
        """Save a checkpoint before the restart."""
        checkpoint.save_all_states()
        self.restart(**environment)

    def run(self, body: Callable[[], None]) -> None:
        body()
        self.restart()
