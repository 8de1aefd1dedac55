"""The environment variables of a replica (docs/reference/variables.md has the table)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from adaptdl_elastic._private import RuntimeFileError, private_directory
from adaptdl_elastic.agent.machine.devices import MIG
from adaptdl_elastic.protocol.environment import SHARE_PATH, ReplicaSettings
from adaptdl_elastic.protocol.hints import MOST_NAMED
from adaptdl_elastic.rendezvous.local.scratch_directory import Shared, sweep
from adaptdl_elastic.rendezvous.schema.records import CheckpointRecord, JobSpec, MasterRecord, Plan

_SHARE, _KEPT_FOR = "share-", 86400.0  # _KEPT_FOR in seconds


@dataclass(frozen=True)
class JobEnvironment:
    """Values that are the same for all replicas of this agent."""

    node: str
    settings: ReplicaSettings
    threads: int | None
    virtual_local_rank: bool = False
    devices: tuple[str, ...] = ()  # `NodeRecord.devices`


def job_settings(spec: JobSpec, checkpoint_interval: float, role: str) -> ReplicaSettings:
    """Return the settings of replicas that are the same on all nodes of a job."""
    settings = ReplicaSettings({})
    settings.checkpoint_path, settings.checkpoint_timeout = spec.checkpoint_path, spec.checkpoint_timeout
    settings.checkpoint_interval, settings.role = checkpoint_interval, role
    settings.max_restarts, settings.rescale = spec.max_restarts, spec.rescale.value
    return settings


def replica_environment(
    job: JobEnvironment,
    plan: Plan,
    master: MasterRecord,
    local_rank: int,
    checkpoint: CheckpointRecord | None,
    error_file: str,
    inherited: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the variables of one replica.

    Args:
        job: values that all replicas of this agent share.
        plan: the plan of its generation.
        master: the store of its generation.
        local_rank: its slot.
        checkpoint: the newest checkpoint; None: there is none.
        error_file: path for the error that ends the script.
        inherited: environment of the agent, which these variables are added to; None: that of this process.
    """
    ranks = plan.ranks(job.node)
    rank = ranks[plan.slots(job.node).index(local_rank)]
    values, outer = dict(job.settings.environ), os.environ if inherited is None else inherited
    found = ReplicaSettings(values)
    found.job, found.generation, found.restarts = plan.job, plan.generation, plan.generation - plan.first
    found.rank, found.replicas, found.nodes = rank, plan.replicas, plan.nodes
    found.role_rank, found.role_replicas, found.node_number = rank, plan.replicas, plan.index(job.node)
    found.torch_local_rank, found.local_replicas = local_rank, len(ranks)
    found.master_host, found.master_port, found.torch_port = master.host, master.collective_port, master.port
    found.node_type = plan.node_type or job.settings.node_type
    found.links_since = plan.links_since
    several = 1 < plan.nodes <= MOST_NAMED
    found.placement = ",".join(sorted(one.node for one in plan.placements)) if several else ""
    found.checkpoint_id = "" if checkpoint is None else checkpoint.id
    found.error_file, found.agent_store = error_file, "True"
    found.memory_limit = plan.memory_limit
    found.batch_size_limit = None if plan.limit is None else plan.limit.batch_size
    if found.rescale == "restart":  # otherwise the library decides, since it may survive an error
        values["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = outer.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if job.threads is not None:
        values["OMP_NUM_THREADS"] = str(job.threads)
    own = replica_devices(job.devices, plan, job.node, local_rank)
    # CUDA shows a process one instance of a divided GPU at most
    alone = job.virtual_local_rank or any(name.startswith(MIG) for name in job.devices)
    if alone:
        found.torch_local_rank = 0
    if job.devices:
        visible = own if alone else _visible(job.devices, plan.devices(job.node), local_rank)
        values["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    elif job.virtual_local_rank:
        values["CUDA_VISIBLE_DEVICES"] = _nth_device(outer.get("CUDA_VISIBLE_DEVICES"), local_rank)
    return values


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
        given = environ.get(SHARE_PATH)
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
