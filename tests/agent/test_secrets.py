"""What replicas, other nodes and strangers get to know, and what not."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from cluster import Cluster
from elastic_run import ElasticRun
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from adaptdl_elastic._private import RuntimeFileError
from adaptdl_elastic._secrets import machine_secret
from adaptdl_elastic.agent.cluster.run_secret import common_secret
from adaptdl_elastic.agent.launch import store_environment
from adaptdl_elastic.agent.runtime.generation_store import GenerationStore
from adaptdl_elastic.agent.terminal.run_options import parse
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobSpec
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

KEYS = Keys("test")
SPEC = JobSpec(job="job", run="run")


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_nothing_secret_is_in_the_store_where_replicas_meet() -> None:
    kept = GenerationStore("127.0.0.1", None)
    record = kept.open(1)
    stranger = TCPStore("127.0.0.1", record.port, is_master=False)
    assert [key for key in stranger.list_keys() if not key.startswith("init/")] == []
    kept.close()


def test_agents_of_one_user_on_one_machine_have_a_secret_in_common() -> None:
    first, second = (common_secret({}, MemoryStore(), KEYS, confidential=False) for _ in range(2))
    assert first == second
    assert first.one_machine
    assert len(first.value) == 64
    (path,) = Path(os.environ["XDG_RUNTIME_DIR"]).glob("*/secret")
    assert path.stat().st_mode & 0o777 == 0o600


def test_processes_that_make_it_at_once_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: machine_secret(tmp_path / "d"), range(64)))) == 1
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["secret"]


def test_a_file_that_others_could_read_or_write_is_refused(tmp_path: Path) -> None:
    machine_secret(tmp_path / "d")
    (tmp_path / "d" / "secret").chmod(0o644)
    with pytest.raises(RuntimeFileError, match="a secret of your own that nobody else can read"):
        machine_secret(tmp_path / "d")
    (tmp_path / "d").chmod(0o755)
    with pytest.raises(RuntimeFileError, match="a directory of your own"):
        machine_secret(tmp_path / "d")


def test_a_secret_that_was_given_goes_first_and_is_in_no_repr() -> None:
    store = MemoryStore()
    found = common_secret({"ADAPTDL_SECRET": "xyzzy"}, store, KEYS, confidential=True)
    assert found.value == b"xyzzy"
    assert "xyzzy" not in repr(found)
    assert store.range(KEYS.root).items == ()


def test_a_store_that_only_its_users_read_keeps_one_for_all_nodes() -> None:
    store = MemoryStore()
    first, second = (common_secret({}, store, KEYS, confidential=True) for _ in range(2))
    assert first == second
    assert not first.one_machine
    assert store.range(KEYS.root).items[0].key == KEYS.secret


def test_every_run_has_a_secret_of_its_own() -> None:
    common = common_secret({"ADAPTDL_SECRET": "xyzzy"}, MemoryStore(), KEYS, confidential=False)
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
    assert "runs with another secret than this node's; set the same ADAPTDL_SECRET" in line
    first.interrupt()
    first.interrupt()
    first.wait()


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
    options = parse(["--standalone", "--etcd-timeout=9", __file__], FOREIGN)
    assert store_environment(options, FOREIGN) == {"ADAPTDL_ETCD_TIMEOUT": "9", "HOME": "/h"}
    assert os.environ == before


def test_what_the_command_line_says_of_the_store_goes_before_the_environment() -> None:
    options = parse(["--etcd=e:1", "--etcd-ca=/mine", "--rdzv-id=job", __file__], FOREIGN)
    assert store_environment(options, FOREIGN) == {**FOREIGN, "ADAPTDL_ETCD_CA": "/mine"}
