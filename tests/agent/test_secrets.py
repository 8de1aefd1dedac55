"""What replicas, other nodes and strangers get to know, and what not."""

from __future__ import annotations

import grp
import os
import pwd
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from cluster import Cluster
from elastic_run import ElasticRun
from odd_files import ODD

from adaptdl_elastic import _secrets
from adaptdl_elastic._private import RuntimeFileError
from adaptdl_elastic._secrets import file_in, machine_secret, secret_in
from adaptdl_elastic.agent.cluster.run_secret import CommonSecret, common_secret, invitation, refusal
from adaptdl_elastic.agent.taking_part import LaunchError, check_checkpoint_path, invite, store_environment
from adaptdl_elastic.agent.terminal.run_options import parse
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobSpec
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

KEYS = Keys("test")
SPEC = JobSpec(job="job", run="run")


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def secret_of(
    folder: Path, environ: dict[str, str] | None = None, store: Store | None = None
) -> CommonSecret:
    """Return what an agent with this folder of checkpoints has; a store that is given may keep secrets."""
    return common_secret(environ or {}, store or MemoryStore(), KEYS, store is not None, str(folder))


def test_agents_that_see_the_same_folder_of_checkpoints_have_the_same_secret(tmp_path: Path) -> None:
    first, second = secret_of(tmp_path), secret_of(tmp_path)
    assert first == second
    assert len(first.value) == 64
    assert first.place == str(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".secret"]
    assert (tmp_path / ".secret").stat().st_mode & 0o777 == 0o700
    assert file_in(tmp_path).stat().st_mode & 0o777 == 0o600
    (tmp_path / "other").mkdir()
    assert secret_of(tmp_path / "other").value != first.value


