"""An etcd that comes back empty (a container without a volume), or with the data of a backup."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster import EPOCHS, LONG, TRAIN
from elastic_run import PATIENCE, ElasticRun
from etcd_server import EtcdServer
from polling import until

pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("how", ["empty", "older"])
def test_a_job_goes_on_in_a_store_that_has_lost_it(tmp_path: Path, how: str) -> None:
    data, backup = tmp_path / "etcd", tmp_path / "backup"
    with EtcdServer(data_dir=data) as etcd, ExitStack() as stack:

        def start(node: str) -> ElasticRun:
            where = [f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", f"--node-name={node}"]
            rest = ["--nnodes=1:2", "--no-autoscale", "--checkpoint-path=saved", TRAIN, *LONG]
            return stack.enter_context(ElasticRun([*where, *rest], tmp_path))

        def scale(replicas: int) -> None:
            seen, command = len(first.events), ["scale", "job", "--replicas", str(replicas)]
            until(
                "no job", lambda: first.adaptdl(*command, "--etcd", etcd.endpoint).returncode == 0, PATIENCE
            )
            first.wait_for_event("generation", after=seen, replicas=replicas)

        first = start("first")
        first.wait_for_event("generation", replicas=1)
        if how == "older":
            etcd.kill()
            shutil.copytree(data, backup)
            etcd.start()  # with its own data
        second = start("second")
        scale(2)
        etcd.kill()
        seen = len(first.events)
        first.wait_for_event("epoch", after=seen)  # training goes on meanwhile
        shutil.rmtree(data)
        if how == "older":
            shutil.copytree(backup, data)
        etcd.start()
        until("nothing is written back", lambda: "writes back what it knows" in first.text() + second.text())
        scale(1)
        scale(2)
        changes = first.of("generation")
        assert [one["generation"] for one in changes] == sorted({one["generation"] for one in changes})
        assert {one["transition"] for one in changes[1:]} == {"inplace"}
        row = json.loads(first.adaptdl("ls", "--json", "--etcd", etcd.endpoint).stdout)[0]
        assert (row["state"], row["replicas"]) == ("running", 2)
        (tmp_path / "hurry").touch()
        assert (first.wait(), second.wait()) == (0, 0)
        assert not first.of("failure")
        assert first.samples() == dict.fromkeys(range(EPOCHS), 200)
