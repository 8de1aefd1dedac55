"""Files of a job that its owner fetches from a node: `adaptdl cp`. Real TLS, real signatures."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from ports import free_port
from service_world import ID, World, refused, running_world
from submitted_jobs import submission_by

from adaptdl_elastic.autoscaler.commands import copy, logs
from adaptdl_elastic.autoscaler.commands.copy import JobFiles, RemoteFile
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import Cause, Placement, Plan, Transition, encode
from adaptdl_elastic.rendezvous.services import context as contexts
from adaptdl_elastic.rendezvous.services.service_client import ServiceClient, ServiceError
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        shutil.which("ssh-keygen") is None or shutil.which("openssl") is None,
        reason="needs ssh-keygen and openssl",
    ),
]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with running_world(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def work(world: World) -> Path:
    """A working directory with a file, a folder, a link out of it and a pipe."""
    folder = world.directory.work("hers@1")
    (folder / "results").mkdir(parents=True)
    (folder / "run.sh").write_text("#!/bin/sh")
    (folder / "run.sh").chmod(0o755)
    (folder / "results" / "model.pt").write_bytes(b"0123456789" * 1000)
    (folder / "results" / "secret").symlink_to(world.directory.key)
    (folder / "results" / "up").symlink_to("../..")
    os.mkfifo(folder / "pipe")
    return folder


def test_a_listing_has_the_regular_files_in_the_folder_only(world: World, work: Path) -> None:
    for person in ("alice", "admin"):
        said = world.ask(person, "/v1/files/hers/work")
        assert [(name, size, may) for name, size, _, may in said["files"]] == [
            ("results/model.pt", 10_000, False),
            ("run.sh", 9, True),
        ]
        assert said["left_out"] == 3
    (alone,) = world.ask("alice", "/v1/files/hers/work?path=results%2Fmodel.pt")["files"]
    assert alone[:2] == ["", 10_000]


@pytest.mark.parametrize("kind", ["list", "file"])
@pytest.mark.parametrize(
    ("path", "status"),
    [
        *(("../../pki/node-key.pem", 400), ("/etc/passwd", 400), ("results/secret", 404)),
        *(("results/up/work", 404), ("results/up/../pki/node-key.pem", 404), ("absent", 404)),
    ],
)
def test_nothing_outside_of_the_folder_is_served(
    world: World, work: Path, path: str, status: int, kind: str
) -> None:
    alice, quoted = world.client("alice"), path.replace("/", "%2F")
    target = f"/v1/files/hers/work?path={quoted}" if kind == "list" else f"/v1/files/hers/work/{quoted}"
    refused(lambda: alice.download(world.record, target, lambda data: None), status, "n1 refuses")


def test_a_pipe_and_an_offset_beyond_the_end_are_refused_at_once(world: World, work: Path) -> None:
    alice = world.client("alice")
    for target, status in (("pipe", 404), ("run.sh?after=10", 400), ("run.sh?after=-1", 400)):
        where = f"/v1/files/hers/work/{target}"
        refused(
            lambda where=where: alice.download(world.record, where, lambda data: None), status, "n1 refuses"
        )


class Broken(ServiceClient):
    """A client whose connection breaks after some bytes, as often as `left` says."""

    left, after, asked = 1, 4000, 0

    def download(self, service: Any, target: str, write: Callable[[bytes], Any]) -> None:
        self.asked += 1
        if self.left:
            self.left -= 1
            got = bytearray()
            super().download(service, target, got.extend)
            write(bytes(got[: self.after]))
            raise ServiceError("n1 broke off")
        super().download(service, target, write)


def broken(world: World) -> Broken:
    client = world.client("alice")
    client.__class__ = Broken
    assert isinstance(client, Broken)
    return client


def test_a_copy_goes_on_where_it_was_and_is_not_made_twice(world: World, work: Path, tmp_path: Path) -> None:
    client, target = broken(world), tmp_path / "mine" / "model.pt"
    files = JobFiles(client, {"n1": world.record}, "hers", "work")
    ((file,),) = files.everywhere("results/model.pt").values()
    with pytest.raises(ServiceError, match="broke off"):
        files.fetch(["n1"], "results/model.pt", file, target)
    (part,) = target.parent.iterdir()
    assert part.stat().st_size == 4000
    files.fetch(["n1"], "results/model.pt", file, target)
    assert target.read_bytes() == b"0123456789" * 1000
    assert [one.name for one in target.parent.iterdir()] == ["model.pt"]
    assert client.asked == 2
    files.fetch(["n1"], "results/model.pt", file, target)
    assert client.asked == 2


def test_of_a_file_that_is_written_again_the_new_state_is_fetched(
    world: World, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, found, model = broken(world), list[int](), work / "results" / "model.pt"
    listed = JobFiles.everywhere

    def write_again(files: JobFiles, path: str) -> dict[str, list[RemoteFile]]:
        said = listed(files, path)
        if not found:
            model.write_bytes(b"new state" * 2000)
        found.append(len(said))
        return said

    client.left = 0
    monkeypatch.setattr(JobFiles, "everywhere", write_again)
    cp(world, monkeypatch, "hers:results", str(tmp_path / "mine"))
    assert found == [1, 1]
    assert [path.read_bytes() for path in (tmp_path / "mine").iterdir()] == [b"new state" * 2000]


def test_two_copies_of_one_file_at_once_and_one_that_is_too_long_spoil_nothing(
    world: World, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, target = JobFiles(broken(world), {"n1": world.record}, "hers", "work"), tmp_path / "model.pt"
    ((file,),) = files.everywhere("results/model.pt").values()
    with pytest.raises(ServiceError, match="broke off"):
        files.fetch(["n1"], "results/model.pt", file, target)
    (part,) = tmp_path.glob(".adaptdl-*")
    with part.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(copy.CommandError, match="is being written by another adaptdl cp"):
            cp(world, monkeypatch, "hers:results/model.pt", str(target))
        other.write(b"x" * 20_000)
    files.fetch(["n1"], "results/model.pt", file, target)
    assert target.read_bytes() == b"0123456789" * 1000
    short = replace(file, size=5000)
    # a node that sends more than it was asked for
    monkeypatch.setattr(Broken, "download", lambda *given: given[-1](b"x" * 6000))
    with pytest.raises(ServiceError, match="sends more of"):
        files.fetch(["n1"], "results/model.pt", short, tmp_path / "short")


def test_a_name_that_is_not_utf_8_travels(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = world.directory.work("hers@1")
    folder.mkdir(parents=True)
    odd = os.fsdecode(b"caf\xe9 \n%2F")
    (folder / odd).write_text("odd")
    cp(world, monkeypatch, "hers", str(tmp_path / "mine"))
    assert (tmp_path / "mine" / odd).read_text() == "odd"


def test_a_file_of_events_is_fetched_as_far_as_it_has_grown(world: World, tmp_path: Path) -> None:
    folder, mine = world.directory.work("hers@1") / "runs", tmp_path / "mine"
    folder.mkdir(parents=True)
    files = JobFiles(world.client("alice"), {"n1": world.record}, "hers", "work")
    for text in ("one", "two"):
        with (folder / "events.out.tfevents.1").open("a") as file:
            file.write(text)
        copy.update_events(files, mine, set())
    assert [path.read_text() for path in mine.rglob("*tfevents*")] == ["onetwo"]


def test_of_a_checkpoint_another_node_is_asked_when_one_breaks_off(
    world: World, work: Path, tmp_path: Path
) -> None:
    gone = replace(world.record, node="n0", port=free_port())
    files = JobFiles(broken(world), {"n0": gone, "n1": world.record}, "hers", "work")
    ((file,),) = files.everywhere("run.sh").values()
    assert "the service of n0" in files.silent["n0"]
    files.fetch(["n0", "n1", "n1"], "run.sh", file, tmp_path / "run.sh")
    assert os.access(tmp_path / "run.sh", os.X_OK)


def test_a_node_that_lists_files_elsewhere_is_not_believed() -> None:
    for path in ("../x", "/x", "a/../../x"):
        with pytest.raises(ValueError, match="it lists a file"):
            RemoteFile(path, 1, 1, False)


def cp(
    world: World, monkeypatch: pytest.MonkeyPatch, *arguments: str, command: click.Command = copy.cp
) -> Result:
    """Run a command as alice, on a cluster whose plan has rank 0 on n1."""
    store, keys = MemoryStore(), Keys("lab")
    world.put(store, keys.submission("hers"), submission_by("alice", "hers"), "alice")
    store.put(keys.service("n1"), encode(world.record))
    plan = Plan("hers", "r", 1, (Placement("n1", 1),), Cause.START, Transition.RESTART, "")
    store.put(keys.job("hers", "plan"), encode(plan))
    reader = SubmissionReader(store.client(), keys, ID)
    contexts.save(world.context)
    for module in (copy, logs):
        monkeypatch.setattr(module, "open_cluster", lambda context: (reader, store.client(), keys))
        monkeypatch.setattr(module, "client_of", lambda context: world.client("alice"))
    return CliRunner().invoke(command, arguments, catch_exceptions=False, standalone_mode=False)


def test_the_command_copies_folders_files_logs_and_checkpoints(
    world: World, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = world.directory.log("hers")
    log.parent.mkdir(parents=True)
    log.write_text("[rank0]: one\n")
    saved = world.directory.checkpoints("hers") / "00000001-g00000-abcd" / "manifest.json"
    saved.parent.mkdir(parents=True)
    saved.write_text("{}")
    mine = tmp_path / "mine"
    said = cp(world, monkeypatch, "hers:results", str(mine))
    assert "1 files, 0.0 MB, from n1" in said.output
    assert [path.name for path in mine.iterdir()] == ["model.pt"]
    cp(world, monkeypatch, "hers:run.sh", str(mine))
    cp(world, monkeypatch, "--logs", "hers", str(mine / "logs"))
    cp(world, monkeypatch, "--checkpoints", "hers", str(mine / "saved"))
    found = {str(path.relative_to(mine)) for path in mine.rglob("*") if path.is_file()}
    assert found == {"model.pt", "run.sh", "logs/output.log", "saved/00000001-g00000-abcd/manifest.json"}


def test_the_kept_log_of_a_node_that_has_gone_is_shown_by_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, text in (("", "[rank0]: one"), ("n0", "2020-11-30T09:15:00Z [rank1]: last"), ("n1", "more")):
        log = world.directory.log("hers", of=node)
        log.parent.mkdir(parents=True)
        log.write_text(f"{text}\n")
    show = partial(cp, world, monkeypatch, command=logs.logs)
    assert show("hers").output == "[rank0]: one\nadaptdl: n0 has gone; what n1 has of its output: --all\n"
    assert show("--all", "hers").output == "[n1] [rank0]: one\n[n0] [rank1]: last\n"
    for since, shown in (("2020-11-30T09:15Z", True), ("2020-11-30T09:15:01+00:00", False), ("0s", False)):
        assert ("last" in show("--all", "--since", since, "hers").output) == shown
    with pytest.raises(click.BadParameter, match="1y: write 10m, 2h or 1d"):
        show("--since", "1y", "hers")


def test_the_page_knows_tensorboard_while_it_runs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[str]()

    class Shown:
        def poll(self) -> int:
            found.append(copy.tensorboard_url(world.context))
            return 0

        wait = terminate = lambda self: 0

    monkeypatch.setattr(copy, "subprocess", SimpleNamespace(Popen=lambda command: Shown()))
    monkeypatch.setattr(copy.importlib.util, "find_spec", lambda name: True)
    cp(world, monkeypatch, "--port", "6007", command=copy.tensorboard)
    assert (found, copy.tensorboard_url(world.context)) == (["http://127.0.0.1:6007/"], "")


def test_a_missing_or_unwritable_file_is_one_line(
    world: World, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(copy.CommandError, match=r"hers:absent is not on n1"):
        cp(world, monkeypatch, "hers:absent", str(tmp_path / "x"))
    with pytest.raises(copy.OptionError, match="--from n7: no such service is registered; registered are n1"):
        cp(world, monkeypatch, "--from", "n7", "hers:run.sh", str(tmp_path / "x"))
    (tmp_path / "file").touch()
    with pytest.raises(copy.CommandError, match=r"cannot be written: .*the same command goes on"):
        cp(world, monkeypatch, "hers:results", str(tmp_path / "file"))
