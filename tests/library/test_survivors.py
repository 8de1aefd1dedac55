"""What survivors of a death conclude from what they tell each other."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from adaptdl_elastic.protocol.messages import Resilient
from adaptdl_elastic.torch._elastic.recovery import Recovery
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


def test_a_replica_names_the_groups_of_all_models_in_each_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {3: (((0, 1), (1, 0)), ((0,),)), 4: ((), ())}
    session = Mock(generation=3, joining=False)
    session.models = [Mock(needed_groups=lambda i=i: groups[session.generation][i]) for i in (0, 1)]
    recovery = Recovery(session)
    monkeypatch.setattr(recovery, "why_not", lambda: None)
    monkeypatch.setattr(recovery, "mark", lambda: None)
    monkeypatch.setattr(recovery, "on_lost", lambda: None)
    for session.generation in (3, 3, 4):
        recovery.arm()
    said = [call.args[0] for call in session.send.call_args_list]
    assert said == [Resilient(3, groups=((0, 1), (1, 0), (0,))), Resilient(4)]
