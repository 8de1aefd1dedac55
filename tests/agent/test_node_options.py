"""What can be said of a node, and what is found out about it, in real runs."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from cluster import JOB, Cluster
from elastic_run import marked
from etcd_server import free_ports

from adaptdl_elastic.rendezvous.schema.records import CheckpointRecord, MasterRecord, decode

pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]


def listening(process: psutil.Process) -> list[int]:
    return [int(c.laddr.port) for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def test_agents_listen_in_the_given_range_and_a_command_returns_behind_its_checkpoint(
    cluster: Cluster,
) -> None:
    low = next(port for port in free_ports(50) if port < 65000)
    options = (f"--port-range={low}:{low + 40}", "--checkpoint-interval=0")
    first = cluster.train("first", *options)
    first.wait_for_event("generation")
    assert first.of("checkpoint") == []
    cluster.ask("checkpoint", JOB, "--wait")
    found = cluster.store.get(cluster.keys.job(JOB, "checkpoint"))
    assert found is not None
    record = decode(CheckpointRecord, found.value)
    assert (cluster.saved / record.id / "manifest.json").is_file()
    assert first.wait_for_event("checkpoint")["kind"] == "request"
    second = cluster.train("second", *options)
    cluster.scale(2, first)
    second.wait_for_event("started")
    replicas = {rank: pid for run in (first, second) for rank, pid in run.of("started")[-1]["pids"].items()}
    everybody = [process for run in (first, second) for process in marked(run.mark)]
    agents = [process for process in everybody if process.pid not in replicas.values()]
    ours = [port for process in agents for port in listening(process)]
    assert ours, "rank 0's agent keeps a store"
    assert all(low <= port <= low + 40 for port in ours), ours
    for item in cluster.store.range(cluster.keys.job(JOB, "generations")).items:
        if item.key.endswith("/master"):  # rank 0 listens there until all have come; gloo's are the kernel's
            assert low <= decode(MasterRecord, item.value).collective_port <= low + 40
    cluster.finish(first, second)
    cluster.check(replicas=2)


def test_a_directory_that_all_can_write_or_that_is_not_shared_is_found_out(
    cluster: Cluster, tmp_path: Path
) -> None:
    of_all = tmp_path / "of all"
    of_all.mkdir()
    of_all.chmod(0o777)
    refused = cluster.train("refused", f"--checkpoint-path={of_all}")
    assert refused.wait() == 1
    assert f"other users can write to {of_all}, where" in refused.text()
    assert refused.text().count("\n") == 1
    restart = "--rescale=restart"
    # otherwise the second agent does not find the secret of the job, and is refused
    env = {"ADAPTDL_SECRET": "given"}
    first = cluster.train("first", restart, "--max-restarts=0", env=env)
    first.wait_for_event("checkpoint")
    elsewhere = f"--checkpoint-path={tmp_path / 'elsewhere'}"
    second = cluster.train("second", restart, elsewhere, env=env)
    cluster.ask("scale", JOB, "--replicas", "2")
    first.wait_for(lambda event: "must be shared" in str(event))
    cluster.finish(first, second)
    for run in (first, second):
        assert "must be shared by all nodes" in run.text(), run.text()
    assert "epoch 0 had" not in second.text(), "nothing was begun afresh"
    cluster.check(replicas=1)
