"""What a person at the terminal sees while the job runs, and at its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from adaptdl_elastic.agent.eventlog import Event
from adaptdl_elastic.agent.options import Options


class Display:
    """Quiet when nobody watches."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self._options, self._say = options, say
        self.events: list[Event] = []
        self.show: Callable[[str], None] | None = None

    def say(self, text: str) -> None:
        """One line."""
        self._say(text)

    def event(self, event: Event) -> None:
        """Take note of an event."""
        self.events.append(event)

    def finish(self, exit_code: int, reason: str, logs: Path | None) -> None:
        """The run is over."""
        self._say(f"{reason} (exit code {exit_code})")

    def close(self, *unused: Any) -> None:
        """Give the terminal back."""
