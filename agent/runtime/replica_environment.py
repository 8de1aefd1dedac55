"""The environment variables of a replica (docs/architecture.md has the table)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adaptdl_elastic._private import RuntimeFileError, private_directory
from adaptdl_elastic.agent.machine.devices import MIG
from adaptdl_elastic.protocol import environment
from adaptdl_elastic.rendezvous.local.scratch_directory import Shared, sweep
from adaptdl_elastic.rendezvous.schema.records import JobSpec, MasterRecord, Plan, Rescale

_SHARE, _KEPT_FOR = "share-", 86400.0  # _KEPT_FOR in seconds


@dataclass(frozen=True)
class JobEnvironment:
    """Values that are the same for all replicas of this agent."""

    node: str
    spec: JobSpec  # as this agent's command line says
    role: str
    checkpoint_interval: float
    share_path: str
    threads: int | None
    virtual_local_rank: bool = False
    hang_timeout: float | None = None
    secret: str = field(default="", repr=False)  # secret of the run
    node_type: str = ""
    devices: tuple[str, ...] = ()  # `NodeRecord.devices`


def replica_environment(
    job: JobEnvironment,
    plan: Plan,
    master: MasterRecord,
    local_rank: int,
    checkpoint: str | None,
    error_file: str,
    inherited: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables of one replica.

    Args:
        job: values that all replicas of this agent share.
        plan: the plan of its generation.
        master: the store of its generation.
        local_rank: its slot.
        checkpoint: id of the newest checkpoint; None: there is none.
        error_file: path for the error that ends the script.
        inherited: environment of the agent, which these variables are added to.
    """
    ranks = plan.ranks(job.node)
    group = plan.index(job.node)
    rank = ranks[plan.slots(job.node).index(local_rank)]
    world, restarts = plan.replicas, plan.generation - plan.first
    values: dict[str, object] = {
        environment.RANK: rank,
        environment.WORLD_SIZE: world,
        environment.LOCAL_RANK: local_rank,
        environment.LOCAL_WORLD_SIZE: len(ranks),
        environment.GROUP_RANK: group,
        environment.GROUP_WORLD_SIZE: plan.nodes,
        environment.ROLE_NAME: job.role,
        environment.ROLE_RANK: rank,
        environment.ROLE_WORLD_SIZE: world,
        environment.MASTER_ADDR: master.host,
        environment.MASTER_PORT: master.port,
        environment.RESTART_COUNT: restarts,
        environment.MAX_RESTARTS: job.spec.max_restarts,
        environment.RUN_ID: plan.job,
        environment.USE_AGENT_STORE: "True",
        environment.ERROR_FILE: error_file,
        environment.ADAPTDL_MASTER_ADDR: master.host,
        environment.ADAPTDL_MASTER_PORT: master.collective_port,
        environment.NUM_REPLICAS: world,
        environment.REPLICA_RANK: rank,
        environment.NUM_NODES: plan.nodes,
        environment.NODE: job.node,
        environment.NODE_TYPE: plan.node_type or job.node_type,
        environment.NUM_RESTARTS: restarts,
        environment.GENERATION: plan.generation,
        environment.JOB_ID: plan.job,
        environment.CHECKPOINT_PATH: job.spec.checkpoint_path,
        environment.CHECKPOINT_TIMEOUT: f"{job.spec.checkpoint_timeout:g}",
        environment.CHECKPOINT_INTERVAL: f"{job.checkpoint_interval:g}",
        environment.CHECKPOINT_ID: checkpoint or "",
        environment.SHARE_PATH: job.share_path,
        environment.RESCALE: job.spec.rescale.value,
        environment.SECRET: job.secret,
    }
    if job.spec.rescale is Rescale.RESTART:  # otherwise the library decides, since it may survive an error
        values["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if plan.memory_limit is not None:
        values[environment.MEMORY_LIMIT] = plan.memory_limit
    if plan.limit is not None and plan.limit.batch_size is not None:
        values[environment.BATCH_SIZE_LIMIT] = plan.limit.batch_size
    if job.hang_timeout:
        values[environment.HANG_TIMEOUT] = f"{job.hang_timeout:g}"
    if job.threads is not None:
        values["OMP_NUM_THREADS"] = job.threads
    own = replica_devices(job.devices, plan, job.node, local_rank)
    # CUDA shows a process one instance of a divided GPU at most
    alone = job.virtual_local_rank or any(name.startswith(MIG) for name in job.devices)
    if alone:
        values[environment.LOCAL_RANK] = 0
    if job.devices:
        visible = own if alone else _visible(job.devices, plan.devices(job.node), local_rank)
        values["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    elif job.virtual_local_rank:
        values["CUDA_VISIBLE_DEVICES"] = _nth_device(inherited.get("CUDA_VISIBLE_DEVICES"), local_rank)
    return {name: str(value) for name, value in values.items()}


def replica_devices(inventory: Sequence[str], plan: Plan, node: str, local_rank: int) -> list[str]:
    """Return the names of a replica's devices; none on a node without GPUs."""
    return [inventory[number] for number in plan.devices(node)[local_rank] if number < len(inventory)]


def _visible(inventory: Sequence[str], devices: Mapping[int, tuple[int, ...]], local_rank: int) -> list[str]:
    """Return the job's devices on a node, with the first of a LOCAL_RANK at its place.

    A process starts with the lowest LOCAL_RANK that is free, so those below it have replicas. The list ends
    at the first one that has none, or with the neighbours of a replica that has several devices.
    """
    own, found = devices[local_rank], list[int]()
    for rank in range(local_rank if len(own) > 1 else max(devices) + 1):
        if rank not in devices:
            break
        found.append(devices[rank][0])
    found += own if len(own) > 1 else ()
    return [inventory[number] for number in found if number < len(inventory)]


def _nth_device(visible: str | None, local_rank: int) -> str:
    devices = [part.strip() for part in (visible or "").split(",") if part.strip()]
    return devices[local_rank] if local_rank < len(devices) else str(local_rank)


class SharePath:
    """The directory `ADAPTDL_SHARE_PATH`, which replicas of this node share between generations.

    Without that variable the agent makes a directory. It is removed when the job is done, else when no agent
    has used it for a day. RuntimeFileError if there can be none.
    """

    def __init__(self, environ: Mapping[str, str], job: str, runtime: Path | None = None) -> None:
        given = environ.get(environment.SHARE_PATH)
        self._ours: Shared | None = None
        if given:
            self.path = Path(given)
            try:
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise RuntimeFileError(f"ADAPTDL_SHARE_PATH={given}: {error.strerror}") from None
            return
        runtime = private_directory(runtime)
        sweep(_SHARE, runtime, older_than=_KEPT_FOR)
        self._ours = Shared(runtime / f"{_SHARE}{job}")
        self.path = self._ours.path

    def close(self, done: bool = False) -> None:
        """Release the directory. `done`: the job will not continue."""
        if self._ours is not None:
            self._ours.close(keep=not done)
