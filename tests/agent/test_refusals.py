"""What a person has got wrong costs one line that says what to write instead."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path

import psutil
import pytest
from cluster import JOB, Cluster
from elastic_run import run_agent

import adaptdl_elastic

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN, PLAIN = str(SCRIPTS / "train.py"), str(SCRIPTS / "plain.py")
LONG = ("60", "0.1")  # epochs, seconds per step
pytestmark = [pytest.mark.etcd, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--standalone", "--log-dir=/dev/null"], ["/dev/null: File exists", "with --log-dir"]),
        (["--standalone", "--log-dir=/proc/x"], ["/proc/x", "with --log-dir"]),
        (["--standalone", "--local-addr=192.0.2.1"], ["192.0.2.1: Cannot assign", "--local-addr"]),
        (["--standalone", "--local-addr=a..b"], ["a..b", "--local-addr"]),
        (["--rescale-timeout=inf"], ["--rescale-timeout=inf", "finite, positive number of seconds"]),
        (["--checkpoint-interval=-1"], ["--checkpoint-interval=-1", "0 switches it off"]),
    ],
)
def test_in_one_line(arguments: list[str], words: list[str], tmp_path: Path) -> None:
    done = run_agent(tmp_path, *arguments, PLAIN)
    assert done.returncode in (1, 2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("adaptdl-run: error: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize(
    ("variable", "value"), [("XDG_RUNTIME_DIR", "/dev/null"), ("ADAPTDL_SHARE_PATH", "/dev/null/x")]
)
def test_directories_that_are_none(variable: str, value: str, tmp_path: Path) -> None:
    done = run_agent(tmp_path, "--standalone", PLAIN, **{variable: value})
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert variable in line
    assert value in line


@pytest.mark.exhaustive
@pytest.mark.slow
def test_another_command_or_version_does_not_join(cluster: Cluster, tmp_path: Path) -> None:
    first = cluster.start("first", TRAIN, *LONG)
    first.wait_for_event("generation")
    other = cluster.start("second", TRAIN, "60", "0.2")
    assert other.wait() == 1
    (line,) = other.text().splitlines()
    runs, was = (shlex.join([str(TRAIN), "60", seconds]) for seconds in ("0.1", "0.2"))
    assert f"runs `{runs}`, and this node was to run `{was}`" in line
    patched = tmp_path / "later" / "sitecustomize.py"
    patched.parent.mkdir()
    patched.write_text("import adaptdl_elastic; adaptdl_elastic.__version__ = '99.0'\n")
    later = cluster.start("third", TRAIN, *LONG, env={"PYTHONPATH": str(patched.parent)})
    assert later.wait() == 1
    (line,) = later.text().splitlines()
    assert f"runs adaptdl-elastic {adaptdl_elastic.__version__} on node first, this node 99.0" in line
    cluster.finish(first)
    assert [event["replicas"] for event in first.of("generation")] == [1]
    cluster.check(epochs=60, replicas=1)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_who_comes_back_to_find_its_name_taken_leaves(cluster: Cluster) -> None:
    stale = cluster.start("first", TRAIN, *LONG)
    stale.wait_for_event("generation")
    other = cluster.start("second", TRAIN, *LONG)
    grown = cluster.scale(2, stale)["generation"]
    family = [stale.process, *psutil.Process(stale.process.pid).children(recursive=True)]
    key = cluster.recorder.keys.node("first", JOB)
    with cluster.store.watch(key, cluster.store.range(key).revision + 1) as changes:
        for process in family:
            process.send_signal(signal.SIGSTOP)
        assert any(change.kind == "delete" for change in changes)
    fresh = cluster.start("first", TRAIN, *LONG)
    both = other.wait_for(
        lambda e: e["event"] == "generation" and e["generation"] > grown and e["replicas"] == 2
    )
    assert both["placements"] == {"second": 1, "first": 1}
    for process in family:
        process.send_signal(signal.SIGCONT)
    assert stale.wait() == 1
    assert f"'first' was taken by the agent at 127.0.0.1, process {fresh.process.pid}" in stale.text()
    cluster.finish(other, fresh)
    cluster.check(epochs=60, replicas=2)


def test_a_job_whose_coordinator_cannot_start_fails_with_its_last_line(
    cluster: Cluster, tmp_path: Path
) -> None:
    broken = tmp_path / "broken" / "click.py"
    broken.parent.mkdir()
    broken.write_text("raise ImportError('click is damaged')\n")
    run = cluster.start("first", TRAIN, *LONG, env={"PYTHONPATH": str(broken.parent)})
    assert run.wait() == 1, run.text()
    line = "the coordinator ended with code 1 (ImportError: click is damaged; all of it in "
    assert line in run.text().splitlines()[-1]
    assert line in cluster.ask("status", JOB)
