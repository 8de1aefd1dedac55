"""What follows from the largest local batch that fits into memory."""

from __future__ import annotations

import pytest

from adaptdl_elastic._values import BatchSize, Limits
from adaptdl_elastic.torch._data.partition import chunks, count_step_chunks, plan_window, steps
from adaptdl_elastic.torch._tuning.batch_size import initial
from adaptdl_elastic.torch._tuning.memory_limit import limited, split


@pytest.mark.parametrize(
    ("now", "largest", "then"),
    [
        ((24, 0), None, (24, 0)),
        ((24, 0), 24, (24, 0)),
        ((24, 0), 12, (12, 1)),
        ((10, 0), 4, (4, 2)),
        ((12, 1), 6, (6, 3)),
        ((3, 0), 1, (1, 2)),
    ],
)
def test_a_batch_is_split_and_stays_as_large(
    now: tuple[int, int], largest: int | None, then: tuple[int, int]
) -> None:
    assert split(BatchSize(*now), largest) == BatchSize(*then)


def test_without_bounds_a_batch_is_accumulated_where_it_does_not_fit() -> None:
    given = Limits(32, None, None, False)
    assert limited(given, None) == given
    assert limited(given, 32) == Limits(32, None, (1, 32), False)
    known = limited(given, 8)
    assert known == Limits(32, None, (1, 8), True)
    assert [initial(known, replicas) for replicas in (1, 2, 4)] == [
        BatchSize(8, 3),
        BatchSize(8, 1),
        BatchSize(8, 0),
    ]


def test_bounds_of_the_script_become_smaller_only() -> None:
    given = Limits(32, 256, (16, 64), True)
    assert limited(given, 100) == given
    assert limited(given, 40).bounds == (16, 40)
    assert limited(given, 8).bounds == (8, 8)


def test_a_step_has_the_same_samples_in_more_passes() -> None:
    assert [chunks(one, 1, 4) for one in steps(0, 25, 10, False)] == [(4, 3, 3), (4, 3, 3), (3, 2)]
    assert count_step_chunks(0, 25, 1, 10, 4, False) == 8
    assert count_step_chunks(0, 25, 1, 10, 4, True) == 6
    assert plan_window(100, 2, 2, 2) == (4, 4, 4)