def test_a_new_secret_takes_the_place_of_one_that_a_user_removed_or_an_agent_did_not_finish(
    tmp_path: Path,
) -> None:
    (tmp_path / ".secret").mkdir(0o700)
    (tmp_path / ".secret" / ".secret-abc").mkdir(0o700)
    said: list[str] = []
    first = secret_in(tmp_path)
    path = file_in(tmp_path)
    path.unlink()
    second = secret_in(tmp_path, said.append)
    assert second not in (first, b"")
    assert (secret_in(tmp_path), said) == (second, [])
    for end in range(len(second)):
        path.write_bytes(second[:end])
        with pytest.raises(RuntimeFileError, match=f"{path} must be .*: remove it"):
            secret_in(tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize("how", ["cp -a", "of another user", "of an earlier version"])
def test_a_secret_that_came_with_a_folder_is_replaced_once_on_all_nodes(tmp_path: Path, how: str) -> None:
    given, folder, said = tmp_path / "given", tmp_path / "copy", list[str]()
    given.mkdir()
    theirs = secret_in(given)
    subprocess.run(["cp", "-a", given, folder], check=True)
    kept = folder / ".secret"
    (mine,) = kept.iterdir()
    if how == "of another user":
        mine.rename(mine.with_name(f"12345-{kept.stat().st_ino}"))
    elif how == "of an earlier version":
        (mine / "secret").rename(kept / "secret")
    before = {path: path.read_bytes() for path in folder.rglob("secret")}
    with ThreadPoolExecutor(8) as pool:
        (found,) = set(pool.map(lambda _: secret_in(folder, said.append), range(64)))
    assert found not in before.values()
    (line,) = said
    assert line.startswith(f"the secret in {kept} is not of this user and folder")
    assert all(path.read_bytes() == text for path, text in before.items())
    assert secret_in(given) == theirs
    assert [*folder.rglob(".secret-*")] == []


def test_nodes_whose_file_system_numbers_the_folder_otherwise_keep_a_secret_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    found = []
    for inode in (1, 2) * 3:
        monkeypatch.setattr(
            _secrets, "file_in", lambda at, inode=inode: at / ".secret" / f"0-{inode}" / "secret"
        )
        found.append(secret_in(tmp_path, said.append))
    assert (len(set(found)), found[:2] * 3, len(said)) == (2, found, 1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ODD)
def test_an_odd_file_in_place_of_the_secret_is_not_waited_for_and_not_followed(
    tmp_path: Path, kind: str
) -> None:
    secret_in(tmp_path)
    path = file_in(tmp_path)
    path.rename(path.with_name("moved"))
    ODD[kind](path)
    with pytest.raises(RuntimeFileError, match=r"cannot be used .*: remove it, or set ADAPTDL_SECRET"):
        secret_in(tmp_path)


def test_the_machines_secret_is_in_the_runtime_directory(tmp_path: Path) -> None:
    assert machine_secret() == machine_secret()
    (path,) = tmp_path.glob("adaptdl-*/.secret/*/secret")
    assert path.read_bytes() == machine_secret()
    path.parents[2].chmod(0o755)
    # that of another place
    assert path.read_bytes() != machine_secret()


def test_a_secret_that_others_could_read_is_refused(tmp_path: Path) -> None:
    secret_in(tmp_path)
    file_in(tmp_path).chmod(0o644)
    with pytest.raises(RuntimeFileError, match="a secret of your own that nobody else can read"):
        secret_in(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_secret_of_another_user_is_refused_also_in_a_folder_of_that_user(tmp_path: Path) -> None:
    secret_in(tmp_path)
    for path in (file_in(tmp_path), tmp_path / ".secret", tmp_path):
        os.chown(path, 12345, 12345)
        with pytest.raises(RuntimeFileError, match="a secret of your own"):
            secret_in(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_roots_files_that_a_server_shows_as_another_users_are_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS with root_squash does."""
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert secret_in(tmp_path) == secret_in(tmp_path)


@pytest.mark.parametrize(("mode", "group", "members", "refused"), [
    (0o757, "private", [], True),
    (0o1777, "private", [], True),
    (0o775, "private", [], False),
    (0o775, "private", ["private"], False),
    (0o775, "private", ["private", "other"], True),
    (0o775, "shared", [], True),
    (0o755, "shared", ["other"], False),
])  # fmt: skip
def test_a_folder_that_other_users_can_write_is_refused(
    mode: int, group: str, members: list[str], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name=group, gr_mem=members))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="private"))
    tmp_path.chmod(mode)
    if not refused:
        assert secret_in(tmp_path)
        return
    with pytest.raises(RuntimeFileError, match=f"other users can write to {tmp_path}.*chmod go-w {tmp_path}"):
        secret_in(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_secret_that_was_given_goes_first_and_is_in_no_repr(tmp_path: Path) -> None:
    store = MemoryStore()
    found = secret_of(tmp_path, {"ADAPTDL_SECRET": "xyzzy"}, store)
    assert (found.value, found.place) == (b"xyzzy", None)
    assert "xyzzy" not in repr(found)
    assert store.range(KEYS.root).items == ()
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_only_its_users_read_keeps_one_for_all_nodes(tmp_path: Path) -> None:
    store = MemoryStore()
    first, second = secret_of(tmp_path, store=store), secret_of(tmp_path / "other", store=store)
    assert first == second
    assert store.range(KEYS.root).items[0].key == KEYS.secret
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_others_read_gets_no_secret(tmp_path: Path) -> None:
    store = MemoryStore()
    common_secret({}, store, KEYS, confidential=False, checkpoint_path=str(tmp_path))
    assert store.range(KEYS.root).items == ()


def test_a_terminal_shows_the_command_with_the_secret_and_a_log_only_where_it_is(tmp_path: Path) -> None:
    common = secret_of(tmp_path)
    command = "adaptdl-run --nnodes=1:2 train.py"
    assert invitation(common, "node0", command, on_terminal=True) == (
        f"a node that does not see {tmp_path} joins by: ADAPTDL_SECRET={common.value.decode()} {command}"
    )
    line = invitation(common, "node0", command, on_terminal=False)
    assert line is not None
    assert common.value.decode() not in line
    assert f'ADAPTDL_SECRET="$(ssh node0 cat {file_in(tmp_path)})" {command}' in line


def test_a_command_with_options_of_one_node_says_that_another_node_needs_its_own(tmp_path: Path) -> None:
    said: list[str] = []
    own = ["--local-addr=192.0.2.1", "--node-name=a"]
    given = ["--nnodes=1:2", "--rdzv-endpoint=etcd0:2379", *own, __file__]
    invite(parse(given, {}), secret_of(tmp_path), "a", said.append)
    invite(parse([given[0], given[1], __file__], {}), secret_of(tmp_path), "a", said.append)
    assert "joins, with its own --local-addr and --node-name, by: ADAPTDL_SECRET=" in said[0]
    assert "joins by: ADAPTDL_SECRET=" in said[1]


@pytest.mark.processes
def test_the_command_of_a_log_is_typable_whatever_the_name_of_the_folder(tmp_path: Path) -> None:
    """The words after `ssh NODE` are read by a shell of that node, too."""
    folder = tmp_path / "it's of a; $HOME"
    folder.mkdir()
    common = secret_of(folder)
    line = invitation(common, "node0", "printenv ADAPTDL_SECRET", on_terminal=False)
    assert line is not None
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    typed = ["sh", "-c", line.partition(" joins by: ")[2]]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(typed, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == common.value.decode()


def test_a_link_to_a_folder_that_other_nodes_see_counts_as_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nfs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nfs")
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint=str(tmp_path / "nfs"), fstype="nfs4"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    common = CommonSecret(b"x", str(tmp_path / "link"))
    assert invitation(common, "node0", "adaptdl-run train.py", True) is None


@pytest.mark.parametrize("path", ["gs://bucket/job", "s3://", "s3:///job"])
def test_a_place_that_cannot_have_checkpoints_is_refused_in_one_line(path: str) -> None:
    with pytest.raises(LaunchError, match=r"^--checkpoint-path: .*s3://bucket/prefix") as refused:
        check_checkpoint_path(path)
    assert repr(path) in str(refused.value)


@pytest.mark.parametrize(("place", "kind"), [
    (None, "ext4"), ("s3://bucket/job", "ext4"), ("/shared/job", "nfs4"), ("/shared/job", "fuse.sshfs"),
])  # fmt: skip
def test_nothing_is_said_where_other_nodes_see_the_secret_as_well(
    place: str | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = [
        SimpleNamespace(mountpoint="/", fstype="ext4"),
        SimpleNamespace(mountpoint="/shared", fstype=kind),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert invitation(CommonSecret(b"x", place), "node0", "adaptdl-run train.py", True) is None
    assert invitation(CommonSecret(b"x", "/home/job"), "node0", "adaptdl-run train.py", True)


def test_a_refusal_names_the_remedy_for_the_place_of_the_secret() -> None:
    begun = CommonSecret(b"one", "/shared/job")
    spec = replace(SPEC, secret_mark=begun.mark("test", SPEC))
    assert refusal(begun, spec, "test", "node0") is None
    assert refusal(CommonSecret(b"one"), spec, "test", "node0") is None
    assert refusal(CommonSecret(b"two"), replace(SPEC, secret_mark=""), "test", "node0") is None
    local = refusal(CommonSecret(b"two", "/local/job"), spec, "test", "node0")
    assert local is not None
    assert "not in /local/job here: give all nodes a --checkpoint-path that is the same folder" in local
    assert "set the ADAPTDL_SECRET of node0 here, as in the command that node0 printed when" in local
    assert "the command that node0 printed when the run began: ADAPTDL_SECRET=… adaptdl-run …" in local
    given = refusal(CommonSecret(b"two"), spec, "test", "node0")
    assert given is not None
    assert "set the same on all nodes, or give the command that node0 printed" in given


def test_every_run_has_a_secret_of_its_own() -> None:
    common = CommonSecret(b"xyzzy")
    others = [
        common.of_run("test", SPEC),
        common.of_run("test", replace(SPEC, run="run2")),
        common.of_run("test", replace(SPEC, job="job2")),
        common.of_run("test2", SPEC),
        common.mark("test", SPEC),
    ]
    assert len(set(others)) == 5
    assert common.mark("test", SPEC) == common.mark("test", SPEC)


@pytest.mark.etcd
@pytest.mark.timeout(600)
def test_a_node_with_another_secret_is_told_so_and_does_not_join(cluster: Cluster, tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import time; time.sleep(1000)\n")
    first = cluster.start("first", str(script))
    first.wait_for_event("started")
    second = cluster.start("second", str(script), env={"ADAPTDL_SECRET": "other"})
    assert second.wait() == 1
    (line,) = second.text().splitlines()
    assert "runs on first with another ADAPTDL_SECRET than this node has" in line
    first.interrupt()
    first.interrupt()
    first.wait()


@pytest.mark.exhaustive
@pytest.mark.etcd
@pytest.mark.timeout(600)
def test_replicas_are_not_told_how_to_get_into_the_store(tmp_path: Path) -> None:
    script = tmp_path / "names.py"
    script.write_text("import os; print([n for n in os.environ if n.startswith('ADAPTDL_ETCD')], 'seen')\n")
    given = {"ADAPTDL_ETCD_PASSWORD": "hidden", "ADAPTDL_ETCD_USER": "me", "ADAPTDL_ETCD_TIMEOUT": "20"}
    with ElasticRun(["--standalone", str(script)], tmp_path, given) as run:
        assert run.wait() == 0
        assert "[] seen" in run.text()


FOREIGN = {
    "ADAPTDL_ETCD_CA": "/other",
    "ADAPTDL_ETCD_USER": "other",
    "ADAPTDL_ETCD_TIMEOUT": "3",
    "HOME": "/h",
}


def test_a_coordinator_of_a_standalone_job_gets_no_credentials_of_an_etcd() -> None:
    before = dict(os.environ)
    options = parse(["--standalone", "--etcd-timeout=9", "--etcd-user=me", __file__], FOREIGN)
    assert store_environment(options, FOREIGN) == {"ADAPTDL_ETCD_TIMEOUT": "9", "HOME": "/h"}
    assert os.environ == before


def test_the_command_line_goes_before_the_environment_for_the_store() -> None:
    given = {**FOREIGN, "ADAPTDL_ETCD_PASSWORD": "x"}
    options = parse(["--etcd=e:1", "--etcd-ca=/mine", "--etcd-user=me", "--rdzv-id=job", __file__], given)
    mine = {"ADAPTDL_ETCD_CA": "/mine", "ADAPTDL_ETCD_USER": "me"}
    assert store_environment(options, given) == {**given, **mine}
