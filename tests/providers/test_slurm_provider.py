"""The provider of Slurm's nodes, and the autoscaler on it, with answers of Slurm that the test makes."""

from __future__ import annotations

from pathlib import Path

import pytest
from scaling_cluster import KEYS, Cluster

from adaptdl_elastic.autoscaler.providers.base import InstanceState, ProviderOptionError, TryLaterError
from adaptdl_elastic.autoscaler.providers.registry import ProviderRequest, make_provider
from adaptdl_elastic.autoscaler.providers.slurm.provider import SlurmProvider
from adaptdl_elastic.autoscaler.providers.slurm.queue import capacity_of, parse
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

MARK = "adaptdl/test/1/"
# Reasons of Slurm, with "-" in place of a blank.
HELD = "QOSMaxJobsPerUserLimit InvalidAccount PartitionDown BadConstraints launch-failed-requeued-held"
KEPT = "Resources Priority JobHeldUser JobHeldAdmin Reservation ReqNodeNotAvail,-UnavailableNodes:n2"


def line(state: str, reason: str = "None", start: str = "N/A", end: str = "N/A", mark: str = MARK) -> str:
    return "\x1f".join(("7", state, reason, start, end, "100", f"{mark}i-{state}"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (line("RUNNING", start="110", end="NONE"), InstanceState.RUNNING),
        (line("SUSPENDED", start="110", end="900"), InstanceState.RUNNING),
        (line("CONFIGURING", start="110"), InstanceState.PENDING),
        (line("COMPLETING", start="110"), InstanceState.LEAVING),
        (line("COMPLETED", start="110", end="120"), True),
        (line("PREEMPTED", start="110", end="120"), False),
        (line("CANCELLED", end="120"), None),
        (line("PENDING", "Resources", start="900"), None),
        (line("SPECIAL_EXIT", "JobHeldAdmin"), None),
        (line("RUNNING", start="110", mark="adaptdl/test/2/"), None),
    ],
)
def test_a_line_of_squeue_is_an_instance_or_how_it_ended(text: str, expected: object) -> None:
    seen = capacity_of(parse(f"{text}\n", MARK), "idle", 2, 8, 0.0)
    found: list[object] = [one.state for one in seen.instances]
    assert found + [one.finished for one in seen.ended] == ([] if expected is None else [expected])
    for one in (*seen.instances, *seen.ended):
        assert (one.launched, one.slots, one.ended) == (110, 2, 120 if seen.ended else None)


@pytest.mark.parametrize(("reasons", "refused"), [(HELD, True), (KEPT, False)])
def test_a_request_that_idle_nodes_would_not_meet_is_trouble(reasons: str, refused: bool) -> None:
    for reason in (word.replace("-", " ") for word in reasons.split()):
        jobs = parse(f"{line('PENDING', reason, '9000')}\n{line('NODE_FAIL', 'NodeDown', '1', '2')}", MARK)
        (pool,) = capacity_of(jobs, "idle", 1, 8, 200.0).pools
        assert (pool.desired, pool.maximum, bool(pool.trouble)) == (1, 8, refused)
        assert len(capacity_of(jobs, "idle", 1, 8, 110.0).warnings) == 1
        waits, lost = capacity_of([*jobs, jobs[0]], "idle", 1, 8, 200.0).warnings
        assert f"idle: 2 nodes were asked for, and Slurm says {reason}, expected at 1970-01-01" in waits
        assert lost == "idle: job 7 of Slurm has ended: NODE_FAIL (NodeDown)"


class FakeSlurm:
    """Answers the provider's commands. `reason`: why jobs wait; empty: they run at once."""

    def __init__(self, reason: str = "", refusal: str = "") -> None:
        self.reason, self.refusal = reason, refusal
        self.jobs: list[list[str]] = []  # what `squeue` prints of each
        self.asked: list[str] = []
        self.now = lambda: "0"
        self.hidden = False  # new jobs have a comment of somebody else's

    def __call__(self, *command: str, **variables: str) -> str:
        self.asked.append(command[0])
        if self.refusal and command[0] in self.refusal:
            raise TryLaterError(self.refusal)
        if command[0] == "sbatch":
            comment, number = command[-2].removeprefix("--comment="), str(len(self.jobs))
            assert comment == f"{MARK}{variables['ADAPTDL_INSTANCE_ID']}"
            assert variables["ADAPTDL_ETCD"] == "store:1"
            comment = "another comment" if self.hidden else comment
            self.jobs.append([number, "PENDING", self.reason, "N/A", "N/A", self.now(), comment])
        elif command[0] == "scancel":
            self.jobs[int(command[-1])][1:5:3] = "CANCELLED", self.now()
        for job in self.jobs if not self.reason else ():
            job[1:4] = ("RUNNING", "None", self.now()) if job[1] == "PENDING" else job[1:4]
        return "".join("\x1f".join(job) + "\n" for job in self.jobs)

    def count(self, state: str) -> int:
        return sum(job[1] == state for job in self.jobs)

    def cluster(self, store: MemoryStore) -> Cluster:
        """Return a new autoscaler on this Slurm."""
        given = ProviderRequest(max_nodes=4, owner="test/1", store={"ADAPTDL_ETCD": "store:1"})
        provider = SlurmProvider(["sbatch", "batch"], "idle", given, lambda: cluster.now, self)
        cluster = Cluster(store, provider=provider)
        self.now = lambda: f"{cluster.now:.0f}"
        return cluster


