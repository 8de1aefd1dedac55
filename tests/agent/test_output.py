"""What becomes of the output of replicas when somebody does not take it any more."""

from __future__ import annotations

import errno
import io
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from adaptdl_elastic.agent.terminal import replica_output
from adaptdl_elastic.agent.terminal.replica_output import LONGEST, MOMENT, Flow, Output, Pump, Streams
from adaptdl_elastic.rendezvous.local.safe_stream import Unshown


class Full(io.BytesIO):
    """A file on a disk that is full while it has no `room`."""

    name = "stdout.log"
    room = 0

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = bytes(data)[: self.room]
        self.room -= len(taken)
        return super().write(taken)


def test_a_full_disk_and_a_closed_terminal_do_not_stop_each_other(caplog: pytest.LogCaptureFixture) -> None:
    shown: list[bytes] = []
    disk = Full()
    flow = Flow(disk, shown.append)
    flow.feed(b"one\ntw", 0.0)
    flow.feed(b"o\n", 0.0)
    assert shown == [b"one", b"two"]
    assert len(caplog.messages) == 1
    disk.room = 1000
    flow.feed(b"three\n", 0.0)
    assert disk.getvalue() == b"[8 bytes are missing here: the disk was full]\nthree\n"
    assert len(caplog.messages) == 1

    def closed(line: bytes) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    file = io.BytesIO()
    file.name = "stdout.log"  # type: ignore[misc]
    flow = Flow(file, closed)
    flow.feed(b"one\n", 0.0)
    flow.feed(b"two\n", 0.0)
    assert file.getvalue() == b"one\ntwo\n"
    flow.end()
    assert len(caplog.messages) == 2


def shows(*pieces: tuple[bytes, float]) -> list[bytes]:
    """What is shown of these pieces at these times, before the end."""
    shown: list[bytes] = []
    flow = Flow(None, shown.append)
    for data, now in pieces:
        flow.flush(now)
        flow.feed(data, now)
    return shown


def test_lines_end_with_or_without_a_carriage_return() -> None:
    assert shows((b"one\ntwo\r\n\nthree\r", 0.0), (b"\nfour\n", 0.1)) == [
        *(b"one", b"two", b"", b"three", b"four")
    ]


def test_lines_of_a_fast_writer_are_not_cut() -> None:
    line, size = b"x" * 996, 65536
    data, shown = (line + b"\n") * 20_000, list[bytes]()
    flow = Flow(None, shown.append)
    for step, start in enumerate(range(0, len(data), size)):  # each piece ends within a line, for 3 s
        flow.feed(data[start : start + size], step / 100)
        flow.flush(step / 100)
    assert set(shown) == {line}
    flow.feed(b"and then", 4.0)
    flow.flush(4.0 + MOMENT)
    assert shown[-1] == b"and then"


def test_a_progress_bar_is_shown_while_it_goes_on_and_not_each_of_its_states() -> None:
    bar = [(b"\r%3d%%" % percent, percent / 10) for percent in range(101)]  # as tqdm writes it, 10 s long
    shown = shows(*bar, (b"\ndone\n", 10.0))
    states = [int(line.strip(b"%")) for line in shown[:-1]]
    assert shown[-1] == b"done"
    assert states == sorted(set(states))
    assert (states[-1], 9 <= len(states) <= 11) == (100, True)


def test_a_bar_that_ends_its_states_with_the_carriage_return() -> None:
    bar = [(b"%d\r" % percent, percent / 10) for percent in range(25)]
    assert shows(*bar, (b"\n", 2.5)) == [b"9", b"19", b"24"]


def test_where_lines_can_be_overwritten_a_bar_is_one_line() -> None:
    shown: list[bytes] = []
    flow = Flow(None, shown.append, live=True)
    for percent in range(25):
        flow.flush(percent / 10)
        flow.feed(b"\r%3d%%" % percent, percent / 10)
    assert shown == [b"  9%\r", b" 19%\r"]
    flow.feed(b"\ndone\n", 2.5)
    assert shown[2:] == [b" 24%", b"done"]
    flow.feed(b"\r  0%", 3.0)
    flow.flush(4.0)
    flow.end()
    assert shown[4:] == [b"  0%\r", b"  0%"]


def test_a_question_without_an_end_is_shown_after_a_moment_and_not_twice() -> None:
    assert shows((b"are you", 0.0), (b" sure? ", MOMENT / 2)) == []
    assert shows((b"are you", 0.0), (b" sure? ", MOMENT / 2), (b"", MOMENT)) == [b"are you sure? "]
    pieces = [(b"are you sure? ", 0.0), (b"", MOMENT), (b"\n", 2 * MOMENT), (b"yes\n\n", 2 * MOMENT)]
    assert shows(*pieces) == [b"are you sure? ", b"yes", b""]


