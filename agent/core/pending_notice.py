"""When the person at the terminal is told why the job has no replicas, or keeps its size."""

from __future__ import annotations

from adaptdl_elastic.rendezvous.schema.records import INSISTS, JobState, JobStatus

AFTER = 2.0  # seconds that a reason to wait must have stood: every job waits a moment while it begins
SILENCE = 20.0  # seconds without a word from any coordinator
UNHEARD = (
    f"no replica yet: no coordinator has answered in {SILENCE:g} s (`adaptdl doctor` looks for the reason; "
    f"coordinator.log is in the log directory of the node that has the coordinator)"
)


class PendingNotice:
    """Each reason is told once, and again when another was true in between. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._insisted: set[str] = set()
        self._reason: str | None = None
        self._told: str | None = None
        self.due: float | None = None  # when `hear` has something to tell though nothing has changed

    def hear(self, status: JobStatus | None, now: float) -> str | None:
        """What is to be said now of the status as last heard."""
        if status is None:
            return self._unheard(now)
        if INSISTS in status.reason:
            told = status.reason in self._insisted
            self._insisted.add(status.reason)
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

    def _unheard(self, now: float) -> str | None:
        if self._told is None and self.due is None:
            self.due = now + SILENCE
        if self.due is None or now < self.due:
            return None
        self._told, self.due = UNHEARD, None
        return UNHEARD
