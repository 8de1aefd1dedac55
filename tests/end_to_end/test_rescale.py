"""The main path on real processes and a real etcd: rescaled by hand in mid-epoch, by the policy, resumed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from elastic_run import ROOT, ElasticRun

SCRIPTS = Path(__file__).parent / "scripts"
EXAMPLE = ROOT / "examples" / "image_classification.py"

pytestmark = [pytest.mark.slow, pytest.mark.etcd, pytest.mark.timeout(600)]


def applied(directory: Path, epoch: int = 0) -> Counter[int]:
    """How often each sample was part of a finished step of that epoch, on whichever replica."""
    counts: Counter[int] = Counter()
    for path in directory.glob("applied-*"):
        for line in path.read_text().splitlines():
            at, *indices = (int(word) for word in line.split())
            counts.update(indices if at == epoch else ())
    return counts


@pytest.mark.parametrize("how", ["restart", "auto"])
def test_twice_rescaled_in_an_epoch_applies_each_sample_exactly_once(tmp_path: Path, how: str) -> None:
    arguments = ["--standalone", "--nproc-per-node=1:2", "--rdzv-id=count", f"--rescale={how}"]
    arguments += ["--no-autoscale"]  # or the policy is sometimes quicker than the person
    command = [*arguments, str(SCRIPTS / "count_samples.py"), str(tmp_path)]
    with ElasticRun(command, tmp_path, fresh=True) as run:
        run.wait_for_event("metrics", replicas=1)
        assert run.adaptdl("scale", "count", "--replicas", "2").returncode == 0
        run.wait_for_event("metrics", replicas=2)
        seen = len(run.events)
        assert run.adaptdl("scale", "count", "--replicas", "1").returncode == 0
        run.wait_for_event("metrics", replicas=1, after=seen)
        (tmp_path / "hurry").touch()
        assert run.wait() == 0
        generations = run.of("generation")
    assert [g["replicas"] for g in generations] == [1, 2, 1]
    assert [g["cause"] for g in generations] == ["start", "manual", "manual"]
    wanted = {"restart": "restart", "auto": "inplace"}[how]
    assert [g["transition"] for g in generations[1:]] == [wanted, wanted]
    assert applied(tmp_path) == Counter(range(4003))


def test_the_policy_grows_the_example_and_names_goodput(tmp_path: Path) -> None:
    arguments = ["--standalone", "--nproc-per-node=1:2", "--rdzv-id=grow", str(EXAMPLE), "--epochs=4000"]
    with ElasticRun(arguments, tmp_path) as run:
        grown = run.wait_for_event("generation", replicas=2)
        assert grown["cause"] == "policy"
        assert "goodput" in grown["reason"]
        status = json.loads(run.adaptdl("status", "grow", "--json").stdout)
        # other work on the machine may have made the policy change it again meanwhile
        shown = run.wait_for_event("generation", generation=status["generation"])
        assert status["replicas"] == shown["replicas"]
        assert run.adaptdl("stop", "grow").returncode == 0
        assert run.wait() == 143


@pytest.mark.parametrize(
    ("slots", "options", "limit"),
    [("1:2", [], "at or below 1 replica "), ("1", ["--autoscale=64"], "at or below batch size 16 ")],
    ids=["two replicas", "a larger batch"],
)
def test_an_error_that_a_size_brings_does_not_end_the_job(
    tmp_path: Path, slots: str, options: list[str], limit: str
) -> None:
    arguments = ["--standalone", f"--nproc-per-node={slots}", "--rdzv-id=one", "--max-restarts=0"]
    with ElasticRun([*arguments, str(SCRIPTS / "one_size.py"), *options], tmp_path) as run:
        back = run.wait_for_event("generation", cause="replica_lost")
        assert (back["replicas"], back["transition"]) == (1, "abort")
        run.wait_until_adaptdl_says(limit, "status", "one")
        assert limit in run.adaptdl("explain", "one").stdout
        run.wait_for_event("goodput", after=run.events.index(back))
        (tmp_path / "hurry").touch()
        assert run.wait() == 0, run.text()
        assert run.of("generation")[-1] == back


def test_a_stopped_job_resumes_where_it_was(tmp_path: Path) -> None:
    arguments = ["--standalone", "--nproc-per-node=1", "--rdzv-id=again", "--checkpoint-path=state"]
    arguments += [str(SCRIPTS / "count_samples.py"), str(tmp_path)]
    for _ in range(2):
        with ElasticRun(arguments, tmp_path) as run:
            run.wait_for_event("metrics")
            run.interrupt()
            assert run.wait() == 143
        for path in tmp_path.glob("applied-0-0"):  # each run counts its generations from 0
            path.rename(path.with_name(f"applied-run{len(list(tmp_path.iterdir()))}-0"))
    (tmp_path / "hurry").touch()
    with ElasticRun(arguments, tmp_path) as run:
        assert run.wait() == 0
    assert applied(tmp_path) == Counter(range(4003))


def test_a_killed_replica_restarts_from_the_last_checkpoint(tmp_path: Path) -> None:
    arguments = ["--standalone", "--nproc-per-node=2", "--checkpoint-interval=0.2", "--rescale=restart"]
    script = [str(SCRIPTS / "count_samples.py"), str(tmp_path), "--crash-at=20"]
    with ElasticRun([*arguments, *script], tmp_path) as run:
        failure = run.wait_for_event("failure")
        assert failure["exit_code"] == -9
        (tmp_path / "hurry").touch()
        assert run.wait() == 0
        first, again = run.of("generation")
        assert (first["cause"], again["transition"]) == ("start", "abort")
    counts = applied(tmp_path)
    assert set(counts) == set(range(4003))  # what was lost is done again, nothing is left out
    repeated = sum(counts.values()) - 4003
    assert repeated <= 20 * 16
    first, second = ((tmp_path / f"parameters-{rank}").read_text() for rank in range(2))
    assert first == second


def test_an_etcd_that_goes_and_comes_back_does_not_end_the_run(tmp_path: Path) -> None:
    from etcd_server import EtcdServer

    with EtcdServer() as server:
        arguments = [f"--rdzv-endpoint={server.endpoint}", "--nproc-per-node=1:2", "--rdzv-id=storm"]
        script = [str(SCRIPTS / "count_samples.py"), str(tmp_path), "--size=6003"]
        with ElasticRun([*arguments, "--nnodes=1", *script], tmp_path) as run:
            run.wait_for_event("metrics")
            server.kill()
            seen = len(run.events)
            run.wait_for_event("metrics", after=seen)  # training goes on meanwhile
            server.start()
            (tmp_path / "hurry").touch()
            assert run.wait() == 0
            assert run.of("generation")[0]["replicas"] == 1
            assert not run.of("failure")
    assert applied(tmp_path) == Counter(range(6003))
