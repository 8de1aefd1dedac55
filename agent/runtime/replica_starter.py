"""Start replicas: their output, their environment and their process."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from adaptdl_elastic.agent.core.inplace_change import renumber
from adaptdl_elastic.agent.core.states import StartReplicas
from adaptdl_elastic.agent.runtime.agent_config import AgentConfig
from adaptdl_elastic.agent.runtime.fork_server import ForkServer
from adaptdl_elastic.agent.runtime.forked_child import Command
from adaptdl_elastic.agent.runtime.replica_environment import replica_devices, replica_environment
from adaptdl_elastic.agent.runtime.replica_handle import ReplicaHandle
from adaptdl_elastic.agent.terminal.replica_output import Output
from adaptdl_elastic.protocol import messages
from adaptdl_elastic.protocol.environment import JOIN
from adaptdl_elastic.rendezvous.schema.records import CheckpointRecord, MasterRecord, Plan, Transition

logger = logging.getLogger(__name__)


class ReplicaStarter:
    """Starts the replicas of one agent."""

    def __init__(self, config: AgentConfig, output: Output) -> None:
        self._config, self._output = config, output
        self._numbers = 0

    def plan_message(
        self,
        handle: ReplicaHandle,
        held: Plan,
        plan: Plan,
        master: MasterRecord,
        saved: CheckpointRecord | None,
    ) -> messages.Plan:
        """Return what a replica is told of a change in place.

        Args:
            handle: the replica.
            held: the plan of its generation.
            plan: the plan of the next one.
            master: the store of the next one.
            saved: the newest checkpoint of the job.
        """
        size, place = (plan.replicas, plan.nodes), (master.host, master.port)
        rank = plan.rank_by_slot(self._config.me.node).get(handle.local_rank)
        variables = dict[str, str]()
        if rank is not None:
            job = self._config.environment
            variables = replica_environment(job, plan, master, handle.local_rank, saved, handle.error_file)
        if plan.transition is Transition.RECOVER:
            return messages.RecoveryPlan(plan.generation, rank, *size, *place, variables)
        numbers = renumber(held, plan)
        ranks = numbers.ranks, numbers.newcomers
        return messages.ChangePlan(plan.generation, *size, *ranks, *place, variables)

    def start(
        self,
        fork_server: ForkServer,
        start: StartReplicas,
        local_rank: int,
        checkpoint: CheckpointRecord | None,
    ) -> ReplicaHandle:
        """Start one replica and return its handle.

        Args:
            fork_server: the process that forks it.
            start: what the core has decided.
            local_rank: the replica's number on this node.
            checkpoint: the newest checkpoint of the job.
        """
        plan = start.plan
        rank = plan.rank_by_slot(self._config.me.node)[local_rank]
        self._numbers += 1
        destination = self._output.open(plan.generation, local_rank, rank, joining=start.join)
        handle = ReplicaHandle(self._numbers, plan.generation, local_rank, rank, destination.error_file)
        environment = replica_environment(
            self._config.environment, plan, start.master, local_rank, checkpoint, destination.error_file
        )
        handle.newcomer = start.join
        if start.join:
            environment[JOIN] = "1"
        reports = str(Path(destination.error_file).parent)
        quiet = self._output.keeps_tracebacks(local_rank)
        devices = replica_devices(self._config.environment.devices, plan, self._config.me.node, local_rank)
        options, threads = self._config.options, self._config.environment.threads
        work = str(options.directory.absolute())
        command = Command(
            *(options.mode, options.command, work, environment, threads, reports, quiet, tuple(devices))
        )
        theirs = handle.theirs.fileno()
        sys.stdout.flush()
        try:
            fork_server.spawn(handle.number, command, destination.stdout, destination.stderr, theirs)
        except OSError as error:
            logger.warning("the fork server is gone: %s", error)
        destination.close()
        handle.theirs.close()
        return handle
