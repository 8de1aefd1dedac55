"""The rendezvous handler that torch's WorkerSpec requires; in fact ranks come from the plan."""

from __future__ import annotations

from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo


class PlanHandler(RendezvousHandler):
    """Names the job in torch's metrics and events. `ElasticAgent` takes the ranks from the plan."""

    def __init__(self, job: str) -> None:
        self._job = job

    def get_backend(self) -> str:
        """Return the name of the backend."""
        return "adaptdl"

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent of rank 0 serves the TCPStore: it does."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Raise NotImplementedError: the agent never calls this."""
        raise NotImplementedError("the coordinator's plan takes the place of a rendezvous")

    def is_closed(self) -> bool:
        """Return False."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: the coordinator plans for nodes that join."""
        return 0

    def get_run_id(self) -> str:
        """Return the job's name."""
        return self._job

    def shutdown(self) -> bool:
        """Return True: there is nothing to shut down."""
        return True
