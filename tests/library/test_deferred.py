"""Changes and deaths on a backend that tells as little as NCCL does, by the code that is for NCCL."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import deferred_backend
import fake_agent
import loop_script_path
import pytest
import torch
from fake_agent import FakeAgent
from polling import until

from adaptdl_elastic._session import Identity, Session
from adaptdl_elastic.torch._process_group import backends, capability, selftest

SIZE, BATCH = 2004, 12  # 1 to 3 replicas divide it
SCRIPT = Path(deferred_backend.__file__).with_name("deferred_script.py")
ROOT = SCRIPT.parents[2]
PATH = {"PYTHONPATH": f"{SCRIPT.parent}:{ROOT}"}


@pytest.fixture
def share(tmp_path: Path) -> Path:
    """Where a self-test has left that it passed."""
    path = tmp_path / "share"
    assert selftest.verdict("deferred", path, run=lambda *_: None) is None
    return path


@pytest.fixture
def start(tmp_path: Path, share: Path) -> Iterator[Callable[..., FakeAgent]]:
    """A job of `loop_script` on the deferred backend, whose replicas would survive a death."""
    jobs: list[FakeAgent] = []

    def begin(
        replicas: int,
        script: Path = loop_script_path.PATH,
        held: Any = None,
        armed: bool = True,
        counted: bool = False,
        **given: Any,
    ) -> FakeAgent:
        loop = fake_agent.settings(**{"size": SIZE, "batch": BATCH, "pace": 0.01, "late": 0.5, **given})
        variables = {"LOOP": loop, "OUT": str(tmp_path), "SCRIPT": str(script), **PATH}
        if counted:
            variables["COUNTED"] = "1"
        if held is not None:
            variables["HELD"] = json.dumps(held)
        job = FakeAgent(SCRIPT, tmp_path, ADAPTDL_SHARE_PATH=str(share), **variables)
        jobs.append(job)
        job.start(replicas)
        if armed:
            job.wait_for("resilient", replicas)
        return job

    yield begin
    for job in jobs:
        job.__exit__()


def applied(folder: Path, replicas: int, epochs: int = 1, size: int = SIZE) -> None:
    """As in test_recovery: each sample once an epoch, by what the weights tell, equal on all replicas."""
    weights = [torch.load(folder / f"weights-{rank}") for rank in range(replicas)]
    for other in weights[1:]:
        assert torch.equal(other, weights[0])
    torch.testing.assert_close(-weights[0] * BATCH / epochs, torch.ones(size, dtype=torch.float64))


@pytest.mark.processes
def test_up_and_down(start: Any, tmp_path: Path) -> None:
    job = start(2)
    job.rescale(3)
    job.wait_for("step")
    job.rescale(1)
    job.rescale(2)
    job.finish()
    applied(tmp_path, 2)


@pytest.mark.processes
@pytest.mark.exhaustive
def test_from_one_that_is_alone(start: Any, tmp_path: Path) -> None:
    job = start(1)
    job.rescale(2)
    job.finish()
    applied(tmp_path, 2)


@pytest.fixture
def failed(tmp_path: Path) -> str:
    """Where a self-test has left that it failed."""
    path = tmp_path / "failed"
    assert selftest.verdict("deferred", path, run=lambda *_: "no luck") == "no luck"
    return str(path)


@pytest.mark.processes
@pytest.mark.parametrize("unlucky", [0, 1])
@pytest.mark.exhaustive
def test_one_node_whose_self_test_failed_is_enough(
    tmp_path: Path, share: Path, failed: str, unlucky: int
) -> None:
    """Rank 0 says so, which is what the coordinator goes by; nobody is armed, and training goes on."""
    loop = fake_agent.settings(size=SIZE, batch=BATCH, pace=0.01, late=0.5, autoscale=BATCH)
    variables = {"LOOP": loop, "OUT": str(tmp_path), "SCRIPT": str(loop_script_path.PATH), **PATH}
    with FakeAgent(SCRIPT, tmp_path, **variables) as job:
        host, port = job.open_store()
        for rank in range(2):
            given = failed if rank == unlucky else str(share)
            job.running.append(job.launch(rank, 2, 0, host, port, ADAPTDL_SHARE_PATH=given))
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
    job.plan(3, ADAPTDL_SHARE_PATH=failed)
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


@pytest.mark.processes
def test_deaths_leave_no_tensors_behind(start: Any, tmp_path: Path) -> None:
    """A second and a third death, in the step in which DDP arranges its buckets, keep none of them."""
    job = start(2, counted=True)
    for _ in range(3):
        job.recover(1)
        job.rescale(2)
        job.wait_for("step")
    held = [int(line) for line in (tmp_path / "held-1").read_text().splitlines()]
    assert len(held) == 3
    assert max(held) - held[0] < 8 * SIZE, held


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.exhaustive
def test_random_schedules(start: Any, tmp_path: Path, seed: int) -> None:
    """Deaths and changes of size at random moments."""
    choose = random.Random(seed)
    job = start(choose.randint(2, 3), epochs=3, evaluate=1)
    job.wander(choose, 3)
    job.finish()
    applied(tmp_path, len(job.running), epochs=3)


FAULTS: dict[str, list[list[Any]]] = {
    "rank 0 dies": [[0, 20, 0, "die"]],
    "rank 1 dies in a late bucket": [[1, 20, 1, "die"]],
    "the second step, after the buckets were made anew": [[1, 1, 0, "die"]],
    "the last step of an epoch": [[2, 39, 1, "die"]],
}


def undisturbed(folder: Path) -> Any:
    """What one replica on gloo has in the end."""
    folder.mkdir()
    with FakeAgent(loop_script_path.RECOVERY, folder, LOOP="{}", OUT=str(folder)) as job:
        job.start(1)
        job.finish()
    return torch.load(folder / "result-0")


def compare(folder: Path, replicas: int, expected: Any) -> None:
    results = [torch.load(folder / f"result-{rank}") for rank in range(replicas)]
    for result in results:
        assert result["steps"] == expected["steps"] == 80
        torch.testing.assert_close(result["parameters"], expected["parameters"])
        torch.testing.assert_close(result["optimizer"]["state"], expected["optimizer"]["state"])
        assert (result["scheduler"], result["scaler"]) == (expected["scheduler"], expected["scaler"])
        torch.testing.assert_close(result["parameters"], results[0]["parameters"], rtol=0, atol=0)
        assert str(result["statistics"]) == str(results[0]["statistics"])


@pytest.mark.processes
@pytest.mark.parametrize("name", FAULTS)
def test_a_death_in_mid_step_leaves_no_trace(start: Any, tmp_path: Path, name: str) -> None:
    """Nobody is told by torch: what had not arrived is garbage by then."""
    faults = FAULTS[name]
    job = start(3, loop_script_path.RECOVERY, faults=faults, armed=False, size=480)
    job.bury(faults[0][0])
    job.plan_recovery()
    job.finish()
    compare(tmp_path, 2, undisturbed(tmp_path / "undisturbed"))


@pytest.mark.processes
@pytest.mark.parametrize("behind", [0, 1])
def test_one_survivor_has_the_sum_and_another_has_not(start: Any, tmp_path: Path, behind: int) -> None:
    """Its last bucket never arrives; the others have taken that step, and wait for it in the next one."""
    none = [[-1, 0, 0, ""]]  # the script marks what it has done where there are faults
    job = start(3, loop_script_path.RECOVERY, held=[behind, 20, 1], faults=none, armed=False, size=480)
    for rank in {0, 1, 2} - {behind}:
        wait_for(tmp_path / f"begun-21-{rank}", job)
    assert not (tmp_path / f"ended-20-{behind}").exists()
    job.recover(2)
    job.finish()
    compare(tmp_path, 2, undisturbed(tmp_path / "undisturbed"))


def wait_for(path: Path, job: FakeAgent) -> None:
    deadline = time.monotonic() + 200
    while not path.exists():
        assert time.monotonic() < deadline, job.outputs()
        time.sleep(0.01)


@pytest.mark.processes
@pytest.mark.parametrize("devices", [1, 2])
def test_the_self_test_passes(tmp_path: Path, processes: Callable[..., str | None], devices: int) -> None:
    assert processes(180.0, DEFERRED_DEVICES=str(devices)) is None


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fault", "devices", "limit", "why"),
    [
        ("hang", 2, 20.0, "it did not end within 20 s"),
        ("crash", 1, 180.0, "signal 11"),
        ("once", 2, 180.0, "a second group cannot be made"),
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


@pytest.mark.processes
def test_the_self_test_ends_with_who_has_asked(tmp_path: Path) -> None:
    """A replica may be killed at any time."""
    script = (
        "import deferred_backend\n"
        "from adaptdl_elastic.torch._process_group import selftest\n"
        "selftest.ask_processes('deferred', 180.0)\n"
    )
    mark = {"DEFERRED_FAULT": "hang", "SELFTEST_OF": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], env={**os.environ, **PATH, **mark}) as asker:
        others = until(
            "nobody is asked", lambda: [pid for pid in marked(tmp_path) if "--role" in command(pid)], 200
        )
        asker.kill()
    assert len(others) > 0
    until("processes are left", lambda: not marked(tmp_path), 200)


def marked(folder: Path) -> list[int]:
    return [pid for pid in pids() if pid != os.getpid() and f"SELFTEST_OF={folder}" in environment(pid)]


def command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return []


def pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def environment(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return []


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


def test_what_never_arrives_is_given_up_in_the_end() -> None:
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


def test_a_result_is_asked_for_once_per_node(tmp_path: Path) -> None:
    asked = []

    def run(backend: str, limit: float) -> str | None:
        asked.append((backend, limit))
        return "it hangs"

    for _ in range(2):
        assert selftest.verdict("deferred", tmp_path, run=run, limit=3.0) == "it hangs"
    assert asked == [("deferred", 3.0)]
    (path,) = tmp_path.glob("selftest-*.json")
    old = json.loads(path.read_text())
    path.write_text(json.dumps({**old, "time": old["time"] - selftest.AGAIN - 1}))
    assert selftest.verdict("deferred", tmp_path, run=lambda *_: None) is None  # a failure gets old
    assert selftest.verdict("deferred", tmp_path, run=run) is None
    path.write_text("{")
    assert selftest.verdict("deferred", tmp_path, run=run) == "it hangs"
