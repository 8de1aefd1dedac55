"""A standalone job: no etcd, what dies beside it, and the commands of other terminals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from cluster import EPOCHS, LONG, TRAIN
from elastic_run import PATIENCE, ElasticRun, run_agent
from polling import until

OWN = f"adaptdl-{os.getuid()}"
ELASTIC = ("--standalone", "--no-autoscale", "--nproc-per-node=1:2", "--checkpoint-path=saved")
pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(600)]


def helpers(run: ElasticRun, forks: bool = False) -> Iterator[psutil.Process]:
    """Yield what the agent has started: the fork server, which has the replicas, or all the rest."""
    for process in psutil.Process(run.process.pid).children():
        with suppress(psutil.NoSuchProcess):
            if ("fork_server" in " ".join(process.cmdline())) == forks:
                yield process


def says(run: ElasticRun, *arguments: str) -> str:
    """What a command in another terminal prints."""
    done = run.adaptdl(*arguments)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr, run.text())
    return done.stdout


def test_files_of_the_working_directory_replace_no_module_of_the_product(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(Path(TRAIN).read_text())
    for name in ("token", "random", "logging", "copy", "click", "runpy", "pydantic"):
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w')\nraise ImportError('not this one')\n")
    command = ["--standalone", "--nproc-per-node=2", "src/train.py", "2", "0"]
    with ElasticRun(command, tmp_path, fresh=True) as run:
        assert run.wait() == 0, run.text()
        assert run.of("generation")
    assert not [*tmp_path.glob("ran-*")]


def test_two_jobs_never_write_to_one_folder_though_the_runtime_directory_goes(tmp_path: Path) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    with ElasticRun(
        [*ELASTIC, "--rdzv-id=job", TRAIN, *LONG], tmp_path, {"XDG_RUNTIME_DIR": str(runtime)}
    ) as run:
        run.wait_for_event("epoch")
        shutil.rmtree(runtime / OWN)
        for name in ("job", "other"):
            second = run_agent(tmp_path, *ELASTIC, f"--rdzv-id={name}", TRAIN, *LONG)
            assert second.returncode == 1
            line = f"a job that writes to {tmp_path / 'saved'} runs already (process {run.process.pid} on "
            assert line in second.stderr, second.stderr
            assert "when-it-fails.md#runs-already" in second.stderr
        run.process.kill()
    with ElasticRun([*ELASTIC, "--rdzv-id=job", TRAIN, *LONG], tmp_path) as run:
        run.wait_for_event("epoch")
        assert says(run, "stop", "job")
        run.wait()
    assert not (tmp_path / "saved" / ".adaptdl-lock").exists()


def test_commands_reach_a_job_whose_runtime_directory_has_gone(tmp_path: Path) -> None:
    runtime, options = tmp_path / "runtime", ("--rdzv-id=job", TRAIN, *LONG)
    runtime.mkdir()
    places = {"XDG_RUNTIME_DIR": str(runtime)}
    with ElasticRun([*ELASTIC, *options], tmp_path, places, fresh=True) as run:
        run.wait_for_event("epoch")
        note = json.loads((runtime / OWN / "job.json").read_text())
        shutil.rmtree(Path(note["endpoint"].removeprefix("unix:")).parent)
        shutil.rmtree(runtime / OWN)
        for process in helpers(run):  # the next coordinator connects to the new socket
            with suppress(psutil.NoSuchProcess):
                process.kill()
        wait_for_file(runtime / OWN / "job.json", run)
        assert run.adaptdl("ls", env=places).stdout.splitlines()[1].split()[:2] == ["job", "running"]
        assert run.adaptdl("status", "job", env=places).returncode == 0
        scaled = run.adaptdl("scale", "job", "--replicas", "2", "--wait", env=places)
        assert scaled.returncode == 0, scaled.stderr + run.text()
        second = run_agent(tmp_path, *ELASTIC, *options, **places)
        assert f"a standalone job 'job' runs already (process {run.process.pid})" in second.stderr
        assert run.adaptdl("stop", "job", "--wait", env=places).returncode == 0
        assert run.wait() == 143
        assert not [*(runtime / OWN).glob("job.*")]


def test_no_process_beside_the_agent_is_needed_for_good(tmp_path: Path) -> None:
    with ElasticRun(
        [*ELASTIC, "--rdzv-id=job", "--nproc-per-node=2", TRAIN, *LONG], tmp_path, fresh=True
    ) as run:
        run.wait_for_event("epoch")
        for victim in ("1", "0"):
            for process in helpers(run):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            seen = len(run.events)
            os.kill(run.of("started")[-1]["pids"][victim], signal.SIGKILL)
            run.wait_for_event("replica_lost", after=seen)
            says(run, "scale", "job", "--replicas", "2", "--wait")
            run.wait_for_event("generation", replicas=2, after=seen)
            seen = len(run.events)
            run.wait_for_event("epoch", after=seen)
        run.hurry()
        assert run.wait() == 0, run.text()
        assert run.samples() == dict.fromkeys(range(EPOCHS), 200)
        assert "store" not in run.text()


@pytest.mark.essential
def test_commands_of_another_terminal(tmp_path: Path) -> None:
    foreign = {"ADAPTDL_ETCD_CA": "/nowhere/ca.pem", "ADAPTDL_ETCD_USER": "somebody"}
    with ElasticRun([*ELASTIC, "--rdzv-id=job", TRAIN, *LONG], tmp_path, foreign) as run:
        run.wait_for_event("generation", replicas=1)
        assert [process.name() for process in helpers(run) if "etcd" in process.name()] == []
        run.wait_until_adaptdl_says("running  1 ", "ls")
        assert "job   running" in says(run, "status", "job")
        says(run, "scale", "job", "--replicas", "2", "--wait")
        assert says(run, "explain", "job")
        says(run, "checkpoint", "job", "--wait")
        assert "manual" in says(run, "events")
        (node,) = (line.split()[0] for line in says(run, "nodes").splitlines()[1:])
        assert "in the memory of a standalone job's agent" in run.adaptdl("doctor").stdout
        says(run, "drain", node, "--wait")
        assert run.wait() == 143, run.text()


SLOW_NEWCOMER = f"""
import os, pathlib, runpy, time
if "ADAPTDL_JOIN" in os.environ:
    pathlib.Path("joining").touch()
    time.sleep(1000)
