"""The fixed values that an agent is started with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adaptdl_elastic.agent.cluster.coordinator_host import CoordinatorCommand
from adaptdl_elastic.agent.core.states import AgentIdentity
from adaptdl_elastic.agent.runtime.replica_environment import JobEnvironment
from adaptdl_elastic.agent.terminal.run_options import RunOptions
from adaptdl_elastic.rendezvous.schema.records import Link


@dataclass(frozen=True)
class AgentConfig:
    """The fixed values that an agent is started with."""

    me: AgentIdentity
    host: str  # address by which other nodes reach this one
    options: RunOptions  # as given to this agent; `me.spec` has those of the run, which count for the job
    environment: JobEnvironment
    coordinator: CoordinatorCommand
    # measures the links from other nodes again, given those that are known
    measure_links: Callable[[Sequence[Link]], tuple[Link, ...]] = tuple
