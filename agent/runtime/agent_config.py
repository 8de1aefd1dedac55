"""The fixed values that an agent is started with."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from adaptdl_elastic.agent.cluster.coordinator_host import CoordinatorCommand
from adaptdl_elastic.agent.core.states import AgentIdentity
from adaptdl_elastic.agent.runtime.forked_child import Command
from adaptdl_elastic.agent.runtime.replica_environment import JobEnvironment


@dataclass(frozen=True)
class MeetingPoint:
    """The address at which the user wants replicas to meet: `--master-addr` and `--master-port`.

    Attributes:
        host: None: the address of the node of rank 0.
        port: the port.
    """

    host: str | None
    port: int

    def __str__(self) -> str:
        """Return the options as given on the command line."""
        address = f"--master-addr={self.host} " if self.host is not None else ""
        return f"{address}--master-port={self.port}"


@dataclass(frozen=True)
class AgentConfig:
    """The fixed values that an agent is started with."""

    me: AgentIdentity
    host: str  # address by which other nodes reach this one
    ports: tuple[int, int] | None
    command: Command
    environment: JobEnvironment
    coordinator: CoordinatorCommand
    max_restarts: int
    meeting_point: MeetingPoint | None = None
    signals: tuple[signal.Signals, ...] = ()  # signals that make the agent save and leave
