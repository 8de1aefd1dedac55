"""Search hyper-parameters with Optuna; each trial is a job, on this machine or on a cluster.

pip install optuna
python examples/optuna_search.py --trials 8 --parallel 2 examples/image_classification.py --epochs 3
python examples/optuna_search.py --cluster --parallel 4 --replicas 1:4 examples/image_classification.py

The script takes what `arguments` returns, and gives the value that counts to `adl.report(loss=...)`.
The study is in .adaptdl/search: the same command adds trials to it. A trial that fails, or is not done after
--limit seconds, is recorded as failed, and the search goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import optuna

FOLDER = Path(".adaptdl/search")  # logs, event logs and checkpoints of the trials, and the study
COMPLETE, FAIL = optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.FAIL


def arguments(trial: optuna.Trial) -> list[str]:
    """Return the arguments of a trial; the learning rate is that of the initial batch size."""
    rate = trial.suggest_float("lr", 1e-3, 1.0, log=True)
    size = trial.suggest_categorical("batch_size", [32, 64, 128])
    return [f"--lr={rate}", f"--batch-size={size}"]


def start(cluster: bool, job: str, replicas: str, command: list[str]) -> subprocess.Popen[bytes]:
    """Start a job that is not restarted if its script fails; return a process that exits as the job does."""
    if cluster:
        options = [f"--name={job}", f"--replicas={replicas}", "--retry=0"]
        subprocess.run(["adaptdl", "submit", *options, *command], check=True)
        return subprocess.Popen(["adaptdl", "wait", job])
    options = ["--standalone", f"--nproc-per-node={replicas}", "--max-restarts=0", "--checkpoint-timeout=10"]
    options += [f"--rdzv-id={job}", f"--checkpoint-path={FOLDER / job}", f"--event-log={FOLDER / job}.events"]
    with (FOLDER / f"{job}.log").open("w") as log:
        return subprocess.Popen(["adaptdl-run", *options, *command], stdout=log, stderr=log)


def stop(cluster: bool, job: str, process: subprocess.Popen[bytes]) -> None:
    """Ask a job to end; what hangs is killed, on a cluster after two minutes."""
    if cluster:
        subprocess.run(["adaptdl", "cancel", job], check=False)
    else:
        process.terminate()


def last_loss(cluster: bool, job: str) -> float:
    """Return the last loss that the script of a job has reported; nan if there is none."""
    if cluster:
        losses = [json.loads(subprocess.check_output(["adaptdl", "status", job, "--json"]))["loss"]]
    else:
        events = map(json.loads, Path(f"{FOLDER / job}.events").read_text().splitlines())
        losses = [event.get("loss") for event in events if event["event"] == "metrics"]
    return float(losses[-1]) if losses and losses[-1] is not None else math.nan


def main(clock: Callable[[], float] = time.monotonic) -> None:
    """Search, and print the best trial."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=1, help="trials at a time")
    parser.add_argument("--replicas", default="1", help="of each trial: N or MIN:MAX")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds that a trial may wait and run")
    parser.add_argument("--cluster", action="store_true", help="submit the trials to the cluster")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script and its other arguments")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the trials, as Ctrl-C does
    FOLDER.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(storage=f"sqlite:///{FOLDER}/study.db", study_name="s", load_if_exists=True)
    running, to_begin = dict[str, tuple[optuna.Trial, subprocess.Popen[bytes], float]](), given.trials
    try:
        while to_begin or running:
            while to_begin and len(running) < given.parallel:
                trial, to_begin = study.ask(), to_begin - 1
                job, command = f"search-{trial.number}", [*given.command, *arguments(trial)]
                process = start(given.cluster, job, given.replicas, command)
                running[job] = trial, process, clock() + given.limit
            time.sleep(0.2)
            for job, (trial, process, deadline) in list(running.items()):
                code = process.poll()
                if code is None and clock() > deadline:
                    print(f"{job} is stopped: it is not done after {given.limit:g} s")
                    stop(given.cluster, job, process)
                    running[job] = trial, process, math.inf
                elif code is not None:
                    del running[job]
                    loss = last_loss(given.cluster, job) if code == 0 else math.nan
                    value, state = (loss, COMPLETE) if math.isfinite(loss) else (None, FAIL)
                    study.tell(trial, value, state)
                    print(f"{job} {state.name}: exit code {code}, loss {loss:.6g}, {trial.params}")
    finally:
        for job, (trial, process, _) in running.items():
            stop(given.cluster, job, process)
            process.wait()
            study.tell(trial, state=FAIL)
    _ = study.get_trials(states=[COMPLETE]) or sys.exit("no trial is complete, so none is the best")
    print(f"best: search-{study.best_trial.number}, loss {study.best_value:.6g}, {study.best_params}")


if __name__ == "__main__":
    main()
