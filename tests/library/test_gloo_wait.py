"""Waiting for collectives of gloo, which may never end after the death of a replica."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import replicas
import slow_link

from adaptdl_elastic.reducer import PeerLostError
from adaptdl_elastic.torch._process_group.backends import Gloo

LONG = timedelta(hours=1)


class Work:
    """A collective that is complete at the `looks`-th look at it, or never."""

    def __init__(self, looks: float, error: str | None = None) -> None:
        self.looks, self.error = looks, error

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks <= 0

    def wait(self) -> None:
        assert self.looks <= 0, "this would block"
        if self.error is not None:
            raise RuntimeError(self.error)


def session(lost: str | None = None) -> Any:
    return SimpleNamespace(consensus=SimpleNamespace(lost=lost), transfer_stuck=False)


def test_all_results_are_waited_for() -> None:
    works = [Work(3), Work(100)]
    Gloo("gloo", session()).wait(works, LONG)
    assert all(work.looks <= 0 for work in works)


def test_an_error_is_raised() -> None:
    with pytest.raises(RuntimeError, match="connection closed"):
        Gloo("gloo", session()).wait([Work(2, "connection closed")], LONG)


def test_a_transfer_that_gloo_forgets_after_a_death_is_not_waited_for() -> None:
    present = session("rank 2 is gone")
    with pytest.raises(PeerLostError, match="rank 2 is gone"):
        Gloo("gloo", present).wait([Work(float("inf"))], LONG)
    assert present.transfer_stuck, "the group would be freed while gloo still works on it"


def test_a_collective_that_ends_soon_after_a_death_has_its_result() -> None:
    present = session("rank 2 is gone")
    Gloo("gloo", present).wait([Work(5)], LONG)
    assert not present.transfer_stuck


def test_there_is_a_time_limit_without_a_session() -> None:
    with pytest.raises(RuntimeError, match=r"took more than 0:00:00\.01"):
        Gloo("gloo").wait([Work(float("inf"))], timedelta(milliseconds=10))


@pytest.mark.processes
@pytest.mark.slow
def test_a_transfer_over_a_slow_link_goes_on_and_one_to_a_stopped_replica_ends(tmp_path: Path) -> None:
    error, _ = replicas.run(slow_link.slow_and_stopped, 2, str(tmp_path))
    assert "Timed out waiting 3000ms for send" in error
