"""`srun adaptdl-run` in a real Slurm: the batch file of docs/howto/slurm.md, on three nodes."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from etcd_server import EtcdServer
from polling import until
from slurm_cluster import Slurm
from slurm_script import TRAIN, batch_file, epochs

from adaptdl_elastic.agent.cluster.job_joining import live_agents
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.services.service_config import ServiceDirectory
from adaptdl_elastic.rendezvous.store.base import StoreAuthError
from adaptdl_elastic.rendezvous.store.connect import connect
from adaptdl_elastic.rendezvous.store.store_options import StoreOptions

pytestmark = [pytest.mark.processes, pytest.mark.etcd, pytest.mark.slow, pytest.mark.exhaustive]


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    """The batch file of the page, beside a script."""
    text = batch_file("test_slurm")
    assert len(text.splitlines()) <= 8
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "train.sbatch").write_text(text)
    return tmp_path / "train.sbatch"


def meeting_place(batch: Path, job: str, restart: int = 0) -> ServiceDirectory:
    return ServiceDirectory(batch.parent / ".adaptdl" / f"slurm-{job}" / ".slurm" / f"{job}.0.{restart}")


def agents(place: ServiceDirectory, job: str) -> int:
    """Return how many agents are registered in the store of a step."""
    with connect(place.read_config().endpoint, options=place.store_options()) as store:
        return len(live_agents(store, Keys("default"), f"slurm-{job}"))


def trains_on(batch: Path, job: str, nodes: int, restart: int = 0) -> ServiceDirectory:
    """Wait until so many agents have joined and an epoch is over; return where they meet."""
    place = meeting_place(batch, job, restart)
    until("the store is not served", (place.path / "service.json").exists)
    until("agents are absent", lambda: agents(place, job) == nodes, pause=0.2)
    until("no epoch is over", lambda: any(line[0] == restart for line in epochs(batch)))
    return place


def etcds() -> list[psutil.Process]:
    """Return the etcds of steps that run."""
    return [one for one in psutil.process_iter(["cmdline"]) if "/adaptdl-step-" in str(one.info["cmdline"])]


def left(place: ServiceDirectory) -> list[str]:
    """Return what is left in a meeting place, and the etcds of steps that run."""
    return [path.name for path in place.path.iterdir()] + [str(one) for one in etcds()]


def test_a_requeued_job_goes_on_and_comes_to_its_end(slurm: Slurm, batch: Path) -> None:
    job = slurm.submit(batch)
    place = trains_on(batch, job, nodes=3)
    assert {path.stat().st_mode & 0o077 for path in (place.path, *place.path.glob("*password"))} == {0}
    without = StoreOptions(ca=place.ca, cert=place.cert, key=place.key)
    with pytest.raises(StoreAuthError):
        connect(place.read_config().endpoint, options=without)
    ended = etcds()
    for etcd in ended:
        etcd.terminate()
    until("etcd has not ended", lambda: not any(one.is_running() for one in ended))
    until("etcd is not started again", etcds)
    slurm.run("scontrol", "requeue", job)
    again = trains_on(batch, job, nodes=3, restart=1)
    seen = epochs(batch)
    assert [epoch for _, epoch in seen] == sorted({epoch for _, epoch in seen}), "an epoch was repeated"
    (batch.parent / "finish").touch()
    until("the job has not ended", lambda: slurm.state(job) == "COMPLETED 0:0")
    assert left(again) == ["ended"]


def test_a_job_is_requeued_before_its_time_limit(slurm: Slurm, batch: Path) -> None:
    job = slurm.submit(batch, "--nodes=2", "--time=2")
    until("the job was not requeued", lambda: len({restart for restart, _ in epochs(batch)}) > 1)
    (batch.parent / "finish").touch()
    until("the job has not ended", lambda: slurm.state(job) == "COMPLETED 0:0")
    seen = [epoch for _, epoch in epochs(batch)]
    assert seen == sorted(set(seen)), "an epoch was repeated"
    assert "this node will be gone: the time limit" in printed(batch)


def test_a_preempted_job_is_requeued_while_another_one_trains(slurm: Slurm, batch: Path) -> None:
    text = batch.read_text().replace("adaptdl-run", "adaptdl-run --rdzv-id=shared --nnodes=1:3")
    batch.write_text(text)
    with EtcdServer() as etcd, connect(etcd.endpoint) as store:
        how = "--nodes=1", f"--export=ALL,ADAPTDL_ETCD={etcd.endpoint}"
        jobs = [slurm.submit(batch, *how) for _ in range(2)]

        def joined(nodes: int) -> bool:
            return len(live_agents(store, Keys("default"), "shared")) == nodes

        until("agents are absent", lambda: joined(2), pause=0.2)
        until("no epoch is over", lambda: epochs(batch))
        (batch.parent / "owner").write_text("#!/bin/sh\nuntil [ -e ended ]; do sleep 0.1; done\n")
        slurm.submit(batch.parent / "owner", "--partition=owner", "--nodes=2")
        until("no job was preempted", lambda: "is requeued" in printed(batch), pause=0.2)
        until("its agent has not left", lambda: joined(1), pause=0.2)
        before = len(epochs(batch))
        until("the other job does not go on", lambda: len(epochs(batch)) > before + 1)
        (batch.parent / "ended").touch()
        until("the job does not come back", lambda: joined(2), pause=0.2)
        (batch.parent / "finish").touch()
        until("jobs have not ended", lambda: {*map(slurm.state, jobs)} == {"COMPLETED 0:0"}, pause=0.2)
    assert printed(batch).count("is requeued") == 1


def printed(batch: Path) -> str:
    """Return what all jobs have printed."""
    return "".join(file.read_text() for file in batch.parent.glob("train-*.out"))


def test_the_first_node_serves_the_store_until_the_last_one_has_left(slurm: Slurm, batch: Path) -> None:
    job = slurm.submit(batch, "--nodes=2")
    place = trains_on(batch, job, nodes=2)
    first = next(one for one in psutil.process_iter(["cmdline"]) if is_agent(one, job, "0"))
    first.terminate()
    until("the first agent has not left", lambda: agents(place, job) == 1, pause=0.2)
    before = len(epochs(batch))
    until("the other node does not go on", lambda: len(epochs(batch)) > before + 1)
    slurm.run("scancel", job)
    until("the job has not ended", lambda: "CANCELLED" in slurm.state(job))
    until("the step is not over", lambda: left(place) == ["ended"])
    assert list(place.path.parents[1].glob("0*")), "no checkpoint was saved"
    assert "requeued" not in printed(batch)


def is_agent(process: psutil.Process, job: str, task: str) -> bool:
    """Return whether this is the agent of a task of a job."""
    words = process.info["cmdline"] or [""]
    if not any(word.endswith("/adaptdl-run") for word in words[:2]):
        return False
    found = process.environ()
    return (found.get("SLURM_JOB_ID"), found.get("SLURM_PROCID")) == (job, task) and "srun" not in words[0]


def test_a_killed_node_a_drained_one_and_a_controller_that_is_away_end_no_training(
    slurm: Slurm, batch: Path
) -> None:
    job = slurm.submit(batch, "--nodes=2")
    place = trains_on(batch, job, nodes=2)
    slurm.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=test")
    (controller,) = (one for one in psutil.process_iter(["name"]) if one.info["name"] == "slurmctld")
    controller.suspend()
    try:
        named = {"SLURM_JOB_ID": job, "SLURM_PROCID": "1"}
        of_second = [
            one
            for one in psutil.process_iter(["environ"])
            if named.items() <= (one.info["environ"] or {}).items()
        ]
        for process in of_second:
            process.kill()
        until("the lost node is still there", lambda: agents(place, job) == 1, pause=0.2)
        seen = len(epochs(batch))
        until("the other node does not train on", lambda: len(epochs(batch)) > seen + 1)
    finally:
        controller.resume()
    (batch.parent / "finish").touch()
    until("the job has not ended", lambda: slurm.state(job).split()[0] in ("COMPLETED", "FAILED"))
    assert [epoch for _, epoch in epochs(batch)] == list(range(len(epochs(batch))))
    assert left(place) == ["ended"]
    slurm.run("scontrol", "update", "NodeName=n3", "State=RESUME")
