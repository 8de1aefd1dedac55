"""What survivors of a death conclude from what they tell each other."""

from __future__ import annotations

from typing import Any

import pytest

from adaptdl_elastic.torch._elastic.survivors import (
    SurvivorReport,
    UnrecoverableStateError,
    knows_sums_alone,
    newest_step,
)


def report(step: int = 7, *, partially_restored: bool = False, **other: Any) -> SurvivorReport:
    place: dict[str, Any] = {"rank": 0, "position": (0, 1, False), "index": 0, "training": True}
    return SurvivorReport(
        step=step, partially_restored=partially_restored, buffers_diverged=False, **place, **other
    )


def test_a_model_that_is_a_mixture_is_nobodys_newest_step() -> None:
    mixture = report(8, partially_restored=True)
    assert newest_step([mixture, report(7), report(6)]) == 7
    with pytest.raises(UnrecoverableStateError, match="no survivor has a whole model"):
        newest_step([mixture])


def test_sums_are_known_elsewhere_only_where_another_has_finished_their_sync() -> None:
    alone, other = report(synced={"loss": 1}, unsynced=("loss",)), report(synced={"loss": 1})
    ahead = report(synced={"loss": 2})
    assert knows_sums_alone([alone], [alone, other])
    assert not knows_sums_alone([alone], [alone, ahead])
    assert not knows_sums_alone([other], [alone, other])
