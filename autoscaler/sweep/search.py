"""Run the trials of a study: start them, pass on what they report, prune them, and record how they ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

# Optuna's states by name: this module runs without the package
RUNNING, COMPLETE, PRUNED, FAILED = "RUNNING", "COMPLETE", "PRUNED", "FAIL"


class Trial(Protocol):
    """The part of `optuna.Trial` that a search uses."""

    number: int

    def report(self, value: float, step: int) -> None:
        """Record a value of the metric at a step before the trial's end."""

    def should_prune(self) -> bool:
        """Return whether the trial is worse than others at the same step."""


class RunningTrial(Protocol):
    """A trial's job."""

    def reported(self) -> list[float]:
        """Return the values of the metric since the last call."""

    def ended(self) -> int | None:
        """Return the exit code; None: it runs."""

    def stop(self) -> None:
        """Ask the job to end; do nothing if it was asked before."""


class Study(Protocol):
    """Gives out trials and records their ends; `study_file.OptunaStudy` is Optuna's."""

    def interrupted(self) -> Sequence[tuple[Trial, int]]:
        """Return the trials that an earlier search left running, each with its next step."""

    def wants_more(self, trials: int) -> bool:
        """Return whether the study is to begin another trial, to have `trials` of them."""

    def ask(self) -> Trial:
        """Begin another trial."""

    def tell(self, trial: Trial, value: float | None, state: str) -> None:
        """Record a trial's end."""


@dataclass
class _Entry:
    trial: Trial
    job: RunningTrial
    recorded: int  # steps below it are in the study already
    values: list[float] = field(default_factory=list)
    pruned: bool = False


@dataclass
class Search:
    """A search for the best trial.

    Args:
        study: Where trials come from.
        command: The script and its arguments for a trial.
        start: Starts a trial's job, given its number and command.
        metric: Name of the value that the script gives to `adl.report`.
        say: Is called with one line per event.
        stopping: Whether the search is to stop; trials then save their state and stay unfinished.
    """

    study: Study
    command: Callable[[Any], Sequence[object]]
    start: Callable[[int, list[str]], RunningTrial]
    metric: str
    say: Callable[[str], None]
    stopping: Callable[[], bool] = lambda: False
    _running: dict[int, _Entry] = field(default_factory=dict, init=False)
    _resumable: list[tuple[Trial, int]] = field(default_factory=list, init=False)

    def run(self, trials: int, parallel: int, wait: Callable[[], None]) -> None:
        """Run until the study has so many trials.

        Args:
            trials: Number of trials of the whole study, those of earlier searches included.
            parallel: Trials at a time.
            wait: Is called between two looks at the jobs.
        """
        self._resumable = list(self.study.interrupted())
        while True:
            stopping = self.stopping()
            while not stopping and len(self._running) < parallel and (found := self._next(trials)):
                self._begin(*found)
            if stopping:
                for entry in self._running.values():
                    entry.job.stop()
            if not self._running:
                return
            wait()
            for number in list(self._running):
                self._look(number, stopping)

    def _next(self, trials: int) -> tuple[Trial, int] | None:
        if self._resumable:
            trial, step = self._resumable.pop(0)
            self.say(f"trial {trial.number} goes on where it was interrupted")
            return trial, step
        return (self.study.ask(), 0) if self.study.wants_more(trials) else None

    def _begin(self, trial: Trial, recorded: int) -> None:
        try:
            words = [str(word) for word in self.command(trial)]
        except Exception as error:  # the study's own code
            self._end(trial, None, FAILED, f"command(trial) raised {type(error).__name__}: {error}")
            return
        self.say(f"trial {trial.number}: {' '.join(words)}")
        self._running[trial.number] = _Entry(trial, self.start(trial.number, words), recorded)

    def _look(self, number: int, stopping: bool) -> None:
        entry = self._running[number]
        code = entry.job.ended()  # asked before the values are read, so that the last values are not missed
        for value in entry.job.reported():
            entry.values.append(value)
            step = len(entry.values) - 1
            if math.isfinite(value) and step >= entry.recorded:
                entry.trial.report(value, step)
        if code is None:
            if entry.values and not entry.pruned and not stopping and entry.trial.should_prune():
                entry.pruned = True
                entry.job.stop()
            return
        del self._running[number]
        finite = [value for value in entry.values if math.isfinite(value)]
        best = f"{self.metric} {finite[-1]:.6g}" if finite else ""
        if entry.pruned:
            self._end(entry.trial, finite[-1], PRUNED, f"pruned at {best}")
        elif code != 0 and stopping:
            self.say(f"trial {number} is stopped; the same command goes on with it")
        elif code != 0:
            self._end(entry.trial, None, FAILED, f"failed with exit code {code}; its log says why")
        elif not entry.values:
            why = f"reported no {self.metric}: call adl.report({self.metric}=...) in the script"
            self._end(entry.trial, None, FAILED, why)
        elif not finite or not math.isfinite(entry.values[-1]):
            self._end(entry.trial, None, FAILED, f"ended with {self.metric} {entry.values[-1]}")
        else:
            self._end(entry.trial, finite[-1], COMPLETE, best)

    def _end(self, trial: Trial, value: float | None, state: str, why: str) -> None:
        self.study.tell(trial, value, state)
        self.say(f"trial {trial.number} {why}")
