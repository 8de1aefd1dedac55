"""The provider of Slurm's nodes, and the autoscaler on it, with answers of Slurm that the test makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from scaling_cluster import KEYS, Cluster

from adaptdl_elastic.autoscaler.providers.base import InstanceState, ProviderOptionError, TryLaterError
from adaptdl_elastic.autoscaler.providers.registry import ProviderRequest, make_provider
from adaptdl_elastic.autoscaler.providers.slurm.provider import SlurmProvider, run_command
from adaptdl_elastic.autoscaler.providers.slurm.queue import (
    FORMAT,
    SlurmJob,
    instances_of,
    parse,
    pool_of,
    told,
)
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

MARK = "adaptdl/test/1/"


def line(state: str, reason: str = "None", start: str = "N/A", end: str = "N/A", mark: str = MARK) -> str:
    number = str(abs(hash((state, reason))) % 1000)
    return "\x1f".join((number, state, reason, start, end, "100", f"{mark}i-{state}"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (line("RUNNING", start="110", end="NONE"), InstanceState.RUNNING),
        (line("SUSPENDED", start="110"), InstanceState.RUNNING),
        (line("CONFIGURING", start="110"), InstanceState.PENDING),
        (line("COMPLETING", start="110"), InstanceState.LEAVING),
        (line("COMPLETED", start="110", end="120"), True),
        (line("PREEMPTED", start="110", end="120"), False),
        (line("NODE_FAIL", "NodeDown", start="110", end="120"), False),
        (line("CANCELLED", start="N/A", end="120"), None),
        (line("PENDING", "Resources", start="900"), None),
        (line("SPECIAL_EXIT", "JobHeldAdmin"), None),
        (line("RUNNING", start="110", mark="adaptdl/test/2/"), None),
        (line("RUNNING", start="110", mark="(null)"), None),
        ("slurm_load_jobs error: Unable to contact", None),
    ],
)
def test_a_line_of_squeue_is_an_instance_or_how_it_ended(
    text: str, expected: InstanceState | bool | None
) -> None:
    there, ended = instances_of(parse(f"{text}\n", MARK), "idle", 2)
    found = [one.state for one in there] + [one.finished for one in ended]
    assert found == ([] if expected is None else [expected])
    for one in (*there, *ended):
        assert (one.launched, one.slots, one.ended) == (110, 2, 120 if ended else None)


@pytest.mark.parametrize(
    ("reason", "refused"),
    [
        *((reason, True) for reason in ("QOSMaxJobsPerUserLimit", "AssocGrpCpuLimit", "InvalidAccount")),
        *((reason, True) for reason in ("PartitionDown", "BadConstraints", "launch failed requeued held")),
        *(
            (reason, False)
            for reason in ("Resources", "Priority", "JobHeldUser", "JobHeldAdmin", "BeginTime")
        ),
        *((reason, False) for reason in ("ReqNodeNotAvail, UnavailableNodes:n2", "Reservation", "Licenses")),
    ],
)
def test_a_request_that_idle_nodes_would_not_meet_is_trouble(reason: str, refused: bool) -> None:
    jobs = parse(f"{line('PENDING', reason)}\n{line('RUNNING', start='110')}", MARK)
    pool = pool_of(jobs, "idle", 1, 8)
    assert (pool.desired, pool.maximum, bool(pool.trouble)) == (2, 8, refused)
    assert told(jobs, "idle", 110.0) == []
    (said,) = told(jobs, "idle", 200.0)
    assert said.endswith(f"asked for, and Slurm says {reason}")


def test_what_waits_and_what_was_lost_is_told() -> None:
    jobs = parse(
        "\n".join((line("PENDING", "Priority", "9000"), line("NODE_FAIL", "NodeDown", "1", "2"))), MARK
    )
    waits, lost = told([jobs[0], replace(jobs[0], start=8000.0), jobs[1]], "idle", 200.0)
    assert waits.startswith("idle: 2 nodes were asked for, and Slurm says Priority, expected at 1970-01-01 ")
    assert lost == f"idle: job {jobs[1].number} of Slurm has ended: NODE_FAIL (NodeDown)"


class FakeSlurm:
    """Answers the provider's commands. `reason`: why jobs wait; empty: they run at once."""

    def __init__(self, reason: str = "", refusal: str = "") -> None:
        self.reason, self.refusal, self.away = reason, refusal, False
        self.jobs: list[SlurmJob] = []
        self.asked: list[str] = []
        self.now = lambda: 0.0

    def __call__(self, *command: str, **variables: str) -> str:
        self.asked.append(command[0])
        if self.away:
            raise TryLaterError(f"{command[0]}: Unable to contact slurm controller (connect failure)")
        if command[0] == "squeue":
            assert variables == {"SLURM_TIME_FORMAT": "%s"}
            return "".join(f"{self.shown(job)}\n" for job in self.jobs)
        if command[0] == "scancel":
            self.jobs = [job if job.number != command[-1] else self.ended(job) for job in self.jobs]
            return ""
        if self.refusal:
            raise TryLaterError(f"sbatch: {self.refusal}")
        (comment,) = (word.removeprefix("--comment=") for word in command if word.startswith("--comment="))
        assert comment.endswith(variables["ADAPTDL_INSTANCE_ID"])
        assert variables["ADAPTDL_ETCD"] == "store:1"
        state, now = ("PENDING", 0.0) if self.reason else ("RUNNING", self.now())
        number = str(len(self.jobs) + 1)
        self.jobs.append(SlurmJob(number, state, self.reason or "None", now, 0.0, self.now(), comment))
        return f"{number}\n"

    def ended(self, job: SlurmJob) -> SlurmJob:
        return replace(job, state="CANCELLED", end=self.now())

    def shown(self, job: SlurmJob) -> str:
        times = (f"{at:.0f}" if at else "N/A" for at in (job.start, job.end, job.submitted))
        return "\x1f".join((job.number, job.state, job.reason, *times, job.instance))

    def waiting(self) -> list[str]:
        return [job.number for job in self.jobs if job.waits]


