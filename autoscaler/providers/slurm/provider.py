"""Nodes of Slurm: each is a job of one node that runs an agent, a batch file of the user's.

Nothing is remembered here: a request is found in Slurm's queue by its comment, which names the cluster and
the instance. The agent gets the instance's id, and how it reaches the store, by variables of its environment.
It ends with its training job, and Slurm's job with it, also if there is no autoscaler any more.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from adaptdl_elastic.autoscaler.providers.base import (
    Capacity,
    Provider,
    ProviderOptionError,
    TryLaterError,
    UnknownInstanceError,
)
from adaptdl_elastic.autoscaler.providers.registry import ProviderRequest
from adaptdl_elastic.autoscaler.providers.slurm.queue import (
    FORMAT,
    SlurmJob,
    instances_of,
    parse,
    pool_of,
    told,
)
from adaptdl_elastic.protocol.environment import INSTANCE_ID, PREEMPTIBLE

# A command ends after so long, also without us: the lease of a dead autoscaler lasts longer (15 s).
_ANSWER_SECONDS = 10
# Slurm is asked again so long after it did not answer; twice as long each time.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5.0, 120.0
# Options of adaptdl-run that the batch file has to give: all nodes have one job, and end with it.
_NEEDED = ("--rdzv-id", "--once")


def from_request(request: ProviderRequest) -> SlurmProvider:
    """Return a provider that submits the batch file of option `batch_file`.

    Further options: `partition`, and `sbatch_option` with one option of sbatch in each line.

    Raises:
        ProviderOptionError: an option is missing, or the batch file does not fit.
    """
    options = request.known("batch_file", "partition", "sbatch_option")
    batch, most = Path(options.get("batch_file", "")).absolute(), request.max_nodes
    if most is None or not options.get("batch_file"):
        raise ProviderOptionError("Slurm needs --batch-file FILE, what a node runs, and --max-nodes N")
    try:
        text = batch.read_text()
    except (OSError, UnicodeError) as error:
        raise ProviderOptionError(f"--batch-file {batch}: cannot be read: {error}") from None
    if missing := [option for option in _NEEDED if option not in text]:
        raise ProviderOptionError(f"--batch-file {batch}: its adaptdl-run needs {' and '.join(missing)}")
    partition = options.get("partition", "")
    given = [f"--partition={partition}"] if partition else []
    given += options.get("sbatch_option", "").splitlines()
    return SlurmProvider(
        batch, given, partition or "slurm", request.slots or 1, most, request.owner, request.store
    )


class SlurmProvider(Provider):
    """One pool of nodes.

    Args:
        batch: the batch file.
        options: further options of sbatch.
        pool: name of the pool.
        slots: replicas per node.
        maximum: most nodes.
        owner: cluster that the nodes are for.
        store: variables by which an agent reaches the store.
        clock: seconds since the epoch.
        run: runs a command of Slurm with variables beside its words, and returns what it prints.
    """

    name = "slurm"

    def __init__(
        self,
        batch: Path,
        options: Sequence[str],
        pool: str,
        slots: int,
        maximum: int,
        owner: str,
        store: Mapping[str, str],
        clock: Callable[[], float] = time.time,
        run: Callable[..., str] | None = None,
    ) -> None:
        self._batch, self._options, self._store = batch, tuple(options), dict(store)
        self._pool, self._slots, self._maximum = pool, slots, maximum
        self._mark, self._clock, self._run = f"adaptdl/{owner}/", clock, run or run_command
        self._numbers: dict[str, str] = {}  # instance → number of its job
        self._last: Capacity | None = None
        self._pause, self._again = 0.0, 0.0  # since Slurm has not answered; when it is asked again

    def capacity(self) -> Capacity:
        """Return our jobs; while Slurm does not answer, those of its last answer with a warning.

        Raises:
            TryLaterError: Slurm has never answered.
        """
        now = self._clock()
        if self._last is not None and now < self._again:
            return self._last
        try:
            jobs = self._jobs()
        except TryLaterError as error:
            if self._last is None:
                raise
            self._pause = min(max(2 * self._pause, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
            self._again = now + self._pause
            text = f"{error}; what is known of nodes is what it said last"
            self._last = replace(self._last, warnings=(text,))
            return self._last
        self._pause = self._again = 0.0
        pool = pool_of(jobs, self._pool, self._slots, self._maximum)
        there, ended = instances_of(jobs, self._pool, self._slots)
        self._last = Capacity((pool,), there, tuple(told(jobs, self._pool, now)), ended)
        return self._last

    def request(self, pool: str, desired: int) -> None:
        """Submit jobs, or cancel those that wait, the newest first."""
        jobs = [job for job in self._jobs() if job.counts]
        for _ in range(desired - len(jobs)):
            self._submit()
        waiting = sorted((job for job in jobs if job.waits), key=lambda job: -job.submitted)
        for job in waiting[: max(0, len(jobs) - desired)]:
            self._run("scancel", "--quiet", "--state=PENDING", job.number)

    def release(self, instance: str, replace: bool = False) -> None:
        """Cancel the job of an instance; with `replace` the next decision asks for another one if it pays."""
        if instance not in self._numbers:
            self._jobs()
        if instance not in self._numbers:
            raise UnknownInstanceError(f"no job of Slurm is for {instance!r}")
        self._run("scancel", "--quiet", self._numbers[instance])

    def hand_back(self) -> None:
        """Cancel what waits; nodes go on with their job, and end with it."""
        self.request(self._pool, 0)

    def _jobs(self) -> list[SlurmJob]:
        answer = self._run(
            "squeue",
            "--noheader",
            "--states=all",
            f"--user={os.geteuid()}",
            "-o",
            FORMAT,
            SLURM_TIME_FORMAT="%s",
        )
        jobs = parse(answer, self._mark)
        self._numbers |= {job.instance: job.number for job in jobs}
        return jobs

    def _submit(self) -> None:
        instance = f"slurm-{secrets.token_hex(4)}"
        ours = ("--parsable", "--nodes=1", "--no-requeue", f"--comment={self._mark}{instance}")
        named = {**self._store, INSTANCE_ID: instance, PREEMPTIBLE: "1"}
        self._run("sbatch", *self._options, *ours, str(self._batch), **named)


def run_command(*command: str, **variables: str) -> str:
    """Return what a command of Slurm prints; `timeout` ends it, also after our death.

    Raises:
        TryLaterError: it fails.
    """
    # what a user sets for squeue would hide jobs from us
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    done = subprocess.run(
        ["timeout", str(_ANSWER_SECONDS), *command],
        env=environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"no answer within {_ANSWER_SECONDS} s"]
        raise TryLaterError(f"{command[0]}: {said[-1].removeprefix(f'{command[0]}: ')}")
    return done.stdout
