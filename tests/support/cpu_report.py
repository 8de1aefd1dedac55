"""Say what a run of the tests cost in CPU seconds, processes that tests start included.

`--once` and `--rest` end with the seconds of each folder, beside those that tests/budget.csv has, and with
the dearest tests. A process counts when it has been waited for, so a server that several tests share counts
for the test at whose end it is stopped. Agents are forked by a server of `multiprocessing` that no process
waits for, so what that server has used is read from /proc. This is a report: nothing fails.
"""

from __future__ import annotations

import csv
import multiprocessing.forkserver
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

BUDGET = Path(__file__).parents[1] / "budget.csv"
DEAREST = 10
_PROPERTY = "cpu_seconds"


def seconds() -> float:
    """Return the CPU seconds of this process, and of those that it or its fork server has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + _of_fork_server()


def _of_fork_server() -> float:
    server = getattr(multiprocessing.forkserver, "_forkserver")._forkserver_pid  # noqa: B009
    try:
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # utime, stime, cutime and cstime of proc(5), without pid and name
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Report(config), "cpu-report")


class _Report:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._last = seconds()
        self._of_test: dict[str, float] = defaultdict(float)
        self._of_workers = 0.0

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output[_PROPERTY] = seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self._of_workers += getattr(node, "workeroutput", {}).get(_PROPERTY, 0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._last = seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = seconds()
        report.user_properties.append((_PROPERTY, now - self._last))
        self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._of_test[report.nodeid] += sum(
            value for name, value in report.user_properties[-1:] if name == _PROPERTY
        )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        kind = next((one for one in ("once", "rest") if self._config.getoption(one)), None)
        if kind is None or not self._of_test:
            return
        folders: dict[str, float] = defaultdict(float)
        for test, spent in self._of_test.items():
            folders[_folder(test)] += spent
        own = os.times()
        total = self._of_workers + own.user + own.system if self._of_workers else seconds()
        folders["starting and collecting"] = max(total - sum(self._of_test.values()), 0.0)
        planned = budget(kind)
        write = terminalreporter.write_line
        terminalreporter.section("CPU seconds, processes included; in brackets tests/budget.csv")
        for folder, spent in sorted(folders.items(), key=lambda one: -one[1]):
            write(f"{spent:8.1f} ({planned.get(folder, 0):5.0f})  {folder}")
        write(f"{total:8.1f} ({sum(planned.values()):5.0f})  in all")
        dearest = sorted(self._of_test.items(), key=lambda one: -one[1])
        for test, spent in dearest[:DEAREST]:
            write(f"{spent:8.1f}  {test}")
        if path := os.environ.get("ADAPTDL_TESTS_CPU_LIST"):
            Path(path).write_text("".join(f"{spent:.2f}\t{test}\n" for test, spent in dearest))


def _folder(test: str) -> str:
    parts = test.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 else parts[-1]


def budget(kind: str) -> dict[str, float]:
    """Return the CPU seconds that tests/budget.csv has for the folders in a run of `kind`."""
    with BUDGET.open(newline="") as file:
        return {row["folder"]: float(row["seconds"]) for row in csv.DictReader(file) if row["run"] == kind}
