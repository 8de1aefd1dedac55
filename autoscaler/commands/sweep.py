"""The command `adaptdl sweep`."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import click

from adaptdl_elastic.autoscaler.cli import CommandError, OptionError, echo
from adaptdl_elastic.autoscaler.sweep import study_file
from adaptdl_elastic.autoscaler.sweep.search import COMPLETE, Search
from adaptdl_elastic.autoscaler.sweep.trial_process import TrialProcess, slot_options
from adaptdl_elastic.rendezvous.local.store_server import LocalServer
from adaptdl_elastic.rendezvous.text import pluralize

_LOOK_EVERY = 0.2  # seconds between two looks at the trials


@click.command()
@click.argument("study", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="STUDY.py")
@click.option("--trials", type=click.IntRange(min=1), default=20, show_default=True, help="Trials in all.")
@click.option(
    "--parallel", type=click.IntRange(min=1), default=1, show_default=True, help="Trials at the same time."
)
@click.option(
    "--metric", default="loss", show_default=True, help="Name of the value in adl.report(loss=...)."
)
@click.option("--maximize", is_flag=True, help="Look for the largest value, as for an accuracy.")
@click.option(
    "--replicas", default="1", show_default=True, metavar="N|MIN:MAX", help="Replicas of each trial."
)
@click.option(
    "--slots",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of replicas that all trials share, divided by goodput within --replicas.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(".adaptdl/sweeps"),
    show_default=True,
    help="Folder for checkpoints, logs and event logs of the trials.",
)
def sweep(
    study: Path,
    trials: int,
    parallel: int,
    metric: str,
    maximize: bool,
    replicas: str,
    slots: int | None,
    folder: Path,
) -> None:
    """Search for hyper-parameters with Optuna; each trial is a job on this machine.

    STUDY.py defines `command(trial)`, which returns a script and its arguments, and may define `study`, an
    Optuna study with its storage, sampler and pruner. The same command continues a study that was
    interrupted; its trials continue from their checkpoints.
    """
    if re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", replicas) is None:
        raise OptionError(f"--replicas {replicas}: give N or MIN:MAX, as in 2 or 1:4")
    least, _, most = replicas.partition(":")
    if slots is not None and slots < int(least):
        raise OptionError(f"--slots {slots} are fewer than a trial needs (--replicas {replicas})")
    try:
        found = study_file.read(study, maximize)
    except study_file.StudyError as error:
        raise CommandError(str(error)) from error
    of_study = folder / found.name
    with ExitStack() as stack:
        stack.enter_context(_alone(of_study))
        interrupted = stack.enter_context(_interruptible())
        options = ["--standalone", f"--nproc-per-node={replicas}"]
        if slots is not None:
            store = stack.enter_context(LocalServer())
            options = slot_options(store.endpoint, slots, int(least), int(most or least))
        Search(
            study_file.OptunaStudy(found.study),
            found.command,
            lambda number, words: TrialProcess(f"{found.name}-{number}", words, of_study, options, metric),
            metric,
            echo,
            interrupted.is_set,
        ).run(trials, parallel, lambda: time.sleep(_LOOK_EVERY))
        _tell(found, metric, of_study)
        if interrupted.is_set():
            raise CommandError("interrupted; the same command goes on with the study")
        if not any(trial.state.name == COMPLETE for trial in found.study.get_trials(deepcopy=False)):
            raise CommandError(f"no trial of the study is complete, so none is the best; see {of_study}")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the study's lock, because two searches at a time would run the same trials."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        raise OptionError(
            f"--folder: {error.filename or folder}: {error.strerror}; give a directory where you may write"
        ) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OptionError(f"another adaptdl sweep runs this study (it holds {folder / 'lock'})") from None
        yield


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Return an event that Ctrl-C and SIGTERM set; the second one ends the program."""
    interrupted = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            os._exit(128 + number)
        echo("trials save their state and stop; once more ends at once", err=True)
        interrupted.set()

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(found: study_file.StudyFile, metric: str, folder: Path) -> None:
    """Print the best trial, and how many trials have ended in each state."""
    ends: dict[str, int] = {}
    for trial in found.study.get_trials(deepcopy=False):
        ends[trial.state.name.lower()] = ends.get(trial.state.name.lower(), 0) + 1
    total = sum(ends.values())
    echo(f"{pluralize(total, 'trial')}: " + ", ".join(f"{count} {name}" for name, count in ends.items()))
    if "complete" in ends:
        best = found.study.best_trial
        values = ", ".join(f"{name}={value}" for name, value in best.params.items())
        echo(f"best: trial {best.number}, {metric} {best.value:.6g} with {values}")
    echo(f"logs and checkpoints: {folder}")
