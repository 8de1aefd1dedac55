"""The result of an agent's run in torchelastic's types."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from adaptdl_elastic.agent.runtime.replica_handle import ReplicaHandle
from adaptdl_elastic.protocol.channel import STOPPED


def run_result(
    exit_code: int, exits: Iterable[tuple[ReplicaHandle, int]], workers: Iterable[Worker]
) -> RunResult:
    """Return the result of a run that ended with `exit_code`, and whose last replicas ended with `exits`."""
    failed = exit_code not in (0, STOPPED)
    state = {0: WorkerState.SUCCEEDED, STOPPED: WorkerState.STOPPED}.get(exit_code, WorkerState.FAILED)
    broken = {
        handle.rank: ProcessFailure(handle.local_rank, handle.pid or 0, code, handle.error_file)
        for handle, code in exits
        if failed and code not in (0, STOPPED)
    }
    fine = {worker.global_rank: None for worker in workers if worker.global_rank not in broken}
    return RunResult(state, fine, broken)
