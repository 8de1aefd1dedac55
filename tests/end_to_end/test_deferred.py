"""What NCCL's code does in a whole job: self-test, change in place, death, on a backend that is like NCCL."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from elastic_run import ROOT, ElasticRun

SUPPORT = ROOT / "tests" / "support"
SCRIPT = Path(__file__).parent / "scripts" / "survive.py"

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.etcd, pytest.mark.timeout(600)]


def job(tmp_path: Path, **variables: str) -> ElasticRun:
    arguments = ["--standalone", "--nproc-per-node=1:2", "--rdzv-id=like-nccl", "--no-autoscale"]
    arguments += ["--max-restarts=0", str(SUPPORT / "deferred_script.py"), "30", "0.12"]
    # tests/library/test_deferred.py runs the self-test on two devices, which takes three processes more
    return ElasticRun(arguments, tmp_path, {"SCRIPT": str(SCRIPT), "DEFERRED_DEVICES": "1", **variables})


def test_a_job_whose_self_test_passes_changes_in_place_and_survives(tmp_path: Path) -> None:
    with job(tmp_path) as run:
        # the coordinator hears of the self-test by the job's next report
        run.wait_until_adaptdl_says("assumed: in place", "explain", "like-nccl")
        assert run.adaptdl("scale", "like-nccl", "--replicas", "2").returncode == 0
        grown = run.wait_for_event("generation", replicas=2)
        assert grown["transition"] == "inplace"
        seen = len(run.events)
        run.wait_for_event("metrics", after=seen)
        started = run.wait_for_event("started", generation=grown["generation"])
        os.kill(started["pids"]["1"], signal.SIGKILL)
        run.wait_for_event("generation", after=seen, replicas=2)
        *_, again, whole = run.of("generation")
        assert (again["cause"], again["transition"]) == ("replica_lost", "recover")
        assert whole["transition"] == "inplace"
        (tmp_path / "hurry").touch()
        assert run.wait() == 0, run.text()
        assert run.of("failure") == []
        assert len(set(re.findall(r"weights (\S+) of rank", run.text()))) == 1


def test_a_job_whose_self_test_fails_restarts_and_says_why(tmp_path: Path) -> None:
    with job(tmp_path, DEFERRED_FAULT="once") as run:
        run.wait_for_event("metrics")
        assert run.adaptdl("scale", "like-nccl", "--replicas", "2").returncode == 0
        grown = run.wait_for_event("generation", replicas=2)
        assert grown["transition"] == "restart"
        (tmp_path / "hurry").touch()
        assert run.wait() == 0, run.text()
        assert "self-test failed" in run.text()
        assert "a second group cannot be made" in run.text()
