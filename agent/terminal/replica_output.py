"""Send the replicas' output to the terminal, to files, or to both, as torchrun's options say.

The files are `<log-dir>/<job>_<random>/attempt_<generation>/<local rank>/{stdout.log,stderr.log,error.json}`.
They are kept when the generation and the run are over. Output that is shown and also kept (`--tee`), output
that is shown above a live line, and output that gets the rank before every line, because several replicas
write to one terminal, goes through pipes, which one thread reads.

After a death torch's C++ code writes the loss of connections and its stacks to stderr: 20 to 40 lines for
each replica, where the agent has one. They are not shown (`StackFilter`); without `--tee`, a replica's
`stderr.log` has them.

Tracebacks of errors that nobody caught are left to `traceback_display`: replicas write them to
`traceback.log` beside their other logs.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import selectors
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import BinaryIO

from adaptdl_elastic._private import RuntimeFileError, check_private
from adaptdl_elastic.protocol.environment import LINE_PREFIX
from adaptdl_elastic.protocol.uncaught_error import TRACEBACK
from adaptdl_elastic.rendezvous.local.safe_stream import Unshown
from adaptdl_elastic.rendezvous.local.scratch_directory import Scratch, sweep
from adaptdl_elastic.rendezvous.text import stamp
from adaptdl_elastic.storage import write_all

logger = logging.getLogger(__name__)

OUT, ERR = 1, 2
# without --log-dir, logs of failed runs are kept while either limit (number, seconds) holds
_KEPT_RUNS, _KEPT_FOR = 20, 86400.0
_CHUNK = 1 << 16
UNSHOWN = "unshown.log"
"""Name of the file for what could not be shown: the terminal is gone, or the disk of its log is full."""
LINE_END = re.compile(rb"\r?\n|\r")
MOMENT = 1.0  # seconds after which the beginning of a line is shown without its end
LONGEST = 1 << 16  # most bytes that are shown at once
# torch's times have months without a leading zero, as in W929 05:54:49
_LOST_CONNECTION = (
    r"\[[WEF]\d{3,4} [\d:.]+ (ProcessGroup\w+|TCPStore\w*)\.cpp:\d+\] .*"
    r"(Broken pipe|Connection (reset|closed)|got 0 bytes|remote process exited|server has shut down)"
)
_STACK = (
    r"(?P<stack>Exception raised from .+ at \S+:\d+ \(most recent call first\):$"
    r"|frame #\d+: .+ \(0x[0-9a-f]+ in .+\)$|<omitting python frames>$)"
)
# harmless: the network has no name server
_NO_NAME = r"\[W\d{3,4} [\d:.]+ socket\.cpp:\d+\] .*hostname of the client socket cannot be retrieved"
_OF_TORCH = re.compile(rf"(\[rank\d+\]: ?)?({_LOST_CONNECTION}|{_STACK}|{_NO_NAME})")


class StreamOptionError(ValueError):
    """The value of --redirects or --tee is invalid."""


class NoOutputError(RuntimeError):
    """The output of replicas cannot be stored."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"replicas' output cannot be kept in {path}: {error.strerror}; "
            f"give a directory that can be written to, with --log-dir"
        )


@dataclass(frozen=True)
class Streams:
    """The streams (1 stdout, 2 stderr, 3 both, 0 none) that an option selects by local rank.

    `default` applies if `by_rank` is empty.
    """

    default: int = 0
    by_rank: tuple[tuple[int, int], ...] = ()

    def has(self, local_rank: int, stream: int) -> bool:
        """Return whether a stream of a local rank is selected."""
        return bool(dict(self.by_rank).get(local_rank, 0 if self.by_rank else self.default) & stream)

    @classmethod
    def parse(cls, option: str, text: str) -> Streams:
        """Parse torchrun's form: `3`, or `0:1,1:2`."""
        if re.fullmatch(r"[0-3]", text):
            return cls(int(text))
        if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
            pairs = (part.split(":") for part in text.split(","))
            return cls(by_rank=tuple((int(rank), int(streams)) for rank, streams in pairs))
        raise StreamOptionError(
            f"{option}={text}: write 1 (stdout), 2 (stderr) or 3 (both), or a list RANK:STREAMS as in 0:3,1:2"
        )


@dataclass
class Destination:
    """The descriptors for one replica, closed once it has them; None: the agent's own stream."""

    directory: Path
    stdout: int | None = None
    stderr: int | None = None

    @property
    def error_file(self) -> str:
        """Path of the file to which the replica writes its error."""
        return str(self.directory / "error.json")

    def close(self) -> None:
        """Close the agent's copies."""
        for number in (self.stdout, self.stderr):
            if number is not None:
                os.close(number)
        self.stdout = self.stderr = None


