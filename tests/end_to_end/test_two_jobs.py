"""Two jobs on one machine share its slots, and one takes over what the other leaves."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from elastic_run import PATIENCE, ElasticRun
from etcd_server import EtcdServer

SCRIPTS = Path(__file__).parent / "scripts"

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.etcd, pytest.mark.timeout(600)]


def test_a_job_waits_for_the_slots_of_another_and_takes_them_over(tmp_path: Path) -> None:
    def job(name: str, etcd: str) -> ElasticRun:
        folder = tmp_path / name
        folder.mkdir()
        arguments = [f"--rdzv-endpoint={etcd}", f"--rdzv-id={name}", "--nproc-per-node=2"]
        return ElasticRun([*arguments, str(SCRIPTS / "share_slots.py"), str(folder)], folder)

    with EtcdServer() as etcd, job("first", etcd.endpoint) as first:
        first.wait_for_event("generation", replicas=2)
        with job("second", etcd.endpoint) as second:
            where = ["--etcd", etcd.endpoint, "--json"]
            waiting = _until(second, [*where], "pending")
            assert "other jobs have 2" in waiting["reason"]
            (tmp_path / "first" / "end").touch()
            assert first.wait() == 0
            second.wait_for_event("generation", replicas=2)
            (tmp_path / "second" / "end").touch()
            assert second.wait() == 0


def _until(run: ElasticRun, where: list[str], state: str) -> dict[str, str]:
    """The status of `second` once it has a reason to be in this state."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        answer = run.adaptdl("status", "second", *where)
        if answer.returncode == 0:
            found: dict[str, str] = json.loads(answer.stdout)
            if found["state"] == state and "other jobs" in found["reason"]:
                return found
    raise AssertionError(answer.stdout + answer.stderr)