runpy.run_path({TRAIN!r}, run_name="__main__")
"""


def wait_for_file(path: Path, run: ElasticRun) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < deadline, run.text()
        assert run.process.poll() is None, run.text()
        time.sleep(0.05)


@pytest.mark.essential
def test_an_agent_has_no_torch_and_little_memory(tmp_path: Path) -> None:
    with ElasticRun([*ELASTIC, TRAIN, *LONG], tmp_path, fresh=True) as run:
        run.wait_for_event("epoch", epoch=0)
        agent = Path(f"/proc/{run.process.pid}")
        assert "libtorch" not in (agent / "maps").read_text()
        (share,) = (
            line for line in (agent / "smaps_rollup").read_text().splitlines() if line.startswith("Pss:")
        )
        # 42 MiB on 2026-12-01; with torch 170
        assert int(share.split()[1]) <= 70 * 1024
        run.hurry()
        assert run.wait() == 0


def test_a_store_that_dies_is_served_again_and_so_may_the_fork_server(tmp_path: Path) -> None:
    with ElasticRun([*ELASTIC, "--rdzv-id=job", TRAIN, *LONG], tmp_path, fresh=True) as run:
        run.wait_for_event("epoch", epoch=0)
        (server,) = helpers(run, forks=True)
        (store,) = (one for one in server.children() if one.cwd() == "/")
        ignored = re.search(r"^SigIgn:\s+(\w+)", Path(f"/proc/{store.pid}/status").read_text(), re.MULTILINE)
        # Slurm may send it to all processes of a job
        assert ignored is not None
        assert int(ignored[1], 16) >> (signal.SIGTERM - 1) & 1
        store.kill()
        until("the death is not noticed", lambda: "generation 0 died: another one serves it" in run.text())
        says(run, "scale", "job", "--replicas", "2")
        run.wait_for_event("generation", generation=1)
        server.kill()
        run.hurry()
        assert run.wait() == 0
        assert run.samples()[EPOCHS - 1] == 200


@pytest.mark.parametrize("interrupted", [True, False], ids=["Ctrl-C", "time is over"])
def test_a_change_that_is_withdrawn_says_whether_training_goes_on(tmp_path: Path, interrupted: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SLOW_NEWCOMER)
    limit = () if interrupted else ("--rescale-timeout=2",)
    with ElasticRun([*ELASTIC, *limit, "--rdzv-id=job", str(script), *LONG], tmp_path) as run:
        run.wait_for_event("epoch")
        says(run, "scale", "job", "--replicas", "2")
        if not interrupted:
            # or a later one: two seconds may be too short for the second, too
            run.wait_for(lambda event: event["event"] == "generation" and event["generation"] >= 2)
            assert "the change to 2 replicas is called off, training goes on: " in run.text()
            return
        wait_for_file(tmp_path / "joining", run)
        run.interrupt()
        assert run.wait() == 143, run.text()
        first, second, third = (line for line in run.text().splitlines() if line.startswith("adaptdl-run: "))
        assert first.startswith("adaptdl-run: SIGINT: saving and stopping")
        assert second.startswith("adaptdl-run: the change to 2 replicas is called off: ")
        assert "(exit code 143" in third
        assert "training goes on" not in run.text()


def test_two_jobs_of_one_user(tmp_path: Path) -> None:
    with ExitStack() as stack:
        runs = {}
        for name in ("first", "second"):
            arguments = [*ELASTIC[:-1], f"--checkpoint-path=saved-{name}", f"--rdzv-id={name}", TRAIN, *LONG]
            runs[name] = stack.enter_context(ElasticRun(arguments, tmp_path))
        for run in runs.values():
            run.wait_for_event("epoch")
        for name in runs:
            run.wait_until_adaptdl_says(f"{name}   running", "status", name)
        listed = [line.split()[:2] for line in says(run, "ls").splitlines()[1:]]
        assert listed == [["first", "running"], ["second", "running"]]
        says(run, "scale", "first", "--replicas", "2", "--wait")
        assert "size          2 replicas" in says(run, "status", "first")
        assert "size          1 replica " in says(run, "status", "second")
        (node, *_) = (line.split()[0] for line in says(run, "nodes").splitlines()[1:])
        assert "2 standalone jobs run on this machine: first" in run.adaptdl("drain", node).stderr
        assert says(run, "stop", "first", "--wait") == "first is stopping\n"
        assert runs["first"].wait() == 143
        assert [line.split()[0] for line in says(run, "ls").splitlines()[1:]] == ["second"]
        says(run, "drain", node, "--wait")
        assert runs["second"].wait() == 143
        gone = run.adaptdl("status", "second")
        assert (gone.returncode, "no standalone job runs on this machine" in gone.stderr) == (1, True)
