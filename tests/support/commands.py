"""Run a command of a test to its end."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def ended(
    command: Sequence[str | Path],
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Return how a command has ended, and the texts that it wrote; `env`: all of its variables."""
    return subprocess.run(
        command, cwd=folder, env=env, timeout=timeout, capture_output=True, text=True, check=False
    )
