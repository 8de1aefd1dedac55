"""Read what Slurm has given to a task of a job step, from the variables that it sets, and how its job ends.

Nothing is read outside of a step that `srun` has started: a batch script itself is no task of one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import takewhile

_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
"""Steps from here on are Slurm's own: a batch script, the shell of `salloc`, a container of ssh sessions."""

EARLY_SECONDS = 60.0
"""Slurm may send the signal of `--signal` so much earlier than it was asked to."""

_NO_GPU = ("", "NoDevFiles", "none", "void")  # in CUDA_VISIBLE_DEVICES: no GPU


class SlurmError(ValueError):
    """The task cannot be an agent; the message says what to ask of Slurm instead."""


@dataclass(frozen=True)
class Allocation:
    """What Slurm has given to one task of a job step.

    Attributes:
        job: Name of the job: the same after a requeue, and another one for each task of an array.
        number: What Slurm's commands call the job.
        restarts: How often Slurm has requeued it.
        step: Name of the step: another one after a requeue.
        node: Name of this node.
        first: Whether this is the first task of the step.
        max_nodes: Number of nodes of the allocation.
        cores: Number of cores that this task has.
        slots: Number of GPUs that this task has, or else of its cores.
        directory: The directory in which the job was submitted.
        reached_by: Addresses by which the nodes of the step reach the command `srun`.
        end: When the job's time limit ends, in seconds since the epoch; 0: not said.
    """

    job: str
    number: str
    restarts: int
    step: str
    node: str
    first: bool
    max_nodes: int
    cores: int
    slots: int
    directory: str
    reached_by: tuple[str, ...]
    end: float

    @property
    def lasting_step(self) -> str:
        """Name of the step without what a requeue changes. The run before has ended then."""
        return self.step.rpartition(".")[0]


def allocation(environ: Mapping[str, str], cores: int, given: Collection[str] = ()) -> Allocation | None:
    """Return what Slurm has given to this task; None if this process is not one of a job step.

    Args:
        environ: The variables of this process.
        cores: Number of cores that the kernel lets this process use.
        given: Options of the user, who may do by hand what is refused otherwise.

    Raises:
        SlurmError: the task cannot be an agent.
    """
    step = _number(environ, "SLURM_STEP_ID", _FIRST_SPECIAL_STEP)
    if step >= _FIRST_SPECIAL_STEP or not environ.get("SLURM_JOB_ID") or not environ.get("SLURMD_NODENAME"):
        return None
    if _number(environ, "SLURM_HET_SIZE", 1) > 1:
        if {"rdzv_endpoint", "rdzv_id"} <= set(given):
            return None
        raise SlurmError(
            "components of a heterogeneous job of Slurm have no store in common: give --rdzv-endpoint "
            "HOST:PORT of an etcd and --rdzv-id, or submit one component"
        )
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", 1)
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", nodes)
    if tasks > nodes and "node_name" not in given:
        raise SlurmError(
            f"Slurm runs {tasks} tasks on {nodes} nodes, and one agent starts all replicas of a node: "
            f"srun --ntasks-per-node=1 --cpus-per-task=N (or --gpus-per-node=N)"
        )
    name, array = environ["SLURM_JOB_ID"], environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        name = f"{array}_{environ.get('SLURM_ARRAY_TASK_ID', '0')}"
    restarts = _number(environ, "SLURM_RESTART_COUNT", 0)
    reached_by = (environ.get(one, "") for one in ("SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST"))
    for variable in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        cores = min(cores, _number(environ, variable, cores))
    return Allocation(
        job=f"slurm-{name}",
        number=environ["SLURM_JOB_ID"],
        restarts=restarts,
        step=f"{environ['SLURM_JOB_ID']}.{step}.{restarts}",
        node=environ["SLURMD_NODENAME"],
        first=_number(environ, "SLURM_PROCID", 0) == 0,
        max_nodes=max(nodes, _number(environ, "SLURM_JOB_NUM_NODES", nodes)),
        cores=cores,
        slots=_gpus(environ) or cores,
        directory=environ.get("SLURM_SUBMIT_DIR", ""),
        reached_by=tuple(address for address in reached_by if address),
        end=_number(environ, "SLURM_JOB_END_TIME", 0),
    )


def parse_job(text: str) -> dict[str, str]:
    """Return what `scontrol show job` says, by name."""
    return dict(re.findall(r"(\w+)=(\S*)", text))


def limit_of(job: Mapping[str, str]) -> float:
    """Return when a job's time limit ends, if SLURM_TIME_FORMAT was %s; infinite if it has none."""
    return _number(job, "EndTime", 0) or math.inf


def notice_time(start: float, end: float, seconds: float) -> float:
    """Return when nodes are to be left: `seconds` before the limit, or in the middle of a short time."""
    return max(end - seconds, (start + end) / 2)


def is_to_requeue(job: Mapping[str, str], restarts: int, seconds: float, now: float) -> bool:
    """Return whether a job whose training was left is to go on later: no person has ended it.

    A job that is COMPLETING has been cancelled, unless something else is said.

    Args:
        job: What Slurm says now.
        restarts: How often it had requeued the job when this run began.
        seconds: How long before the limit nodes are left.
        now: The time.
    """
    if _number(job, "Restarts", 0) > restarts:
        return False
    if job.get("Reason") == "TimeLimit" or _number(job, "PreemptTime", 0):
        return True
    near = notice_time(_number(job, "StartTime", 0), limit_of(job), seconds + EARLY_SECONDS)
    return job.get("JobState") == "RUNNING" and now >= near


def _gpus(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs of this task; Slurm binds them by CUDA_VISIBLE_DEVICES, if it binds them."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return _number(environ, "SLURM_GPUS_ON_NODE", 0)
    # what follows one that is no device does not count, as for CUDA
    names = (name.strip() for name in visible.split(","))
    return len(list(takewhile(lambda name: name not in _NO_GPU and not name.startswith("-"), names)))


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else default
