"""Select tests: `--quick` (no process), `--once` (every feature once), `--rest` (what `--once` leaves out).

A test that starts processes has the marker `processes`, `etcd` or `slow`, or its module has. Of such tests
`--once` takes the first case of each parametrised function, and the cases with a marker `essential` of their
own. Neither `--quick` nor `--once` takes a test that
is `exhaustive` unless it is `essential`. `--quick` checks that its tests start no process.

Where ADAPTDL_TESTS_MAY_SKIP names a list of reasons, a test that is skipped for another reason fails.
"""

from __future__ import annotations

import importlib
import multiprocessing.process
import os
import re
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any, NoReturn

import pytest

Report = pytest.TestReport | pytest.CollectReport
MARKERS = ("processes", "etcd", "slow", "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that start no process, none exhaustive")
    parser.addoption("--once", action="store_true", help="every feature once: what `make test` runs")
    parser.addoption("--rest", action="store_true", help="what --once leaves out")


def pytest_configure(config: pytest.Config) -> None:
    if sum(map(config.getoption, ("--quick", "--once", "--rest"))) > 1:
        raise pytest.UsageError("--quick, --once and --rest exclude each other")
    if listed := os.environ.get("ADAPTDL_TESTS_MAY_SKIP"):
        config.pluginmanager.register(_ListedSkips(Path(listed)))


class _ListedSkips:
    """Lets a test fail that is skipped for a reason that a list does not have.

    Args:
        path: The list, a regular expression of a whole reason on each line. Lines with # are comments.
    """

    def __init__(self, path: Path) -> None:
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        self._path, self._listed = path, re.compile("|".join(f"(?:{line})" for line in lines))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, Report, Report]:
        report = yield
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            reason = reason.removeprefix("Skipped: ")
            if not self._listed.fullmatch(reason):
                report.outcome = "failed"
                report.longrepr = f"skipped, for a reason that {self._path} does not list: {reason}"
        return report

    # of a whole module
    pytest_make_collect_report = pytest_runtest_makereport


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    quick, once, rest = (config.getoption(name) for name in ("--quick", "--once", "--rest"))
    if quick:
        left_out = [item for item in items if _starts_processes(item) or _exhaustive(item)]
        _forbid_processes()  # not before: pytest-xdist starts its workers, and they ask `uname`
    elif once or rest:
        repeated = _repeated(items)
        left_out = [item for item in items if (item in repeated) == once]
    else:
        return
    config.hook.pytest_deselected(items=left_out)
    dropped = set(left_out)
    items[:] = [item for item in items if item not in dropped]


def _starts_processes(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in MARKERS)


def _exhaustive(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("exhaustive") and not item.get_closest_marker("essential"))


def _repeated(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests of features that another test or case has shown already."""
    found, seen = set(), set[str]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        case = getattr(item, "callspec", None)
        essential = case is not None and any(mark.name == "essential" for mark in case.marks)
        if _exhaustive(item) or (_starts_processes(item) and name in seen and not essential):
            found.add(item)
        seen.add(name)
    return found


def _forbid_processes() -> None:
    """Let every attempt of a test to start a process fail, with what to do."""
    # the first import of these starts a process: for the fonts, and with NumPy 1.26 the processor
    for name in ("matplotlib.font_manager", "numpy.testing"):
        importlib.import_module(name)

    def refuse(*given: Any, **options: Any) -> NoReturn:
        pytest.fail("this test starts a process: give it `@pytest.mark.processes`")

    subprocess.Popen.__init__ = refuse  # type: ignore[method-assign]
    multiprocessing.process.BaseProcess.start = refuse  # type: ignore[method-assign]
    os.fork = refuse
    os.posix_spawn = refuse
