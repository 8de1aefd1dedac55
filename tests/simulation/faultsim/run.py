"""One run: a cluster, faults for a while, healing, and what must hold then."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
from adaptdl_elastic.rendezvous.schema.records import JobSpec, Rescale
from faultsim.agents import Job
from faultsim.faults import KINDS, Faults
from faultsim.replica import Defect, Script
from faultsim.standing import Standing
from faultsim.truth import JobTruth
from faultsim.world import World

PROGRESS_SECONDS = 240.0  # after healing, until every job trains or has ended
MOST_MACHINES = 12
REST_SECONDS = 140.0  # in which nothing is mended


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


class Theme(Enum):
    """What most faults of a run wait for."""

    MIXED = "mixed"
    END = "end"  # the end of a script, which comes soon and takes long
    REST = "rest"  # a change; what they have broken stays so
    LEAVE = "leave"  # a change; nodes leave while others are idle, and stay away
    INSIST = "insist"  # as MIXED, with jobs that may change in place alone, and cannot
    NEWCOMER = "newcomer"  # a script that fails on one node, or at all larger sizes than one
    AGAIN = "again"  # jobs that fail or are stopped soon, and are started again while old agents are stuck


_SHARES = {Theme.END: (0.1, 0.8), Theme.REST: (0.75, 0.05), Theme.LEAVE: (0.6, 0.1)}
_MIXED_SHARES = (0.4, 0.15)
_LEAVING = ("ask_to_drain", "hurry", "kill_coordinator", "stop_process", "store_down", "cut_line", "scale")
_IN_ORDER = ("drain", "scale", "scale", "stop_job", "kill_coordinator")  # nothing is lost by them
_STARTING = ("kill_replica", "fail_replica", "stop_process", "cut_line", "supplant", "kill_agent", "scale")
_GROWING = ("kill_coordinator", "scale", "scale", "drain", "stop_coordinators", "kill_agent", "kill_replica")
_ANY_RESCALE = (Rescale.AUTO, Rescale.AUTO, Rescale.AUTO, Rescale.RESTART, Rescale.INPLACE)
_RESCALES = {Theme.INSIST: (Rescale.INPLACE,), Theme.LEAVE: (Rescale.AUTO, Rescale.RESTART)}
_AWAY_SECONDS = 400.0  # most that a drained node stays away in LEAVE


def draw(world: World, theme: Theme) -> tuple[list[str], float, float]:
    """Fill a world: machines, jobs, agents; the kinds of faults, their mean distance, and when they end."""
    chance = world.kernel.random
    machines = chance.choice([1, 2, 2, 3, 3, 3, 4, 4, 5, 6, 8, MOST_MACHINES])
    slots = [chance.choice([1, 1, 2, 2, 3]) for _ in range(machines)]
    if machines > 6:
        slots = [1] * machines
    names = ["a", "b"] if machines <= 4 and chance.random() < 0.3 else ["a"]
    weather = chance.uniform(30.0, 120.0 if theme is Theme.MIXED else 60.0)
    for name in names:
        world.jobs[name] = _job(world, name, machines, sum(slots), weather, theme)
    world.settings = CoordinatorSettings(interval=chance.choice([5.0, 15.0, 30.0]), refill_after=60.0)
    for index, count in enumerate(slots):
        machine = world.machine(f"n{index}", count)
        for name in names:
            when = chance.choice([0.5, 0.5, 15.0]) * chance.random()
            world.kernel.after(when, world.start_agent, machine, name)
    world.calm = chance.random() < 0.3
    if theme is Theme.LEAVE:
        world.calm = chance.random() < 0.5
        kinds = ["drain", "stop_coordinators", *chance.sample(_LEAVING, chance.choice([0, 1, 2]))]
        if chance.random() < 0.4:
            kinds = ["ask_to_drain", *chance.sample(_IN_ORDER, chance.choice([1, 2, 3]))]
    elif theme is Theme.NEWCOMER:
        kinds = chance.sample(_GROWING, chance.choice([1, 2, 4]))
    elif theme is Theme.AGAIN:
        kinds = [
            "stop_job",
            "start_again",
            "start_again",
            *chance.sample(_STARTING, chance.choice([1, 2, 4])),
        ]
    else:
        kinds = sorted(KINDS)
        kinds = chance.sample(
            kinds, chance.choice([2, 3, 4, 6, 9, len(kinds)])
        )  # few, so that they meet often
    return kinds, chance.choice([3.0, 8.0] if theme is Theme.END else [3.0, 8.0, 20.0]), weather


def _job(world: World, name: str, machines: int, slots: int, weather: float, theme: Theme) -> Job:
    chance = world.kernel.random
    step_seconds = chance.choice([0.2, 0.5, 1.0, 2.0])
    ends = theme is Theme.END
    length = chance.uniform(*((0.2, 0.7) if ends else chance.choice([(0.1, 0.5), (0.5, 1.5), (0.5, 1.5)])))
    script = Script(
        steps=max(10, int(length * weather / step_seconds)),
        step_seconds=step_seconds,
        start_seconds=chance.choice([0.2, 1.0, 4.0]),
        tail_seconds=chance.choice([1.0, 3.0, 6.0] if ends else [0.05, 0.5, 3.0]),
        save_seconds=chance.choice([0.05, 0.5, 2.0]),
        inplace=chance.random() < (0.0 if theme is Theme.INSIST else 0.75),
        resilient=chance.random() < 0.75,
        library=chance.random() < 0.9,
        stop_exit_code=chance.choice([143, 143, 143, 0, 1]),
    )
    most = chance.randint(1, max(1, slots // 2 if theme is Theme.LEAVE else slots))
    least = chance.choice([1, 1, 1, chance.randint(1, max(1, most // 2))])
    if theme is Theme.NEWCOMER:
        most, least = slots, 1
        script = replace(script, library=True, defect=_defect(world, machines))
    spec = JobSpec(
        job=name,
        run="",
        min_nodes=chance.choice([1, 1, min(2, machines, least)]),
        max_nodes=machines,
        min_replicas=least,
        max_replicas=most,
        max_restarts=chance.choice([0, 1] if theme is Theme.AGAIN else [1, 3, 10]),
        rescale=chance.choice(_RESCALES.get(theme, _ANY_RESCALE)),
        rescale_timeout=20.0,
        checkpoint_timeout=15.0,
        checkpoint_path=f"/checkpoints/{name}",
    )
    hang_timeout = chance.choice([8.0, 8.0, 0.0])
    return Job(spec, script, checkpoint_interval=chance.choice([3.0, 10.0, 30.0]), hang_timeout=hang_timeout)


def _defect(world: World, machines: int) -> Defect:
    chance = world.kernel.random
    at, final, once = chance.choice(["start", "step", "end"]), chance.random() < 0.3, chance.random() < 0.2
    if chance.random() < 0.4 or machines == 1:
        return Defect(above=1, at=at, final=final, once=once)
    return Defect(node=f"n{chance.randrange(machines)}", at=at, final=final, once=once)


def run(seed: int, keep_lines: bool = False, theme: str | None = None) -> Outcome:
    """One run, from its seed, and of a theme if one is given."""
    world = World(seed)
    with world.running():
        drawn = world.kernel.random.choice([Theme.MIXED, *Theme])
        of = Theme(theme) if theme else drawn
        kinds, distance, weather = draw(world, of)
        kernel, truth = world.kernel, world.truth
        kernel.note(
            f"{world.jobs} {sorted(world.machines)} {kinds} every {distance} s for {weather} s, {of.value}"
        )
        faults, rests = Faults(world), of is Theme.REST or kernel.random.random() < 0.2
        faults.change_share, faults.end_share = _SHARES.get(of, _MIXED_SHARES)
        if of is Theme.LEAVE:
            faults.away_seconds = _AWAY_SECONDS
        standing = Standing(world, faults)
        faults.begin(kinds, distance, weather)
        kernel.run(weather, lambda: bool(kernel.defects))
        if rests and not kernel.defects and not all(map(_over, _jobs(world))):
            faults.rest()
            kernel.run(kernel.now + REST_SECONDS, lambda: bool(kernel.defects))
        standing.closed = True
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
        waits = job.status is not None and "is left out" in job.status.reason  # for ten minutes
        if not (_over(job) or waits) and job.committed_at <= healed + 30.0 and not kernel.defects:
            kernel.defect(f"job {name} does not train {PROGRESS_SECONDS:g} s after healing: {job.status}")
    longest = max(job.script.steps * job.script.step_seconds * 2.0 for job in world.jobs.values())
    # a defect may use up all restarts, most of them after the longest pause
    tries = max(job.spec.max_restarts if job.script.defect else 0 for job in world.jobs.values())
    until = kernel.now + longest + 600.0 + PROGRESS_SECONDS + tries * (longest + 60.0)
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
