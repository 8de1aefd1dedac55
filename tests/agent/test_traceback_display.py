"""Which traceback is shown when replicas fail, and how lines of several replicas are told apart."""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from adaptdl_elastic._private import RuntimeFileError
from adaptdl_elastic.agent.terminal.replica_output import Output, Pump, Streams
from adaptdl_elastic.agent.terminal.traceback_display import Shown, TracebackDisplay
from adaptdl_elastic.protocol import uncaught_error
from adaptdl_elastic.protocol.uncaught_error import UncaughtError


@dataclass
class Ended:
    """A replica that has exited."""

    local_rank: int
    rank: int
    error_file: str


class Node:
    """The output of a node's replicas, and what of it is seen."""

    def __init__(
        self,
        directory: Path,
        redirects: str = "0",
        tee: str = "0",
        only: frozenset[int] | None = None,
        *,
        several: bool = True,
    ) -> None:
        streams = Streams.parse("--redirects", redirects), Streams.parse("--tee", tee)
        self.seen: list[str] = []
        self.output = Output("job", directory, *streams, only, show=self.seen.append, several=several)
        self.display = TracebackDisplay(self.output)

    def start(
        self, local_rank: int, rank: int | None = None, generation: int = 0, *, joining: bool = False
    ) -> tuple[Ended, int]:
        """A replica, and the descriptor that its stderr is."""
        rank = local_rank if rank is None else rank
        made = self.output.open(generation, local_rank, rank, joining=joining)
        assert made.stderr is not None
        stderr = os.dup(made.stderr)
        made.close()
        return Ended(local_rank, rank, made.error_file), stderr

    def fails(
        self, local_rank: int, text: str, raised: float = 1.0, *, lost_peer: bool = False, generation: int = 0
    ) -> Ended:
        """A replica that has raised an error."""
        ended, stderr = self.start(local_rank, generation=generation)
        os.close(stderr)
        directory = Path(ended.error_file).parent
        uncaught_error.write(UncaughtError("kind", "message", raised, lost_peer), directory)
        if self.output.keeps_tracebacks(local_rank):
            (directory / uncaught_error.TRACEBACK).write_text(text)
        return ended


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait up to 200 s for the thread that shows the output, which a busy machine may delay."""
    for waits in (Pump.catch_up, Pump.close):
        monkeypatch.setattr(waits, "__defaults__", (200.0,))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_traceback_of_the_cause_is_shown_once_and_whole(node: Node) -> None:
    both = [node.fails(0, "Traceback:\n  zero\n"), node.fails(1, "Traceback:\n  one\n")]
    assert node.display.show_cause(both, 1, alone=True) == Shown(rank=1)
    assert node.seen == ["[rank1]: Traceback:", "[rank1]:   one"]


def test_the_prefix_that_torch_writes_is_not_doubled(node: Node) -> None:
    node.display.show_cause(
        [node.fails(1, "[rank1]: Traceback:\n[rank1]:   one\n\n[rank1]: E")], 1, alone=True
    )
    assert node.seen == ["[rank1]: Traceback:", "[rank1]:   one", "[rank1]: ", "[rank1]: E"]


def test_a_traceback_that_differs_in_addresses_and_ranks_only_is_the_same(node: Node) -> None:
    first = node.fails(0, "x at 0x7f3a of rank 0, pid 712, 127.0.0.1:4711")
    again = node.fails(1, "x at 0x7a00 of rank 1, pid 713, 127.0.0.1:815", generation=1)
    other = node.fails(1, "y at 0x7a00 of rank 1, pid 713, 127.0.0.1:815", generation=2)
    shown = [node.display.show_cause([one], one.rank, alone=True) for one in (first, again, other)]
    assert shown == [Shown(rank=0), Shown(repeated=True), Shown(rank=1)]
    assert len(node.seen) == 2


@pytest.mark.parametrize("alone", [False, True])
def test_an_error_of_a_lost_peer_is_shown_only_where_it_has_no_cause_elsewhere(
    node: Node, alone: bool
) -> None:
    ended = node.fails(0, "Connection closed by peer", lost_peer=True)
    shown = node.display.show_cause([ended], 0, alone=alone)
    kept = Path(ended.error_file).with_name("traceback.log")
    assert shown == (Shown(rank=0) if alone else Shown(hidden_in=kept))
    assert bool(node.seen) == alone


def test_of_replicas_that_leave_the_first_error_is_shown_that_is_not_of_a_lost_peer(node: Node) -> None:
    ended = [
        node.fails(0, "lost", 1.0, lost_peer=True),
        node.fails(1, "third", 3.0),
        node.fails(2, "second", 2.0),
    ]
    assert node.display.show_first(ended) == Shown(rank=2)
    assert node.seen == ["[rank2]: second"]
    assert node.display.show_first(ended[:1]) == Shown()


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"redirects": "2"}, []),
        ({"redirects": "3"}, []),
        ({"redirects": "1"}, ["[rank0]: E"]),
        ({"tee": "2"}, ["[default0]:E"]),
        ({"tee": "2", "redirects": "3"}, ["[default0]:E"]),
        ({"only": frozenset({1})}, []),
        ({"several": False}, ["E"]),
    ],
)
def test_a_traceback_goes_with_stderr(tmp_path: Path, options: dict[str, object], seen: list[str]) -> None:
    node = Node(tmp_path, **options)  # type: ignore[arg-type]
    node.display.show_cause([node.fails(0, "E")], 0, alone=True)
    assert node.seen == seen


def test_replicas_write_their_tracebacks_themselves_into_files_of_theirs(tmp_path: Path) -> None:
    kept = [
        Node(tmp_path, **options).output.keeps_tracebacks(0)  # type: ignore[arg-type]
        for options in ({}, {"tee": "3"}, {"redirects": "2"}, {"redirects": "1"})
    ]
    assert kept == [True, True, False, True]


def test_a_log_that_is_also_shown_holds_the_traceback_behind_all_else(tmp_path: Path) -> None:
    node = Node(tmp_path, tee="3")
    ended, stderr = node.start(0)
    os.write(stderr, b"before\n")
    Path(ended.error_file).with_name(uncaught_error.TRACEBACK).write_text("Traceback:\n  E\n")
    os.close(stderr)
    node.output.close()
    assert Path(ended.error_file).with_name("stderr.log").read_text() == "before\nTraceback:\n  E\n"
    assert node.seen == ["[default0]:before"]


def test_lines_have_the_rank_that_their_replica_has_by_then(node: Node) -> None:
    _, first = node.start(0, rank=0)
    _, second = node.start(1, rank=1)
    os.write(second, b"one\n[rank1]: two\n")
    node.output.show_error(1, 1, "")  # what was written before has been shown
    node.output.renumber({1: 0, 7: 3})
    os.write(second, b"three\n")
    for stderr in (first, second):
        os.close(stderr)
    node.output.close()
    assert node.seen == ["[rank1]: one", "[rank1]: two", "[rank0]: three"]


def test_lines_of_a_replica_say_that_it_has_not_joined_yet(node: Node) -> None:
    _, stderr = node.start(1, joining=True)
    os.write(stderr, b"epoch 3 HR 0.067\n")
    node.output.show_error(1, 1, "")  # what was written before has been shown
    node.output.renumber({0: 0, 1: 1})
    os.write(stderr, b"epoch 4 HR 0.581\n")
    os.close(stderr)
    node.output.close()
    assert node.seen == ["[rank1, not joined yet]: epoch 3 HR 0.067", "[rank1]: epoch 4 HR 0.581"]


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("${role_name}/${rank}/${local_rank} ", "default/3/0 x"),
        ("${hostname}: ", f"{socket.gethostname()}: x"),
        ("", "x"),
    ],
)
def test_torchruns_variable_says_what_stands_before_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, line: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", template)
    node = Node(tmp_path, tee="3")
    _, stderr = node.start(0, rank=3)
    os.write(stderr, b"x\n")
    os.close(stderr)
    node.output.close()
    assert node.seen == [line]


def test_output_is_only_carried_by_us_where_something_is_to_be_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(several: bool) -> bool:
        output = Output("job", tmp_path, Streams(), Streams(), None, several=several)
        made = output.open(0, 0, 0)
        found = made.stdout is not None
        made.close()
        output.close()
        return found

    assert [opened(False), opened(True)] == [False, True]
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "")
    assert not opened(True)


@pytest.mark.parametrize("kind", ["link", "open to all"])
def test_a_folder_for_logs_that_another_user_may_have_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    base, elsewhere = tmp_path / f"adaptdl-logs-{os.getuid()}", tmp_path / "elsewhere"
    (elsewhere / "old").mkdir(parents=True)
    os.utime(elsewhere / "old", (0, 0))
    if kind == "link":
        base.symlink_to(elsewhere)
    else:
        base.mkdir()
        base.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(RuntimeFileError, match=r"that nobody else can enter; .*--log-dir"):
        Output("job", None, Streams(), Streams(), None)
    assert (elsewhere / "old").exists()