@pytest.mark.parametrize(
    ("slurm", "words", "most"),
    [
        (FakeSlurm(refusal="sbatch: error: Invalid account"), "Invalid account", 10),
        (FakeSlurm("QOSMaxJobsPerUserLimit"), "QOSMaxJobsPerUserLimit", 10),
        (FakeSlurm("Resources"), "Slurm says Resources", 1),
        (FakeSlurm("JobHeldUser"), "Slurm says JobHeldUser", 1),
    ],
)
def test_a_request_that_is_not_met_is_told_and_made_ever_less_often(
    slurm: FakeSlurm, words: str, most: int
) -> None:
    cluster = slurm.cluster(MemoryStore()).submit()
    for _ in range(3600 * 2 // 10):
        cluster.ruler.attempt(first=False)
        cluster.now += 10
        assert slurm.count("PENDING") <= 1
    assert 1 <= slurm.asked.count("sbatch") <= most
    assert any(words in warning for warning in cluster.status().warnings), cluster.status().warnings
    slurm.reason = slurm.refusal = ""
    cluster.ticks(200)
    assert slurm.count("RUNNING") == 1


@pytest.mark.parametrize("end", ["FAILED", "COMPLETED"])
def test_jobs_that_end_at_once_are_not_submitted_without_end(end: str) -> None:
    slurm = FakeSlurm()
    cluster = slurm.cluster(MemoryStore()).submit()
    for _ in range(360):
        cluster.ruler.attempt(first=False)
        for job in slurm.jobs:
            job[1:5] = (end, "None", slurm.now(), slurm.now()) if job[1] == "RUNNING" else job[1:5]
        cluster.now += 10
    assert 1 <= slurm.asked.count("sbatch") <= 10


def test_a_job_that_the_queue_does_not_show_is_cancelled_and_asked_for_ever_less_often() -> None:
    slurm = FakeSlurm("Resources")
    cluster = slurm.cluster(MemoryStore()).submit()
    for _ in range(360):
        cluster.ruler.attempt(first=False)
        for job in slurm.jobs:
            job[-1] = "another comment"
        slurm.hidden, cluster.now = True, cluster.now + 10
    assert 1 <= slurm.asked.count("sbatch") <= 10


@pytest.mark.parametrize(
    "option", ["other.sh", "--array=1-20", "-a 1-3", "-M east", "--wrap=true", "--test-only"]
)
def test_an_option_by_which_a_request_is_not_one_job_is_refused(tmp_path: Path, option: str) -> None:
    batch = tmp_path / "batch"
    for text, options in (("", {"sbatch_option": option}), (f"#SBATCH {option}\n", {})):
        batch.write_text(f"#!/bin/sh\n{text}adaptdl-run --rdzv-id=j --once train.py\n")
        given = ProviderRequest(max_nodes=2, options={"batch_file": str(batch), **options})
        with pytest.raises(ProviderOptionError, match="cannot be an option"):
            make_provider("slurm", given)


def test_a_controller_that_is_away_is_told_and_asked_ever_less_often() -> None:
    slurm = FakeSlurm()
    cluster = slurm.cluster(MemoryStore()).submit().ticks(3)
    cluster.placed()
    slurm.refusal, before = "squeue: Unable to contact slurm controller", len(slurm.asked)
    cluster.ticks(60, 5)
    assert len(slurm.asked) - before < 10
    assert cluster.status().warnings[0].startswith(slurm.refusal)
    slurm.refusal = ""
    cluster.ticks(20)
    assert not cluster.status().warnings
    assert (len(slurm.jobs), slurm.count("RUNNING")) == (1, 1)


def test_nodes_are_given_back_before_their_hours_are_over() -> None:
    slurm, store = FakeSlurm(), MemoryStore()
    cluster = slurm.cluster(store).submit(nodes=2)
    cluster.ruler.change(ScalingSettings(max_node_hours=0.5, stop_reserve=120))
    cluster.ticks(3).placed()
    for _ in range(400):
        cluster.tick()
        if store.range(KEYS.drains).items:
            cluster.plan()
        for job in slurm.jobs if not cluster.instances else ():
            store.delete(KEYS.node(f"node-{job[-1].removeprefix(MARK)}", "train"))
    assert "none are left of --max-node-hours 0.5" in cluster.status().reason
    assert 0.4 < sum(int(job[4]) - int(job[3]) for job in slurm.jobs) / 3600 < 0.5
    assert len(slurm.jobs) == 2


def test_a_missing_slurm_option_is_one_line(tmp_path: Path) -> None:
    for name, text in (
        ("good", "srun adaptdl-run --rdzv-id=a --once t.py"),
        ("bad", "srun adaptdl-run t.py"),
    ):
        (tmp_path / name).write_text(text)
    options = {"batch_file": f"{tmp_path}/good", "sbatch_option": "--time=9\n--gres=gpu:1,x:2"}
    made = make_provider("slurm", ProviderRequest({**options, "partition": "idle"}, max_nodes=3))
    assert isinstance(made, SlurmProvider)
    assert made.submit[:4] == ["sbatch", "--partition=idle", "--time=9", "--gres=gpu:1,x:2"]
    for name, value, most, words in (
        ("partition", "idle", None, "--max-nodes N"),
        ("batch_file", f"{tmp_path}/bad", 3, "needs --rdzv-id NAME and --once"),
        ("batch_file", f"{tmp_path}/nothing", 3, "cannot be read"),
        ("asg", "x", 3, "there are: batch_file, partition, sbatch_option"),
    ):
        with pytest.raises(ProviderOptionError, match=words):
            make_provider("slurm", ProviderRequest({**options, name: value}, max_nodes=most))
