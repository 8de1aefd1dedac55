"""One run: a cluster, faults for a while, healing, and what must hold then."""

from __future__ import annotations

from dataclasses import dataclass, field

from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
from adaptdl_elastic.rendezvous.schema.records import JobSpec, Rescale
from faultsim.agents import Job
from faultsim.faults import KINDS, Faults
from faultsim.replica import Script
from faultsim.truth import JobTruth
from faultsim.world import World

PROGRESS_SECONDS = 240.0  # after healing, until every job trains or has ended
MOST_MACHINES = 12


@dataclass
class Outcome:
    """What came of a run."""

    seed: int
    defects: list[str]
    digest: str
    seconds: float  # simulated
    events: int
    faults: int
    states: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


def draw(world: World) -> tuple[list[str], float, float]:
    """Fill a world: machines, jobs, agents; the kinds of faults, their mean distance, and when they end."""
    chance = world.kernel.random
    machines = chance.choice([1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 8, MOST_MACHINES])
    slots = [chance.choice([1, 1, 2, 2, 3]) for _ in range(machines)]
    if machines > 6:
        slots = [1] * machines
    names = ["a", "b"] if machines <= 4 and chance.random() < 0.3 else ["a"]
    weather = chance.uniform(30.0, 120.0)
    for name in names:
        world.jobs[name] = _job(world, name, machines, sum(slots), weather)
    world.settings = CoordinatorSettings(interval=chance.choice([5.0, 15.0, 30.0]), refill_after=60.0)
    for index, count in enumerate(slots):
        machine = world.machine(f"n{index}", count)
        for name in names:
            when = chance.choice([0.5, 0.5, 15.0]) * chance.random()
            world.kernel.after(when, world.start_agent, machine, name)
    kinds = sorted(KINDS)
    kinds = chance.sample(kinds, chance.choice([2, 3, 4, 6, 9, len(kinds)]))  # few, so that they meet often
    return kinds, chance.choice([3.0, 8.0, 20.0]), weather


def _job(world: World, name: str, machines: int, slots: int, weather: float) -> Job:
    chance = world.kernel.random
    step_seconds = chance.choice([0.2, 0.5, 1.0, 2.0])
    script = Script(
        steps=max(10, int(chance.uniform(0.5, 1.5) * weather / step_seconds)),
        step_seconds=step_seconds,
        start_seconds=chance.choice([0.2, 1.0, 4.0]),
        tail_seconds=chance.choice([0.05, 0.5, 3.0]),
        save_seconds=chance.choice([0.05, 0.5, 2.0]),
        inplace=chance.random() < 0.75,
        resilient=chance.random() < 0.75,
        library=chance.random() < 0.9,
        stop_exit_code=chance.choice([143, 143, 143, 0, 1]),
    )
    most = chance.randint(1, max(1, slots))
    least = chance.choice([1, 1, 1, chance.randint(1, max(1, most // 2))])
    spec = JobSpec(
        job=name,
        run="",
        min_nodes=chance.choice([1, 1, min(2, machines, least)]),
        max_nodes=machines,
        min_replicas=least,
        max_replicas=most,
        max_restarts=chance.choice([1, 3, 10]),
        rescale=chance.choice([Rescale.AUTO, Rescale.AUTO, Rescale.AUTO, Rescale.RESTART, Rescale.INPLACE]),
        rescale_timeout=20.0,
        checkpoint_timeout=15.0,
        checkpoint_path=f"/checkpoints/{name}",
    )
    return Job(spec, script, checkpoint_interval=chance.choice([3.0, 10.0, 30.0]))


def run(seed: int, keep_lines: bool = False) -> Outcome:
    """One run, from its seed."""
    world = World(seed)
    with world.running():
        kinds, distance, weather = draw(world)
        kernel, truth = world.kernel, world.truth
        kernel.note(f"{world.jobs} {sorted(world.machines)} {kinds} every {distance} s for {weather} s")
        faults = Faults(world)
        faults.begin(kinds, distance, weather)
        kernel.run(weather, lambda: bool(kernel.defects))
        if not kernel.defects:
            faults.heal()
            _liveness(world)
        if not kernel.defects:
            kernel.defects += world.history_violations()
        states = {
            name: found.status.state.value if (found := truth.job(name)).status is not None else "none"
            for name in world.jobs
        }
    lines = list(kernel.lines) if keep_lines or kernel.defects else []
    return Outcome(
        seed, kernel.defects, kernel.digest, kernel.now, kernel.events, faults.count, states, lines
    )


def _liveness(world: World) -> None:
    """Run on without faults: every job trains soon, and comes to its end."""
    kernel, truth = world.kernel, world.truth
    healed = kernel.now
    kernel.run(healed + PROGRESS_SECONDS, lambda: bool(kernel.defects) or all(map(_over, _jobs(world))))
    for name in world.jobs:
        job = truth.job(name)
        if not _over(job) and job.committed_at <= healed + 30.0 and not kernel.defects:
            kernel.defect(f"job {name} does not train {PROGRESS_SECONDS:g} s after healing: {job.status}")
    longest = max(job.script.steps * job.script.step_seconds * 2.0 for job in world.jobs.values())
    until = kernel.now + longest + PROGRESS_SECONDS
    kernel.run(until, lambda: bool(kernel.defects) or all(map(_over, _jobs(world))))
    for name in world.jobs:
        if not _over(truth.job(name)) and not kernel.defects:
            kernel.defect(f"job {name} has not ended: {truth.job(name).status}")
    kernel.run(kernel.now + 90.0, lambda: bool(kernel.defects) or not any(a.alive for a in world.agents))
    for agent in world.agents:
        if agent.alive and not kernel.defects:
            kernel.defect(f"{agent.name} still runs though its job has ended")


def _jobs(world: World) -> list[JobTruth]:
    return [world.truth.job(name) for name in world.jobs]


def _over(job: JobTruth) -> bool:
    return job.over
