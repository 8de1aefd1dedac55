"""Agents and coordinators as simulated processes: the product's own classes, started as `launch` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from adaptdl_elastic.agent.cluster import ended_run, job_joining
from adaptdl_elastic.agent.cluster.coordinator_host import CoordinatorCommand
from adaptdl_elastic.agent.cluster.store_link import NameTakenError, Registration
from adaptdl_elastic.agent.core.states import AgentIdentity
from adaptdl_elastic.agent.runtime import agent as agent_module
from adaptdl_elastic.agent.runtime.agent_config import AgentConfig
from adaptdl_elastic.agent.runtime.event_loop import Signalled
from adaptdl_elastic.agent.runtime.replica_environment import JobEnvironment, job_settings
from adaptdl_elastic.agent.terminal.event_recorder import EventRecorder
from adaptdl_elastic.agent.terminal.run_options import RunOptions
from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
from adaptdl_elastic.autoscaler.coordinator.policy_adapter import Policy
from adaptdl_elastic.autoscaler.coordinator.process import Coordinator
from adaptdl_elastic.rendezvous.schema.records import JobSpec, JobState, NodeRecord
from adaptdl_elastic.rendezvous.store.base import Store, StoreError
from faultsim import threads
from faultsim.kernel import Process
from faultsim.node import Forks, Machine, Meeting, Output, Wire
from faultsim.replica import Replica, Script

if TYPE_CHECKING:
    from faultsim.world import World


@dataclass(frozen=True)
class Job:
    """A job as its owner starts it, on every node."""

    spec: JobSpec  # but for its run
    script: Script
    checkpoint_interval: float = 10.0
    checkpoint_timeout: float = 15.0
    hang_timeout: float = 8.0
    min_slots: int = 1


class AgentProcess(Process):
    """One agent of one job on one machine."""

    def __init__(self, machine: Machine, job: Job, serial: int) -> None:
        kernel = machine.world.kernel
        name = f"{machine.name}:agent.{job.spec.job}#{serial}"
        super().__init__(kernel, name, machine.clock_offset, machine.wall_offset)
        self.machine, self.job, self.serial = machine, job, serial
        self.wires: dict[int, Wire] = {}
        self.events: list[dict[str, Any]] = []  # its event log
        self.agent: agent_module.NodeAgent | None = None
        self.forks: Forks | None = None
        self.meeting: Meeting | None = None
        self.loop: Any = None
        self.said: list[str] = []
        machine.processes.append(self)
        self.spawn(self._run, "main")

    @property
    def identity(self) -> str:
        """As in the store."""
        return f"{self.machine.name}-{self.job.spec.job}-{self.serial}"

    def notice(self, number: int) -> None:
        """Send it a signal: one that has no loop yet ends by it."""
        if self.alive and self.loop is not None:
            self.loop.post(Signalled(number))
        elif self.alive:
            self.kernel.kill(self, -number, "(a signal)")

    @property
    def _devices(self) -> tuple[str, ...]:
        """As its agent numbers them: each job's in another order."""
        return self.machine.devices[:: 1 if self.job.spec.job == "a" else -1]

    @property
    def departing(self) -> bool:
        """Whether it knows that it is to leave."""
        return self.agent is not None and self.agent.state.departure is not None

    def say(self, text: str) -> None:
        """A line for the person at the terminal."""
        self.said.append(text)
        self.kernel.note(f"{self.name} tells: {text}")

    def _run(self) -> None:
        world, machine, job = self.machine.world, self.machine, self.job
        store = machine.client(self)
        run = f"{int(threads.Time.time())}-{next(self.kernel.numbers):06d}"  # begins with when it began
        fresh = replace(job.spec, run=run, created=threads.Time.time())
        record = NodeRecord(
            node=machine.name,
            job=job.spec.job,
            run=run,
            agent=self.identity,
            host=machine.host,
            slots=machine.slots,
            min_slots=job.min_slots,
            version="1",
            devices=self._devices,
            instance=f"i-{machine.name}",
        )
        try:
            spec, registration = self._join(store, fresh, record)
        except ended_run.JobEndedError as error:
            self.kernel.exit(error.exit_code, f"(starts nothing: {error})")
        except (ended_run.JoinError, StoreError, NameTakenError) as error:
            self.kernel.exit(2, f"(cannot join: {error})")
        journal = EventRecorder(self.events.append, threads.Time.time)
        agent = self.agent = agent_module.NodeAgent(
            self._setting(spec),
            store,
            world.keys,
            registration,
            self._forks(),  # type: ignore[arg-type]
            Output(),  # type: ignore[arg-type]
            journal,
            self.say,
            self._forks,  # type: ignore[arg-type]
        )
        try:
            agent.run()
        finally:
            status = agent.job_ended
            if status is not None and status.state is JobState.DONE:
                ended_run.write_note(spec, status, spec.checkpoint_path, self.say, even_if_empty=False)
            registration.close()
        store.close()
        self.kernel.exit(agent.exit_code, f"({agent.exit_reason})")

    def _join(self, store: Store, fresh: JobSpec, record: NodeRecord) -> tuple[JobSpec, Registration]:
        """Take part in the job, as `launch` does."""
        keys, start = self.machine.world.keys, ended_run.StartOptions()

        def busy() -> bool:
            return bool(job_joining.live_agents(store, keys, fresh.job))

        with ended_run.turn_to_start(store, keys, fresh, start, busy, self.say):
            registration = job_joining.register(store, keys, record, exact=True)
            try:
                spec = job_joining.join_job(store, keys, fresh, record.version, self.say, start)
                if spec.run != fresh.run:
                    registration.update(run=spec.run)
            except BaseException:
                registration.close()
                raise
            return spec, registration

    def _forks(self) -> Forks:
        script = self.job.script

        def launch(machine: Machine, agent: Process, environ: dict[str, str], wire: Wire) -> Process:
            return Replica(machine, agent, environ, wire, script)

        self.forks = Forks(self.machine, self, launch)
        return self.forks

    def _setting(self, spec: JobSpec) -> AgentConfig:
        job, machine = self.job, self.machine
        spec = replace(spec, checkpoint_timeout=job.checkpoint_timeout)
        settings = job_settings(spec, job.checkpoint_interval, "default")
        settings.node, settings.share_path, settings.secret = machine.name, "/share", ""
        return AgentConfig(
            me=AgentIdentity(machine.name, self.identity, spec, job.hang_timeout),
            host=machine.host,
            options=RunOptions(**{**vars(spec), "command": ("train.py",)}),
            environment=JobEnvironment(machine.name, settings, None, devices=self._devices),
            coordinator=CoordinatorCommand((), {}),
        )


