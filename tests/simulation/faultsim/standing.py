"""What must not last: a job that stands still though nodes can run it, and two agents of one name.

`Standing` looks every few seconds of simulated time, also while what is broken stays broken. A job counts as
able to run if the nodes that nothing ails are enough for it. Whatever has just happened excuses a pause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaptdl_elastic.rendezvous.schema.held import Held
from adaptdl_elastic.rendezvous.schema.records import Outcome, Rescale
from adaptdl_elastic.rendezvous.store.base import read_record
from faultsim.agents import AgentProcess
from faultsim.node import Machine
from faultsim.replica import Replica

if TYPE_CHECKING:
    from faultsim.faults import Faults
    from faultsim.world import World

LOOK_SECONDS = 5.0  # between two looks
STILL_SECONDS = 100.0  # after the last fault, until a job that can run takes a step
GIVES_WAY_SECONDS = 20.0  # until an agent whose name another one has is gone
LEAVES_SECONDS = 40.0  # until an agent that is to leave has left
PLANNED_SECONDS = 12.0  # until a leader that nothing ails has planned without an agent that has left


class Standing:
    """Looks at a world until it is closed."""

    def __init__(self, world: World, faults: Faults) -> None:
        self._world, self._faults = world, faults
        self._lost_name: dict[str, float] = {}  # agent → since when another one has its name
        self._left: dict[tuple[str, int, str], float] = {}  # (job, generation, agent) → since when it is gone
        self._leaves: dict[str, float] = {}  # agent → since when it is to leave
        self.closed = False
        world.kernel.after(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        if self.closed:
            return
        self._names()
        self._departures()
        for name in sorted(self._world.jobs):
            self._job(name)
            self._leavers(name)
        self._world.kernel.after(LOOK_SECONDS, self._look)

    def _well(self, machine: Machine) -> bool:
        """Return whether nothing ails a machine, its line to the store, or the store."""
        line, now = machine.line, self._world.kernel.now
        mended = now - machine.troubled_at >= GIVES_WAY_SECONDS
        return (
            machine.up
            and mended
            and self._world.etcd.up
            and not line.cut
            and not (line.lost_requests or line.lost_answers or line.late_requests)
        )

    def _holder(self, agent: AgentProcess) -> str | None:
        """Return the record of the agent that has this one's name."""
        found = self._world.etcd.get(self._world.keys.node(agent.machine.name, agent.job.spec.job))
        return None if found is None else found.value

    def _registered(self, agent: AgentProcess) -> bool:
        return f'"agent":"{agent.identity}"' in (self._holder(agent) or "")

    def _names(self) -> None:
        """An agent whose name another one has taken ends soon, and its replicas with it."""
        now = self._world.kernel.now
        for agent in self._world.agents:
            runs = agent.alive and not agent.stopped and agent.agent is not None
            if runs and self._well(agent.machine) and self._holder(agent) and not self._registered(agent):
                since = self._lost_name.setdefault(agent.identity, now)
                if now - since > GIVES_WAY_SECONDS:
                    self._world.kernel.defect(f"{agent.name} goes on, and another agent has its name")
                    self._lost_name[agent.identity] = float("inf")
            else:
                self._lost_name.pop(agent.identity, None)

    def _departures(self) -> None:
        """An agent that is to leave ends soon unless its job takes steps: it holds nothing any more."""
        now = self._world.kernel.now
        for agent in self._world.agents:
            job = self._world.truth.job(agent.job.spec.job)
            if not (agent.departing and agent.alive) or agent.stopped or not self._well(agent.machine):
                self._leaves.pop(agent.identity, None)
                continue
            since = max(
                self._leaves.setdefault(agent.identity, now), job.committed_at, self._faults.changed_at
            )
            if now - since > LEAVES_SECONDS:
                self._world.kernel.defect(f"{agent.name} is to leave for {now - since:.0f} s, and does not")

    def _job(self, name: str) -> None:
        """A job that can run takes a step within a bound."""
        job, world, now = self._world.truth.job(name), self._world, self._world.kernel.now
        last = max(job.committed_at, self._faults.changed_at, job.finished_at if job.finished else 0.0)
        alone = len(world.jobs) == 1  # else the other one may have its slots
        if job.status is None or job.over or now - last < STILL_SECONDS or not alone:
            return
        spec = world.specs[name]
        if spec.rescale is Rescale.INPLACE:
            return  # it may insist on what it has
        able = [agent for agent in world.agents if self._able(agent, name)]
        network, names = world.network, [agent.machine.name for agent in able]
        if not all(network.connects(one, other) for one in names for other in names):
            able = self._survivors(name, able)
        elif any(not network.connects(one, other) for one in names for other in world.machines):
            return  # nobody needs to know of that
        slots = sum(agent.machine.slots for agent in able)
        if able and len(able) >= spec.min_nodes and slots >= spec.min_replicas:
            where = ", ".join(agent.machine.name for agent in able)
            text = f"job {name} stands still for {now - last:.0f} s, and {where} can run it"
            world.kernel.defect(f"{text}: {job.status}")

    def _leavers(self, name: str) -> None:
        """A plan is replaced soon after an agent of it has left, if a leader is well."""
        job, world, now = self._world.truth.job(name), self._world, self._world.kernel.now
        plan = job.plan
        if plan is None or job.over or not self._led():
            self._left.clear()
            return
        for place in plan.placements:
            found = world.etcd.get(world.keys.node(place.node, name))
            here = found is not None and f'"agent":"{place.agent}"' in found.value
            held = read_record(Held, world.etcd.get(world.keys.held(name, place.node)))
            ended = None if held is None else held.end_of(plan.generation)
            at = name, plan.generation, place.agent
            # a job that has failed pauses before its restart
            over = ended is not None and ended.outcome in (Outcome.DONE, Outcome.FAILED)
            if here or over:
                self._left.pop(at, None)
            elif now - self._left.setdefault(at, now) > PLANNED_SECONDS:
                world.kernel.defect(
                    f"generation {plan.generation} of job {name} keeps {place.agent}, which left"
                )

    def _led(self) -> bool:
        """Return whether a coordinator leads that nothing ails."""
        found = self._world.etcd.get(self._world.keys.coordinator_leader)
        return found is not None and any(
            one.alive and not one.stopped and self._well(one.machine)
            for one in self._world.coordinators
            if f'"id":"{one.machine.name}-{one.serial}"' in found.value
        )

    def _survivors(self, name: str, able: list[AgentProcess]) -> list[AgentProcess]:
        """Return the agents that have reported deaths, if their replicas survive them and reach each other.

        Where machines cannot reach each other, nobody knows until one side has lost a replica.
        """
        world, plan = self._world, self._world.truth.job(name).plan
        if plan is None or not (world.jobs[name].script.resilient and world.jobs[name].script.library):
            return []
        said = world.etcd.range(world.keys.reports(name)).items
        losses = {held.node: held.loss for one in said if (held := read_record(Held, one)) is not None}
        nodes = {node for node, loss in losses.items() if loss and loss.generation == plan.generation}
        found = [agent for agent in able if agent.machine.name in nodes]
        names = [agent.machine.name for agent in found]
        if any(not world.network.connects(one, other) for one in names for other in names):
            return []
        lives = sum(bool(self._lives(agent)) for agent in found)
        enough = sum(map(self._lives, found)) >= world.specs[name].min_replicas
        return found if lives == len(found) and enough else []

    def _lives(self, agent: AgentProcess) -> int:
        return 0 if agent.forks is None else len(agent.forks.running)

    def _able(self, agent: AgentProcess, name: str) -> bool:
        """Return whether an agent can run a job's replicas."""
        mine = agent.alive and not agent.stopped and agent.job.spec.job == name
        if not mine or agent.departing or not self._well(agent.machine) or not self._registered(agent):
            return False
        if self._world.etcd.get(self._world.keys.drain(agent.machine.name)) is not None:
            return False
        plan = self._world.truth.job(name).plan
        if plan is not None and agent.identity in {one.agent for one in plan.left_out}:
            return False
        stuck = (one for one in agent.machine.processes if isinstance(one, Replica) and one.alive)
        return not any(one.stopped or one.hangs for one in stuck)


__all__ = ["Standing"]
