"""What really happens in a run, and what of it must not be: held against every promise of the product.

`Truth` is told by replicas what they commit, save and load. It knows which processes live, so it sees two
replicas in one slot, two generations that train at once, steps that are lost without a reason or done twice,
and a job that is called done before its script has come to its end, or that goes on after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    JobState,
    JobStatus,
    MalformedRecordError,
    Plan,
    decode,
)
from adaptdl_elastic.rendezvous.store.base import Change

if TYPE_CHECKING:
    from faultsim.mesh import Mesh
    from faultsim.replica import Replica
    from faultsim.world import World


HEARS_SECONDS = 8.0  # after trouble on a machine, until its agents know what is in the store


@dataclass(frozen=True)
class Checkpoint:
    """What was saved."""

    number: str
    step: int
    chain: str
    at: float


class Archive:
    """In place of what `checkpoint_archive.kept` makes of a path: the checkpoints of one job."""

    def __init__(self, job: JobTruth) -> None:
        self._job = job

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
    finished: bool = False  # all replicas of a generation did
    lost_steps: int = 0
    losses: int = 0  # restarts that lost steps
    excuses: int = 0  # faults since the last of them
    deaths: int = 0  # replicas that faults have killed, or that ended with an error of their own
    status: JobStatus | None = None
    plan: Plan | None = None


class Truth:
    """Sees everything."""

    def __init__(self, world: World) -> None:
        self._world, self._kernel = world, world.kernel
        self.jobs: dict[str, JobTruth] = {}
        self.live: dict[tuple[str, str, int], list[Replica]] = {}  # by job, node, slot

    def job(self, name: str) -> JobTruth:
        """What is known of one job."""
        return self.jobs.setdefault(name, JobTruth())

    def archive(self, path: str) -> Archive:
        """The checkpoints under a path."""
        return Archive(self.job(path.rpartition("/")[2]))

    def excuse(self) -> None:
        """A fault has happened: work since the last checkpoint may be lost."""
        for job in self.jobs.values():
            job.excuses += 1

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
            if self._counts(one)
        ]
        if len(here) > machine.slots:
            self._kernel.defect(f"{len(here)} replicas on {machine.name}, which has {machine.slots} slots")
        job = self.job(replica.job)
        if job.status is not None and job.status.state.ended and job.finished:
            self._kernel.defect(f"{replica.name} starts though its job has {job.status.state.value}")

    def _counts(self, replica: Replica) -> bool:
        """Whether others can know of it: its agent lives and is registered."""
        if not replica.alive or not replica.agent.alive:
            return False
        found = self._world.etcd.get(self._world.keys.node(replica.machine.name, replica.job))
        return found is not None and f'"agent":"{replica.agent.identity}"' in found.value  # type: ignore[attr-defined]

    def replica_ended(self, replica: Replica) -> None:
        """A process is gone."""
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
        if job.finished:
            self._kernel.defect(f"{replica.name} takes step {step + 1} of a job that is finished")
        job.newest, job.committed_at = step + 1, self._kernel.now
        self._kernel.note(f"job {replica.job}: step {step + 1} on {mesh.size} replicas")

    def _begins(self, job: JobTruth, mesh: Mesh, replica: Replica, step: int) -> bool:
        """Another generation takes a step; False: one whose agents could not hear that its time is over."""
        if job.mesh is not None and mesh.generation <= job.mesh.generation:
            if not any(self._cut_off(member) for member in mesh.members.values()):
                self._kernel.defect(
                    f"{mesh.label} takes step {step + 1} after generation {job.mesh.generation} has begun to"
                )
            return False
        job.mesh = mesh
        lost = job.newest - step
        if lost > 0:
            job.lost_steps += lost
            job.losses += 1
            if not job.excuses:
                self._kernel.defect(f"{lost} steps of job {replica.job} are lost, and there was no fault")
            job.excuses = 0
        return True

    def _cut_off(self, replica: Replica) -> bool:
        """Whether its agent cannot have heard of all that is in the store."""
        agent, line = replica.agent, replica.machine.line
        recent = self._kernel.now - replica.machine.troubled_at < HEARS_SECONDS
        return agent.stopped or line.cut or recent or not self._counts(replica) or not self._world.etcd.up

    def finished(self, replica: Replica) -> None:
        """A replica has come to the end of its script."""
        job = self.job(replica.job)
        if replica.mesh is job.mesh and replica.rank == 0 and replica.step >= replica.script.steps:
            job.finished = True

    def plain_step(self, replica: Replica) -> None:
        """A script without the library does something; nobody knows what."""
        self.job(replica.job).committed_at = self._kernel.now

    def plain_end(self, replica: Replica) -> None:
        """It comes to its end."""
        self.job(replica.job).finished = True

    # -- checkpoints

    def save(self, replica: Replica, step: int, chain: str) -> str:
        """A checkpoint is written; its id."""
        job = self.job(replica.job)
        number = f"{len(job.checkpoints) + 1:08d}"
        job.checkpoints.append(Checkpoint(number, step, chain, self._kernel.now))
        return number

    def load(self, replica: Replica, recorded: str) -> tuple[int, str] | None:
        """The newest checkpoint; None where the one that the store names is not there."""
        job = self.job(replica.job)
        checkpoints = job.checkpoints
        if recorded and not any(one.number >= recorded for one in checkpoints):
            return None
        if not checkpoints:
            return 0, ""
        found = checkpoints[-1]
        if job.chains.get(found.chain) and any(not job.chains.get(one.chain) for one in checkpoints):
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
        if change.value is None or parts[0] != "jobs" or len(parts) != 3:
            return
        try:
            if parts[2] == "status":
                self._status(self.job(parts[1]), parts[1], decode(JobStatus, change.value, change.key))
            elif parts[2] == "plan":
                self._plan(self.job(parts[1]), parts[1], decode(Plan, change.value, change.key))
        except MalformedRecordError as error:
            self._kernel.defect(f"a record that cannot be read: {error}")

    def _status(self, job: JobTruth, name: str, status: JobStatus) -> None:
        before, job.status = job.status, status
        same = before is not None and before.run == status.run
        if before is not None and same and before.state.ended and status.state is not before.state:
            self._kernel.defect(f"job {name} was {before.state.value} and is {status.state.value}")
        if before is not None and same and before.state is status.state:
            return
        if status.state is JobState.DONE and not job.finished:
            self._kernel.defect(f"job {name} is called done at step {job.newest}: {status.reason}")
        if status.state is JobState.FAILED:
            most = self._world.specs[name].max_restarts
            if job.deaths <= most:
                self._kernel.defect(
                    f"job {name} failed after {job.deaths} deaths, {most} restarts are allowed"
                )
        if status.state is JobState.STOPPED and name not in self._world.stops:
            self._kernel.defect(f"job {name} is stopped, and nobody asked: {status.reason}")

    def _plan(self, job: JobTruth, name: str, plan: Plan) -> None:
        before, job.plan = job.plan, plan
        most = self._world.specs[name].max_restarts
        if plan.restarts > most:
            self._kernel.defect(f"job {name} has used {plan.restarts} of {most} restarts")
        if before is None or before.generation == plan.generation or before.run != plan.run:
            return
        if plan.cause is Cause.FAILURE and plan.restarts != before.restarts + 1 and plan.restarts != 1:
            self._kernel.defect(
                f"a failure of job {name} makes {plan.restarts} restarts of {before.restarts}"
            )
