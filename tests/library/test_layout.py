"""Which rows of a sharded tensor each replica holds, and which move in a change."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptdl_elastic.torch._sharded.layout import moves, spans


@given(st.integers(1, 60), st.integers(1, 12))
def test_spans_divide_as_torch_does(rows: int, parts: int) -> None:
    chunks = torch.arange(rows).chunk(parts)
    wanted = [chunk.tolist() for chunk in chunks] + [[]] * (parts - len(chunks))
    assert [list(range(first, end)) for first, end in spans(rows, parts)] == wanted


@given(st.integers(0, 50), st.data())
def test_moves_bring_every_row_to_its_new_holder(rows: int, data: st.DataObject) -> None:
    ranks = st.lists(st.integers(0, 9), min_size=1, max_size=9, unique=True)
    holders, takers = data.draw(ranks), data.draw(ranks)
    held = {rank: list(range(*span)) for rank, span in zip(holders, spans(rows, len(holders)), strict=True)}
    wanted = {rank: list(range(*span)) for rank, span in zip(takers, spans(rows, len(takers)), strict=True)}
    found = {rank: [-1] * len(part) for rank, part in wanted.items()}
    for move in moves(rows, holders, takers):
        given = held[move.source][move.source_row : move.source_row + move.rows]
        assert len(given) == move.rows > 0
        found[move.target][move.target_row : move.target_row + move.rows] = given
    assert found == wanted


def test_only_rows_that_change_their_replica_are_sent() -> None:
    sent = [move for move in moves(12, [0, 1], [0, 1, 2]) if move.source != move.target]
    assert sum(move.rows for move in sent) == 6
