"""The main path on real processes and a real etcd: rescaled by hand in mid-epoch, resumed, killed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from elastic_run import ElasticRun

SCRIPTS = Path(__file__).parent / "scripts"

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
def test_twice_rescaled_and_resumed_in_an_epoch_applies_each_sample_exactly_once(
    tmp_path: Path, how: str
) -> None:
    arguments = ["--standalone", "--nproc-per-node=1:2", "--rdzv-id=count", f"--rescale={how}"]
    # without the policy, which is sometimes quicker than the person
    arguments += ["--no-autoscale", "--checkpoint-path=state"]
    command = [*arguments, str(SCRIPTS / "count_samples.py"), str(tmp_path)]
    with ElasticRun(command, tmp_path, fresh=how == "restart") as run:
        run.wait_for_event("metrics", replicas=1)
        assert run.adaptdl("scale", "count", "--replicas", "2").returncode == 0
        run.wait_for_event("metrics", replicas=2)
        seen = len(run.events)
        assert run.adaptdl("scale", "count", "--replicas", "1").returncode == 0
        run.wait_for_event("metrics", replicas=1, after=seen)
        # its agent may still wait for the end of the replica that has left
        run.wait_for_event("generation", replicas=1, after=seen)
        run.interrupt()
        assert run.wait() == 143
        generations = run.of("generation")
    assert [g["replicas"] for g in generations] == [1, 2, 1]
    assert [g["cause"] for g in generations] == ["start", "manual", "manual"]
    wanted = {"restart": "restart", "auto": "inplace"}[how]
    assert [g["transition"] for g in generations[1:]] == [wanted, wanted]
    for path in tmp_path.glob("applied-*"):  # each run counts its generations from 0
        path.rename(path.with_name(f"{path.name}-of-the-first-run"))
    assert 0 < sum(applied(tmp_path).values()) < 4003
    (tmp_path / "hurry").touch()
    with ElasticRun(command, tmp_path) as run:
        assert run.wait() == 0
    assert applied(tmp_path) == Counter(range(4003))


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


@pytest.mark.exhaustive
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
