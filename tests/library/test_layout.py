"""Which rows of a sharded tensor each replica holds, and which move in a change."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptdl_elastic.torch._sharded.layout import Layout, moves, spans


@given(st.integers(1, 60), st.integers(1, 12))
def test_spans_divide_as_torch_does(rows: int, parts: int) -> None:
    chunks = torch.arange(rows).chunk(parts)
    wanted = [chunk.tolist() for chunk in chunks] + [[]] * (parts - len(chunks))
    assert [list(range(first, end)) for first, end in spans(rows, parts)] == wanted


def _shared(data: st.DataObject) -> list[list[int]]:
    """The ranks of some replicas, by the part that they hold."""
    ranks = data.draw(st.permutations(range(10)))
    copies = data.draw(st.integers(1, 2))
    parts = data.draw(st.integers(1, 5))
    return [[*ranks[part * copies : (part + 1) * copies]] for part in range(parts)]


@given(st.integers(0, 50), st.data())
def test_moves_bring_every_row_to_its_new_holders(rows: int, data: st.DataObject) -> None:
    holders, takers = _shared(data), _shared(data)
    old, new = (
        {
            rank: list(range(*span))
            for ranks, span in zip(by, spans(rows, len(by)), strict=True)
            for rank in ranks
        }
        for by in (holders, takers)
    )
    found = {rank: [-1] * len(part) for rank, part in new.items()}
    for move in moves(rows, holders, takers):
        part = old[move.source][move.source_row : move.source_row + move.rows]
        assert len(part) == move.rows > 0
        assert move.source == move.target or not {*part} <= {*old.get(move.target, ())}
        found[move.target][move.target_row : move.target_row + move.rows] = part
    assert found == new


def test_only_rows_that_change_their_replica_are_sent() -> None:
    sent = [move for move in moves(12, [[0], [1]], [[0], [1], [2]]) if move.source != move.target]
    assert sum(move.rows for move in sent) == 6


@given(st.integers(1, 40), st.integers(1, 2))
def test_every_replica_holds_one_part_and_every_part_has_its_copies(replicas: int, copies: int) -> None:
    layout = Layout.of(replicas, copies)
    assert sorted(rank for ranks in layout.holders for rank in ranks) == list(range(replicas))
    assert all(layout.part(rank) == part for part, ranks in enumerate(layout.holders) for rank in ranks)
    assert layout.copies == (copies if replicas % copies == 0 else 1)
