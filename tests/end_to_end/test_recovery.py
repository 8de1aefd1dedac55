"""Deaths that the others survive, on real processes and a real etcd, through agent and coordinator."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest
from elastic_run import ElasticRun

SCRIPT = str(Path(__file__).parent / "scripts" / "survive.py")

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.etcd, pytest.mark.timeout(600)]


def finish(run: ElasticRun) -> dict[int, int]:
    """Let the job come to its end; {rank: pid} of who came there, with equal parameters."""
    run.hurry()
    assert run.wait() == 0, run.text()
    said = re.findall(r"weights (\S+) of rank (\d+) in (\d+)", run.text())
    assert len({weights for weights, _, _ in said}) == 1
    return {int(rank): int(pid) for _, rank, pid in said}


def start(run: ElasticRun, replicas: int) -> dict[int, int]:
    """{rank: pid} once so many train."""
    run.wait_for_event("metrics")
    assert run.adaptdl("scale", "survive", "--replicas", str(replicas)).returncode == 0
    grown = run.wait_for_event("generation", replicas=replicas)
    seen = len(run.events)
    run.wait_for_event("metrics", after=seen)
    return run.pids(grown["generation"])


def job(replicas: int, *more: str) -> list[str]:
    arguments = ["--standalone", f"--nproc-per-node=1:{replicas}", "--rdzv-id=survive", "--no-autoscale"]
    return [*arguments, *more, SCRIPT, "30", "0.12"]


@pytest.mark.essential
@pytest.mark.parametrize(
    ("replicas", "killed"), [(2, [1]), (2, [0]), (4, [0, 2])], ids=["the last", "rank 0", "two of four"]
)
def test_the_replicas_that_are_killed_are_not_missed(
    tmp_path: Path, replicas: int, killed: list[int]
) -> None:
    with ElasticRun(job(replicas, "--max-restarts=0"), tmp_path) as run:
        before = start(run, replicas)
        seen = len(run.events)
        for rank in killed:
            os.kill(before[rank], signal.SIGKILL)
        whole = run.wait_for_event("generation", after=seen, replicas=replicas)  # it was asked for so many
        *_, again, _ = run.of("generation")
        assert (again["cause"], again["transition"]) == ("replica_lost", "recover")
        assert again["pause_s"] is not None
        survivors = [pid for rank, pid in before.items() if rank not in killed]
        assert list(run.pids(again["generation"]).values()) == survivors
        assert whole["transition"] == "inplace"
        assert list(run.pids(whole["generation"]).values())[: len(survivors)] == survivors
        status = json.loads(run.adaptdl("status", "survive", "--json").stdout)
        assert status["restarts_used"] == 0
        assert finish(run) == run.pids(whole["generation"])
        assert run.of("failure") == []
        assert len(run.of("replica_lost")) == len(killed)
        assert f"replica {killed[0]} is lost (SIGKILL" in run.text()


def test_a_replica_that_breaks_its_channel_is_killed_and_the_others_go_on(tmp_path: Path) -> None:
    with ElasticRun(job(2, "--max-restarts=0"), tmp_path) as run:
        before = start(run, 2)
        seen = len(run.events)
        (tmp_path / "new").write_text(str(before[1]))
        (tmp_path / "new").rename(tmp_path / "broken")
        whole = run.wait_for_event("generation", after=seen, replicas=2)
        assert (whole["transition"], run.pids(whole["generation"])[0]) == ("inplace", before[0])
        [lost] = run.of("replica_lost")
        assert (lost["rank"], lost["message"]) == (1, "a message of more than 16 MiB to the agent")
        finish(run)
        assert run.of("failure") == []
        assert run.text().count("b'junk'") <= 1
        assert "to the agent; it is killed" in run.text()


def test_a_death_during_the_recovery(tmp_path: Path) -> None:
    with ElasticRun(job(3, "--max-restarts=0"), tmp_path) as run:
        before = start(run, 3)
        seen = len(run.events)
        os.kill(before[0], signal.SIGKILL)
        run.wait_for_event("replica_lost", after=seen)
        os.kill(before[1], signal.SIGKILL)
        whole = run.wait_for_event("generation", after=seen, replicas=3)
        assert run.pids(whole["generation"])[0] == before[2]
        finish(run)
        assert run.of("failure") == []


def test_the_death_of_all_is_a_failure_that_counts_without_a_checkpoint(tmp_path: Path) -> None:
    with ElasticRun(job(2, "--max-restarts=1", "--checkpoint-interval=0"), tmp_path) as run:
        before = start(run, 2)
        seen = len(run.events)
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        again = run.wait_for_event("generation", after=seen, cause="failure")
        assert again["transition"] == "abort"
        [failure] = run.of("failure")
        assert (failure["exit_code"], failure["restarts_used"], failure["max_restarts"]) == (-9, 1, 1)
        finish(run)


def test_a_death_while_a_newcomer_warms_up(tmp_path: Path) -> None:
    with ElasticRun(job(3, "--max-restarts=0"), tmp_path, {"SLOW_NEWCOMERS": str(tmp_path / "go")}) as run:
        os.mkfifo(tmp_path / "go")
        (tmp_path / "quick").touch()
        before = start(run, 2)
        (tmp_path / "quick").unlink()
        assert run.adaptdl("scale", "survive", "--replicas", "3").returncode == 0
        with (tmp_path / "go").open("w"):  # there is a newcomer, and it waits for us
            seen = len(run.events)
            os.kill(before[0], signal.SIGKILL)
            again = run.wait_for_event("generation", after=seen, cause="replica_lost")
        assert again["replicas"] == 1
        assert list(run.pids(again["generation"]).values()) == [before[1]]
        (tmp_path / "quick").touch()
        run.wait_for_event("generation", after=seen, replicas=3)
        finish(run)
        assert run.of("failure") == []


def test_a_stopped_replica_is_dropped_and_the_others_go_on(tmp_path: Path) -> None:
    with ElasticRun(job(2, "--max-restarts=0", "--hang-timeout=30"), tmp_path) as run:
        before = start(run, 2)
        seen = len(run.events)
        os.kill(before[1], signal.SIGSTOP)
        again = run.wait_for_event("generation", after=seen, cause="replica_lost")
        assert list(run.pids(again["generation"]).values()) == [before[0]]
        [lost] = run.of("replica_lost")
        assert lost["rank"] == 1
        assert "does not answer for 30 s" in lost["message"]
        finish(run)
        assert run.of("failure") == []


def test_a_death_in_the_middle_of_a_gather_repeats_its_step(tmp_path: Path) -> None:
    script = [str(Path(__file__).parent / "scripts" / "contrast.py"), "40", "0.05"]
    arguments = ["--standalone", "--nproc-per-node=1:3", "--rdzv-id=survive", "--no-autoscale"]
    ended = r"ended with \[(.*)\], (\S+) in (\d+) steps"
    folders = [tmp_path / "alone", tmp_path / "grown"]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "hurry").touch()
    with ElasticRun([*arguments[:1], "--nproc-per-node=1", "--rdzv-id=one", *script], folders[0]) as run:
        assert run.wait() == 0, run.text()
        wanted = re.search(ended, run.text())
    with ElasticRun([*arguments, "--max-restarts=0", *script], folders[1]) as run:
        before = start(run, 3)
        seen = len(run.events)
        (folders[1] / "new").write_text(str(before[1]))
        (folders[1] / "new").rename(folders[1] / "die")
        run.wait_for_event("generation", after=seen, transition="recover")
        run.hurry()
        assert run.wait() == 0, run.text()
        found = re.search(ended, run.text())
        assert len(run.of("replica_lost")) == 1
    assert wanted is not None
    assert found is not None
    assert found[3] == wanted[3] == "440"
    assert float(found[2]) == pytest.approx(float(wanted[2]), abs=1e-4)
    ours, theirs = ([float(word) for word in one[1].split(", ")] for one in (found, wanted))
    assert ours == pytest.approx(theirs, abs=1e-6)
