"""Read a replica's settings from the environment, by AdaptDL's functions.

Every function reads the `ADAPTDL_*` variable first, then the variable that `torchrun` sets. If neither is
set, the script is a single replica: rank 0 on one node, generation 0. The environment changes when the
generation changes within the process. So call these functions again instead of keeping their results.
"""

from __future__ import annotations

from adaptdl_elastic.protocol.environment import HERE
from adaptdl_elastic.protocol.environment import EnvironmentVariableError as EnvironmentVariableError


def checkpoint_path() -> str | None:
    """Return the directory, or `s3://bucket/prefix`, of this job's checkpoints; None: nothing is saved."""
    return HERE.checkpoint_path


def share_path() -> str | None:
    """Return a directory that the replicas of a node share, e.g. for data sets; None if not set."""
    return HERE.share_path


def job_id() -> str | None:
    """Return the name of the job; None for a script without a job."""
    return HERE.job


def master_addr() -> str:
    """Return the host on which rank 0 listens; 127.0.0.1 if not set."""
    return HERE.master_host


def master_port() -> int:
    """Return the port on which rank 0 listens; 0 (any free port) if not set."""
    return HERE.torch_port if HERE.master_port is None else HERE.master_port


def replica_rank() -> int:
    """Return this replica's rank, from 0 to `num_replicas() - 1`."""
    rank = HERE.rank
    if rank >= num_replicas():
        raise EnvironmentVariableError(
            f"rank {rank} of {num_replicas()} replicas: ADAPTDL_REPLICA_RANK counts from 0 and must be "
            f"below ADAPTDL_NUM_REPLICAS"
        )
    return rank


def num_replicas() -> int:
    """Return the number of replicas in this generation."""
    return HERE.replicas


def num_nodes() -> int:
    """Return the number of nodes on which the replicas of this generation run."""
    return HERE.nodes


def local_rank() -> int:
    """Return the number of this replica on its node, counted from 0, e.g. the number of its GPU."""
    return HERE.torch_local_rank if HERE.local_rank is None else HERE.local_rank


def num_restarts() -> int:
    """Return how many times the set of replicas has changed in this run of the job."""
    return HERE.restarts


def generation() -> int:
    """Return the number of this generation, counted over all runs of the job.

    Agents and replicas identify a generation by this number. Without an agent it is `num_restarts()`.
    """
    return HERE.restarts if HERE.generation is None else HERE.generation


def adaptdl_sched_version() -> str | None:
    """Return the version of the scheduler that started this job; None if not set."""
    return HERE.scheduler_version


def supervisor_url() -> str | None:
    """Return the URL of AdaptDL's supervisor; None if not set. This library does not use a supervisor."""
    return HERE.supervisor_url


def from_ray() -> bool:
    """Return False: a trial of Ray Tune runs as any job does (`adaptdl_elastic.tune`)."""
    return False


def rescale() -> str:
    """Return how the number of replicas may change (`ADAPTDL_RESCALE`): "auto", "inplace" or "restart"."""
    return HERE.rescale


def secret() -> bytes | None:
    """Return the run's secret (`ADAPTDL_SECRET`), from which keys are derived; None if not set."""
    return None if HERE.secret is None else HERE.secret.encode()


def checkpoint_interval() -> float:
    """Return the seconds between periodic checkpoints; 0: no periodic checkpoints.

    The value is that of `ADAPTDL_CHECKPOINT_INTERVAL`, 30 if not set.
    """
    return HERE.checkpoint_interval


def checkpoint_timeout() -> float:
    """Return the seconds that saving a checkpoint may take (`ADAPTDL_CHECKPOINT_TIMEOUT`); 120 if not set."""
    return HERE.checkpoint_timeout


def checkpoint_keep() -> int:
    """Return how many checkpoints are kept (`ADAPTDL_CHECKPOINT_KEEP`); 3 if not set."""
    return HERE.checkpoint_keep


def checkpoint_wait() -> float:
    """Return the seconds that a replica waits for the checkpoint that it has to start from; 0 if not set."""
    return HERE.checkpoint_wait


def report_interval() -> float:
    """Return the seconds between reports (`ADAPTDL_REPORT_INTERVAL`); 2 if not set or 0."""
    return HERE.report_interval or 2.0


def hang_timeout() -> float | None:
    """Return the seconds without progress after which a replica is killed (`ADAPTDL_HANG_TIMEOUT`).

    The value is that of `--hang-timeout`; None if not set or 0.
    """
    return HERE.hang_timeout or None


def memory_limit() -> int | None:
    """Return the samples of one replica that fit into memory, as other jobs have learnt; None: not known."""
    return HERE.memory_limit


def batch_size_limit() -> int | None:
    """Return the batch size above which the script has failed; None: not known."""
    return HERE.batch_size_limit
