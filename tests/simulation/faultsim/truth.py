"""What really happens in a run, and what of it must not be: held against every promise of the product.

`Truth` is told by replicas what they commit, save and load. It knows which processes live, so it sees two
replicas in one slot, two generations that train at once, steps that are lost without a reason or done twice,
and a job that is called done before its script has come to its end, or that goes on after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from adaptdl_elastic.rendezvous.schema.held import Held
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    CheckpointRecord,
    JobSpec,
    JobState,
    JobStatus,
    MalformedRecordError,
    Outcome,
    Plan,
    Transition,
    decode,
)
from adaptdl_elastic.rendezvous.store.base import Change, read_record, read_text
from faultsim.budget import Budget

if TYPE_CHECKING:
    from faultsim.agents import AgentProcess
    from faultsim.mesh import Mesh
    from faultsim.replica import Defect, Replica
    from faultsim.world import World


LATE_SECONDS = 15.0  # after a fault, until all that it makes agents and coordinators do is done
SPAWN_SECONDS = 0.5  # after the end of a job, until a replica that was asked for before is there, at most
HEARS_SECONDS = 8.0  # after trouble on a machine, until its agents know what is in the store


@dataclass(frozen=True)
class Checkpoint:
    """What was saved."""

    number: str
    step: int
    chain: str
    at: float
    generation: int


class Archive:
    """The checkpoints of one job, in place of what `checkpoint_archive.kept` and `storage` make of a path."""

    def __init__(self, job: JobTruth) -> None:
        self._job = job

    def ids(self) -> list[str]:
        """The ids of all."""
        return [one.number for one in self._job.checkpoints]

    def read_note(self) -> bytes | None:
        """What the agents of a run have left."""
        return self._job.note

    def write_note(self, note: bytes, *, even_if_empty: bool) -> None:
        """Leave a note."""
        if even_if_empty or self._job.checkpoints:
            self._job.note = note

    def withdraw_note(self) -> None:
        """Delete it."""
        self._job.note = None

    def move_aside(self, name: str) -> str | None:
        """Nobody gives `--anew` here."""
        raise NotImplementedError


@dataclass
class JobTruth:
    """One job."""

    checkpoints: list[Checkpoint] = field(default_factory=list)
    note: bytes | None = None  # beside them
    chains: dict[str, bool] = field(default_factory=dict)  # states; True: of a generation that was given up
    newest: int = 0  # step that is committed, in the line that goes on
    committed_at: float = 0.0
    mesh: Mesh | None = None  # of the newest generation that has taken a step
    begun: int = 0  # step that it went on from
    finished: bool = False  # all replicas of a generation have come to the end of the script
    finished_at: float = 0.0
    status_at: float = 0.0  # when the status was written
    resumed: bool = False  # and a plan that was made before that was known has gone on from a checkpoint
    finished_by: tuple[tuple[int, str], ...] = ()  # (generation, node) of those replicas
    given_up: set[str] = field(default_factory=set)  # replicas whose node was lost, and planned without
    plain_ends: dict[int, set[int]] = field(default_factory=dict)  # generation → ranks, without the library
    errors: list[tuple[int, str]] = field(default_factory=list)  # (generation, kind): what scripts raised
    fault_at: float = float("-inf")  # the last fault after which work may be lost
    lost_steps: int = 0
    losses: int = 0  # restarts that lost steps
    deaths: int = 0  # replicas that faults have killed, or that ended with an error of their own
    # (generation, replicas, nodes) that took steps
    worked: set[tuple[int, int, frozenset[str]]] = field(default_factory=set)
    broken: bool = False  # the script's defect has shown
    budget: Budget = field(default_factory=Budget)
    recorded: CheckpointRecord | None = None  # what the store says
    least_step: dict[int, int] = field(
        default_factory=dict
    )  # generation → step that it must not begin before
    status: JobStatus | None = None
    plan: Plan | None = None
    run: str = ""

    @property
    def over(self) -> bool:
        """Whether the present run has ended, as far as the store says."""
        return self.status is not None and self.status.state.ended and self.status.run == self.run


class Truth:
    """Sees everything."""

    def __init__(self, world: World) -> None:
        self._world, self._kernel = world, world.kernel
        self.jobs: dict[str, JobTruth] = {}
        self.lasting = 0  # faults that are not over yet
        self.live: dict[tuple[str, str, int], list[Replica]] = {}  # by job, node, slot
        self.registered: dict[str, float] = {}  # key of an agent → since when it has been there

    def job(self, name: str) -> JobTruth:
        """What is known of one job."""
        return self.jobs.setdefault(name, JobTruth())

    def archive(self, path: str) -> Archive:
        """The checkpoints under a path."""
        return Archive(self.job(path.rpartition("/")[2]))

    def excuse(self) -> None:
        """A fault has happened: work since the last checkpoint may be lost."""
        for job in self.jobs.values():
            job.fault_at = self._kernel.now

    def _excused(self, job: JobTruth) -> bool:
        """Whether a fault can have ended the generation that was the last to take a step."""
        formed = job.mesh.formed_at if job.mesh is not None else 0.0
        return self.lasting > 0 or job.fault_at >= formed - LATE_SECONDS

    # -- replicas

    def replica_started(self, replica: Replica) -> None:
        """A process is there."""
        at = replica.job, replica.machine.name, replica.slot
        others = [one for one in self.live.get(at, ()) if self._counts(one)]
        if others and self._counts(replica):
            self._kernel.defect(f"{replica.name} starts in the slot where {others[0].name} lives")
        self.live[at] = [*(one for one in self.live.get(at, ()) if one.alive), replica]
        machine = replica.machine
        here = [
            one
            for (_, node, _), found in self.live.items()
            if node == machine.name
            for one in found
            if self._counts(one) and self._was_there(one, replica)
        ]
        for other in here:
            if other.device == replica.device and other is not replica and self._counts(replica):
                self._kernel.defect(f"{replica.name} gets {replica.device}, which {other.name} has")
        if len(here) > machine.slots:
            self._kernel.defect(f"{len(here)} replicas on {machine.name}, which has {machine.slots} slots")
        job = self.job(replica.job)
        # one that was asked for when the end came starts nevertheless, and is killed at once
        heard = self._kernel.now - job.status_at > SPAWN_SECONDS
        if job.over and heard and job.status is not None and not self._cut_off(replica):
            self._kernel.defect(f"{replica.name} starts though its job has {job.status.state.value}")

    def _counts(self, replica: Replica) -> bool:
        """Whether others can know of it: its agent lives and is registered."""
        if not replica.alive or not replica.agent.alive:
            return False
        found = self._world.etcd.get(self._world.keys.node(replica.machine.name, replica.job))
        return found is not None and f'"agent":"{replica.agent.identity}"' in found.value  # type: ignore[attr-defined]

    def _was_there(self, other: Replica, replica: Replica) -> bool:
        """Whether an agent with an older plan was registered when the plan of another job's replica was made.

        Else its devices were free. It may be back before that replica starts, which then waits for the locks
        of the devices (`agent/machine/device_locks.py`); there are none here.
        """
        before, planned = (
            self.job(one.job).budget.written_at.get(one.generation, float("inf")) for one in (other, replica)
        )
        since = self.registered.get(self._world.keys.node(other.machine.name, other.job), 0.0)
        return other.job == replica.job or before > planned or since <= planned

    def replica_ended(self, replica: Replica) -> None:
        """A process is gone."""
        self._look_for_the_end(replica)
        at = replica.job, replica.machine.name, replica.slot
        self.live[at] = [one for one in self.live.get(at, ()) if one is not replica]

    def commit(self, replica: Replica, mesh: Mesh, values: Mapping[int, tuple[int, str]]) -> None:
        """A replica has the result of a step."""
        if len(set(values.values())) > 1:
            self._kernel.defect(
                f"replicas of {mesh.label} train from different states: {sorted(values.items())}"
            )
        step, _ = values[replica.mesh_rank]
        job = self.job(replica.job)
        after = f"{step + 1}.{mesh.number}"
        replica.step, replica.chain = step + 1, after
        if after in job.chains:
            return  # another replica of it was first
        aside = mesh is not job.mesh and not self._begins(job, mesh, replica, step)
        job.chains[after] = aside
        if aside:
            return
        if job.finished and not job.resumed:
            if self._end_is_known(job, replica.job, mesh.generation):
                self._kernel.defect(f"{replica.name} takes step {step + 1} of a job that is finished")
            job.resumed = True  # what is heard of that end from now on is too late
        job.newest, job.committed_at = step + 1, self._kernel.now
        nodes = frozenset(member.machine.name for member in mesh.members.values())
        job.worked.add((mesh.generation, mesh.size, nodes))
        self._kernel.note(f"job {replica.job}: step {step + 1} on {mesh.size} replicas")

    def _begins(self, job: JobTruth, mesh: Mesh, replica: Replica, step: int) -> bool:
        """Another generation takes a step; False: one whose agents could not hear that its time is over."""
        if job.mesh is not None and mesh.generation <= job.mesh.generation:
            if not any(self._cut_off(member) for member in mesh.members.values()):
                self._kernel.defect(
                    f"{mesh.label} takes step {step + 1} after generation {job.mesh.generation} has begun to"
                )
            return False
        lost, least = job.newest - step, job.least_step.get(mesh.generation, 0)
        if step < least:
            self._kernel.defect(
                f"{mesh.label} begins at step {step}, and the checkpoint of step {least} was recorded before"
            )
        if lost > 0:
            job.lost_steps += lost
            job.losses += 1
            if not self._excused(job):
                self._kernel.defect(f"{lost} steps of job {replica.job} are lost, and there was no fault")
        job.mesh, job.begun = mesh, step
        return True

    def _cut_off(self, replica: Replica) -> bool:
        """Whether its agent cannot have heard of all that is in the store."""
        agent, line = replica.agent, replica.machine.line
        recent = self._kernel.now - replica.machine.troubled_at < HEARS_SECONDS
        return agent.stopped or line.cut or recent or not self._counts(replica) or not self._world.etcd.up

    def finished(self, replica: Replica) -> None:
        """A replica has come to the end of its script."""
        replica.finished = True
        self._look_for_the_end(replica)

    def _look_for_the_end(self, replica: Replica) -> None:
        """Note that a job is finished when the last replica of a generation is.

        Behind the last epoch a death by a signal is survived, unless rank 0 dies. So is the loss of a node,
        also if its replicas live.
        """
        job, mesh = self.job(replica.job), replica.mesh
        known = job.finished and not job.resumed
        if mesh is None or known or len(mesh.members) < mesh.size:
            return
        steps, newest = self._world.jobs[replica.job].script.steps, job.mesh
        # survivors of a death after the last step take no step any more
        follows = newest is not None and mesh.generation > newest.generation and replica.step >= steps
        if mesh is not newest and not follows:
            return
        for rank, member in mesh.members.items():
            behind = member.over or member.step >= steps
            died = not member.alive and behind and (member.exit_code or 0) < 0
            lost = died or not self._counts(member) or member.name in job.given_up
            if not member.finished and not (rank > 0 and lost):
                return
        nodes = sorted({member.machine.name for member in mesh.members.values()})
        self._is_finished(job, [(mesh.generation, node) for node in nodes])

    def _is_finished(self, job: JobTruth, by: list[tuple[int, str]]) -> None:
        job.finished, job.finished_at, job.finished_by = True, self._kernel.now, tuple(by)
        job.resumed = False

    def _end_is_known(self, job: JobTruth, name: str, generation: int) -> bool:
        """Whether all nodes had said so when `generation` was planned, or no fault kept them from it.

        What a node says after it was lost is too late: others may have been planned in its place.
        """
        if not self.lasting and job.fault_at < job.finished_at - HEARS_SECONDS:
            return True
        keys = self._world.keys
        missing = {(keys.held(name, node), g): node for g, node in job.finished_by}
        plan = keys.job(name, "plan")
        its_plan = f'"generation":{min((g for g, _ in job.finished_by), default=-1)},'
        planned, lost = False, set[str]()
        for change in self._world.etcd.history:
            value = change.value or ""
            if change.key == plan and f'"generation":{generation},' in value:
                break
            planned |= change.key == plan and its_plan in value  # a new leader writes it again
            if planned and change.key.startswith(keys.nodes) and change.value is None:
                lost.add(change.key.removeprefix(keys.nodes))
            for at in [at for at in missing if at[0] == change.key]:
                held = read_text(Held, change.value)
                end = None if held is None else held.end_of(at[1])
                done = end is not None and end.outcome is Outcome.DONE
                if done and f"{missing.pop(at)}/{name}" in lost:
                    return False
        return not missing

    def failed(self, replica: Replica, kind: str) -> None:
        """A script raises an error."""
        job = self.job(replica.job)
        job.deaths += 1
        job.errors.append((replica.generation, kind))

    def broke(self, replica: Replica, defect: Defect) -> None:
        """The script's defect shows: it counts unless the job has worked, and can, without that node or size.

        So no job that has committed steps ends, or uses up restarts, by a newcomer or by a larger size.
        """
        job = self.job(replica.job)
        job.broken = True
        if not replica.joining:
            self.excuse()
        now = replica.mesh and replica.mesh.generation
        earlier = [
            (size, nodes) for generation, size, nodes in job.worked if generation != now or defect.above
        ]
        worked = any(defect.node not in nodes and not 0 < defect.above < size for size, nodes in earlier)
        can = defect.above or self._stays_elsewhere(replica)
        if not worked or not can or any(defect.node in nodes for _, nodes in earlier):
            self.failed(replica, "NameError at train.py:1")
            job.deaths += defect.final * self._world.specs[replica.job].max_restarts

    def plain_step(self, replica: Replica) -> None:
        """A script without the library does something; nobody knows what."""
        self.job(replica.job).committed_at = self._kernel.now

    def plain_end(self, replica: Replica) -> None:
        """It comes to its end."""
        job = self.job(replica.job)
        ranks = job.plain_ends.setdefault(replica.generation, set())
        ranks.add(replica.rank)
        if len(ranks) == replica.size:
            self._is_finished(job, [])

    # -- checkpoints

    def saved(self, job: str) -> str:
        """Return the id of the newest checkpoint; "" if there is none."""
        return max((one.number for one in self.job(job).checkpoints), default="")

    def save(self, replica: Replica, step: int, chain: str) -> str:
        """Write a checkpoint; its id, or "" where a later generation has saved since this process began.

        `checkpoint.manager` refuses to begin such a save. One that it has begun before has the later
        generation delete its files, or gets a lower id.
        """
        job = self.job(replica.job)
        began = self.saved(replica.job) if replica.saved_before is None else replica.saved_before
        replica.saved_before = began
        if any(one.number > began and one.generation > replica.generation for one in job.checkpoints):
            return ""
        number = f"{len(job.checkpoints) + 1:08d}"
        job.checkpoints.append(Checkpoint(number, step, chain, self._kernel.now, replica.generation))
        return number

    def load(self, replica: Replica, recorded: str) -> tuple[int, str] | None:
        """The newest checkpoint; None where the one that the store names is not there."""
        job = self.job(replica.job)
        checkpoints = job.checkpoints
        if recorded and not any(one.number >= recorded for one in checkpoints):
            return None
        if not checkpoints:
            return 0, ""
        # as `checkpoint.manager`: what an older generation saved late comes behind the recorded one
        newest = next((one for one in checkpoints if one.number == recorded), None)
        late = [
            one
            for one in checkpoints
            if newest and one.number > recorded and one.generation < newest.generation
        ]
        found = max((one for one in checkpoints if one not in late), key=lambda one: one.number)
        later = [one for one in checkpoints if one.generation > found.generation]
        if job.chains.get(found.chain) and any(not job.chains.get(one.chain) for one in later):
            self._kernel.defect(
                f"{replica.name} goes on from step {found.step} of a generation that was given up"
            )
        return found.step, found.chain

    def agree(self, replica: Replica, standing: Mapping[int, tuple[int, str]]) -> tuple[int, str]:
        """What survivors go on from: the newest state of any of them."""
        top = max(step for step, _ in standing.values())
        found = {chain for step, chain in standing.values() if step == top}
        if len(found) > 1:
            self._kernel.defect(f"survivors of job {replica.job} have different states: {sorted(found)}")
        if min(step for step, _ in standing.values()) < top - 1:
            self._kernel.defect(f"survivors of job {replica.job} are more than a step apart")
        return top, sorted(found)[0]

    def hand_over(self, replica: Replica, values: Mapping[int, Any], newcomers: list[int]) -> None:
        """Survivors and newcomers have formed a generation: who has a state is a survivor."""
        without = sorted(rank for rank, value in values.items() if value is None)
        if without != sorted(newcomers):
            self._kernel.defect(f"ranks {without} came as newcomers, planned were {sorted(newcomers)}")
        self.agree(replica, {rank: value for rank, value in values.items() if value is not None})

    # -- what the store is told

    def store_changed(self, change: Change) -> None:
        """A key has changed."""
        parts = change.key.removeprefix(self._world.keys.root).split("/")
        if parts[0] == "nodes":
            known = self.registered.pop(change.key, self._kernel.now)
            if change.value is not None:
                self.registered[change.key] = known
        if change.value is None or parts[0] != "jobs" or len(parts) != 3:
            return
        try:
            if parts[2] == "spec":
                self._run(self.job(parts[1]), parts[1], decode(JobSpec, change.value, change.key).run)
            elif parts[2] == "status":
                self._status(self.job(parts[1]), parts[1], decode(JobStatus, change.value, change.key))
            elif parts[2] == "checkpoint":
                self._recorded(self.job(parts[1]), decode(CheckpointRecord, change.value, change.key))
            elif parts[2] == "plan":
                self._plan(self.job(parts[1]), parts[1], decode(Plan, change.value, change.key))
        except MalformedRecordError as error:
            self._kernel.defect(f"a record that cannot be read: {error}")

    def _status(self, job: JobTruth, name: str, status: JobStatus) -> None:
        before, job.status, job.status_at = job.status, status, self._kernel.now
        same = before is not None and before.run == status.run
        if before is not None and same and before.state.ended and status.state is not before.state:
            self._kernel.defect(f"job {name} was {before.state.value} and is {status.state.value}")
        if before is not None and same and before.state is status.state:
            return
        if status.state is JobState.DONE and not job.finished:
            self._kernel.defect(f"job {name} is called done at step {job.newest}: {status.reason}")
        if status.state is JobState.FAILED:
            most = self._world.specs[name].max_restarts
            deaths = job.deaths + self._world.network.troubled
            if deaths <= most and not self._fails_again(job, name, status):
                self._kernel.defect(f"job {name} failed after {deaths} deaths, {most} restarts are allowed")
        if status.state is JobState.STOPPED:
            self._stopped(job, name, status)

    def _run(self, job: JobTruth, name: str, run: str) -> None:
        """A run begins: one of a job that was stopped or has failed has all of its restarts again."""
        if job.run and run != job.run:
            if job.over and job.status is not None and job.status.state is JobState.DONE:
                self._kernel.defect(f"job {name} is done, and run {run} begins")
            job.deaths, job.errors, job.finished, job.resumed = 0, [], False, False
            job.worked, job.broken = set(), False
            job.budget = Budget(recorded=job.budget.recorded)
        job.run = run

    def _fails_again(self, job: JobTruth, name: str, status: JobStatus) -> bool:
        """Whether a job has failed because its script raised the same twice before its first step."""
        if not status.reason.startswith("failed twice"):
            return False
        early = {one for one in job.errors[-8:] if not self._reported_step(name, one[0])}
        kinds = [kind for _, kind in early]
        return len(kinds) > len(set(kinds))

    def _reported_step(self, name: str, generation: int) -> bool:
        found = self._world.etcd.range(self._world.keys.reports(name))
        held = [one for item in found.items if (one := read_record(Held, item)) is not None]
        steps = [one.first_step for one in held if one.generation == generation]
        steps += [end.first_step for one in held if (end := one.end_of(generation)) is not None]
        return any(step is not None for step in steps)

    def _stopped(self, job: JobTruth, name: str, status: JobStatus) -> None:
        agents = [one for one in self._world.agents if one.alive and one.job.spec.job == name]
        # one that stands still cannot take over, and may not have read yet that it is to leave
        if name not in self._world.stops and not all(one.departing or one.stopped for one in agents):
            self._kernel.defect(f"job {name} is stopped, and nobody asked: {status.reason}")
        saved = max((one.step for one in job.checkpoints if not job.chains.get(one.chain)), default=0)
        if saved < job.newest and not self._excused(job) and self._world.jobs[name].script.library:
            self._kernel.defect(f"job {name} is stopped at step {job.newest}, its checkpoint has {saved}")

    def _plan(self, job: JobTruth, name: str, plan: Plan) -> None:
        before, job.plan = job.plan, plan
        if plan.run != job.run:
            return  # the leader has not heard of the newer run yet
        most = self._world.specs[name].max_restarts
        if plan.restarts > most:
            self._kernel.defect(f"job {name} has used {plan.restarts} of {most} restarts")
        of_this_run = before if before is not None and before.run == plan.run else None
        if wrong := job.budget.planned(self._world, name, of_this_run, plan):
            self._kernel.defect(wrong)
        if plan.transition is Transition.RECOVER and job.mesh is not None:
            planned = {place.agent for place in plan.placements}
            for member in job.mesh.members.values():
                if not self._counts(member) and member.agent.identity not in planned:  # type: ignore[attr-defined]
                    job.given_up.add(member.name)
        job.least_step.setdefault(plan.generation, self._recorded_step(job))
        if before is None or before.generation == plan.generation or before.run != plan.run:
            return
        counts = plan.cause is Cause.FAILURE and plan.failed != before.failed
        self._counted(job, name, before.restarts, plan.restarts - counts)
        if plan.cause is Cause.FAILURE and self._world.network.troubled:
            job.deaths += 1  # a split can fail generations for as long as it lasts, and its aftermath
        resumes = before.cause is plan.cause and not before.placements and before.restarts == plan.restarts
        if plan.cause is Cause.FAILURE and plan.restarts not in (before.restarts + 1, 1) and not resumes:
            self._kernel.defect(
                f"a failure of job {name} makes {plan.restarts} restarts of {before.restarts}"
            )

    def _recorded(self, job: JobTruth, record: CheckpointRecord) -> None:
        before, job.recorded = job.recorded, record
        if before is not None and (record.generation, record.step) < (before.generation, before.step):
            self._kernel.defect(
                f"the checkpoint of step {record.step} and generation {record.generation} is recorded after "
                f"that of step {before.step} and generation {before.generation}"
            )
        job.budget.record(record)

    def _recorded_step(self, job: JobTruth) -> int:
        """Return the step of the recorded checkpoint; 0 for one of a generation that was given up.

        An agent that was cut off may record what its replicas have saved after a later generation has gone on
        from an earlier step. It was not there in time, and what that generation saves replaces it.
        """
        record, mesh = job.recorded, job.mesh
        if record and mesh and record.generation < mesh.generation and record.step > job.begun:
            return 0
        known = [one for one in job.checkpoints if record is not None and one.number == record.id]
        return max((one.step for one in known if not job.chains.get(one.chain)), default=0)

    def _counted(self, job: JobTruth, name: str, restarts: int, later: int) -> None:
        """A restart is counted for replicas that failed; one that proves to be a node's loss is given back.

        Args:
            job: what is known of the job.
            name: its name.
            restarts: those that a plan has counted.
            later: those of them that the next plan still counts.
        """
        if any(self._vanishes(agent) for agent in self._world.agents if agent.job.spec.job == name):
            return  # it is given back when that node's lease has run out
        if later >= restarts > job.deaths + self._world.network.troubled:
            self._kernel.defect(f"job {name} has used {restarts} restarts after {job.deaths} failures")

    def _stays_elsewhere(self, replica: Replica) -> bool:
        """Whether another machine is registered for a replica's job, and is not drained."""
        others = (name for name in self._world.machines if name != replica.machine.name)
        found = (self._world.etcd.get(self._world.keys.node(name, replica.job)) for name in others)
        return any(one is not None and '"draining":false' in one.value for one in found)

    def _vanishes(self, agent: AgentProcess) -> bool:
        """Whether an agent is dead, and its registration is still there."""
        found = self._world.etcd.get(self._world.keys.node(agent.machine.name, agent.job.spec.job))
        return not agent.alive and found is not None and f'"agent":"{agent.identity}"' in found.value
