"""What a person at the terminal and the event log are told of failures, and of the restarts after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

from adaptdl_elastic.agent.runtime import failure_reports
from adaptdl_elastic.agent.terminal.event_recorder import EventRecorder
from adaptdl_elastic.agent.terminal.replica_output import Output
from adaptdl_elastic.agent.terminal.traceback_display import EndedReplica, TracebackDisplay
from adaptdl_elastic.rendezvous.schema.held import GenerationEnd
from adaptdl_elastic.rendezvous.schema.records import (
    PART_OF_MODEL,
    Cause,
    CheckpointRecord,
    Failure,
    Outcome,
    Plan,
    Transition,
)
from adaptdl_elastic.rendezvous.text import pluralize
from adaptdl_elastic.storage import DirectoryStorage, StorageError


class FailureReporter:
    """Tells of each failure once, with one traceback."""

    def __init__(
        self,
        output: Output,
        recorder: EventRecorder,
        say: Callable[[str], None],
        max_restarts: int,
        checkpoint_path: str,
    ) -> None:
        self._recorder, self._say, self._max_restarts = recorder, say, max_restarts
        self._checkpoint_path = checkpoint_path
        self._tracebacks = TracebackDisplay(output)
        # (generation, rank) of replicas whose death the others survived
        self._survived: set[tuple[int, int]] = set()
        # whether a signal ended the replica that failed last on this node
        self._killed = False
        # why training cannot go on without a dead replica, as the replicas said; "" if it can, None at first
        self._why_not_resilient: str | None = None

    def resilience(self, why_not: str) -> None:
        """Learn why the death of a replica ends the others; "" if it does not. Tell if that has changed."""
        if why_not and self._why_not_resilient == "":
            self._say(f"from now on a death starts all replicas again: {why_not}")
        self._why_not_resilient = why_not

    def survived(self, generation: int, failure: Failure) -> None:
        """Tell of the death of a replica that the others survive."""
        self._survived.add((generation, failure.rank))
        self._say(f"replica {failure.rank} is lost ({failure.message})")
        self._recorder.lost(generation, failure)

    def ended(
        self, end: GenerationEnd, ended: Iterable[EndedReplica], restarts_used: int, *, alone: bool
    ) -> None:
        """Tell how a generation has ended on this node, with one traceback.

        Args:
            end: The end; its failure is that of the replica which the others' came of.
            ended: The replicas of the generation.
            restarts_used: Restarts of the job before this end.
            alone: No other node has replicas.
        """
        failure = end.failure
        # the last death on this node is no failure if replicas of other nodes live on
        survived = not alone and failure is not None and (end.generation, failure.rank) in self._survived
        if failure is not None and end.outcome is Outcome.FAILED and not survived:
            self._killed = failure.exit_code < 0
            used = min(restarts_used + 1, self._max_restarts)
            shown = self._tracebacks.show_cause(ended, failure.rank, alone=alone)
            self._say(failure_reports.summarise(failure, again=shown.repeated, traceback=shown.hidden_in))
            self._recorder.failure(failure, used, self._max_restarts)
        elif failure is not None or end.outcome is Outcome.STOPPED:
            # a replica may have ended with an error while the others were to go on without it
            shown = self._tracebacks.show_first(ended)
            if shown.rank is not None:
                self._say(f"replica {shown.rank} has ended with this error")

    def withdrawn(
        self, plan: Plan, newcomers: Iterable[EndedReplica], reason: str, *, stopping: bool
    ) -> None:
        """Tell that a change in place is off.

        Args:
            plan: The change.
            newcomers: Those of its replicas that have exited.
            reason: Why it is off.
            stopping: The other replicas are about to stop.
        """
        self._tracebacks.show_first(newcomers)
        goes_on = "" if stopping else ", training goes on"
        self._say(f"the change to {pluralize(plan.replicas, 'replica')} is called off{goes_on}: {reason}")

    def starts_again(self, plan: Plan, saved: CheckpointRecord | None) -> None:
        """Tell that a generation starts because the one before was lost, if that is so."""
        if plan.transition is not Transition.ABORT or plan.generation <= plan.first:
            return
        origin = self._begins_from() if saved is None else f"the checkpoint of step {saved.step}"
        if self._why_not_resilient and (self._killed or plan.cause is Cause.NODE_LOST):
            origin += f", as training cannot go on without a dead replica: {self._why_not_resilient}"
        counted = plan.cause is Cause.FAILURE
        if counted and PART_OF_MODEL not in plan.reason:
            self._say(f"restart {plan.restarts} of {self._max_restarts}, from {origin}")
        else:
            also = "" if counted else "; not counted as a restart"
            self._say(f"starting again, from {origin} ({plan.reason}{also})")

    def _begins_from(self) -> str:
        """Return what a run goes on from that has saved nothing itself."""
        path = self._checkpoint_path
        if path.startswith("s3://"):
            return "where the run began"  # to look there may take as long as its time limits
        with suppress(StorageError):
            if DirectoryStorage(path.removeprefix("file://")).ids():
                return f"the newest checkpoint in {path}, which an earlier run has saved"
        return "the beginning, because no checkpoint had been saved yet"
