"""Read a study file, and give its Optuna study to a search."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptdl_elastic.autoscaler.sweep import search


class StudyError(ValueError):
    """A study file cannot be used; the message is one line with the remedy."""


@dataclass(frozen=True)
class StudyFile:
    """What a study file defines."""

    name: str  # of the study; jobs are called after it
    command: Callable[[Any], Sequence[object]]
    study: Any  # optuna.Study


def read(path: Path, maximize: bool) -> StudyFile:
    """Run a study file.

    It defines `command(trial)`, which returns a script and its arguments, and may define `study`, an
    `optuna.Study`. Without one a study is kept in a SQLite file beside it.

    Raises:
        StudyError: optuna is not installed, or the file does not define these.
    """
    try:
        import optuna
    except ImportError:
        raise StudyError("adaptdl sweep needs Optuna: pip install optuna") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        defined = runpy.run_path(str(path), run_name="adaptdl_sweep")
    except Exception as error:  # the user's own code
        raise StudyError(f"{path}: {type(error).__name__}: {error}") from error
    command, study = defined.get("command"), defined.get("study")
    if not callable(command):
        raise StudyError(f"{path} defines no command(trial) that returns a script and its arguments")
    if study is None:
        study = optuna.create_study(
            study_name=path.stem,
            storage=f"sqlite:///{path.with_suffix('.db').absolute()}",
            direction="maximize" if maximize else "minimize",
            load_if_exists=True,
        )
    elif not isinstance(study, optuna.Study):
        raise StudyError(f"{path}: study is {type(study).__name__}, give an optuna.Study")
    if len(study.directions) != 1:
        raise StudyError(f"{path}: the study has {len(study.directions)} objectives, one is supported")
    if maximize != (study.direction == optuna.study.StudyDirection.MAXIMIZE):
        raise StudyError(
            f"{path}: the study is to {study.direction.name.lower()}; "
            + ("leave out --maximize, or delete the study" if maximize else "give --maximize")
        )
    return StudyFile(study.study_name, command, study)


class OptunaStudy:
    """An Optuna study as a search uses it."""

    def __init__(self, study: Any) -> None:
        self._study = study
        self._exhausted = False  # the sampler has nothing more to try

    def interrupted(self) -> Sequence[tuple[search.Trial, int]]:
        """Return the trials that an earlier search left running, each with its next step."""
        import optuna

        left = self._study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.RUNNING])
        found: list[tuple[Any, int]] = []
        for one in left:
            # Optuna has no public way from a stored trial to one that takes reports
            trial = optuna.Trial(self._study, one._trial_id)
            found.append((trial, max(one.intermediate_values, default=-1) + 1))
        return found

    def wants_more(self, trials: int) -> bool:
        """Return whether the study has fewer trials than that, and its sampler more to try."""
        return not self._exhausted and len(self._study.get_trials(deepcopy=False)) < trials

    def ask(self) -> search.Trial:
        """Begin another trial."""
        trial: search.Trial = self._study.ask()
        return trial

    def tell(self, trial: search.Trial, value: float | None, state: str) -> None:
        """Record a trial's end."""
        import optuna

        given = value if state == search.COMPLETE else None
        try:
            self._study.tell(trial, given, optuna.trial.TrialState[state])
        except RuntimeError as error:
            # A sampler that has tried everything (GridSampler) calls `Study.stop`, which is for Optuna's own
            # loop. The trial's end is recorded all the same.
            if "Study.stop" not in str(error):
                raise
            self._exhausted = True
