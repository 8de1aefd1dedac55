"""Compute which rows of a tensor each replica holds. Rows are indices of the first dimension."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Layout(NamedTuple):
    """How the replicas of a generation share a model: `parts` parts, each on `copies` replicas.

    Replica r holds part r modulo `parts`, so the first `parts` replicas hold one copy of everything.
    """

    parts: int
    copies: int = 1

    @classmethod
    def of(cls, replicas: int, copies: int) -> Layout:
        """Return the layout with so many copies, or with one if the replicas cannot be divided by them."""
        return cls(replicas // copies, copies) if replicas % copies == 0 else cls(replicas)

    def part(self, rank: int) -> int:
        """Return the part that a replica holds."""
        return rank % self.parts

    @property
    def holders(self) -> list[list[int]]:
        """The ranks that hold each part."""
        return [[part + copy * self.parts for copy in range(self.copies)] for part in range(self.parts)]


class Move(NamedTuple):
    """Rows that one replica gives to another, or keeps if `source` and `target` are equal.

    Attributes:
        source: Rank of the replica that holds the rows.
        target: Rank of the replica that will hold them.
        source_row: First row, counted in the part of `source`.
        target_row: First row, counted in the part of `target`.
        rows: Number of rows.
    """

    source: int
    target: int
    source_row: int
    target_row: int
    rows: int


def spans(rows: int, parts: int) -> list[tuple[int, int]]:
    """Return first row and end of each part, as `torch.chunk` divides; the last parts may be empty."""
    size = -(-rows // parts)
    return [(min(part * size, rows), min((part + 1) * size, rows)) for part in range(parts)]


def moves(rows: int, holders: Sequence[Sequence[int]], takers: Sequence[Sequence[int]]) -> Iterator[Move]:
    """Yield which rows move, in an order that is the same on all replicas.

    A replica keeps the rows that it holds already. Those that hold the same part give it in turn.

    Args:
        rows: Rows of the whole tensor.
        holders: Ranks of the replicas that hold each part now.
        takers: Ranks of the replicas that will hold each new part.
    """
    old = list(zip(holders, spans(rows, len(holders)), strict=True))
    for targets, (first, end) in zip(takers, spans(rows, len(takers)), strict=True):
        for turn, target in enumerate(targets):
            for sources, (start, stop) in old:
                low, high = max(first, start), min(end, stop)
                if low < high:
                    source = target if target in sources else sources[turn % len(sources)]
                    yield Move(source, target, low - start, low - first, high - low)