@dataclass
class _Label:
    """The rank of the replica that has a LOCAL_RANK: it changes while the process lives.

    A replica that has not joined the others yet may pass ends of epochs, and prints what its untrained model
    gives.
    """

    rank: int
    joining: bool = False


class StackFilter:
    """Tells which lines of one stream torch's C++ code has written after a death, or for want of a name."""

    def __init__(self) -> None:
        self._in_stack = False

    def hides(self, line: str) -> bool:
        """Return whether a line is one of them, or the empty line that ends a stack."""
        found, ends = _OF_TORCH.match(line), self._in_stack and not line
        self._in_stack = found is not None and found["stack"] is not None
        return ends or found is not None


class Output:
    """Opens the destinations of replicas' output, and forwards what goes through pipes.

    Args:
        unshown: Keeps what could not be shown, from now on in the directory.
        several: Several replicas of this node may write to the terminal: the rank stands before their lines.
        prefix: Text before lines, with `${role_name}`, `${rank}`, `${local_rank}`, `${hostname}` and
            `${time}`; None: torchrun's variable says it, else `[<role><local rank>]:` with `--tee`,
            `[rank<rank>]: ` for `several`.
    """

    def __init__(
        self,
        job: str,
        log_dir: Path | None,
        redirects: Streams,
        tee: Streams,
        shown: frozenset[int] | None,
        role: str = "default",
        show: Callable[[str], None] | None = None,
        prefix: str | None = None,
        *,
        unshown: Unshown | None = None,
        several: bool = False,
    ) -> None:
        base = log_dir or Path(tempfile.gettempdir()) / f"adaptdl-logs-{os.getuid()}"
        try:
            base.mkdir(mode=0o755 if log_dir else 0o700, parents=True, exist_ok=True)
            if log_dir is None:
                check_private(base)  # another user may have made it, or a link of this name
                sweep("", base, keep=_KEPT_RUNS, older_than=_KEPT_FOR)
            self._scratch = Scratch(f"{job}_", base)
        except OSError as error:
            raise NoOutputError(base, error) from None
        except RuntimeFileError as error:
            raise RuntimeFileError(f"{error}; --log-dir keeps the output elsewhere") from None
        self.directory = self._scratch.path
        self.keep = log_dir is not None  # also set when the run has failed
        self._unshown = unshown or Unshown()
        self._unshown.keep_in(self.directory / UNSHOWN)
        self._redirects, self._tee, self._shown = redirects, tee, shown
        self._role, self._show = role, show
        given = os.environ.get(LINE_PREFIX) if prefix is None else prefix
        self._template = None if given is None else Template(given)
        self._several = several
        self._labels: dict[int, _Label] = {}  # by LOCAL_RANK
        self._pump: Pump | None = None

    def open(self, generation: int, local_rank: int, rank: int, *, joining: bool = False) -> Destination:
        """Open the streams of one replica, which may have yet to join; or raise NoOutputError."""
        directory = self.directory / f"attempt_{generation}" / str(local_rank)
        made = Destination(directory)
        self._labels[local_rank] = _Label(rank, joining)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            made.stdout = self._open_one(directory, OUT, local_rank)
            made.stderr = self._open_one(directory, ERR, local_rank)
        except OSError as error:
            made.close()
            raise NoOutputError(directory, error) from None
        return made

    def renumber(self, ranks: Mapping[int, int]) -> None:
        """Take note of the ranks, by LOCAL_RANK, that replicas have from now on. All of them have joined."""
        for local_rank, rank in ranks.items():
            if local_rank in self._labels:
                self._labels[local_rank].rank = rank
                self._labels[local_rank].joining = False

    def keeps_tracebacks(self, local_rank: int) -> bool:
        """Whether a replica leaves its traceback to the agent, and does not write it to its stderr."""
        return not self._is_redirected(local_rank, ERR)

    def shows_errors(self, local_rank: int) -> bool:
        """Whether the stderr of a replica is seen on the terminal."""
        return self._is_visible(local_rank) and not self._is_redirected(local_rank, ERR)

    def show_error(self, local_rank: int, rank: int, text: str) -> None:
        """Show a replica's traceback on the terminal, behind all that replicas have written before."""
        if self._pump is not None:
            self._pump.catch_up()
        show = self._print(ERR, local_rank, _Label(rank))
        for line in text.splitlines():
            show(line.encode())

    def _is_visible(self, local_rank: int) -> bool:
        return self._shown is None or local_rank in self._shown

    def _is_redirected(self, local_rank: int, stream: int) -> bool:
        return self._redirects.has(local_rank, stream) and not self._tee.has(local_rank, stream)

    def _open_one(self, directory: Path, stream: int, local_rank: int) -> int | None:
        path = directory / ("stdout.log" if stream == OUT else "stderr.log")
        tee, visible = self._tee.has(local_rank, stream), self._is_visible(local_rank)
        if self._is_redirected(local_rank, stream):
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if not tee and not visible:
            return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        marked = self._template.template != "" if self._template is not None else self._several
        if not tee and self._show is None and not marked:
            return None
        file = path.open("ab", buffering=0) if tee else None
        hidden = path if stream == ERR and not tee else None
        shown = self._print(stream, local_rank, self._labels[local_rank], hidden) if visible else None
        if self._pump is None:
            self._pump = Pump()
        kept = stream == ERR and tee and self.keeps_tracebacks(local_rank)
        appendix = directory / TRACEBACK if kept else None
        return self._pump.pipe(Flow(file, shown, appendix, live=self._show is not None))

    def _print(
        self, stream: int, local_rank: int, label: _Label, hidden: Path | None = None
    ) -> Callable[[bytes], None]:
        """Return what shows a line; C++ stacks on stderr are written to the file `hidden` instead."""
        show, tee = self._show, self._tee.has(local_rank, stream)
        stacks = StackFilter() if stream == ERR else None

        def one(line: bytes) -> None:
            text = line.decode(errors="replace").rstrip("\n")
            if stacks is not None and stacks.hides(text):
                if hidden is not None:
                    with contextlib.suppress(OSError), hidden.open("ab") as file:
                        file.write(line + b"\n")
                return
            text = self._marked(text, local_rank, label, tee)
            if show is not None:
                show(text)
            else:
                print(text, file=sys.stdout if stream == OUT else sys.stderr, flush=True)

        return one

    def _marked(self, line: str, local_rank: int, label: _Label, tee: bool) -> str:
        """Return a line with what says whose it is."""
        rank = label.rank
        if self._template is not None:
            names = {"role_name": self._role, "local_rank": local_rank, "rank": rank}
            names |= {"hostname": socket.gethostname(), "time": stamp(time.time())}
            return self._template.safe_substitute(names) + line
        if tee:
            return f"[{self._role}{local_rank}]:{line}"
        mark = f"[rank{rank}]:"  # as torch writes it itself in many places
        shown = f"[rank{rank}, not joined yet]:" if label.joining else mark
        return f"{shown} {line}" if self._several and not line.startswith(mark) else line

    def close(self) -> None:
        """Show the rest of the pipes; remove the directory unless it is to be kept."""
        if self._pump is not None:
            self._pump.close()
        self._scratch.close(self.keep or self._unshown.size > 0)


