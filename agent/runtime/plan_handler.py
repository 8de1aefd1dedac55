"""What torch's WorkerSpec wants for a rendezvous; the plan is ours."""

from __future__ import annotations

from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo


class PlanHandler(RendezvousHandler):
    """Names the job to torch's metrics and events. Ranks come from the plan, in ElasticAgent."""

    def __init__(self, job: str) -> None:
        self._job = job

    def get_backend(self) -> str:
        """As in `--rdzv-backend`."""
        return "adaptdl"

    @property
    def use_agent_store(self) -> bool:
        """The TCPStore of a generation is kept by the agent of rank 0."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Never asked."""
        raise NotImplementedError("the coordinator's plan takes the place of a rendezvous")

    def is_closed(self) -> bool:
        """Never."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """Nobody waits for us: who joins is planned for."""
        return 0

    def get_run_id(self) -> str:
        """The job's name."""
        return self._job

    def shutdown(self) -> bool:
        """Nothing to shut down."""
        return True
