"""Processes that outlive the service that has started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adaptdl_elastic.agent.machine.kept_process import KeptProcess

PARENT = """
import json, signal, subprocess, sys
import psutil
# the child ends with its parent
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(json.dumps({"pid": child.pid, "created": psutil.Process(child.pid).create_time()}), flush=True)
signal.pause()
"""


@pytest.mark.processes
def test_an_end_that_the_parent_does_not_collect_is_an_end(tmp_path: Path) -> None:
    """As in a container whose process 1 collects no children: `cluster down` waited for its limits there."""
    note = tmp_path / "note.json"
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        note.write_text(parent.stdout.readline())
        found = KeptProcess.find(note)
        assert found is not None
        assert not found.wait(0.05)  # it runs
        found.signal(signal.SIGKILL)
        assert found.wait(100.0)
        assert not found.alive
        assert found.wait(0.0)  # also for who asks again
    finally:
        parent.kill()
        parent.communicate()


@pytest.mark.processes
@pytest.mark.parametrize("asks", ["the service that has started it", "a later one"])
def test_wait_for_a_process_that_is_gone(tmp_path: Path, asks: str) -> None:
    command = [sys.executable, "-c", ""]
    process = KeptProcess.start(command, tmp_path / "note.json", tmp_path / "log", tmp_path, os.environ)
    assert process.child is not None
    process.child.wait()
    asked = process if asks.startswith("the") else KeptProcess(process.pid, process.note)
    assert asked.wait(100.0)
