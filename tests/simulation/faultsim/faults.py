"""What goes wrong in a run: every fault picks its victim and its length by the run's chance."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from adaptdl_elastic.rendezvous.schema.records import DrainRequest, JobRequest, JobState, encode
from adaptdl_elastic.rendezvous.store.base import Change
from faultsim.agents import AgentProcess, CoordinatorProcess
from faultsim.kernel import Process
from faultsim.node import Machine
from faultsim.replica import Replica

if TYPE_CHECKING:
    from faultsim.world import World

SIGTERM, SIGKILL = 15, 9
T = TypeVar("T")
_ERRORS = ("ValueError at train.py:7", "KeyError at train.py:9")  # kinds of errors of scripts


class NothingToHarmError(Exception):
    """There is no victim for a fault now."""


class Faults:
    """Does harm to a world until `heal`."""

    def __init__(self, world: World) -> None:
        self._world, self._kernel, self._chance = world, world.kernel, world.kernel.random
        self.healed = False
        self.resting = False  # nothing new goes wrong, and what is broken stays so
        self.change_share, self.end_share = 0.4, 0.15  # of faults, those that wait for a change, for an end
        self.away_seconds = 20.0  # most that a drained node stays away
        self.count = 0
        self.changed_at = 0.0  # when something last went wrong, or was mended
        self._at_end: list[tuple[list[str], float]] = []  # faults that wait for the end of a script
        self._at_change: list[tuple[list[str], float]] = []  # faults that wait for the next plan
        world.etcd.listeners.append(self._store_changed)
        world.on_script_end.append(self._script_ends)

    def begin(self, kinds: list[str], mean_seconds: float, until: float) -> None:
        """Have faults of these kinds come at random, so many seconds apart on average."""
        when = self._kernel.now + self._chance.expovariate(1.0 / mean_seconds)
        if when < until:
            self._kernel.at(when, self._strike, kinds, mean_seconds, until)

    def _strike(self, kinds: list[str], mean_seconds: float, until: float) -> None:
        moment = self._chance.random()
        if moment < self.change_share:
            self._at_change.append((kinds, until))
        elif moment < self.change_share + self.end_share:
            self._at_end.append((kinds, until))
        else:
            self._do(self._chance.choice(kinds))
        if self._chance.random() < 0.25:  # one seldom comes alone
            self._kernel.after(2.0 * self._chance.random() ** 2, self._again, kinds, until)
        self.begin(kinds, mean_seconds, until)

    def _store_changed(self, change: Change) -> None:
        """Have the faults that wait for it strike while a change is under way."""
        if self._at_change and change.value is not None and change.key.endswith("/plan"):
            waiting, self._at_change = self._at_change, []
            self._strike_soon(waiting)

    def _script_ends(self) -> None:
        """Have the faults that wait for it strike while replicas come to the end of their script."""
        waiting, self._at_end = self._at_end, []
        self._strike_soon(waiting)

    def _strike_soon(self, waiting: list[tuple[list[str], float]]) -> None:
        for kinds, until in waiting:
            delay = self._chance.choice([0.01, 0.3, 3.0]) * self._chance.random()
            self._kernel.after(delay, self._again, kinds, until)

    def _again(self, kinds: list[str], until: float) -> None:
        if self._kernel.now < until:
            self._do(self._chance.choice(kinds))

    def _do(self, kind: str) -> None:
        if self.resting:
            return
        with suppress(NothingToHarmError):
            KINDS[kind](self)
            self.count += 1
            self.changed_at = self._kernel.now
            if kind not in _HARMLESS:
                self._world.truth.excuse()

    def _later(self, seconds: float, call: Callable[[], object]) -> None:
        def go() -> None:
            if not (self.healed or self.resting):
                self.changed_at = self._kernel.now
                call()

        self._kernel.after(seconds, go)

    def _over_in(self, seconds: float, call: Callable[[], object]) -> None:
        """End a fault that lasts: what it has led to by then may cost work, too."""

        def end() -> None:
            self._world.truth.excuse()
            self._world.truth.lasting -= 1
            call()

        self._world.truth.lasting += 1
        self._later(seconds, end)

    def _note(self, text: str) -> None:
        self._kernel.note(f"FAULT {text}")

    # -- victims

    def _enough(self, found: list[T], least: int = 1) -> list[T]:
        """Return `found`, or give the fault up if these are too few."""
        if len(found) < least:
            raise NothingToHarmError
        return found

    def _one_of(self, found: list[T], least: int = 1) -> T:
        return self._chance.choice(self._enough(found, least))

    def _agents(self) -> list[AgentProcess]:
        return [agent for agent in self._world.agents if agent.alive]

    def _replicas(self) -> list[Replica]:
        found = self._world.truth.live
        return [one for at in sorted(found) for one in found[at] if one.alive]

    def _coordinators(self) -> list[CoordinatorProcess]:
        return [one for one in self._world.coordinators if one.alive]

    def _machines(self) -> list[Machine]:
        return [machine for machine in self._world.machines.values() if machine.up]

    # -- deaths

    def kill_replica(self) -> None:
        """SIGKILL, as from the kernel when memory is short."""
        victim = self._one_of(self._replicas())
        self._note(f"kills {victim.name}")
        self._world.truth.job(victim.job).deaths += 1
        self._kernel.kill(victim, -SIGKILL, "(a fault)")

    def fail_replica(self) -> None:
        """An error of the script, of one of a few kinds."""
        victim = self._one_of(self._replicas())
        kind = self._chance.choice(_ERRORS)
        self._note(f"{victim.name} raises {kind}")
        self._world.truth.failed(victim, kind)
        victim.fail(kind, "(an error of the script)")

    def kill_fork_server(self) -> None:
        """A fork server dies, and its replicas with it."""
        found = [agent for agent in self._agents() if agent.forks is not None and not agent.forks.died]
        victim = self._one_of(found)
        assert victim.forks is not None
        running = victim.forks.running
        self._note(f"kills the fork server of {victim.name}, and {len(running)} replicas")
        # one that has been asked for and does not run yet is lost, too
        self._world.truth.job(victim.job.spec.job).deaths += max(1, len(running))
        victim.forks.die()

    def kill_store(self) -> None:
        """The process that serves the TCPStore of an agent's newest generation dies."""
        found = [agent for agent in self._agents() if agent.forks is not None and not agent.forks.died]
        for victim in self._chance.sample(found, len(found)):
            number = victim.meeting.die() if victim.meeting is not None else None
            if number is not None and victim.forks is not None:
                self._note(f"kills the store of {victim.name}'s newest generation")
                self._world.truth.job(victim.job.spec.job).deaths += 1  # replicas that meet there fail
                victim.forks.tell_death(number)
                return
        raise NothingToHarmError

    def kill_agent(self) -> None:
        """An agent dies; another one is started in its place, soon or later."""
        victim = self._one_of(self._agents())
        self._note(f"kills {victim.name}")
        self._kernel.kill(victim, -SIGKILL, "(a fault)")
        delay = self._chance.choice([0.1, 1.0, 4.0, 8.0, 20.0]) * self._chance.random()
        self._later(delay, lambda: self.start_agent(victim.machine, victim.job.spec.job))

    def kill_coordinator(self) -> None:
        """A coordinator dies; its agent starts it again."""
        victim = self._one_of(self._coordinators())
        self._note(f"kills {victim.name}")
        self._kernel.kill(victim, -SIGKILL, "(a fault)")

    def crash_machine(self) -> None:
        """A machine loses its power, and boots later."""
        victim = self._one_of(self._machines(), least=2)
        self._note(f"crashes {victim.name}")
        for replica in self._replicas():
            if replica.machine is victim:
                self._world.truth.job(replica.job).deaths += 1
        victim.crash()
        self._later(self._chance.choice([2.0, 10.0, 30.0]) * self._chance.random(), lambda: self.boot(victim))

    def boot(self, machine: Machine) -> None:
        """Start a machine, and its agents with it."""
        machine.up = True
        for job in sorted(self._world.jobs):
            self.start_agent(machine, job)

    def start_agent(self, machine: Machine, job: str, again: bool = False) -> None:
        """Start an agent where there is none, and a job to do, or one to be started `again`."""
        found = self._world.truth.job(job)
        there = any(one.machine is machine and one.job.spec.job == job for one in self._agents())
        done = found.status is not None and found.status.state is JobState.DONE
        again = not found.over or done or again  # a newer run than the status is of has not ended
        if machine.up and not there and again:
            self._world.start_agent(machine, job)

    def die_at_write(self) -> None:
        """A process dies just before one of its next writes into the store."""
        victim: Process = self._one_of([*self._agents(), *self._coordinators()])
        count = self._world.writes.get(victim.name, 0) + self._chance.randint(1, 6)
        self._world.kill_before[victim.name] = count
        self._note(f"{victim.name} will die before its write {count}")
        if isinstance(victim, AgentProcess):
            agent = victim
            delay = 8.0 * self._chance.random()
            victim.at_end.append(
                lambda: self._later(delay, lambda: self.start_agent(agent.machine, agent.job.spec.job))
            )

    # -- stopped clocks

    def stop_process(self) -> None:
        """SIGSTOP to one process, and SIGCONT later."""
        found: list[Process] = [*self._agents(), *self._coordinators(), *self._replicas()]
        found = [one for one in found if not one.stopped]
        victim = self._one_of(found)
        seconds = self._chance.choice([1.0, 4.0, 8.0, 20.0]) * self._chance.random()
        self._note(f"stops {victim.name} for {seconds:.2f} s")
        if isinstance(victim, Replica):
            self._world.truth.job(victim.job).deaths += 1  # it may be taken to hang
        victim.stop()
        self._over_in(seconds, partial(self._go_on, victim))

    def stop_coordinators(self) -> None:
        """All coordinators stand still for a while, and see together what has happened meanwhile."""
        found = [one for one in self._coordinators() if not one.stopped]
        seconds = self._chance.choice([0.3, 1.0, 4.0, 12.0]) * self._chance.random()
        self._note(f"stops {len(found)} coordinators for {seconds:.2f} s")
        for one in found:
            one.stop()
            self._over_in(seconds, partial(self._go_on, one))
        self._enough(found)

    def hang_replica(self) -> None:
        """A replica hangs for good: all of it, or only its script, whose other threads go on to answer.

        Only one that has reported a step: before that a replica may take its time.
        """
        found = [one for one in self._replicas() if one.takes_steps and not one.stopped]
        found = [one for one in found if self._world.jobs[one.job].hang_timeout]
        victim = self._one_of(found)
        whole = self._chance.random() < 0.5
        self._note(f"{'all' if whole else 'the script'} of {victim.name} hangs")
        self._world.truth.job(victim.job).deaths += 1
        victim.hangs = True
        if whole:
            victim.stop()

    def stop_machine(self) -> None:
        """All processes of a machine stand still for a while."""
        machine = self._one_of(self._machines())
        seconds = self._chance.choice([1.0, 4.0, 8.0, 20.0]) * self._chance.random()
        self._note(f"stops {machine.name} for {seconds:.2f} s")
        victims = [one for one in machine.processes if one.alive and not one.stopped]
        for victim in victims:
            if isinstance(victim, Replica):
                self._world.truth.job(victim.job).deaths += 1
            victim.stop()
        for victim in victims:
            self._over_in(seconds, partial(self._go_on, victim))

    def jump_clock(self) -> None:
        """The wall clock of a machine is set, as by NTP; monotonic clocks go on."""
        machine = self._one_of(self._machines())
        seconds = self._chance.choice([-1.0, 1.0]) * self._chance.choice([2.0, 60.0, 4000.0])
        seconds *= self._chance.random()
        self._note(f"sets the wall clock of {machine.name} by {seconds:.2f} s")
        machine.wall_offset += seconds
        for process in machine.processes:
            process.wall_offset += seconds

    # -- the network and the store

    def split_network(self) -> None:
        """Machines cannot reach each other, and all reach the store: silence, or connections that break."""
        found = self._enough(self._machines(), 2)
        side = self._chance.sample(found, self._chance.randint(1, len(found) - 1))
        names = frozenset(one.name for one in side)
        others = frozenset(one.name for one in found) - names
        seconds = self._chance.choice([0.5, 4.0, 20.0]) * self._chance.random()
        breaks = self._chance.random() < 0.5
        how = "which breaks connections" if breaks else "silently"
        self._note(f"splits {sorted(names)} off for {seconds:.2f} s, {how}")
        self._over_in(seconds, self._world.network.split(names, others))
        if breaks:
            for mesh in {one.mesh.number: one.mesh for one in self._replicas() if one.mesh}.values():
                mesh.reset((names, others))

    def cut_line(self) -> None:
        """A machine, or several, cannot reach the store for a while."""
        found = self._enough(self._machines())
        victims = self._chance.sample(found, self._chance.randint(1, len(found)))
        seconds = self._chance.choice([1.0, 4.0, 8.0, 20.0]) * self._chance.random()
        refused = self._chance.random() < 0.3
        self._note(f"cuts {[one.name for one in victims]} off for {seconds:.2f} s")
        for machine in victims:
            machine.line.cut, machine.line.refused = True, refused
            self._over_in(seconds, partial(self._mend, machine))

    def bad_line(self) -> None:
        """A machine's requests and answers get lost, or come late, for a while."""
        machine = self._one_of(self._machines())
        seconds = 15.0 * self._chance.random()
        self._note(f"{machine.name} has a bad line for {seconds:.2f} s")
        line, chance = machine.line, self._chance
        line.lost_requests, line.lost_answers = 0.3 * chance.random(), 0.4 * chance.random()
        line.late_requests = 0.1 * chance.random()
        line.seconds = chance.choice([0.001, 0.05, 0.4])
        self._over_in(seconds, partial(self._mend, machine))

    def store_down(self) -> None:
        """The store answers nobody for a while."""
        etcd = self._world.etcd
        if not etcd.up:
            raise NothingToHarmError
        seconds = self._chance.choice([1.0, 4.0, 8.0, 16.0]) * self._chance.random()
        renew = self._chance.random() < 0.5
        self._note(f"takes the store away for {seconds:.2f} s")
        etcd.go_down()
        self._over_in(seconds, partial(self._bring_back, renew))

    def _go_on(self, process: Process) -> None:
        if isinstance(process, Replica) and process.hangs:
            return
        process.go_on()
        process.machine.troubled_at = self._kernel.now  # type: ignore[attr-defined]

    def _mend(self, machine: Machine) -> None:
        line = machine.line
        line.cut = False
        line.lost_requests = line.lost_answers = line.late_requests = 0.0
        line.seconds = 0.001
        machine.troubled_at = self._kernel.now

    def _bring_back(self, renew: bool) -> None:
        if not self._world.etcd.up:
            self._world.etcd.come_back(renew)
        for machine in self._world.machines.values():
            machine.troubled_at = self._kernel.now

    def compact(self) -> None:
        """The store forgets its history."""
        self._note("compacts the store")
        self._world.etcd.compact()

    def expire_lease(self) -> None:
        """A lease runs out, as if its holder had not been heard."""
        number = self._one_of(sorted(self._world.etcd.leases))
        self._note(f"lets lease {number} run out")
        self._world.etcd.revoke(number)

    # -- what people ask for

    def drain(self) -> None:
        """SIGTERM to an agent: it leaves, and another one comes later."""
        found = self._enough([agent for agent in self._agents() if not agent.departing], 2)
        fresh = [agent for agent in found if self._is_to_start(agent)]
        victim = self._chance.choice(fresh if fresh and self._chance.random() < 0.5 else found)
        self._note(f"drains {victim.name}")
        victim.notice(SIGTERM)
        delay = self.away_seconds * self._chance.random()
        victim.at_end.append(
            lambda: self._later(delay, lambda: self.start_agent(victim.machine, victim.job.spec.job))
        )

    def _is_to_start(self, agent: AgentProcess) -> bool:
        """Whether the newest plan has replicas for an agent that runs none yet."""
        plan = self._world.truth.job(agent.job.spec.job).plan
        named = plan is not None and any(place.agent == agent.identity for place in plan.placements)
        return named and agent.forks is not None and not agent.forks.running

    def hurry(self) -> None:
        """SIGTERM once more to an agent that is about to leave: it stops at once."""
        victim = self._one_of([agent for agent in self._agents() if agent.departing])
        self._note(f"hurries {victim.name}")
        victim.notice(SIGTERM)

    def stop_job(self) -> None:
        """A person asks for a job to stop: seldom, since nothing happens to it after that."""
        name = self._chance.choice(sorted(self._world.jobs))
        status = self._world.truth.job(name).status
        if self._chance.random() < 0.7 or status is None or status.state.ended:
            raise NothingToHarmError
        self._note(f"asks job {name} to stop")
        asked = replace(self._world.requests.get(name, JobRequest()), stop=True, run=status.run)
        self._world.requests[name] = asked
        self._world.stops.add(name)
        self._world.etcd.put(self._world.keys.job(name, "request"), encode(asked), None)

    def start_again(self) -> None:
        """A person starts a job again that was stopped or has failed, or one that is done and stays so."""
        names = []
        for name in sorted(self._world.jobs):
            status = self._world.truth.job(name).status
            if status is not None and status.state.ended:
                names.append(name)
        name = self._one_of(names)
        self._note(f"starts job {name} again")
        self._world.stops.discard(name)
        for machine in self._machines():
            self._later(4.0 * self._chance.random(), partial(self.start_agent, machine, name, True))

    def start_twice(self) -> None:
        """Another agent is started on a machine that has one, and finds the name taken or takes it."""
        victim = self._one_of(self._agents())
        self._note(f"starts another agent beside {victim.name}")
        self._world.start_agent(victim.machine, victim.job.spec.job)

    def supplant(self) -> None:
        """An agent stands still until its lease has run out, and a watchdog starts another one beside it."""
        victim = self._one_of([agent for agent in self._agents() if not agent.stopped])
        begins = 5.0 + 4.0 * self._chance.random()
        seconds = begins + 10.0 * self._chance.random()
        self._note(f"stops {victim.name} for {seconds:.2f} s; another one comes after {begins:.2f} s")
        victim.stop()
        self._over_in(seconds, partial(self._go_on, victim))
        again = partial(self._world.start_agent, victim.machine, victim.job.spec.job)
        self._later(begins, again)

    def ask_to_drain(self) -> None:
        """The autoscaler asks for a node, or for all of them, to be left, and takes that back later."""
        found, chance = self._enough(self._machines(), 2), self._chance
        victims = found if chance.random() < 0.4 else [chance.choice(found)]
        within, again = chance.choice([0.0, 0.1, 1.0]), chance.random() < 0.5
        keys = {one.name: self._world.keys.drain(one.name) for one in victims}
        self._note(f"asks for {[*keys]} to be drained within {within} s")
        for name, key in keys.items():
            asked = encode(DrainRequest(name, "the cloud wants it back", instance=f"i-{name}"))
            self._later(within * chance.random(), partial(self._world.etcd.put, key, asked, None))

        def take_back() -> None:
            self._world.etcd.delete([*keys.values()])
            for machine in victims:
                for job in sorted(self._world.jobs):
                    self.start_agent(machine, job, again)

        self._later(within + 15.0 * chance.random(), take_back)

    def scale(self) -> None:
        """A person asks for another size, or for a checkpoint."""
        name = self._chance.choice(sorted(self._world.jobs))
        key = self._world.keys.job(name, "request")
        spec, chance = self._world.specs[name], self._chance
        old = self._world.requests.get(name, JobRequest())
        if chance.random() < 0.3:
            asked = replace(old, checkpoint=old.checkpoint + 1)
        elif old.replicas is not None and chance.random() < 0.5:
            asked = replace(old, replicas=None)
        else:
            asked = replace(old, replicas=chance.randint(spec.min_replicas, spec.max_replicas))
        self._world.requests[name] = asked
        self._note(f"asks job {name} for {asked}")
        self._world.etcd.put(key, encode(asked), None)

    # -- the end of it

    def heal(self) -> None:
        """No faults any more: everything that was broken works again, and everybody is there."""
        self.healed = self._world.calm = True
        self.resting = False
        self._note("heals")
        self._world.truth.excuse()
        self._world.truth.lasting = 0
        self._bring_back(True)
        self._world.network.mend_all()
        self._at_change.clear()
        self._world.kill_before.clear()
        for key in [key for key in self._world.etcd.items if key.startswith(self._world.keys.drains)]:
            self._world.etcd.delete([key])
        for machine in self._world.machines.values():
            self._mend(machine)
            machine.up = True
            for process in machine.processes:
                if process.alive and process.stopped:
                    self._go_on(process)
        for _ in range(3):
            self._kernel.after(20.0 * self._chance.random(), self._everybody)
        self._kernel.after(21.0, self._everybody)
        self._kernel.after(60.0, self._everybody)

    def rest(self) -> None:
        """Let nothing new go wrong and mend nothing but the store, and processes that nobody watches.

        The policy leaves jobs as they are, so that no change of size helps a job that stands still.
        """
        self.resting, self.changed_at = True, self._kernel.now
        self._world.calm = True
        self._note("rests: what is broken stays so")
        self._at_change.clear()
        self._at_end.clear()
        self._world.kill_before.clear()
        self._bring_back(True)
        jobs = self._world.jobs
        unwatched = [one for one in self._replicas() if not (jobs[one.job].hang_timeout and one.takes_steps)]
        for process in [*unwatched, *self._coordinators()]:
            if process.stopped:
                self._go_on(process)

    def _everybody(self) -> None:
        for machine in self._world.machines.values():
            for job in sorted(self._world.jobs):
                self.start_agent(machine, job)


_NAMES = """
kill_replica fail_replica kill_fork_server kill_store kill_agent kill_coordinator crash_machine die_at_write
stop_process stop_coordinators hang_replica stop_machine jump_clock split_network cut_line bad_line store_down
compact expire_lease drain hurry stop_job start_again start_twice supplant ask_to_drain scale
"""
KINDS: dict[str, Callable[[Faults], None]] = {name: getattr(Faults, name) for name in _NAMES.split()}
_HARMLESS = (  # nothing may be lost by them
    "kill_coordinator", "compact", "drain", "ask_to_drain", "scale", "stop_job", "jump_clock",
)  # fmt: skip
