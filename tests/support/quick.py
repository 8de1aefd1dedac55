"""`pytest --quick`: only tests that start no process, and a check that they start none.

A test that starts processes has the marker `processes`, `etcd` or `slow`, or its module has.
"""

from __future__ import annotations

import importlib
import multiprocessing.process
import os
import subprocess
from typing import Any, NoReturn

import pytest

MARKERS = ("processes", "etcd", "slow", "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that start no process")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    marked = [item for item in items if any(item.get_closest_marker(name) for name in MARKERS)]
    config.hook.pytest_deselected(items=marked)
    items[:] = [item for item in items if item not in set(marked)]
    _forbid_processes()  # not before: pytest-xdist starts its workers, and they ask `uname`


def _forbid_processes() -> None:
    """Let every attempt of a test to start a process fail, with what to do."""
    importlib.import_module("matplotlib.font_manager")  # a user's first import asks a process for the fonts

    def refuse(*given: Any, **options: Any) -> NoReturn:
        pytest.fail("this test starts a process: give it `@pytest.mark.processes`")

    subprocess.Popen.__init__ = refuse  # type: ignore[method-assign]
    multiprocessing.process.BaseProcess.start = refuse  # type: ignore[method-assign]
    os.fork = refuse
    os.posix_spawn = refuse
