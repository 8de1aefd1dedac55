"""Tables and summaries on terminals of any width."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from adaptdl_elastic.autoscaler.commands.tables import show_table, wait_until
from adaptdl_elastic.rendezvous.local import runtime_file
from adaptdl_elastic.rendezvous.local.runtime_file import RuntimeFile
from adaptdl_elastic.rendezvous.local.store_server import LocalServer
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobSpec, JobState, JobStatus, NodeRecord, encode
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

HEADS = ("JOB", "OWNER", "STATE", "REPLICAS", "EFFICIENCY", "DISK FREE", "LOSS", "AGE", "PROBLEM", "WHY")
WHY = "a reason of so many words that no terminal has room for all of them in the last column of a table"

words = st.text(st.sampled_from("ab-… é→\n作한🚂"), max_size=30)
cells = st.one_of(words, st.just("-"), st.integers(), st.none(), st.builds("x".join, st.lists(words)))


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[object]]]:
    heads = draw(st.lists(st.sampled_from(HEADS), min_size=1, max_size=20))
    row = st.lists(cells, min_size=len(heads), max_size=len(heads))
    return heads, draw(st.lists(row, min_size=1, max_size=4))


class Terminal(io.StringIO):
    """A standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def on_a_terminal(heads: list[str], rows: list[list[object]], width: int) -> str:
    """What show_table prints on a terminal of this width."""
    with mock.patch.dict(os.environ, COLUMNS=str(width)), redirect_stdout(Terminal()) as printed:
        show_table(heads, rows)
    return printed.getvalue()


def dense(text: str) -> str:
    """A text without its white space, which wrapping changes."""
    return "".join(text.split())


@given(tables(), st.integers(40, 250))
def test_every_value_is_shown_within_the_terminal(
    table: tuple[list[str], list[list[object]]], width: int
) -> None:
    heads, rows = table
    text = on_a_terminal(heads, rows, width)
    assert max(map(cell_len, text.splitlines()), default=0) <= width
    for row in rows:
        for head, value in zip(heads, row, strict=True):
            shown = dense(str(value)) if value is not None else ""
            if shown in ("", "-"):
                continue
            assert head in text
            if shown not in dense(text):
                assert value is row[-1], "only the last column is cut"
                assert any(
                    line.endswith("…") and dense(line.rpartition("  ")[2])[:-1] in shown
                    for line in text.splitlines()
                ), "a cut is marked"


@given(tables(), st.integers(1, 39))
def test_a_terminal_that_is_narrower_still_gets_an_answer(
    table: tuple[list[str], list[list[object]]], width: int
) -> None:
    heads, rows = table
    text = dense(on_a_terminal(heads, rows, width))
    for row in rows:
        for value in row[:-1]:
            assert value is None or dense(str(value)) in ("-", "") or dense(str(value)) in text


def test_a_pipe_gets_the_whole_width() -> None:
    heads, row = [*HEADS[:-1], "WHY"], ["a value", *"bcdefghi", WHY]
    with mock.patch.dict(os.environ, COLUMNS="40"), redirect_stdout(io.StringIO()) as printed:
        show_table(heads, [row])
    head, line = printed.getvalue().splitlines()
    assert head.split("  ")[0] == "JOB"
    assert line.endswith(WHY)


def terminal_output(command: list[str], columns: int, environment: dict[str, str], seconds: float) -> str:
    """Run a command on a real terminal; return what it has shown there."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    alarm = threading.Timer(seconds, process.kill)
    alarm.start()
    output = b""
    try:
        while piece := os.read(ours, 65536):
            output += piece
    except OSError:  # EIO: nothing has the terminal open any more
        pass
    finally:
        alarm.cancel()
        os.close(ours)
    assert process.wait() == 0, f"{command} was killed or failed: {output.decode()}"
    return output.decode().replace("\r\n", "\n")


@pytest.mark.processes
def test_ls_on_a_terminal_of_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("COLUMNS", raising=False)
    keys = Keys()
    with LocalServer() as server:
        store = server.store
        store.put(keys.node("host", "mnist"), encode(NodeRecord("host", "mnist", "r", "a", "127.0.0.1", 2)))
        store.put(keys.job("mnist", "spec"), encode(JobSpec("mnist", "r", created=1000.0)))
        status = JobStatus("mnist", "r", JobState.RUNNING, reason=WHY, updated=2000.0)
        store.put(keys.job("mnist", "status"), encode(status))
        runtime_file.write(RuntimeFile(server.endpoint, keys.cluster, "mnist", os.getpid()))
        command = [sys.executable, "-m", "adaptdl_elastic.autoscaler", "ls"]
        text = terminal_output(command, 80, dict(os.environ), 60.0)
    assert text.startswith("JOB: mnist  STATE: running")
    assert f"WHY:{dense(WHY)}" in dense(text)
    assert max(map(len, text.splitlines())) <= 80


def test_without_time_to_wait_the_present_state_counts() -> None:
    with MemoryStore() as store:
        assert wait_until(store, Keys(), lambda view: True, 0.0)
        assert not wait_until(store, Keys(), lambda view: False, 0.0)
