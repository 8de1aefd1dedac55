"""How `adaptdl wait` and `adaptdl logs -f` end, and what `submit --replace` refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from submitted_jobs import submission_by

from adaptdl_elastic.autoscaler.cli import adaptdl
from adaptdl_elastic.autoscaler.commands import logs, submit
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobSpec, JobState, JobStatus, NodeRecord, encode
from adaptdl_elastic.rendezvous.schema.submissions import (
    Cancellation,
    Resumption,
    ServiceRecord,
    Signed,
    Submission,
)
from adaptdl_elastic.rendezvous.services import context as contexts
from adaptdl_elastic.rendezvous.services import signatures
from adaptdl_elastic.rendezvous.services.admission import Request
from adaptdl_elastic.rendezvous.services.context import ClusterContext
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

# git lists the files of a working directory
pytestmark = pytest.mark.processes
KEYS = Keys("lab")


class World:
    """A cluster in a store in memory, whose node takes every archive and has no output."""

    def __init__(self, folder: Path, patched: pytest.MonkeyPatch) -> None:
        self.store = MemoryStore()
        self.asleep: Callable[[], object] = lambda: pytest.fail("it waits")
        self.sent: list[str] = []
        contexts.save(ClusterContext("lab", "id", person="alice", endpoint="https://127.0.0.1:1"))
        (folder / "train.py").write_text("")
        patched.chdir(folder)
        reader = SubmissionReader(self.store, KEYS, "id")
        for module in (logs, submit):
            patched.setattr(module, "open_cluster", lambda _: (reader, self.store.client(), KEYS))
            patched.setattr(module, "client_of", lambda _: self)
        patched.setattr(signatures, "sign", lambda *_: "signed")
        patched.setattr(logs.time, "sleep", lambda _: self.asleep())
        self.store.put(KEYS.service("n1"), encode(ServiceRecord("n1", "127.0.0.1", 1, 4)))

    def has_blob(self, service: ServiceRecord, digest: str) -> bool:
        self.sent.append(digest)
        return True

    def get_json(self, service: ServiceRecord, path: str, **values: Any) -> Any:
        return {"text": "", "offset": 0, "running": False}

    def put(self, key: str, record: Submission | Cancellation | Resumption, person: str = "alice") -> None:
        self.store.put(key, encode(Signed(encode(record), person, "signed")))

    def job(self, state: JobState | None = None, owner: str = "alice", **status: Any) -> None:
        """Submit `job`, of which the coordinator says this."""
        of = submission_by(owner, command=("old.py",), created=1.0)
        self.put(KEYS.submission("job"), of)
        if state is not None:
            self.store.put(KEYS.job("job", "spec"), encode(JobSpec("job", "r1")))
            self.store.put(KEYS.job("job", "status"), encode(JobStatus("job", "r1", state, **status)))

    def request(self) -> Request:
        """Return what a node service sees of `job`."""
        request = SubmissionReader(self.store, KEYS, "id").read(None).find("job")
        assert request is not None
        return request

    def agent(self) -> None:
        self.store.put(KEYS.node("n1", "job"), encode(NodeRecord("n1", "job", "r1", "a", "127.0.0.1", 1)))

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(adaptdl, words, prog_name="adaptdl")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "work").mkdir()
    return World(tmp_path / "work", monkeypatch)


ENDS: dict[str, tuple[JobState, int | None, int]] = {
    "done": (JobState.DONE, 0, 0),
    "failed": (JobState.FAILED, 3, 3),
    "failed, by an earlier version": (JobState.FAILED, None, 1),
    "stopped": (JobState.STOPPED, 143, 143),
}


def test_the_owner_of_a_submission_is_told_which_weight_counts(world: World) -> None:
    assert world.run("submit", "--weight", "1", "train.py").output.count("\n") == 2
    told = world.run("submit", "--weight", "1e6", "train.py").output.splitlines()[1]
    assert told == (
        "train-2: its weight 1e+06 counts as 1, the most that its owner may give; "
        "an administrator grants more: adaptdl cluster grant PERSON KEY.pub --most-weight 1e+06"
    )


@pytest.mark.parametrize("name", ENDS)
def test_a_command_that_waits_exits_as_the_job_did(world: World, name: str) -> None:
    state, code, wanted = ENDS[name]
    world.job(state, reason="because", exit_code=code)
    for words in (("wait", "job"), ("logs", "-f", "job")):
        done = world.run(*words)
        assert (done.exit_code, done.output.count("\n")) == (wanted, 1)
        assert f"job is {state.value}: because" in done.output
    assert world.run("logs", "job").exit_code == 0
    # the coordinator has deleted all but the outcome
    item = world.store.get(KEYS.job("job", "status"))
    assert item is not None
    world.store.put(KEYS.outcome("job", "status"), item.value)
    world.store.delete_prefix(KEYS.job("job"))
    assert world.run("wait", "job").exit_code == wanted


def test_a_cancelled_job_has_ended_once_its_agents_have_left(world: World) -> None:
    world.job(JobState.RUNNING)
    world.agent()
    world.put(KEYS.cancellation("job"), Cancellation("job", "alice", 2.0, 1.0))
    waited = []

    def leave() -> None:
        waited.append(1)
        world.store.delete_prefix(KEYS.nodes)

    world.asleep = leave
    done = world.run("wait", "job")
    assert (done.exit_code, done.output, waited) == (143, "job is cancelled: by alice\n", [1])


def test_a_job_that_waits_is_waited_for_and_one_that_does_not_exist_is_not(world: World) -> None:
    world.job()
    world.asleep = lambda: world.job(JobState.FAILED, reason="exit code 7", exit_code=7)
    assert world.run("wait", "job").exit_code == 7
    done = world.run("wait", "other")
    assert (done.exit_code, done.output.count("\n")) == (1, 1)
    assert "no job 'other' was submitted to cluster lab; see adaptdl ls --all" in done.output
    world.job()
    world.asleep = lambda: world.store.delete_prefix(KEYS.submissions)
    world.store.delete_prefix(KEYS.jobs)
    done = world.run("wait", "job")
    assert (done.exit_code, done.output.count("\n")) == (1, 1)
    assert "adaptdl ls --all" in done.output


@pytest.mark.parametrize("state", [JobState.STOPPED, JobState.FAILED, JobState.DONE])
def test_a_job_that_has_ended_is_replaced_and_goes_on(world: World, state: JobState) -> None:
    world.job(state)
    taken = world.run("submit", "--name", "job", "train.py")
    assert taken.exit_code == 1
    assert "there is a job job already: choose another --name, or --replace it" in taken.output
    done = world.run("submit", "--replace", "--name", "job", "train.py", "--lr", "1")
    assert (done.exit_code, world.sent) == (0, world.sent[:1]), done.output
    request = world.request()
    new = request.submission
    assert (new.command, new.replaces, new.follows) == (("train.py", "--lr", "1"), 1.0, "r1")
    assert new.created > 1.0
    assert new.folder == f"job@{new.bundle[:16]}"
    assert (request.run.resumed, request.over) == (True, False)
    assert (
        "job has not ended: adaptdl stop job"
        in world.run("submit", "--replace", "--name", "job", "train.py").output
    )
    # what ended the old one is not for the new one
    world.put(KEYS.cancellation("job"), Cancellation("job", "alice", 2.0, 1.0))
    for earlier in ("r0", "r2"):  # by the clocks of the nodes that began them
        world.put(KEYS.resumption("job"), Resumption("job", "alice", earlier))
        request = world.request()
        assert (request.run.resumed, request.over) == (True, False)
    assert world.run("cancel", "job").exit_code == 0
    assert world.request().cancelled_by == "alice"


def test_a_job_that_was_cancelled_in_the_queue_is_replaced(world: World) -> None:
    world.job()
    world.put(KEYS.cancellation("job"), Cancellation("job", "alice", 2.0, 1.0))
    assert world.run("submit", "--replace", "--name", "job", "train.py").exit_code == 0
    request = world.request()
    assert (request.cancelled_by, request.submission.follows) == (None, "")


def test_a_job_that_cannot_be_replaced_is_one_line_with_the_remedy(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*words: str) -> str:
        done = world.run("submit", "--replace", *words, "train.py")
        assert (done.exit_code, done.output.count("\n"), world.sent) == (1, 1, [])
        return done.output

    assert "there is no job train to replace: leave --replace away, or give --name" in said()
    world.job(JobState.RUNNING)
    assert "job has not ended: adaptdl stop job or adaptdl wait job first" in said("--name", "job")
    world.job(JobState.FAILED)
    assert "--after job: a job cannot wait for itself" in said("--name", "job", "--after", "job")
    world.job(JobState.FAILED, owner="bob")
    assert "job belongs to bob: choose another --name, without --replace" in said("--name", "job")
    world.job(JobState.FAILED)
    world.agent()
    monkeypatch.setattr(submit, "LEAVE_SECONDS", -1.0)
    assert "agents of job are still there: adaptdl cluster status says where" in said("--name", "job")
