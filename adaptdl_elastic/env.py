"""What a replica's surroundings say about it: AdaptDL's functions, read from the environment.

Every function reads the `ADAPTDL_*` variable first, then the one that `torchrun` sets. Where neither is
set a script is alone: one replica of rank 0 on one node, of generation 0. The environment is rewritten
when a generation changes within the process, so the answers stay right; keep none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from adaptdl_elastic.protocol import environment

T = TypeVar("T")


class EnvironmentVariableError(ValueError):
    """A variable is set to what cannot be meant."""


def _read(parse: Callable[[str], T], *names: str) -> T | None:
    """Return the parsed value of the first of `names` that is set and not empty."""
    for name in names:
        text = os.environ.get(name)
        if text:
            try:
                return parse(text)
            except ValueError as error:
                raise EnvironmentVariableError(f"{name}={text}: {error}") from None
    return None


def _count(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"a whole number of at least {minimum} is needed") from None
        if value < minimum:
            raise ValueError(f"must be at least {minimum}")
        return value

    return parse


def checkpoint_path() -> str | None:
    """Directory, or `s3://bucket/prefix`, of this job's checkpoints; None: nothing is saved."""
    return _read(str, environment.CHECKPOINT_PATH)


def share_path() -> str | None:
    """Directory that the replicas of a node share, e.g. for data sets; None where nobody set one."""
    return _read(str, environment.SHARE_PATH)


def job_id() -> str | None:
    """Return the job's name; None for a script without a job."""
    return _read(str, environment.JOB_ID, environment.RUN_ID)


def master_addr() -> str:
    """Host that rank 0 listens on; loopback for a script that is alone."""
    return _read(str, environment.ADAPTDL_MASTER_ADDR, environment.MASTER_ADDR) or "127.0.0.1"


def master_port() -> int:
    """Port that rank 0 listens on; 0 (any free one) where none is set."""
    return _read(_port, environment.ADAPTDL_MASTER_PORT, environment.MASTER_PORT) or 0


def _port(text: str) -> int:
    value = _count(0)(text)
    if value > 65535:
        raise ValueError("a port is at most 65535")
    return value


def replica_rank() -> int:
    """Return this replica's rank, from 0 to `num_replicas() - 1`."""
    rank = _read(_count(0), environment.REPLICA_RANK, environment.RANK) or 0
    if rank >= num_replicas():
        raise EnvironmentVariableError(
            f"rank {rank} of {num_replicas()} replicas: ADAPTDL_REPLICA_RANK counts from 0 and must be "
            f"below ADAPTDL_NUM_REPLICAS"
        )
    return rank


def num_replicas() -> int:
    """How many replicas train together in this generation."""
    return _read(_count(1), environment.NUM_REPLICAS, environment.WORLD_SIZE) or 1


def num_nodes() -> int:
    """How many nodes these replicas are spread over."""
    return _read(_count(1), environment.NUM_NODES, environment.GROUP_WORLD_SIZE) or 1


def local_rank() -> int:
    """Return the slot of this replica on its node, e.g. the number of its GPU."""
    return _read(_count(0), environment.ADAPTDL_LOCAL_RANK, environment.LOCAL_RANK) or 0


def num_restarts() -> int:
    """Return how often the membership has changed in this run of the job."""
    return _read(_count(0), environment.NUM_RESTARTS, environment.RESTART_COUNT) or 0


def generation() -> int:
    """Return the number of this generation, counted over all runs of the job.

    Agents and replicas name a generation by it. Without an agent it is `num_restarts`.
    """
    return _read(_count(0), environment.GENERATION, environment.NUM_RESTARTS, environment.RESTART_COUNT) or 0


def adaptdl_sched_version() -> str | None:
    """Version of the scheduler that started this job; None where none did."""
    return _read(str, environment.SCHED_VERSION)


def supervisor_url() -> str | None:
    """AdaptDL's supervisor. There is none here: replicas learn of each other from their agents."""
    return _read(str, environment.SUPERVISOR_URL)


def from_ray() -> bool:
    """Whether the script runs inside of Ray Tune, as AdaptDL can be. Never: there is no such link here."""
    return False


def rescale() -> str:
    """How the number of replicas may change, from `ADAPTDL_RESCALE`: "auto", "inplace" or "restart"."""
    return _read(_way, environment.RESCALE) or "auto"


def _way(text: str) -> str:
    if text not in ("auto", "inplace", "restart"):
        raise ValueError("auto, inplace or restart is needed")
    return text


def secret() -> bytes | None:
    """Key that the library's collectives authenticate with; None where none was given."""
    text = _read(str, environment.SECRET)
    return text.encode() if text else None


def checkpoint_interval() -> float:
    """Seconds between periodic checkpoints (30 unless `ADAPTDL_CHECKPOINT_INTERVAL` says otherwise).

    0 turns them off.
    """
    value = _read(_seconds, environment.CHECKPOINT_INTERVAL)
    return 30.0 if value is None else value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a number of seconds is needed") from None
    if not 0 <= value < float("inf"):
        raise ValueError("a number of seconds, 0 or more, is needed")
    return value