class Pump(threading.Thread):
    """A thread that reads pipes, writes everything to files and shows it line by line."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(name="output", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._clock = clock
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._closing = self._lagging = False
        self._caught_up = threading.Event()
        self.start()

    def pipe(self, flow: Flow) -> int:
        """Return a pipe's writing end. The thread reads it until every writer has closed it."""
        read, write = os.pipe()
        with self._lock:
            self._selector.register(read, selectors.EVENT_READ, flow)
        os.write(self._wake_write, b"\0")
        return write

    def catch_up(self, timeout: float = MOMENT) -> None:
        """Wait until what has been written by now has been shown."""
        self._caught_up.clear()
        self._lagging = True
        os.write(self._wake_write, b"\0")
        self._caught_up.wait(timeout)

    def run(self) -> None:
        """Read the pipes until `close`."""
        flows: set[Flow] = set()  # flows with text that is still to be shown
        while True:
            due = min((flow.due for flow in flows if flow.due is not None), default=None)
            wait = None if due is None else max(0.0, due - self._clock())
            # read before it is looked: what was written before they were set is found by then
            closing, lagging = self._closing, self._lagging
            if closing or lagging:
                wait = 0.0 if lagging else min(0.2, wait or 0.2)
            ready = self._selector.select(wait)
            if not any(key.data for key, _ in ready):
                if lagging:
                    self._lagging = False
                    self._caught_up.set()
                if closing:
                    break
            for key, _ in ready:
                data = os.read(key.fd, _CHUNK)
                if key.data is None:
                    continue
                if data:
                    key.data.feed(data, self._clock())
                    flows.add(key.data)
                else:
                    with self._lock:
                        self._selector.unregister(key.fd)
                    os.close(key.fd)
                    key.data.end()
            for flow in list(flows):
                flow.flush(self._clock())
                if flow.due is None:
                    flows.discard(flow)

    def close(self, timeout: float = 5.0) -> None:
        """Forward what is in the pipes, then end."""
        self._closing = True
        os.write(self._wake_write, b"\0")
        self.join(timeout)
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.end()
            os.close(key.fd)
        os.close(self._wake_write)
        self._selector.close()


