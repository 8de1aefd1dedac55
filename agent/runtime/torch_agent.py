"""What torch's agent keeps of a node's replicas: the worker group, restarts, results and events."""

from __future__ import annotations

import json
import time
import traceback

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from adaptdl_elastic.agent.runtime.torch_events import TorchEvents
from adaptdl_elastic.rendezvous.schema.records import Plan


class TorchAgent(SimpleElasticAgent):
    """A torch agent whose worker group follows the plan. A subclass starts, watches and ends the replicas."""

    def __init__(self, spec: WorkerSpec, node: str, max_restarts: int) -> None:
        super().__init__(spec)
        self._worker_group.workers = []
        self._node, self._max_restarts = node, max_restarts
        self._plan: Plan | None = None  # plan of the held generation
        # generation of the newest plan, and time.perf_counter() when it was first seen
        self._plan_seen = (-1, 0.0)
        self._torch_events = TorchEvents(spec.event_log_handler)

    def run(self, role: str = "default") -> RunResult:
        """Run until the job, or this node's part in it, is over."""
        try:
            result: RunResult = super().run(role)
        except BaseException:
            self._torch_events.send(self, "FAILED", raw_error=traceback.format_exc())
            raise
        else:
            self._torch_events.send(self, "SUCCEEDED")  # torchrun records this, too, even if workers failed
            return result
        finally:
            self._torch_events.close()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        plan, group = self._plan, worker_group
        if plan is None:
            raise RuntimeError("there is no plan to act on")
        group.group_rank = plan.index(self._node)  # type: ignore[assignment]
        group.group_world_size = plan.nodes  # type: ignore[assignment]
        group.workers = [
            Worker(slot, rank, rank, plan.replicas, plan.replicas)
            for slot, rank in plan.rank_by_slot(self._node).items()
        ]

    def _record_worker_events(self, result: RunResult) -> None:
        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            self._torch_events.send(
                self,
                self._get_worker_state(worker, result),
                worker,
                raw_error=json.dumps(failure.error_file_data) if failure else None,
                exit_code=failure.exitcode if failure else None,
                worker_pid=failure.pid if failure else None,
            )

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        met, used = time.perf_counter(), self._plan.restarts if self._plan is not None else 0
        self._remaining_restarts = max(0, self._max_restarts - used)
        self._rendezvous(worker_group)
        assigned = time.perf_counter()
        self._torch_events.rendezvous(
            self, 1e3 * (met - self._plan_seen[1]), assigned_ms=1e3 * (assigned - met)
        )
        worker_group.state = WorkerState.HEALTHY
