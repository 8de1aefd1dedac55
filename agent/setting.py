"""What an agent is given when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from adaptdl_elastic.agent.child import Command
from adaptdl_elastic.agent.coordinator_host import CoordinatorCommand
from adaptdl_elastic.agent.environ import JobEnvironment
from adaptdl_elastic.agent.states import Identity


@dataclass(frozen=True)
class Setting:
    """What the agent is given; constant."""

    me: Identity
    host: str  # address by which other nodes reach this one
    ports: tuple[int, int] | None
    command: Command
    environment: JobEnvironment
    coordinator: CoordinatorCommand
    max_restarts: int
