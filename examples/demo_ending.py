"""How a demo ends: what it expected and did not see is one line on stderr, and the exit code is 1."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LONGEST = 400  # characters of a line


class UnmetError(Exception):
    """An expectation of a demo that was not met: what was expected, and what was seen in short."""


def conclude(name: str, logs: Path, demo: Callable[[], int]) -> int:
    """Run a demo and return its exit code.

    Args:
        name: The demo's target of make.
        logs: Folder of what the demo writes. The traceback of an error of another kind goes there, too.
        demo: What runs it.
    """
    try:
        return demo()
    except KeyboardInterrupt:
        complain(name, "it was interrupted", logs)
        return 130
    except UnmetError as error:
        complain(name, str(error), logs)
    except Exception as error:
        (logs / "traceback.txt").write_text(traceback.format_exc())
        complain(name, f"{type(error).__name__}: {in_short(str(error))}; see traceback.txt", logs)
    return 1


def heed_signals() -> None:
    """Let SIGINT, SIGTERM and SIGHUP interrupt the demo once; clearing up takes seconds, and ignores them."""
    for name in _SIGNALS:
        signal.signal(name, _interrupted)


def _interrupted(number: int, frame: object) -> None:
    for name in _SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)


def complain(name: str, text: str, logs: Path) -> None:
    """Print one line: what was expected, what was seen, and where the logs are."""
    print(f"{name}: {in_short(text)}; logs are in {logs}", file=sys.stderr, flush=True)


def in_short(text: str) -> str:
    """Return the first and the last line of a text as one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = " ... ".join(dict.fromkeys(lines[:1] + lines[-1:]))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."
