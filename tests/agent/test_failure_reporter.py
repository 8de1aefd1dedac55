"""What a person at the terminal is told of a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adaptdl_elastic.agent.runtime.failure_reporter import FailureReporter
from adaptdl_elastic.autoscaler.coordinator.survivors import describe_beyond
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.held import GenerationEnd
from adaptdl_elastic.rendezvous.schema.records import Cause, CheckpointRecord, Failure, Plan, Transition


class Ignored:
    """A recorder, or the terminal, whose methods do nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: False


def restarted(
    path: Path,
    cause: Cause,
    exit_code: int,
    why: str,
    saved: CheckpointRecord | None,
    reason: str = "a reason",
) -> str:
    """Return the line about the generation after one that failed with `exit_code`."""
    said: list[str] = []
    output: Any = Ignored()
    reporter = FailureReporter(output, output, said.append, 3, str(path))
    reporter.resilience(why)
    end = GenerationEnd(1, records.Outcome.FAILED, 0, Failure(0, exit_code, "failed"))
    reporter.ended(end, [], 0, alone=True)
    plan = Plan("a", "1", 2, (), cause, Transition.ABORT, reason, restarts=1)
    reporter.starts_again(plan, saved)
    return said[-1]


@pytest.mark.parametrize(
    ("cause", "exit_code", "why", "line"),
    [
        (
            Cause.FAILURE,
            -9,
            "why",
            "restart 1 of 3, from {}, as training cannot go on without a dead replica: why",
        ),
        (Cause.FAILURE, -9, "", "restart 1 of 3, from {}"),
        (Cause.FAILURE, 1, "why", "restart 1 of 3, from {}"),
        (
            Cause.NODE_LOST,
            1,
            "why",
            "starting again, from {}, as training cannot go on without a dead replica: why (a reason; not "
            "counted as a restart)",
        ),
    ],
    ids=["killed", "killed where deaths can be survived", "raised", "node lost"],
)
def test_a_restart_after_a_death_says_why_it_is_one_and_from_where(
    cause: Cause, exit_code: int, why: str, line: str, tmp_path: Path
) -> None:
    saved = CheckpointRecord("1", str(tmp_path), 1, 13, 0.0)
    assert restarted(tmp_path, cause, exit_code, why, saved) == line.format("the checkpoint of step 13")
    beginning = "the beginning, because no checkpoint had been saved yet"
    assert restarted(tmp_path, cause, exit_code, why, None) == line.format(beginning)


def test_a_restart_says_that_all_copies_are_lost(tmp_path: Path) -> None:
    reason = f"rank 1 failed: SIGKILL{describe_beyond((1, 2))} (restart 1 of 3)"
    line = restarted(tmp_path, Cause.FAILURE, -9, "", CheckpointRecord("1", "/1", 1, 13), reason)
    assert line == f"starting again, from the checkpoint of step 13 ({reason})"
