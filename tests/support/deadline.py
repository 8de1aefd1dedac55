"""Begin no test after a time of day, so that a slow machine ends a run in time.

ADAPTDL_TESTS_UNTIL is that time in seconds since 1970. Tests that would begin later are skipped, and counted
in the summary. Which these are changes with the commit: its name draws the order of the files.
A test that begins in time is not interrupted.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

import pytest

VARIABLE = "ADAPTDL_TESTS_UNTIL"


def pytest_configure(config: pytest.Config) -> None:
    if until := os.environ.get(VARIABLE):
        config.pluginmanager.register(_Deadline(float(until), _commit(config.rootpath)))


def _commit(root: Path) -> str:
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    return asked.stdout.strip()


class _Deadline:
    def __init__(self, until: float, seed: str) -> None:
        self._until, self._seed = until, seed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files = sorted({str(item.path) for item in items})
        random.Random(self._seed).shuffle(files)
        place = {path: number for number, path in enumerate(files)}
        items.sort(key=lambda item: place[str(item.path)])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.time() > self._until:
            pytest.skip(f"not begun by {time.strftime('%H:%M', time.localtime(self._until))}: {VARIABLE}")
