"""Which traceback a person sees when replicas fail: one, of the replica that failed first.

Replicas that fail together fail for one reason. The first of them has its traceback; the others' are the
same, or tell that a peer is gone. All of them are in `traceback.log` in the replicas' directories of logs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from adaptdl_elastic.agent.terminal.replica_output import Output
from adaptdl_elastic.protocol import uncaught_error
from adaptdl_elastic.protocol.uncaught_error import UncaughtError

_TORCHS_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_DIFFERS_EACH_TIME = re.compile(
    r"0x[0-9a-fA-F]+|\b(?:rank|pid|process|thread) ?\d+|\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?|\]:\d+|localhost:\d+"
)


class EndedReplica(Protocol):
    """What is asked of the handle of a replica that has exited."""

    local_rank: int
    rank: int
    error_file: str


@dataclass(frozen=True)
class Shown:
    """What has become of a traceback."""

    repeated: bool = False  # it is the one that was shown last, and is not shown again
    hidden_in: Path | None = None  # it only tells of a lost peer; where it can be read
    rank: int | None = None  # whose it is, if it was shown


class TracebackDisplay:
    """Shows at most one traceback of a generation, and none twice in a row."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._last = ""

    def show_cause(self, ended: Iterable[EndedReplica], rank: int, *, alone: bool) -> Shown:
        """Show the traceback of the replica with that rank, which the failure of the others came of.

        Args:
            ended: Replicas of this node that have exited.
            rank: That of the one whose failure is the cause.
            alone: No other node has replicas, so an error that tells of a lost peer has no cause elsewhere.
        """
        for replica, error in _errors(ended):
            if replica.rank == rank:
                path = Path(replica.error_file).with_name(uncaught_error.TRACEBACK)
                if error.lost_peer and not alone:
                    return Shown(hidden_in=path if path.is_file() else None)
                return self._show(replica, path)
        return Shown()

    def show_first(self, ended: Iterable[EndedReplica]) -> Shown:
        """Show the traceback that was raised first, if it tells of more than a lost peer."""
        found = [(error.raised, replica) for replica, error in _errors(ended) if not error.lost_peer]
        if not found:
            return Shown()
        _, replica = min(found, key=lambda one: one[0])
        return self._show(replica, Path(replica.error_file).with_name(uncaught_error.TRACEBACK))

    def _show(self, replica: EndedReplica, path: Path) -> Shown:
        if not self._output.shows_errors(replica.local_rank):
            return Shown()
        try:
            text = _TORCHS_PREFIX.sub("", path.read_text(errors="replace"))
        except OSError:  # it has been shown by the replica itself
            return Shown()
        same = _DIFFERS_EACH_TIME.sub("…", text)
        if same == self._last:
            return Shown(repeated=True)
        self._last = same
        self._output.show_error(replica.local_rank, replica.rank, text)
        return Shown(rank=replica.rank)


def _errors(ended: Iterable[EndedReplica]) -> list[tuple[EndedReplica, UncaughtError]]:
    read = ((replica, uncaught_error.read(Path(replica.error_file).parent)) for replica in ended)
    return [(replica, error) for replica, error in read if error is not None]
