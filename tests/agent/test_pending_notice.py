"""An agent whose job has no replicas says why."""

from __future__ import annotations

import pytest

from adaptdl_elastic.agent.core.pending_notice import AFTER, SILENCE, UNHEARD, PendingNotice
from adaptdl_elastic.rendezvous.schema.records import INPLACE_REQUIRED, JobState, JobStatus


def pending(reason: str) -> JobStatus:
    return JobStatus("job", "run-1", JobState.PENDING, reason=reason)


RUNNING = JobStatus("job", "run-1", JobState.RUNNING, reason="2 replicas")
INSISTS = JobStatus("job", "run-1", JobState.RUNNING, reason=f"keeps 2: {INPLACE_REQUIRED}")


@pytest.fixture
def waiting() -> PendingNotice:
    return PendingNotice()


def test_a_reason_that_stands_is_said_once_and_when_it_changes(waiting: PendingNotice) -> None:
    assert waiting.notice(None, 0.0) is None
    assert waiting.due == SILENCE
    assert waiting.notice(pending("one node"), 10.0) is None
    assert waiting.due == 10.0 + AFTER
    assert waiting.notice(pending("one node"), waiting.due) == "no replica yet: one node"
    assert (waiting.notice(pending("one node"), 99.0), waiting.due) == (None, None)
    assert waiting.notice(pending("two nodes"), 100.0) is None
    assert waiting.notice(pending("two nodes"), 100.0 + AFTER) == "no replica yet: two nodes"
    assert waiting.notice(pending("one node"), 200.0) is None
    assert waiting.notice(pending("one node"), 200.0 + AFTER) == "no replica yet: one node"


def test_a_missing_coordinator_is_reported_once(waiting: PendingNotice) -> None:
    assert waiting.notice(None, 1.0) is None
    assert waiting.notice(None, SILENCE) is None
    assert waiting.notice(None, 1.0 + SILENCE) == UNHEARD
    assert (waiting.notice(None, 99.0), waiting.due) == (None, None)
    assert waiting.notice(pending("one node"), 100.0) is None
    assert waiting.notice(pending("one node"), 100.0 + AFTER) == "no replica yet: one node"


def test_a_moment_of_waiting_is_not_reported(waiting: PendingNotice) -> None:
    assert waiting.notice(pending("its turn"), 0.0) is None
    assert waiting.notice(pending("slots"), AFTER / 2) is None
    assert waiting.notice(pending("slots"), AFTER) is None
    assert (waiting.notice(RUNNING, 2 * AFTER), waiting.due) == (None, None)
    assert waiting.notice(pending("slots"), 3 * AFTER) is None
    assert waiting.notice(pending("slots"), 4 * AFTER) == "no replica yet: slots"


def test_why_a_size_is_kept_is_said_at_once_and_once(waiting: PendingNotice) -> None:
    assert waiting.notice(INSISTS, 0.0) == INSISTS.reason
    assert waiting.notice(RUNNING, 1.0) is None
    assert waiting.notice(INSISTS, 2.0) is None


def test_a_job_that_keeps_its_size_reports_no_wait(waiting: PendingNotice) -> None:
    assert waiting.notice(None, 0.0) is None
    assert waiting.notice(INSISTS, 1.0) == INSISTS.reason
    assert waiting.due is None
