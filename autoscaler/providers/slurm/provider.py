"""Nodes of Slurm: each is a job of one node that runs an agent, a batch file of the user's.

A request is found in Slurm's queue by its comment, which names the cluster and the instance, so a successor
of this process needs nothing else. The agent gets the instance's id, and how it reaches the store, by
variables of its environment. It ends with its training job, and Slurm's job with it, also if there is no
autoscaler any more.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from adaptdl_elastic.autoscaler.providers.base import Capacity, Provider, ProviderOptionError, TryLaterError
from adaptdl_elastic.autoscaler.providers.registry import ProviderRequest
from adaptdl_elastic.autoscaler.providers.slurm.queue import FORMAT, SlurmJob, capacity_of, parse
from adaptdl_elastic.protocol.environment import INSTANCE_ID, PREEMPTIBLE

# A command ends after so long, also without us: the lease of a dead autoscaler lasts longer (15 s).
_ANSWER_SECONDS = 10
# Options of sbatch by which a request is not one job that this queue shows.
_NOT_ONE_NODE = re.compile("(--(array|clusters?|wrap|wait|test-only)|-[aMW])(=|$| |[0-9])")
# Variables by which a job that the autoscaler runs in, or a user, changes what a command does.
_OTHERS = re.compile("SQUEUE_|SBATCH_(ARRAY_INX|CLUSTERS|WAIT)|SLURM_(?!CONF$)")
# Slurm is asked again so long after it did not answer; twice as long each time.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5.0, 120.0


def from_request(request: ProviderRequest) -> SlurmProvider:
    """Return a provider that submits the batch file of option `batch_file`.

    Further options: `partition`, and `sbatch_option` with one option of sbatch in each line.

    Raises:
        ProviderOptionError: an option is missing, or the batch file does not fit.
    """
    options = request.known("batch_file", "partition", "sbatch_option")
    batch, partition = Path(options.get("batch_file", "")).absolute(), options.get("partition", "")
    if request.max_nodes is None or "batch_file" not in options:
        raise ProviderOptionError("Slurm needs --batch-file FILE, what a node runs, and --max-nodes N")
    try:
        text = batch.read_text()
    except (OSError, UnicodeError) as error:
        raise ProviderOptionError(f"--batch-file {batch}: cannot be read: {error}") from None
    if not ("--rdzv-id" in text and "--once" in text):  # all nodes have one job, and end with it
        raise ProviderOptionError(f"--batch-file {batch}: its adaptdl-run needs --rdzv-id NAME and --once")
    given = [*filter(None, options.get("sbatch_option", "").split("\n"))]
    in_batch = [line.partition(" ")[2].strip() for line in text.splitlines() if line.startswith("#SBATCH")]
    for one in (*given, *in_batch):
        if not one.startswith("-") or _NOT_ONE_NODE.match(one):
            raise ProviderOptionError(f"{one!r} cannot be an option of a request for one node")
    given = [*([f"--partition={partition}"] if partition else []), *given]
    command = ["sbatch", *given, "--parsable", "--nodes=1", "--no-requeue", "--export=ALL", str(batch)]
    return SlurmProvider(command, partition or "slurm", request)


def run_command(*words: str, **variables: str) -> str:
    """Return what a command of Slurm prints; `timeout` ends it, also after our death.

    Raises:
        TryLaterError: it fails.
    """
    environ = {name: value for name, value in os.environ.items() if not _OTHERS.match(name)}
    command = ("timeout", str(_ANSWER_SECONDS), *words)
    done = subprocess.run(
        command, env=environ | variables, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"no answer within {_ANSWER_SECONDS} s"]
        raise TryLaterError(f"{words[0]}: {said[-1].removeprefix(f'{words[0]}: ')}")
    return done.stdout


@dataclass
class SlurmProvider(Provider):
    """One pool of nodes.

    Attributes:
        submit: Command that asks for a node, without its comment.
        pool: Name of the pool.
        given: What the command line says: slots, most nodes, the cluster and its store.
        clock: Seconds since the epoch.
        run: Runs a command with variables beside its words, and returns what it prints.
    """

    submit: Sequence[str]
    pool: str
    given: ProviderRequest
    clock: Callable[[], float] = time.time
    run: Callable[..., str] = run_command

    name = "slurm"

    def __post_init__(self) -> None:
        self._mark, self._last = f"adaptdl/{self.given.owner}/", Capacity()
        self._pause, self._again = 0.0, -1.0  # between two questions without an answer; when the next one is
        # when this one began to look, and the instances that it has seen
        self._began, self._shown = math.inf, set[str]()

    def capacity(self) -> Capacity:
        """Return our jobs; while Slurm does not answer, those of its last answer with a warning.

        Raises:
            TryLaterError: Slurm has never answered.
        """
        if (now := self.clock()) < self._again:
            return self._last
        self._began = min(self._began, now)
        try:
            most, slots = self.given.max_nodes or 0, self.given.slots or 1
            jobs = self._jobs()
            # a job that has ended since the last look is shown as running once, so that its end is noticed
            unseen = {one.instance for one in jobs if one.had_node and one.end >= self._began} - self._shown
            self._shown = {one.instance for one in jobs if not one.waits}
            jobs = [replace(one, state="RUNNING") if one.instance in unseen else one for one in jobs]
            self._last = capacity_of(jobs, self.pool, slots, most, now)
            self._pause = 0.0
        except TryLaterError as error:
            if not self._last.pools:
                raise
            self._pause = min(max(2 * self._pause, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
            self._again = now + self._pause
            text = f"{error}; what is known of nodes is what it said last"
            self._last = replace(self._last, warnings=(text,))
        return self._last

    def request(self, pool: str, desired: int) -> None:
        """Submit jobs, or cancel those that wait, the newest first."""
        jobs = [job for job in self._jobs() if job.counts]
        for _ in range(desired - len(jobs)):
            instance = f"slurm-{secrets.token_hex(4)}"
            variables = {**self.given.store, INSTANCE_ID: instance, PREEMPTIBLE: "1"}
            *words, batch = self.submit
            said = self.run(*words, f"--comment={self._mark}{instance}", batch, **variables)
            if all(job.instance != instance for job in self._jobs()):
                number = said.strip().partition(";")[0]
                if number.isdigit():
                    self.run("scancel", "--quiet", number)
                raise TryLaterError(f"sbatch: squeue does not show job {number} with our comment; cancelled")
        waiting = sorted((job for job in jobs if job.waits), key=lambda job: -job.submitted)
        for job in waiting[: max(0, len(jobs) - desired)]:
            self.run("scancel", "--quiet", "--state=PENDING", job.number)

    def release(self, instance: str, replace: bool = False) -> None:
        """Cancel the job of an instance; with `replace` the next decision asks for another if it pays."""
        for job in self._jobs():
            if job.instance == instance and job.counts:
                self.run("scancel", "--quiet", job.number)

    def hand_back(self) -> None:
        """Cancel what waits; nodes go on with their job, and end with it."""
        self.request(self.pool, 0)

    def _jobs(self) -> list[SlurmJob]:
        whose = ("--noheader", "--states=all", f"--user={os.geteuid()}")
        return parse(self.run("squeue", *whose, "-o", FORMAT, SLURM_TIME_FORMAT="%s"), self._mark)
