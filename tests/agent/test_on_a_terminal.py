"""`adaptdl-run` on a terminal: a pseudo-terminal, and what is on its screen at the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
from pathlib import Path

import pytest
from elastic_run import environment
from warm_agent import WarmAgent

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(600)]

WIDTH = 80
EXAMPLE = Path(__file__).parents[2] / "examples" / "image_classification.py"
# as tqdm writes it: the carriage return stands before each state, and a new line behind the last
BAR = """
import os, sys, time
print("begins", flush=True)
for done in range(31):
    sys.stderr.write(f"\\r{done * 100 // 30:3d}%|{'#' * (done // 3):<10}| {done}/30 [10.0it/s]")
    sys.stderr.flush()
    time.sleep(0.1)  # longer than the time after which a state is shown
    while done in (10, 20) and os.path.exists("watched") and os.path.getsize("watched") < done / 10:
        time.sleep(0.01)
sys.stderr.write("\\n")
print("ends", flush=True)
"""


def on_a_terminal(directory: Path, *arguments: str) -> tuple[int, str]:
    """The exit code of `adaptdl-run`, and everything that it and its replicas write to their terminal."""
    (directory / "watched").touch()
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
    variables = environment(XDG_RUNTIME_DIR=str(directory), TERM="xterm")
    terminal = Path(os.ttyname(theirs))
    run = WarmAgent(arguments, directory, variables, terminal, terminal)
    written = b""
    # what was written before the end is there at once
    while select.select([ours], [], [], 0.1)[0] or run.poll() is None:
        if select.select([ours], [], [], 0)[0]:
            written += os.read(ours, 1 << 16)
            # the bar waits for what is seen of it: one state more in each third
            (directory / "watched").write_bytes(b"x" * len(set(re.findall(rb"\d+/30", written))))
    for end in (ours, theirs):
        os.close(end)
    return run.wait(), written.decode()


def screen(text: str) -> list[str]:
    """The lines of a terminal, those that have scrolled away included."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", text):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.endswith("A") and token.startswith("\x1b"):
            row = max(0, row - int(token[2:-1] or 1))
        elif token == "\x1b[2K":
            lines[row] = ""
        elif not token.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]


def test_the_screen_is_what_a_terminal_makes_of_it() -> None:
    assert screen("one\r\n10%\r20%\r\n\x1b[32mlive\x1b[0m\r\x1b[2K\x1b[1A\x1b[2Ktwo\r\nx") == [
        "one",
        "two",
        "x",
    ]


def test_a_progress_bar_is_one_line_and_a_run_that_ended_well_ends_green(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BAR)
    code, text = on_a_terminal(tmp_path, "--standalone", "--no-summary", "script.py")
    assert code == 0, text
    lines = [line for line in screen(text) if line]
    assert lines[:3] == ["begins", "100%|##########| 30/30 [10.0it/s]", "ends"], lines
    assert lines[3].endswith("its replicas ended well"), lines
    assert len(lines) == 4
    assert len(set(re.findall(r"\d+/30", text))) > 2, "it is seen while it goes on"
    *_, last = re.findall(r"(\x1b\[\d+m)(its replicas ended well|no replica here)", text)
    assert last == ("\x1b[32m", "its replicas ended well")


@pytest.mark.exhaustive
def test_a_bar_goes_to_the_terminal_itself_where_there_is_no_live_line(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BAR)
    ours, theirs = pty.openpty()
    variables, output = environment(XDG_RUNTIME_DIR=str(tmp_path)), tmp_path / "output"
    terminal = Path(os.ttyname(theirs))
    run = WarmAgent(["--standalone", "script.py"], tmp_path, variables, output, terminal)
    assert run.wait() == 0
    assert output.read_text() == "begins\nends\n"
    text = os.read(ours, 1 << 16).decode()
    for end in (ours, theirs):
        os.close(end)
    assert [line for line in screen(text) if line] == ["100%|##########| 30/30 [10.0it/s]"]


def test_the_live_line_of_a_job_that_trains_is_one_line_of_80_columns(tmp_path: Path) -> None:
    job = ("--standalone", "--nproc-per-node=2", "--rdzv-id=image-classification")
    code, text = on_a_terminal(tmp_path, *job, str(EXAMPLE), "--data=digits", "--epochs=2")
    assert code == 0, text
    assert "\x1b[1A" not in text, "the cursor goes up only over a line that was wrapped"
    shown = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text)
    assert re.search("image-classification  .*2 replicas  batch .*gain .*epoch 1", shown), shown
