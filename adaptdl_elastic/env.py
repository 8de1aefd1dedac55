"""Read a replica's settings from the environment, by AdaptDL's functions.

Every function reads the `ADAPTDL_*` variable first, then the variable that `torchrun` sets. If neither is
set, the script is a single replica: rank 0 on one node, generation 0. The environment changes when the
generation changes within the process. So call these functions again instead of keeping their results.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from adaptdl_elastic.protocol import environment

T = TypeVar("T")


class EnvironmentVariableError(ValueError):
    """Raised if an environment variable has an invalid value."""


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
    """Return the directory, or `s3://bucket/prefix`, of this job's checkpoints; None: nothing is saved."""
    return _read(str, environment.CHECKPOINT_PATH)


def share_path() -> str | None:
    """Return a directory that the replicas of a node share, e.g. for data sets; None if not set."""
    return _read(str, environment.SHARE_PATH)


def job_id() -> str | None:
    """Return the name of the job; None for a script without a job."""
    return _read(str, environment.JOB_ID, environment.RUN_ID)


def master_addr() -> str:
    """Return the host on which rank 0 listens; 127.0.0.1 if not set."""
    return _read(str, environment.ADAPTDL_MASTER_ADDR, environment.MASTER_ADDR) or "127.0.0.1"


def master_port() -> int:
    """Return the port on which rank 0 listens; 0 (any free port) if not set."""
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
    """Return the number of replicas in this generation."""
    return _read(_count(1), environment.NUM_REPLICAS, environment.WORLD_SIZE) or 1


def num_nodes() -> int:
    """Return the number of nodes on which the replicas of this generation run."""
    return _read(_count(1), environment.NUM_NODES, environment.GROUP_WORLD_SIZE) or 1


def local_rank() -> int:
    """Return the number of this replica on its node, counted from 0, e.g. the number of its GPU."""
    return _read(_count(0), environment.ADAPTDL_LOCAL_RANK, environment.LOCAL_RANK) or 0


def num_restarts() -> int:
    """Return how many times the set of replicas has changed in this run of the job."""
    return _read(_count(0), environment.NUM_RESTARTS, environment.RESTART_COUNT) or 0


def generation() -> int:
    """Return the number of this generation, counted over all runs of the job.

    Agents and replicas identify a generation by this number. Without an agent it is `num_restarts()`.
    """
    return _read(_count(0), environment.GENERATION, environment.NUM_RESTARTS, environment.RESTART_COUNT) or 0


def adaptdl_sched_version() -> str | None:
    """Return the version of the scheduler that started this job; None if not set."""
    return _read(str, environment.SCHED_VERSION)


def supervisor_url() -> str | None:
    """Return the URL of AdaptDL's supervisor; None if not set. This library does not use a supervisor."""
    return _read(str, environment.SUPERVISOR_URL)


def from_ray() -> bool:
    """Return False. A trial of Ray Tune runs as any job does: see `adaptdl_elastic.tune`."""
    return False


def rescale() -> str:
    """Return how the number of replicas may change (`ADAPTDL_RESCALE`): "auto", "inplace" or "restart"."""
    return _read(_way, environment.RESCALE) or "auto"


def _way(text: str) -> str:
    if text not in ("auto", "inplace", "restart"):
        raise ValueError("auto, inplace or restart is needed")
    return text


def secret() -> bytes | None:
    """Return the run's secret (`ADAPTDL_SECRET`), from which keys are derived; None if not set."""
    text = _read(str, environment.SECRET)
    return text.encode() if text else None


def checkpoint_interval() -> float:
    """Return the seconds between periodic checkpoints; 0: no periodic checkpoints.

    The value is that of `ADAPTDL_CHECKPOINT_INTERVAL`, 30 if not set.
    """
    value = _read(_seconds, environment.CHECKPOINT_INTERVAL)
    return 30.0 if value is None else value


def checkpoint_timeout() -> float:
    """Return the seconds that saving a checkpoint may take (`ADAPTDL_CHECKPOINT_TIMEOUT`); 120 if not set."""
    value = _read(_seconds, environment.CHECKPOINT_TIMEOUT)
    return 120.0 if value is None else value


def checkpoint_keep() -> int:
    """Return how many checkpoints are kept (`ADAPTDL_CHECKPOINT_KEEP`); 3 if not set."""
    return _read(_count(1), environment.CHECKPOINT_KEEP) or 3


def checkpoint_wait() -> float:
    """Return the seconds that a replica waits for the checkpoint that it has to start from; 0 if not set."""
    return _read(_seconds, environment.CHECKPOINT_WAIT) or 0.0


def report_interval() -> float:
    """Return the seconds between reports (`ADAPTDL_REPORT_INTERVAL`); 2 if not set or 0."""
    return _read(_seconds, environment.REPORT_INTERVAL) or 2.0


def hang_timeout() -> float | None:
    """Return the seconds without progress after which a replica is killed (`ADAPTDL_HANG_TIMEOUT`).

    The value is that of `--hang-timeout`; None if not set or 0.
    """
    return _read(_seconds, environment.HANG_TIMEOUT) or None


def memory_limit() -> int | None:
    """Return the samples of one replica that fit into memory, as other jobs have learnt; None: not known."""
    return _read(_count(1), environment.MEMORY_LIMIT)


def batch_size_limit() -> int | None:
    """Return the batch size above which the script has failed; None: not known."""
    return _read(_count(1), environment.BATCH_SIZE_LIMIT)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("a number of seconds is needed") from None
    if not 0 <= value < float("inf"):
        raise ValueError("a number of seconds, 0 or more, is needed")
    return value
