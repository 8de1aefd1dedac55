from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from coordinator_pump import Pump
from etcd_server import EtcdServer
from forbidden import forbidden, unwritable

from adaptdl_elastic._private import private_directory
from adaptdl_elastic.autoscaler.cli import adaptdl
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger
from adaptdl_elastic.autoscaler.diagnostics import checks
from adaptdl_elastic.autoscaler.diagnostics.checks import Finding, Level
from adaptdl_elastic.autoscaler.diagnostics.rows import node_rows
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import CheckpointRecord, encode
from adaptdl_elastic.rendezvous.store.base import Store, StoreAuthError
from adaptdl_elastic.rendezvous.store.connect import connect
from adaptdl_elastic.rendezvous.store.memory import MemoryStore
from adaptdl_elastic.rendezvous.store.store_options import StoreOptions


def worst(found: list[Finding]) -> Level:
    order = list(Level)
    return max((finding.level for finding in found), key=order.index)


def test_a_good_directory(tmp_path: Path) -> None:
    assert worst(checks.check_directory(tmp_path)) is Level.OK
    assert worst(checks.check_directory(tmp_path / "not" / "yet")) is Level.OK
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (finding,) = checks.check_directory(tmp_path / "file")
    assert (finding.level, finding.remedy) == (Level.ERROR, "choose another --checkpoint-path")


def test_a_directory_that_may_not_be_written_to() -> None:
    with unwritable() as folder:
        for path in (folder, folder / "not" / "yet"):
            assert worst(checks.check_directory(path)) is Level.ERROR


def test_a_directory_below_one_that_may_not_be_entered(tmp_path: Path) -> None:
    with forbidden(tmp_path / "no") as folder:
        for path in (folder / "there", folder / "not" / "yet"):
            (finding,) = checks.check_directory(path)
            assert (finding.level, "cannot be looked at" in finding.detail) == (Level.ERROR, True)
        pump = Pump()
        pump.job("a")
        pump.node("n0", "a")
        record = CheckpointRecord("c1", str(folder / "there"))
        pump.store.put(pump.keys.job("a", "checkpoint"), encode(record))
        assert worst(checks.check_checkpoints(pump.view())) is Level.ERROR


def test_the_address_is_the_one_that_an_agent_gives_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "address_towards", lambda urls: {"http://etcd0:2379": "192.0.2.7"}[urls[0]])
    (finding,) = checks.check_address(None, "etcd0")
    assert (finding.level, finding.detail) == (Level.OK, "192.0.2.7")
    for endpoint in (None, "no endpoint!"):
        (finding,) = checks.check_address(None, endpoint)
        assert socket.gethostname() in finding.detail


def test_an_unreachable_address_is_reported() -> None:
    assert checks.check_address("127.0.0.1")[0].level is Level.WARNING
    assert checks.check_address("no-such-host.invalid")[0].level is Level.ERROR
    assert checks.check_address("a..b")[0].level is Level.ERROR


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("3.3.1", Level.ERROR),
        ("3.5.1", Level.WARNING),
        ("3.5.9", Level.OK),
        ("3.4.23", Level.OK),
        ("3.6.0", Level.OK),
    ],
)
def test_versions_of_etcd(version: str, level: Level) -> None:
    assert checks._version("http://x", version).level is level


class Forbidden(MemoryStore):
    def put(self, *_: object, **__: object) -> int:
        raise StoreAuthError("permission denied")


def test_rights() -> None:
    store: Store = MemoryStore()
    assert worst(checks.check_rights(store, Keys())) is not Level.ERROR
    assert store.range(Keys().root).items == ()
    (finding,) = checks.check_rights(Forbidden(), Keys())
    assert "may not write under /adaptdl/v1/default/" in finding.detail
    assert "grant-permission" in finding.remedy


def test_versions_of_the_others_and_a_cluster_without_a_leader() -> None:
    pump = Pump()
    pump.store.delete(pump.keys.coordinator_leader)
    pump.job("a")
    pump.node("n0", "a").register(version="9.9")
    found = checks.check_cluster(pump.view(), "n1")
    details = {finding.check: finding for finding in found}
    assert details["versions"].level is Level.ERROR
    assert "9.9" in details["versions"].detail
    assert details["coordinator"].level is Level.WARNING


def test_a_gpu_that_cannot_be_used_is_named_once_though_two_jobs_say_so() -> None:
    pump = Pump()
    line = "GPU-7: another program has 20.0 of its 80.0 GiB"
    for job in "ab":
        pump.job(job)
        pump.node("n0", job).register(devices=("GPU-6", "GPU-7"), unusable=(line,))
    (finding,) = checks.check_devices(pump.view())
    assert (finding.level, finding.detail) == (Level.WARNING, f"n0: {line}")
    (row,) = node_rows(pump.view(), Ledger(pump.view()))
    assert (row["unusable"], row["slots"]) == ([line], 1)


