"""A stranger beside a running job that changes size and loses a replica: no code of it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from attacker import Attacker
from elastic_run import PATIENCE, ROOT, ElasticRun
from polling import until

TRAIN = ROOT / "tests" / "agent" / "scripts" / "train.py"
LIMIT = 60.0  # seconds for what may not happen under an attack

PREY = f"""
import os, pathlib, runpy
pathlib.Path("secret").write_text(os.environ["ADAPTDL_SECRET"])
runpy.run_path({str(TRAIN)!r}, run_name="__main__")
"""

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def options() -> list[str]:
    return ["--nproc-per-node=1:3"]


@pytest.fixture
def run(tmp_path: Path, options: list[str]) -> Iterator[ElasticRun]:
    (tmp_path / "prey.py").write_text(PREY)
    arguments = ["--standalone", *options, "--rdzv-id=prey", "--no-autoscale"]
    arguments += [str(tmp_path / "prey.py"), "60", "0.05"]
    with ElasticRun(arguments, tmp_path) as run:
        run.wait_for_event("epoch")  # it has written its secret, and gloo listens
        yield run


def replicas(run: ElasticRun) -> list[psutil.Process]:
    """Those of the newest generation that live, by rank."""
    pids = run.of("started")[-1]["pids"]
    return [psutil.Process(pid) for _, pid in sorted(pids.items()) if psutil.pid_exists(pid)]


@pytest.fixture
def attacker(run: ElasticRun, tmp_path: Path) -> Iterator[Attacker]:
    agent = psutil.Process(run.process.pid)

    def stores() -> list[int]:
        listening = [one for one in agent.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        assert all(one.laddr.ip == "127.0.0.1" for one in listening)
        return [one.laddr.port for one in listening]

    with contextlib.closing(Attacker(tmp_path, stores, lambda: [agent, *replicas(run)])) as made:
        yield made


@pytest.mark.essential
def test_an_attacker_that_reads_all_keys_learns_no_secret(run: ElasticRun, attacker: Attacker) -> None:
    secret = (run.directory / "secret").read_bytes()
    attacker.do(attacker.read_all, attacker.impersonate)
    assert run.adaptdl("scale", "prey", "--replicas", "3").returncode == 0
    assert run.wait_for_event("generation", replicas=3)["transition"] == "inplace"
    replicas(run)[1].kill()
    assert run.wait_for_event("generation", replicas=2)["transition"] == "recover"
    (run.directory / "hurry").touch()
    assert run.wait() == 0
    assert not attacker.owned.exists()
    assert any("go/" in key for key in attacker.read)
    for value in attacker.read.values():
        assert secret not in value
        assert bytes.fromhex(secret.decode()) not in value


@pytest.mark.parametrize(
    "options", [["--nproc-per-node=2:3", "--rescale-timeout=15"]], ids=["two, soon given up"]
)
def test_an_attacker_that_writes_all_keys_and_connects_to_all_ports_runs_no_code(
    run: ElasticRun, attacker: Attacker
) -> None:
    """The job goes on, or it stops and says why; both are fine."""
    listening = {one.laddr.port for one in replicas(run)[0].net_connections("tcp") if one.status == "LISTEN"}
    attacker.do(attacker.read_all, attacker.write_all, attacker.send_replicas_here, attacker.impersonate)
    attacker.do(attacker.connect_to_all)
    # a change of size may close ports
    until(
        "it has not reached them all",
        lambda: listening <= attacker.connected or run.process.poll() is not None,
        PATIENCE,
    )
    assert run.process.poll() is None, run.text()
    run.adaptdl("scale", "prey", "--replicas", "3")
    with contextlib.suppress(AssertionError):
        run.wait_for_event("generation", LIMIT / 2, replicas=3)
    with contextlib.suppress(psutil.NoSuchProcess):
        for victim in replicas(run)[-1:]:
            victim.kill()
    with contextlib.suppress(AssertionError):
        run.wait_for_event("exit", LIMIT / 2)
    attacker.close()
    (run.directory / "hurry").touch()
    code = run.wait()
    assert not attacker.owned.exists()
    assert attacker.read
    assert listening <= attacker.connected  # gloo's, too
    (ended,) = run.of("exit")
    assert ended["exit_code"] == code
    assert ended["reason"], run.text()