def cluster_on(slurm: FakeSlurm, store: MemoryStore, most: int = 4) -> Cluster:
    provider = SlurmProvider(
        *(Path("/batch"), ["--partition=idle"], "idle", 1, most, "test/1", {"ADAPTDL_ETCD": "store:1"}),
        clock=lambda: cluster.now,
        run=slurm,
    )
    cluster = Cluster(store, provider=provider)
    slurm.now = lambda: cluster.now
    return cluster


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.mark.parametrize(
    ("slurm", "words", "most"),
    [
        (FakeSlurm(refusal="error: Invalid account or account/partition"), "Invalid account", 10),
        (FakeSlurm("QOSMaxJobsPerUserLimit"), "QOSMaxJobsPerUserLimit", 10),
        (FakeSlurm("PartitionDown"), "PartitionDown", 10),
        (FakeSlurm("Resources"), "Slurm says Resources", 1),
        (FakeSlurm("JobHeldUser"), "Slurm says JobHeldUser", 1),
    ],
    ids=lambda value: getattr(value, "reason", None),
)
def test_a_request_that_is_not_met_is_told_and_asked_for_ever_less_often(
    memory: MemoryStore, slurm: FakeSlurm, words: str, most: int
) -> None:
    cluster = cluster_on(slurm, memory).submit()
    for _ in range(3600 * 2 // 10):
        cluster.ruler.attempt(first=False)
        cluster.now += 10
        assert len(slurm.waiting()) <= 1
    assert 1 <= slurm.asked.count("sbatch") <= most
    assert any(words in warning for warning in cluster.status().warnings), cluster.status().warnings
    slurm.reason = slurm.refusal = ""
    slurm.jobs = [
        replace(job, state="RUNNING", start=cluster.now) if job.waits else job for job in slurm.jobs
    ]
    cluster.ticks(200)
    assert sum(job.state == "RUNNING" for job in slurm.jobs) == 1


def test_a_controller_that_is_away_is_told_and_asked_ever_less_often(memory: MemoryStore) -> None:
    slurm = FakeSlurm()
    cluster = cluster_on(slurm, memory).submit().ticks(3)
    cluster.placed()
    slurm.away, before = True, len(slurm.asked)
    for _ in range(60):
        cluster.tick(5)
    assert len(slurm.asked) - before < 10
    assert cluster.status().warnings[0].startswith("squeue: Unable to contact slurm controller")
    slurm.away = False
    cluster.ticks(20)
    assert not cluster.status().warnings
    assert [job.state for job in slurm.jobs] == ["RUNNING"]


def test_requests_are_found_again_by_their_comment_and_taken_back(memory: MemoryStore) -> None:
    slurm = FakeSlurm("Resources")
    cluster = cluster_on(slurm, memory, most=3).submit(nodes=3).ticks(2)
    assert len(slurm.waiting()) == 3
    again = cluster_on(slurm, memory, most=3)
    again.now = cluster.now + 60
    again.ticks(5)
    assert slurm.asked.count("sbatch") == 3
    again.finish()
    again.ticks(30)
    assert slurm.waiting() == []


def test_nodes_are_given_back_before_their_hours_are_over(memory: MemoryStore) -> None:
    slurm = FakeSlurm()
    cluster = cluster_on(slurm, memory).submit(nodes=2)
    cluster.ruler.change(ScalingSettings(max_node_hours=0.5, stop_reserve=120))
    cluster.ticks(3)
    assert len(cluster.placed()) == 2
    for _ in range(400):
        cluster.tick()
        if memory.range(KEYS.drains).items:
            cluster.plan()
        for job in slurm.jobs if not cluster.instances else ():
            memory.delete(KEYS.node(f"node-{job.instance.rpartition('/')[2]}", "train"))
    used = sum((job.end or cluster.now) - job.start for job in slurm.jobs) / 3600
    assert "none are left of --max-node-hours 0.5" in cluster.status().reason
    assert len(slurm.jobs) == 2
    assert 0.4 < used < 0.5


def test_a_command_that_fails_is_one_line() -> None:
    with pytest.raises(TryLaterError, match=r"^sh: why$"):
        run_command("sh", "-c", "echo what; echo why >&2; exit 3")
    assert run_command("sh", "-c", "echo $A", A="1") == "1\n"


@pytest.mark.parametrize(
    ("options", "text", "most", "words"),
    [
        ({"batch_file": "b"}, "srun adaptdl-run --rdzv-id=a --once t.py", None, "--max-nodes N"),
        ({}, "", 3, "--batch-file FILE"),
        ({"batch_file": "nothing"}, "", 3, "cannot be read"),
        ({"batch_file": "b"}, "srun adaptdl-run t.py", 3, "needs --rdzv-id and --once"),
        ({"batch_file": "b", "asg": "x"}, "", 3, "there are: batch_file, partition, sbatch_option"),
        ({"batch_file": "b"}, "srun adaptdl-run --rdzv-id=a --once t.py", 3, ""),
    ],
)
def test_what_slurm_needs_is_said_in_one_line(
    options: dict[str, str],
    text: str,
    most: int | None,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b").write_text(text)
    request = ProviderRequest(options, max_nodes=most)
    if not words:
        assert make_provider("slurm", request).name == "slurm"
        return
    with pytest.raises(ProviderOptionError, match=words) as caught:
        make_provider("slurm", request)
    assert "\n" not in str(caught.value)


def test_the_format_has_one_separator_between_values() -> None:
    assert FORMAT.count("\x1f") == 6
