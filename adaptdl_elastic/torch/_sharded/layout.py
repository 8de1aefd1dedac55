"""Compute which rows of a tensor each replica holds. Rows are indices of the first dimension."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


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


def moves(rows: int, holders: Sequence[int], takers: Sequence[int]) -> Iterator[Move]:
    """Yield which rows move, in an order that is the same on all replicas.

    Args:
        rows: Rows of the whole tensor.
        holders: Ranks of the replicas that hold the parts now, in the order of the parts.
        takers: Ranks of the replicas that will hold the new parts, in their order.
    """
    old = list(zip(holders, spans(rows, len(holders)), strict=True))
    for target, (first, end) in zip(takers, spans(rows, len(takers)), strict=True):
        for source, (start, stop) in old:
            low, high = max(first, start), min(end, stop)
            if low < high:
                yield Move(source, target, low - start, low - first, high - low)
