"""Decide when to tell the user why the job has no replicas, or keeps its size."""

from __future__ import annotations

from adaptdl_elastic.rendezvous.schema.records import INPLACE_REQUIRED, JobState, JobStatus

AFTER = 2.0  # seconds that a reason must have lasted, since every job waits for a moment at its start
SILENCE = 20.0  # seconds without an answer from any coordinator
UNHEARD = (
    f"no replica yet: no coordinator has answered in {SILENCE:g} s (`adaptdl doctor` looks for the reason; "
    f"coordinator.log is in the log directory of the node that has the coordinator)"
)


class PendingNotice:
    """Tells each reason once, and again if another reason came between. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._inplace_reasons: set[str] = set()
        self._reason: str | None = None
        self._told: str | None = None
        self.due: float | None = None  # when `notice` has something to tell even if nothing has changed

    def notice(self, status: JobStatus | None, now: float) -> str | None:
        """Return the line to print about the newest status, or None."""
        if status is None:
            return self._no_coordinator(now)
        if INPLACE_REQUIRED in status.reason:
            told = status.reason in self._inplace_reasons
            self._inplace_reasons.add(status.reason)
            self._reason = self._told = self.due = None
            return None if told else status.reason
        if status.state is not JobState.PENDING or not status.reason:
            self._reason = self._told = self.due = None
            return None
        if status.reason != self._reason:
            self._reason = status.reason
            self.due = None if self._reason == self._told else now + AFTER
        if self.due is None or now < self.due:
            return None
        self._told, self.due = self._reason, None
        return f"no replica yet: {self._reason}"

    def _no_coordinator(self, now: float) -> str | None:
        if self._told is None and self.due is None:
            self.due = now + SILENCE
        if self.due is None or now < self.due:
            return None
        self._told, self.due = UNHEARD, None
        return UNHEARD