class CoordinatorProcess(Process):
    """A coordinator, which ends when `parent_gone` is set."""

    def __init__(
        self,
        machine: Machine,
        world: World,
        policy: Policy,
        settings: CoordinatorSettings,
        parent_gone: threads.Event,
    ) -> None:
        serial = next(world.kernel.numbers)
        name = f"{machine.name}:coordinator#{serial}"
        super().__init__(world.kernel, name, machine.clock_offset, machine.wall_offset)
        self.machine, self.serial = machine, serial
        self._world, self._policy, self._settings, self._parent_gone = world, policy, settings, parent_gone
        self.coordinator: Coordinator | None = None
        machine.processes.append(self)
        self.spawn(self._run, "main")

    def _run(self) -> None:
        world = self._world
        store = self.machine.client(self)
        with store:
            served = self.coordinator = Coordinator(
                store,
                world.keys,
                self._settings,
                self._policy,
                clock=threads.Time.monotonic,
                wall=threads.Time.time,
                identity=f"{self.machine.name}-{self.serial}",
                version="1",
            )
            self.spawn(lambda: self._stop_with_parent(served.stop), "parent")
            served.run()
        self.kernel.exit(0)

    def _stop_with_parent(self, stop: Callable[[], None]) -> None:
        self._parent_gone.wait()
        stop()


__all__ = ["AgentProcess", "CoordinatorProcess", "Job"]
