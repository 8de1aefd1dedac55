"""Epoch loops by themselves; with data loops in them they are in test_loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fresh import Script

from adaptdl_elastic import checkpoint
from adaptdl_elastic.torch import AdaptiveDataLoader, current_epoch, finished_epochs, remaining_epochs_until
from adaptdl_elastic.torch.epoch import continue_at

pytestmark = pytest.mark.usefixtures("script")


def test_epochs_are_counted_from_0_and_known_only_inside() -> None:
    assert (current_epoch(), finished_epochs()) == (None, 0)
    for number, epoch in enumerate(remaining_epochs_until(3)):
        assert (epoch, current_epoch(), finished_epochs()) == (number, number, number)
    assert (current_epoch(), finished_epochs()) == (None, 3)


def test_a_second_loop_goes_on_counting() -> None:
    assert list(remaining_epochs_until(2)) == [0, 1]
    assert list(remaining_epochs_until(2)) == []
    assert list(remaining_epochs_until(5)) == [2, 3, 4]
    assert list(remaining_epochs_until(0)) == []


def test_an_epoch_that_was_under_way_comes_again_and_one_that_had_ended_does_not(script: Script) -> None:
    ran: list[Any] = []
    for epoch in remaining_epochs_until(4):
        ran.append(epoch)
        if epoch == 2:
            checkpoint.save_all_states()
            break
    script.restart()
    ran += remaining_epochs_until(4)
    assert ran == [0, 1, 2, 2, 3]
    script.restart()
    assert list(remaining_epochs_until(4)) == []  # the last loop has saved its end
    assert finished_epochs() == 4


def test_continue_ends_an_epoch_and_break_does_not() -> None:
    for epoch in remaining_epochs_until(3):
        if epoch == 0:
            continue
        break
    assert finished_epochs() == 1
    assert current_epoch() is None


def test_a_loop_inside_a_loop_is_refused_and_an_exception_leaves_the_epoch_unfinished() -> None:
    loop = remaining_epochs_until(2)
    next(loop)
    with pytest.raises(RuntimeError, match="an epoch loop is under way"):
        next(iter(remaining_epochs_until(2)))
    loop.close()  # type: ignore[attr-defined]
    assert finished_epochs() == 0
    assert list(remaining_epochs_until(2)) == [0, 1]


def test_a_job_that_has_finished_says_so_when_it_is_started_again(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    list(remaining_epochs_until(2))
    assert "are finished" not in capsys.readouterr().err
    script.restart()
    assert list(remaining_epochs_until(2)) == []
    assert "all 2 epochs are finished in" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [-1, 2.0, "3", None, True])
def test_the_number_of_epochs_is_checked(bad: Any) -> None:
    with pytest.raises(ValueError, match=f"remaining_epochs_until\\({bad!r}\\)"):
        next(iter(remaining_epochs_until(bad)))


def test_numpys_integers_are_integers() -> None:
    three: Any = np.int64(3)
    assert list(remaining_epochs_until(three)) == [0, 1, 2]


def trained_epochs(until: int) -> dict[int, list[int]]:
    loader = AdaptiveDataLoader(range(10), batch_size=2)  # type: ignore[arg-type]
    return {
        epoch: [int(number) for batch in loader for number in batch]
        for epoch in remaining_epochs_until(until)
    }


def test_training_continues_at_the_position_of_another_checkpoint() -> None:
    continue_at(2, samples=6)
    assert trained_epochs(4) == {2: [6, 7, 8, 9], 3: [*range(10)]}


def test_a_later_position_of_the_job_itself_counts_more(script: Script) -> None:
    assert list(remaining_epochs_until(3)) == [0, 1, 2]
    script.restart()
    continue_at(1, samples=4)
    assert trained_epochs(4) == {3: [*range(10)]}


def test_a_position_is_given_before_the_first_epoch() -> None:
    with pytest.raises(ValueError, match="samples=-1: give an integer of at least 0"):
        continue_at(0, samples=-1)
    for _ in remaining_epochs_until(1):
        with pytest.raises(RuntimeError, match="call it before"):
            continue_at(1)
    with pytest.raises(RuntimeError, match="call it before"):
        continue_at(1)
