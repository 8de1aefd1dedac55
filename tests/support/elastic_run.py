"""Start `adaptdl-run` in a test, and wait for what its event log says instead of sleeping.

The event log is a FIFO: a line is here as soon as it is written.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from commands import ended
from warm_agent import MARK, WarmAgent, completed, suits

from adaptdl_elastic import _own_python

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 200.0  # seconds that a slow and busy machine may need for anything
# as `adaptdl-run`, which does not look for modules in the working directory
_AGENT = _own_python.module("adaptdl_elastic.agent")

_WARM = {"ls", "status", "nodes", "events", "explain", "history", "queue", "stop", "drain", "checkpoint"}
"""Commands that are forked, unlike those that are started afresh."""

Event = dict[str, Any]


def environment(**extra: str) -> dict[str, str]:
    """This process's, with the checkout importable and the virtual environment's commands on PATH."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **extra}


def run_agent(
    directory: Path, *arguments: str, fresh: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`adaptdl-run` in `directory`, to its end, with which all that it has started ends."""
    mark = uuid.uuid4().hex
    whole = environment(**{"XDG_RUNTIME_DIR": str(directory), MARK: mark, **variables})
    if fresh or not suits(whole):
        done = ended([*_AGENT, *arguments], directory, env=whole)
    else:
        done = completed("adaptdl_elastic.agent", arguments, directory, whole, None)
    left = orphans(mark)
    assert not left, f"left behind: {left}\n{done.stdout}{done.stderr}"
    return done


def adaptdl(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command `adaptdl`, to its end."""
    module, whole = "adaptdl_elastic.autoscaler", environment(**variables)
    # a request for another size would come before a job's first step, where no change can be in place yet
    if suits(whole) and arguments[0] in _WARM:
        return completed(module, arguments, Path.cwd(), whole, PATIENCE)
    return ended([sys.executable, "-m", module, *arguments], env=whole, timeout=PATIENCE)


def marked(mark: str) -> list[psutil.Process]:
    """The living processes whose environment carries this mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _name(process: psutil.Process) -> str:
    """For messages; nothing when it has just ended."""
    try:
        return f"{process.pid} {' '.join(process.cmdline())}"
    except psutil.Error:
        return ""


def orphans(mark: str, timeout: float = 60) -> list[str]:
    """What is still alive of a run that has ended, after a moment to die."""
    _, alive = psutil.wait_procs(marked(mark), timeout=timeout)
    return [name for name in map(_name, alive) if name]


class ElasticRun:
    """One `adaptdl-run`, its events, and everything it started; killed and checked at the end."""

    def __init__(
        self,
        arguments: Sequence[str],
        directory: Path,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
        terminal: Path | None = None,
    ) -> None:
        """Start it; `terminal`: a device or a pipe for its output, which is opened for writing."""
        self.directory = directory
        self.mark = uuid.uuid4().hex
        self.events: list[Event] = []
        self._changed = threading.Condition()
        self._fifo = directory / f"events-{self.mark[:6]}"
        os.mkfifo(self._fifo)
        # Opened for both directions: the agent's open does not block, and its end is not our end-of-file.
        self._descriptor = os.open(self._fifo, os.O_RDWR)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        whole = environment(**{MARK: self.mark, "XDG_RUNTIME_DIR": str(directory), **(env or {})})
        self.output = (directory / f"output-{self.mark[:6]}").open("w+")
        arguments = [f"--event-log={self._fifo}", *arguments]
        self.process: WarmAgent | subprocess.Popen[bytes]
        output = terminal or Path(self.output.name)
        if fresh or not suits(whole):
            with output.open("a") as file:
                self.process = subprocess.Popen(
                    [*_AGENT, *arguments], cwd=directory, env=whole, stdout=file, stderr=file
                )
        else:
            self.process = WarmAgent(arguments, directory, whole, output, output)

    def _read(self) -> None:
        with open(self._descriptor, closefd=False) as lines:
            for line in lines:
                if line == "\n":
                    return
                with self._changed:
                    self.events.append(json.loads(line))
                    self._changed.notify_all()

    def wait_for(self, wanted: Callable[[Event], bool], timeout: float = PATIENCE, after: int = 0) -> Event:
        """The first event from index `after` on that is `wanted`; fails with the output when none comes."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.process.poll() is not None
            if ended:
                self._finish_reading()
            with self._changed:
                for event in self.events[after:]:
                    if wanted(event):
                        return event
                left = deadline - time.monotonic()
                assert left > 0, f"no such event in {timeout} s; events {self.events}\n{self.text()}"
                assert not ended, (
                    f"ended with {self.process.returncode} before such an event: {self.events}\n{self.text()}"
                )
                self._changed.wait(min(left, 0.5))

    def wait_for_event(self, name: str, timeout: float = PATIENCE, after: int = 0, **fields: object) -> Event:
        """The first `name` event with these field values."""
        return self.wait_for(
            lambda e: e["event"] == name and all(e.get(k) == v for k, v in fields.items()), timeout, after
        )

    def of(self, name: str) -> list[Event]:
        """All events of that name so far."""
        with self._changed:
            return [event for event in self.events if event["event"] == name]

    def pids(self, generation: int) -> dict[int, int]:
        """{rank: pid} of this agent's replicas of a generation."""
        event = self.wait_for_event("started", generation=generation)
        return {int(rank): pid for rank, pid in event["pids"].items()}

    def samples(self) -> dict[int, int]:
        """Samples of each finished epoch."""
        return {event["epoch"]: event["samples"] for event in self.of("epoch")}

    def hurry(self) -> None:
        """What the test is about has been seen: the job may come to its end."""
        (self.directory / "hurry").touch()

    def wait(self, timeout: float = PATIENCE) -> int:
        """The exit code."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s\n{self.text()}") from None
        self._finish_reading()
        return code

    def _finish_reading(self) -> None:
        if self._reader.is_alive():
            os.write(self._descriptor, b"\n")  # what was written before it has been read by then
            self._reader.join(PATIENCE)

    def text(self) -> str:
        """What it printed so far."""
        return Path(self.output.name).read_text()

    def said(self) -> str:
        """What it printed so far, without the ranks before the lines of its replicas."""
        return re.sub(r"^\[rank\d+\]: ", "", self.text(), flags=re.MULTILINE)

    def adaptdl(
        self, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """The command `adaptdl`, as in another terminal."""
        return adaptdl(*arguments, **{"XDG_RUNTIME_DIR": str(self.directory), **(env or {})})

    def wait_until_adaptdl_says(
        self, text: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> str:
        """Ask by a command until its answer has this text: the coordinator says a thing after it is done."""
        deadline = time.monotonic() + PATIENCE
        while text not in (said := self.adaptdl(*arguments, env=env).stdout):
            assert time.monotonic() < deadline, f"no {text!r} in {PATIENCE} s: {said}\n{self.text()}"
            # a look costs CPU time that what it waits for needs
            time.sleep(0.3)
        return said

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def orphans(self, timeout: float = 60) -> list[str]:
        """What is still alive although the run has ended, after a moment to die."""
        return orphans(self.mark, timeout)

    def __enter__(self) -> ElasticRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        left = self.orphans()
        for process in marked(self.mark):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._finish_reading()
        os.close(self._descriptor)
        self.output.close()
        if error is None:
            assert not left, f"left behind: {left}\n{self.text()}"
