"""SIGTERM to every process of a job at once, as Slurm and systemd send it: the job saves and ends."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from cluster import Cluster
from elastic_run import ElasticRun, marked
from polling import until

SCRIPT = str(Path(__file__).parent / "scripts" / "workers.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def signal_all(run: ElasticRun) -> None:
    for process in marked(run.mark):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize("kind", ["fork", "pool", "spawn", "persistent"])
def test_a_job_whose_processes_all_get_sigterm_saves_and_ends(kind: str, tmp_path: Path) -> None:
    command = ["--standalone", "--no-autoscale", "--checkpoint-path=saved", SCRIPT, kind]
    # what a warm agent has of `multiprocessing` cannot be spawned from
    with ElasticRun(command, tmp_path, fresh=kind == "spawn") as run:
        until("no step was made", (tmp_path / "stepped").exists)
        signal_all(run)
        assert run.wait() == 128 + signal.SIGTERM, run.text()
        assert "not saved" not in run.text()
        assert "is killed by signal" not in run.text()
    assert len(list((tmp_path / "saved").glob("0*"))) == 1


@pytest.mark.exhaustive
@pytest.mark.etcd
def test_the_other_node_trains_on_without_a_restart(cluster: Cluster) -> None:
    leaves, stays = cluster.together("a", "b")
    seen = len(stays.events)
    signal_all(leaves)
    assert leaves.wait() == 0, leaves.text()
    alone = stays.wait_for_event("generation", after=seen, replicas=1)
    assert alone["transition"] == "inplace"
    cluster.finish(stays)
    assert stays.of("failure") == []
