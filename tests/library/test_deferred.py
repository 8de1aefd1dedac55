"""Changes and deaths on a backend that tells as little as NCCL does, by the code that is for NCCL."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import deferred_backend
import fake_agent
import loop_script_path
import psutil
import pytest
import torch
from fake_agent import FakeAgent
from polling import until
from recovered import BATCH, SIZE, applied, as_undisturbed, same, train

from adaptdl_elastic import _own_python
from adaptdl_elastic._private import runtime_directories
from adaptdl_elastic._session import Identity, Session
from adaptdl_elastic.protocol import self_test
from adaptdl_elastic.torch._process_group import backends, capability, selftest

SCRIPT = Path(deferred_backend.__file__).with_name("deferred_script.py")
ROOT = SCRIPT.parents[2]
PATH = {"PYTHONPATH": f"{SCRIPT.parent}:{ROOT}"}


@pytest.fixture
def passed(tmp_path: Path) -> Path:
    """XDG_RUNTIME_DIR of a user whose self-test has passed."""
    path = tmp_path / "passed"
    folder = runtime_directories({"XDG_RUNTIME_DIR": str(path)})[0]
    assert selftest.verdict("deferred", folder, run=lambda *_: None) is None
    return path


@pytest.fixture
def start(tmp_path: Path, passed: Path) -> Iterator[Callable[..., FakeAgent]]:
    """A job of `loop_script` on the deferred backend, whose replicas would survive a death."""
    with contextlib.ExitStack() as jobs:

        def begin(
            replicas: int, script: Path = loop_script_path.PATH, armed: bool = True, **given: Any
        ) -> FakeAgent:
            variables = {"SCRIPT": str(script), "XDG_RUNTIME_DIR": str(passed), **PATH}
            variables |= {name: given.pop(name) for name in ("COUNTED", "HELD") if name in given}
            loop = {"size": SIZE, "batch": BATCH, "pace": 0.01, "late": 0.5, **given}
            job = jobs.enter_context(fake_agent.running(SCRIPT, tmp_path, replicas, variables, **loop))
            if armed:
                job.wait_for("resilient", replicas)
            return job

        yield begin


@pytest.mark.processes
def test_up_and_down(start: Any, tmp_path: Path) -> None:
    job = start(2)
    for size in (3, 1, 2):
        job.rescale(size)
        job.wait_for("step")
    job.finish()
    applied(tmp_path, 2)


@pytest.fixture
def failed(tmp_path: Path) -> str:
    """XDG_RUNTIME_DIR of a user whose self-test has failed."""
    path = tmp_path / "failed"
    folder = runtime_directories({"XDG_RUNTIME_DIR": str(path)})[0]
    assert selftest.verdict("deferred", folder, run=lambda *_: "no luck") == "no luck"
    return str(path)


@pytest.mark.processes
@pytest.mark.parametrize("unlucky", [0, 1])
@pytest.mark.exhaustive
def test_one_node_whose_self_test_failed_is_enough(
    tmp_path: Path, passed: Path, failed: str, unlucky: int
) -> None:
    """Rank 0 says so, which is what the coordinator goes by; nobody is armed, and training goes on."""
    loop = fake_agent.settings(size=SIZE, batch=BATCH, pace=0.01, late=0.5, autoscale=BATCH)
    variables = {"LOOP": loop, "OUT": str(tmp_path), "SCRIPT": str(loop_script_path.PATH), **PATH}
    with FakeAgent(SCRIPT, tmp_path, **variables) as job:
        host, port = job.open_store()
        for rank in range(2):
            given = failed if rank == unlucky else str(passed)
            job.running.append(job.launch(rank, 2, 0, host, port, XDG_RUNTIME_DIR=given))
        hints: dict[str, Any] = {}
        while not hints:
            _, message, _ = job.messages.get(timeout=200)
            assert message["type"] != "resilient" or message["why_not"]
            hints = message.get("hints", {})
        assert (hints["inplace"], hints["inplace_reason"]) == (
            False,
            "the deferred backend's self-test failed: no luck",
        )
        job.finish()
    applied(tmp_path, 2)


@pytest.mark.processes
def test_a_newcomer_whose_nodes_self_test_failed_never_joins(start: Any, tmp_path: Path, failed: str) -> None:
    job = start(2)
    job.plan(3, XDG_RUNTIME_DIR=failed)
    assert job.pending[0].join() == 1
    assert "self-test failed: no luck" in job.pending[0].text()
    job.withdraw()
    job.rescale(1)
    job.finish()
    applied(tmp_path, 1)


@pytest.mark.processes
@pytest.mark.parametrize("dies", [0, 1])
def test_one_of_two_dies(start: Any, tmp_path: Path, dies: int) -> None:
    job = start(2)
    job.recover(dies)
    job.finish()
    applied(tmp_path, 1)


@pytest.mark.exhaustive
@pytest.mark.processes
def test_deaths_leave_no_tensors_behind(start: Any, tmp_path: Path) -> None:
    """Deaths in the step in which DDP arranges its buckets keep none of them.

    How many the present step holds depends on the moment of the death, so the least of several are compared.
    """
    size = 2004
    job = start(2, COUNTED="1", size=size)
    for _ in range(7):
        job.recover(1)
        job.rescale(2)
        job.wait_for("step")
    held = [int(line) for line in (tmp_path / "held-1").read_text().splitlines()]
    assert len(held) == 7
    # one of `size` numbers for each death would make three of them
    assert min(held[4:]) - min(held[1:4]) < 12 * size, held


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_random_schedule(start: Any, tmp_path: Path) -> None:
    """Deaths and changes of size at random moments."""
    choose = random.Random(1)
    job = start(choose.randint(2, 3), epochs=3, evaluate=1)
    job.wander(choose, 3)
    job.finish()
    applied(tmp_path, len(job.running), epochs=3)


FAULTS: dict[str, list[list[Any]]] = {
    "rank 0 dies": [[0, 10, 0, "die"]],
    "rank 1 dies in a late bucket": [[1, 10, 1, "die"]],
    "the second step, after the buckets were made anew": [[1, 1, 0, "die"]],
    "the last step of an epoch": [[2, 19, 1, "die"]],
}


def recovered(folder: Path, replicas: int) -> None:
    """Check that the replicas have in the end what one replica on gloo has."""
    (expected,) = train(folder / "undisturbed", 1)
    results = [torch.load(folder / f"result-{rank}") for rank in range(replicas)]
    for result in results:
        as_undisturbed(result, expected)
    same(results)


@pytest.mark.processes
@pytest.mark.parametrize("name", FAULTS)
def test_a_death_in_mid_step_leaves_no_trace(start: Any, tmp_path: Path, name: str) -> None:
    """Nobody is told by torch: what had not arrived is garbage by then."""
    faults = FAULTS[name]
    job = start(3, loop_script_path.RECOVERY, faults=faults, armed=False, size=240)
    job.bury(faults[0][0])
    job.plan_recovery()
    job.finish()
    recovered(tmp_path, 2)


@pytest.mark.exhaustive
@pytest.mark.processes
@pytest.mark.parametrize("behind", [0, 1])
def test_one_survivor_has_the_sum_and_another_has_not(start: Any, tmp_path: Path, behind: int) -> None:
    """Its last bucket never arrives; the others have taken that step, and wait for it in the next one."""
    none = [[-1, 0, 0, ""]]  # the script marks what it has done where there are faults
    job = start(3, loop_script_path.RECOVERY, HELD=f"[{behind}, 10, 1]", faults=none, armed=False, size=240)
    for rank in {0, 1, 2} - {behind}:
        job.wait_for_file(f"begun-11-{rank}")
    assert not (tmp_path / f"ended-10-{behind}").exists()
    job.recover(2)
    job.finish()
    recovered(tmp_path, 2)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "devices", "limit", "why"),
    [
        ("hang", 2, 20.0, "it did not end within 20 s"),
        ("crash", 1, 180.0, "signal 11"),
    ],
)
@pytest.mark.exhaustive
def test_a_backend_with_a_fault_is_found_out(
    processes: Callable[..., str | None], fault: str, devices: int, limit: float, why: str
) -> None:
    found = processes(limit, DEFERRED_DEVICES=str(devices), DEFERRED_FAULT=fault)
    assert found is not None
    assert why in found


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str | None]]:
    """Run the self-test for so many seconds at most; none of its processes may be left."""

    def run(limit: float, **variables: str) -> str | None:
        for name, value in {**variables, **PATH, "SELFTEST_OF": str(tmp_path)}.items():
            monkeypatch.setenv(name, value)
        return selftest.ask_processes("deferred", limit)

    yield run
    until("processes are left", lambda: not marked(tmp_path), 200)


@pytest.mark.exhaustive
@pytest.mark.processes
def test_the_self_test_ends_with_the_replica_that_started_it(tmp_path: Path) -> None:
    """A replica may be killed at any time."""
    script = (
        "import deferred_backend\n"
        "from adaptdl_elastic.torch._process_group import selftest\n"
        "selftest.ask_processes('deferred', 180.0)\n"
    )
    mark = {"DEFERRED_FAULT": "hang", "SELFTEST_OF": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], env={**os.environ, **PATH, **mark}) as asker:
        others = until("nobody is asked", lambda: marked(tmp_path, "--role"), 200)
        asker.kill()
    assert len(others) > 0
    until("processes are left", lambda: not marked(tmp_path), 200)


def marked(folder: Path, argument: str | None = None) -> list[psutil.Process]:
    """Return the other processes of a self-test in `folder` that have this argument."""
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if one.pid != os.getpid() and one.environ().get("SELFTEST_OF") == str(folder):
                found += [one] if argument is None or argument in one.cmdline() else []
    return found


@pytest.mark.processes
def test_an_abort_that_hangs_ends_the_process() -> None:
    """Nothing can be counted on then, not even an orderly exit: the agent restarts it."""
    script = (
        "import deferred_backend, torch.distributed as dist\n"
        "from adaptdl_elastic.torch._process_group import selftest\n"
        "from adaptdl_elastic.torch._process_group.backends import nccl\n"
        "nccl.ABORT_SECONDS = 0.1\n"
        "kind = deferred_backend.Deferred\n"
        "selftest._join(kind, 'deferred', dist.HashStore(), 0, 1, kind.devices()[0]).destroy()\n"
    )
    environment = {**os.environ, **PATH, "DEFERRED_FAULT": "hang"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, "restart from the last checkpoint" in done.stderr) == (1, True), done.stderr


class Never:
    def is_completed(self) -> bool:
        return False


def test_a_result_that_never_arrives_is_given_up_in_the_end() -> None:
    group = deferred_backend.Deferred("deferred")
    with pytest.raises(RuntimeError, match="took more than"):
        group.wait([Never()], timedelta(0))


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("gloo", backends.Gloo),
        ("cpu:gloo,cuda:gloo", backends.Gloo),
        ("nccl", backends.Nccl),
        ("cuda:nccl", backends.Nccl),
        ("cpu:gloo,cuda:nccl", backends.Nccl),
        ("mpi", backends.Group),
        ("cpu:mpi,cuda:nccl", backends.Group),
        (None, backends.Group),
    ],
)
def test_how_backends_are_spelled(backend: Any, kind: type[backends.Group]) -> None:
    assert backends.kind(backend) is kind


def test_why_a_backend_can_not_change_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(Identity(), None)
    session.backend = "mpi"
    assert "the backend is mpi" in str(capability.why_not(session))
    session.backend = "gloo"
    assert capability.why_not(session) is None
    session.backend = "nccl"
    assert capability.why_not(session) == "there is no agent"
    monkeypatch.setenv("ADAPTDL_RESCALE", "restart")
    assert capability.why_not(session) == "--rescale=restart"
    for name in backends.Nccl.variables:  # set, to be put back
        monkeypatch.setenv(name, "1")
    backends.Nccl.prepare()
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING=1" in str(backends.Nccl.why_not(session))


def test_a_failure_is_kept_for_an_hour_and_a_success_for_good(tmp_path: Path) -> None:
    asked, now, folder = list[tuple[str, float]](), 1000.0, tmp_path / "kept"

    def run(backend: str, limit: float) -> str | None:
        asked.append((backend, limit))
        return "it hangs"

    def verdict(run: selftest.Run) -> str | None:
        return selftest.verdict("deferred", folder, run, clock=lambda: now)

    for _ in range(2):
        assert verdict(run) == "it hangs"
        now += self_test.AGAIN - 1
    assert asked == [("deferred", selftest.LIMIT)]
    now += 1
    assert verdict(lambda *_: None) is None
    now += 1000 * self_test.AGAIN
    assert verdict(run) is None
    (path,) = folder.glob(self_test.FILES)
    assert folder.stat().st_mode & 0o777 == 0o700
    for torn in ("", "{", "[1]", '{"why": "no", "time": "soon"}'):
        path.write_text(torn)
        assert verdict(run) == "it hangs"
        assert json.loads(path.read_text())["why"] == "it hangs"


@pytest.mark.processes
def test_a_worker_that_is_forked_during_the_test_does_not_keep_its_lock(tmp_path: Path) -> None:
    workers = list[int]()

    def run(*_: object) -> str | None:
        workers.append(os.fork())
        if not workers[-1]:
            signal.pause()
        return "it hangs"

    try:
        for clock in (lambda: 0.0, lambda: self_test.AGAIN):
            assert selftest.verdict("deferred", tmp_path / "kept", run, clock) == "it hangs"
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            os.waitpid(worker, 0)
    assert len(workers) == 2


def test_a_test_with_two_devices_counts_for_one_but_not_the_other_way_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tested, other, known in (("2", "1", ""), ("1", "2", None)):
        folder = tmp_path / tested
        monkeypatch.setenv("DEFERRED_DEVICES", tested)
        assert selftest.verdict("deferred", folder, run=lambda *_: None) is None
        monkeypatch.setenv("DEFERRED_DEVICES", other)
        assert selftest.remembered("deferred", folder) == known


def test_where_no_verdict_can_be_kept_the_test_runs_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    link, file, open_to_all = (tmp_path / name for name in ("link", "file", "open"))
    link.symlink_to(tmp_path)
    file.write_text("")
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for folder in (link, file, file / "below", open_to_all):
        assert selftest.remembered("deferred", folder) is None
        assert selftest.verdict("deferred", folder, run=lambda *_: "no") == "no"
    monkeypatch.setattr(Path, "write_text", full)
    assert selftest.verdict("deferred", tmp_path / "full", run=lambda *_: "no") == "no"


@pytest.mark.processes
def test_a_process_beside_the_job_can_have_the_verdict_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two devices; jobs of tests/end_to_end/test_deferred.py run the self-test on one."""
    command = _own_python.module(selftest.__name__, "deferred", "--import", "deferred_backend", "--keep")
    variables = {"XDG_RUNTIME_DIR": str(tmp_path), "DEFERRED_DEVICES": "2", "SELFTEST_OF": str(tmp_path)}
    for name, value in {**variables, **PATH}.items():
        monkeypatch.setenv(name, value)
    assert subprocess.run(command).returncode == 0
    assert selftest.remembered("deferred") == ""
    until("processes are left", lambda: not marked(tmp_path), 200)