class Flow:
    """One stream of one replica. Times are those of the pump's clock.

    A line is shown when it ends. A part of a line is shown when it is older than `MOMENT` or longer than
    `LONGEST`. Text that ends with a carriage return is overwritten on a terminal, so of a progress bar only
    the latest state is shown, once per `MOMENT`.

    Args:
        file: to which everything is written.
        shown: gets what is to be shown.
        appendix: a file whose content is added to `file` at the end, if it exists by then.
        live: `shown` can overwrite a line: a state of a progress bar has a carriage return at its end.
    """

    def __init__(
        self,
        file: BinaryIO | None,
        shown: Callable[[bytes], None] | None,
        appendix: Path | None = None,
        live: bool = False,
    ) -> None:
        self._file, self._shown, self._appendix = file, shown, appendix
        self.unfinished: list[bytes] = []  # parts of the line that has not ended
        self._size = 0
        self._state = b""  # text that a carriage return has ended and that has not been shown yet
        self._seen = False  # the beginning of the present line has been shown
        self._missing = 0  # bytes that the file lacks because its disk was full
        self._live, self._overwrites = live, False  # the present line overwrites another one
        self.due: float | None = None  # when `flush` has something to show

    def feed(self, data: bytes, now: float) -> None:
        """Write and show data; skip a file or terminal that has failed, so that the replica never blocks."""
        if self._file is not None:
            self._file = self._keep(self._file, data)
        if self._shown is not None:
            ended = self._split(data)
            if not (self.unfinished or self._state):
                self.due = None
            elif self.due is None or (ended and not self._state):  # the remaining text has just begun
                self.due = now + MOMENT

    def _keep(self, file: BinaryIO, data: bytes) -> BinaryIO | None:
        """Write to the file; return None if it is not to be written any more."""
        note = f"[{self._missing} bytes are missing here: the disk was full]\n" if self._missing else ""
        try:
            # without a buffer a write may take a part only
            write_all(file, memoryview(note.encode() + data))
            self._missing = 0
        except (OSError, ValueError) as error:
            if getattr(error, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
                logger.warning("%s is not written any more: %s", file.name, error)
                return None
            if not self._missing:
                logger.warning("%s is not written until the disk has room: %s", file.name, error)
            self._missing += len(data)
        return file

    def _split(self, data: bytes) -> bool:
        """Split data into lines; return whether a line has ended, so that the rest belongs to a new one."""
        start, ended = 0, False
        for end in LINE_END.finditer(data):
            self._add(data[start : end.start()])
            start = end.end()
            line = self._take()
            ended, self._overwrites = ended or end[0] != b"\r", end[0] == b"\r"
            if end[0] == b"\r":
                self._state = line or self._state
            elif line or self._state:
                self._show(line or self._state)
                self._state = b""
            elif not self._seen:
                self._show(b"")
            self._seen = False if end[0] != b"\r" else self._seen and not line
        self._add(data[start:])
        return ended

    def _add(self, data: bytes) -> None:
        for start in range(0, len(data), LONGEST):
            piece = data[start : start + LONGEST]
            if self._size + len(piece) > LONGEST:
                self._show(self._take())
                self._seen = True
            self.unfinished.append(piece)
            self._size += len(piece)

    def _take(self) -> bytes:
        line = b"".join(self.unfinished)
        self.unfinished.clear()
        self._size = 0
        return line

    def flush(self, now: float) -> None:
        """Show the beginning of a line that has not ended for long enough."""
        if self.due is None or now < self.due:
            return
        self.due = None
        text, passes = self._take() or self._state, self._live and self._overwrites
        self._state = text if passes else b""
        if text:
            self._show(text + b"\r" if passes else text)
            self._seen = True

    def _show(self, line: bytes) -> None:
        if self._shown is None:
            return
        try:
            self._shown(line)
        except (OSError, ValueError) as error:  # the reader has gone, as with `| head`
            logger.warning("replicas' output is not shown any more: %s", error)
            self._shown = None

    def end(self) -> None:
        """Show the rest at the end of the stream."""
        self.due = None
        last, self._state = self._take() or self._state, b""
        if last:
            self._show(last)
        if self._file is not None:
            with contextlib.suppress(OSError):
                if self._appendix is not None and self._appendix.is_file():
                    self._file.write(self._appendix.read_bytes())
                self._file.close()
