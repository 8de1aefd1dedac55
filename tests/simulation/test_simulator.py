"""The simulator itself: seeds repeat, nothing of the product runs on real time, quiet clusters are quiet."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faultsim import patching
from faultsim.agents import Job
from faultsim.replica import Replica, Script
from faultsim.run import run
from faultsim.world import World
from planted_defects import PLANTED, ROOT, Planted, edited

from adaptdl_elastic.protocol.messages import ReplicaMessage, Switched
from adaptdl_elastic.rendezvous.schema.records import JobSpec, JobState, Rescale

HERE = Path(__file__).parent
SEEDS = 40  # `make simulate-faults` tries as many as it has time for


DIGESTS = """
import os, sys
from adaptdl_elastic import _program
from faultsim.run import run
REAL = {"open", "os.listdir", "os.scandir", "os.mkdir", "os.remove", "os.rename", "subprocess.Popen"}
def end(event, arguments):
    if event in REAL:
        os.write(2, f"a run reaches {event}{arguments}".encode())
        os._exit(1)
run(1)  # what is imported late is imported now
_program.version()  # it is read when a job fails
sys.addaudithook(end)
for seed in map(int, sys.argv[1:]):
    print(run(seed).digest)
"""


def digests(folder: Path, hash_seed: int, seeds: range) -> list[str]:
    """The digests of runs in a process of its own, which sees no other folder than this one as its own."""
    path = os.pathsep.join([str(HERE), str(HERE.parent / "support")])
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "PYTHONHASHSEED": str(hash_seed)}
    environ |= {"HOME": str(folder), "TMPDIR": str(folder), f"ONLY_IN_{folder.name}": "1"}
    command = [sys.executable, "-c", DIGESTS, *map(str, seeds)]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.processes
def test_a_seed_repeats_a_run_in_another_process_and_folder_and_under_another_hash_seed(
    tmp_path: Path,
) -> None:
    seeds, found = range(777011, 777013), []
    for hash_seed, folder in enumerate((tmp_path / "a", tmp_path / "b")):
        folder.mkdir()
        found.append(digests(folder, hash_seed, seeds))
    assert found[0] == found[1]
    assert len(set(found[0])) == len(seeds)


def test_no_module_that_runs_here_reaches_for_a_real_clock_or_thread() -> None:
    assert patching.unknown() == []


@pytest.mark.parametrize("rescale", list(Rescale))
def test_without_faults_nothing_is_lost_and_the_job_is_done(rescale: Rescale) -> None:
    world = World(int.from_bytes(rescale.value.encode(), "big") % 1000)
    with world.running():
        spec = JobSpec(
            "a", "", max_nodes=3, max_replicas=5, rescale=rescale, rescale_timeout=20.0, checkpoint_path="/a"
        )
        world.jobs["a"] = Job(spec, Script(steps=120))
        for index in range(3):
            world.kernel.after(float(index), world.start_agent, world.machine(f"n{index}", 2), "a")
        world.kernel.run(400.0)
    assert world.kernel.defects == []
    assert world.history_violations() == []
    job = world.truth.job("a")
    assert job.status is not None
    assert job.status.state is JobState.DONE
    assert (job.newest, job.lost_steps) == (120, 0)
    assert [agent.exit_code for agent in world.agents] == [0, 0, 0]
    assert job.plan is not None
    assert job.plan.generation >= (1 if rescale is not Rescale.INPLACE else 0), "its size has changed"


def test_an_event_log_names_a_replica_that_died_before_the_others_were_forked() -> None:
    world, killed = World(7), list[str]()
    started = world.truth.replica_started

    def kill_the_first(replica: Replica) -> None:
        started(replica)
        if not killed:
            killed.append(replica.name)
            world.truth.job("a").deaths += 1
            world.kernel.kill(replica, -9)

    world.truth.replica_started = kill_the_first  # type: ignore[method-assign]
    with world.running():
        spec = JobSpec("a", "", max_nodes=1, min_replicas=3, max_replicas=3, checkpoint_path="/a")
        world.jobs["a"] = Job(spec, Script(steps=10))
        world.kernel.after(0.0, world.start_agent, world.machine("n0", 3), "a")
        world.kernel.run(60.0)
    assert killed
    assert world.kernel.defects == []
    begun = [sorted(map(int, e["pids"])) for e in world.agents[0].events if e["event"] == "started"]
    assert begun == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("seed", [1, 2])
def test_an_event_log_names_a_survivor_that_dies_after_the_leaver_has_switched(seed: int) -> None:
    world, killed = World(seed), list[str]()
    send = Replica.send

    def kill_the_survivor(replica: Replica, message: ReplicaMessage) -> None:
        send(replica, message)
        here = [other for other in replica.machine.processes if isinstance(other, Replica) and other.alive]
        leaves = isinstance(message, Switched) and replica.generation < message.generation
        if leaves and len(here) == 2 and not killed:
            (other,) = {*here} - {replica}
            killed.append(other.name)
            world.truth.job("a").deaths += 1
            world.truth.excuse()
            world.kernel.kill(other, -9)

    with world.running(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "send", kill_the_survivor)
        spec = JobSpec("a", "", max_nodes=2, max_replicas=4, rescale=Rescale.INPLACE, checkpoint_path="/a")
        world.jobs["a"] = Job(spec, Script(steps=400))
        for index in range(2):
            world.kernel.after(float(index), world.start_agent, world.machine(f"n{index}", 2), "a")
        world.kernel.run(400.0)
    assert killed
    assert world.kernel.defects == []
    assert world.history_violations() == []


@pytest.mark.slow
@pytest.mark.exhaustive
def test_no_defect_is_found_in_forty_seeds() -> None:
    for seed in range(1, 1 + SEEDS):
        found = run(seed)
        again = f"python -m faultsim --seed {seed} --runs 1 --trace"
        assert found.defects == [], "\n".join([*found.lines[-60:], *found.defects, again])


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_every_planted_defect_still_finds_the_guard_that_it_takes_out(planted: Planted) -> None:
    ast.parse(edited(planted))
    assert (ROOT / planted.tests).exists()
