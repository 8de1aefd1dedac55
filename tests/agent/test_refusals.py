"""What a person has got wrong costs one line that says what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import JOB, PLAIN, Cluster
from elastic_run import run_agent

from adaptdl_elastic.rendezvous.schema.records import NodeRecord, encode

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--log-dir=/dev/null", ["/dev/null: File exists", "with --log-dir"]),
        ("--log-dir=/proc/x", ["/proc/x", "with --log-dir"]),
        ("--local-addr=192.0.2.1", ["192.0.2.1: Cannot assign", "--local-addr"]),
        ("--local-addr=a..b", ["a..b", "--local-addr"]),
        ("--checkpoint-path=/proc/nowhere", ["/proc/nowhere", "--checkpoint-path"]),
        ("--event-log=/proc/nowhere/log", ["--event-log"]),
        ("ADAPTDL_SHARE_PATH=/dev/null/x", ["ADAPTDL_SHARE_PATH", "/dev/null/x"]),
        ("ADAPTDL_ETCD=127.0.0.1:1", ["127.0.0.1:1", "--etcd"]),
    ],
)
def test_a_directory_or_address_that_cannot_be_used_is_named_in_one_line(
    given: str, words: list[str], tmp_path: Path
) -> None:
    name, _, value = given.partition("=")
    where = "--nnodes=1:2" if name == "ADAPTDL_ETCD" else "--standalone"
    options, variables = ([given], {}) if given.startswith("--") else ([], {name: value})
    done = run_agent(tmp_path, where, "--etcd-timeout=0.5", *options, PLAIN, **variables)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("adaptdl-run: error: ")
    for word in words:
        assert word in line


@pytest.mark.exhaustive
def test_a_job_whose_coordinator_cannot_start_fails_with_its_last_line(
    cluster: Cluster, tmp_path: Path
) -> None:
    broken = tmp_path / "broken" / "click.py"
    broken.parent.mkdir()
    broken.write_text("raise ImportError('click is damaged')\n")
    run = cluster.train("first", env={"PYTHONPATH": str(broken.parent)})
    assert run.wait() == 1, run.text()
    line = "the coordinator ended with code 1 (ImportError: click is damaged; all of it in "
    assert line in run.text().splitlines()[-1]
    assert line in cluster.ask("status", JOB)


def test_an_agent_is_refused_beside_one_that_only_its_own_machine_reaches(cluster: Cluster) -> None:
    other = NodeRecord("first", JOB, "run", "agent", "127.0.0.1", 1, network="another machine")
    cluster.store.put(cluster.keys.node("first", JOB), encode(other))
    late = cluster.train("second")
    assert late.wait() == 1
    assert "node first of job 'job' has the address 127.0.0.1, at which node second cannot" in late.text()


@pytest.mark.processes
def test_variables_that_only_an_agent_sets_are_dropped_and_named_once(tmp_path: Path) -> None:
    left = {"ADAPTDL_JOIN": "1", "ADAPTDL_REPLICA_RANK": "3", "ADAPTDL_MEMORY_LIMIT": "x"}
    done = run_agent(tmp_path, "--standalone", "--nproc-per-node=1", PLAIN, **left)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "ADAPTDL_" in line)
    assert line.startswith(f"adaptdl-run: {', '.join(sorted(left))}: of no effect here")