def test_a_line_without_an_end_costs_no_more_than_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting:
        searched = 0

        def finditer(self, data: bytes) -> Any:
            self.searched += len(data)
            return found(data)

    found, counting = replica_output.LINE_END.finditer, Counting()
    monkeypatch.setattr(replica_output, "LINE_END", counting)
    chunk, chunks, shown = b"x" * 65521, 305, list[bytes]()
    flow = Flow(None, shown.append)
    for _ in range(chunks):  # 20 MB
        flow.feed(chunk, 0.0)
        assert sum(map(len, flow.unfinished)) <= LONGEST
    flow.feed(b"\n", 0.0)
    assert counting.searched == chunks * len(chunk) + 1
    assert b"".join(shown) == chunk * chunks
    assert max(map(len, shown)) <= LONGEST
    assert len(shown) <= chunks + 1


def test_a_line_without_end_comes_through_the_pump() -> None:
    shown: queue.Queue[bytes] = queue.Queue()
    pump = Pump()
    write = pump.pipe(Flow(None, shown.put))
    os.write(write, b"\r 10%")
    assert shown.get(timeout=200) == b" 10%"
    os.close(write)
    pump.close(timeout=200)
    assert shown.empty()


def test_text_that_could_not_be_shown_is_kept_until_there_is_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "unshown.log"
    path.symlink_to("/dev/full")
    unshown, opened = Unshown(path), Path.open
    unshown.add("first\n")
    path.unlink()

    @contextmanager
    def open_and_add(place: Path, mode: str, **how: Any) -> Iterator[IO[str]]:
        with opened(place, mode, **how) as file:
            yield file
        monkeypatch.undo()
        unshown.add("third\n")  # as another thread may do at that moment

    monkeypatch.setattr(Path, "open", open_and_add)
    unshown.add("second\n")
    assert path.read_text() == "first\nsecond\nthird\n"


# What torch's TCPStore and ProcessGroupNCCL wrote begins with ">"; the other lines are a script's, or stay.
AFTER_A_DEATH = """\
>[rank1]:[W929 05:54:49.748646065 ProcessGroupNCCL.cpp:1659] [PG ID 0 PG GUID 0 Rank 1] Failed to check \
the "should dump" flag on TCPStore, (maybe TCPStore server has shut down too early), with error: Broken pipe
epoch 3
>[W1130 18:20:32.6 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3
>[W1127 13:02:42.957642441 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=16, \
addr=[::ffff:127.0.0.1]:46334, remote=[::ffff:127.0.0.1]:34109): Broken pipe
>Exception raised from sendBytes at /torch/csrc/distributed/c10d/Utils.hpp:758 (most recent call first):
>frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f7b in /a folder/lib/libc10.so)
>frame #1: <unknown function> + 0x6747a52 (0x7f7b88347a52 in /torch/lib/libtorch_cpu.so)
><omitting python frames>
>frame #18: <unknown function> + 0x2724a (0x7f7b98c4524a in /lib/x86_64-linux-gnu/libc.so.6)
>[rank1]: frame #19: _start + 0x21 (0x556735bff081 in /usr/bin/python)
>

[W1127 13:02:42.9 ProcessGroupNCCL.cpp:5068] Warning: using GPU 0 as device used by this process is unknown.
[rank1]:[E1127 13:02:42.9 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout
frame #7 of the video is (0x0 in size)
Exception raised from here: see the log
Broken pipe
"""


@pytest.mark.parametrize("tee", [0, 3])
def test_a_cpp_stack_goes_to_the_log_file_and_not_to_the_terminal(tmp_path: Path, tee: int) -> None:
    lines = [line.removeprefix(">") for line in AFTER_A_DEATH.splitlines()]
    torchs = [line[1:] for line in AFTER_A_DEATH.splitlines() if line.startswith(">")]
    own = [line for line in AFTER_A_DEATH.splitlines() if not line.startswith(">")]
    shown: list[str] = []
    output = Output("job", tmp_path, Streams(), Streams(tee), None, show=shown.append, prefix="")
    made = output.open(0, 0, 0)
    assert made.stderr is not None
    os.write(made.stderr, "".join(f"{line}\n" for line in lines).encode())
    made.close()
    output.show_error(0, 0, "\n".join(lines))  # the text of an error that nobody caught has the stack as well
    output.close()
    assert shown == [*own, *own]
    kept = (made.directory / "stderr.log").read_text().splitlines()
    assert kept == (lines if tee else torchs)
