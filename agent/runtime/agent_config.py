"""The fixed values that an agent is started with."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from adaptdl_elastic.agent.cluster.coordinator_host import CoordinatorCommand
from adaptdl_elastic.agent.core.states import AgentIdentity
from adaptdl_elastic.agent.runtime.forked_child import Command
from adaptdl_elastic.agent.runtime.replica_environment import JobEnvironment
from adaptdl_elastic.agent.terminal.run_options import MeetingPoint


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