def test_the_verdict_of_the_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = private_directory()

    def said(driver: Path = tmp_path) -> list[tuple[Level, str]]:
        return [(one.level, one.detail) for one in checks.check_self_test(driver)]

    assert said(tmp_path / "no driver") == []
    assert said() == [(Level.OK, "has never run; the first job with NCCL runs it")]
    (folder / "selftest-0.json").write_text('{"why": "it hangs", "time": 1.0}')
    assert said() == [(Level.WARNING, "has failed: it hangs")]
    os.utime(folder / "selftest-0.json", (1.0, 1.0))
    assert said() == [(Level.OK, "has never run; the first job with NCCL runs it")], "it is repeated"
    (folder / "selftest-1.json").write_text('{"why": null, "time": 2.0}')
    (folder / "selftest-2.json").write_text('{"why": nul')
    assert said() == [(Level.OK, "has passed")]
    folder.chmod(0o777)
    assert said(tmp_path / "no driver") == []


def test_a_checkpoint_that_is_not_here() -> None:
    pump = Pump()
    pump.job("a")
    pump.node("n0", "a")
    pump.store.put(pump.keys.job("a", "checkpoint"), encode(CheckpointRecord("c1", "/nowhere/c1")))
    (finding,) = checks.check_checkpoints(pump.view())
    assert finding.level is Level.ERROR
    assert "mount the directory" in finding.remedy


def test_nodes_that_share_a_directory_and_nodes_that_do_not(tmp_path: Path) -> None:
    store, shared, own = MemoryStore(), tmp_path / "shared", tmp_path / "own"
    with checks.marked(store, Keys(), "n0", shared) as found:
        assert "no other node" in found[0].detail
    with checks.marked(store, Keys(), "n1", shared) as found:
        assert (found[0].level, found[0].detail) == (Level.OK, "n0 wrote to the same one")
    with checks.marked(store, Keys(), "n2", own) as found:
        assert found[0].level is Level.ERROR
        assert "n0, n1 ran the doctor on a directory that is not this one" in found[0].detail


def test_old_marks_are_forgotten(tmp_path: Path) -> None:
    store = MemoryStore()
    store.put(
        Keys().root + "doctor/marks/n9", json.dumps({"token": "x", "time": time.time() - checks.FRESH - 1})
    )
    with checks.marked(store, Keys(), "n0", tmp_path) as found:
        assert found[0].level is Level.OK


def test_marks_are_neither_written_nor_deleted_behind_a_link(tmp_path: Path) -> None:
    users, mark = tmp_path / "users", tmp_path / "place" / ".adaptdl-doctor"
    users.mkdir()
    (users / "thesis.txt").write_text("mine")
    os.utime(users / "thesis.txt", (0, 0))
    mark.parent.mkdir()
    mark.symlink_to(users)
    with checks.marked(MemoryStore(), Keys(), "n0", mark.parent) as found:
        assert (found[0].level, "it is a link: remove it" in found[0].detail) == (Level.ERROR, True)
    mark.unlink()
    mark.mkdir()
    (mark / "n0").symlink_to(users / "thesis.txt")
    with checks.marked(MemoryStore(), Keys(), "n0", mark.parent) as found:
        assert found[0].level is Level.OK
    assert (users / "thesis.txt").read_text() == "mine"


@pytest.mark.etcd
def test_the_whole_examination(etcd: EtcdServer, keys: Keys, tmp_path: Path) -> None:
    with connect(etcd.endpoint) as store:
        before = store.range("").items
        arguments = ["doctor", "--etcd", etcd.endpoint, "--cluster", keys.cluster, "--node", "n0"]
        arguments += ["--local-addr", "127.0.0.1", "--checkpoint-path", str(tmp_path)]
        result = CliRunner().invoke(adaptdl, [*arguments, "--json"])
        found = {row["check"]: row["level"] for row in json.loads(result.stdout)}
        assert "error" not in found.values()
        assert {"python", "torch", "store", "rights", "store latency", "shared directory"} <= set(found)
        left = {item.key for item in store.range("").items} - {item.key for item in before}
        assert left <= {f"{keys.root}doctor/marks/n0"}


def test_a_store_that_is_not_there() -> None:
    found = checks.check_server("127.0.0.1:1", StoreOptions(timeout=2.0))
    assert found[0].level is Level.ERROR
    result = CliRunner().invoke(adaptdl, ["doctor", "--etcd", "127.0.0.1:1"], standalone_mode=False)
    assert result.return_value == 1
    assert "does not answer" in result.output
    assert "-> is etcd running" in result.output
