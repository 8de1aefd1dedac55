"""Several agents on one machine, one etcd: they come late, idle, leave, and die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from elastic_run import ElasticRun

from adaptdl_elastic.rendezvous.server import EtcdServer

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN, PLAIN = str(SCRIPTS / "train.py"), str(SCRIPTS / "plain.py")
pytestmark = [pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(300)]
Start = Callable[..., ElasticRun]


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@pytest.fixture
def start(etcd: EtcdServer, tmp_path: Path) -> Iterator[Start]:
    """Start an agent of the job as a node of that name."""
    with ExitStack() as stack:

        def one(node: str, *arguments: str, nodes: str = "1:3") -> ElasticRun:
            command = [
                *(f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", f"--node-name={node}"),
                *(f"--nnodes={nodes}", "--no-autoscale", f"--checkpoint-path={tmp_path / 'saved'}"),
                *("--checkpoint-interval=0.5", *arguments),
            ]
            return stack.enter_context(ElasticRun(command, tmp_path))

        yield one


def ask(run: ElasticRun, etcd: EtcdServer, *arguments: str) -> None:
    done = run.adaptdl(*arguments, "--etcd", etcd.endpoint)
    assert done.returncode == 0, done.stderr


def samples(*runs: ElasticRun) -> dict[int, int]:
    """Samples of each finished epoch, whichever node had rank 0."""
    return {event["epoch"]: event["samples"] for run in runs for event in run.of("epoch")}


def test_a_node_comes_late_and_is_drained_and_the_other_goes_on(etcd: EtcdServer, start: Start) -> None:
    first = start("first", TRAIN, "16", "0.2")
    first.wait_for_event("generation", generation=0, timeout=120)
    second = start("second", TRAIN, "16", "0.2")
    ask(first, etcd, "scale", "job", "--replicas", "2")
    grown = first.wait_for_event("generation", replicas=2, timeout=120)
    assert grown["transition"] == "inplace"
    assert 0 < grown["pause_s"] < 10
    assert grown["placements"] == {"first": 1, "second": 1}
    seen = len(first.events)
    ask(first, etcd, "drain", "second")
    shrunk = first.wait_for_event("generation", replicas=1, after=seen, timeout=120)
    assert shrunk["cause"] == "drain"
    assert second.wait() == 0
    assert first.wait(200) == 0
    assert samples(first, second) == dict.fromkeys(range(16), 200)
    assert first.of("failure") == []


def test_an_agent_is_killed_and_the_other_goes_on(etcd: EtcdServer, start: Start) -> None:
    first = start("first", TRAIN, "16", "0.2", nodes="1:2")
    first.wait_for_event("generation", generation=0, timeout=120)
    second = start("second", TRAIN, "16", "0.2", nodes="1:2")
    ask(first, etcd, "scale", "job", "--replicas", "2")
    first.wait_for_event("generation", replicas=2, timeout=120)
    second.process.kill()
    assert first.wait(200) == 0
    assert sorted(samples(first, second)) == list(range(16))
    assert samples(first)[15] == 200
    last = first.of("generation")[-1]
    assert (last["replicas"], last["cause"]) == (1, "node_lost")


def test_the_second_run_of_a_finished_job_is_another_one(etcd: EtcdServer, start: Start) -> None:
    assert start("first", PLAIN, nodes="1").wait() == 0
    again = start("first", PLAIN, nodes="1")
    assert again.wait() == 0
    assert "starting it anew" in again.text()
    assert "rank 0 of 1" in again.text()
