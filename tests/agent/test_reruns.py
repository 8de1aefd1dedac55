"""Another run of a job that has ended: its generations go on where the last run's have stopped."""

from __future__ import annotations

import psutil
import pytest
from cluster import JOB, Cluster
from elastic_run import ElasticRun

pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]


def is_after(run: ElasticRun, generation: int, **fields: object) -> dict[str, object]:
    return run.wait_for(
        lambda e: (
            e["event"] == "generation"
            and e["generation"] > generation
            and all(e[name] == value for name, value in fields.items())
        )
    )


def test_another_run_changes_in_place_and_survives_deaths(cluster: Cluster) -> None:
    first = cluster.train("a", "--nproc-per-node=1:2")
    first.wait_for_event("generation")
    cluster.scale(2, first)
    cluster.finish(first)
    (cluster.directory / "hurry").unlink()
    run = cluster.train("a", "--nproc-per-node=1:2", "--anew")
    begun = run.wait_for_event("generation")
    assert begun["generation"] > 0
    grown = cluster.scale(2, run)
    assert grown["transition"] == "inplace", run.text()
    generation = grown["generation"]
    pids = run.wait_for_event("started", generation=generation)["pids"]
    psutil.Process(pids["1"]).kill()
    survived = is_after(run, generation, replicas=1)  # type: ignore[arg-type]
    assert survived["transition"] == "recover", run.text()
    assert is_after(run, survived["generation"], replicas=2)["transition"] == "inplace"  # type: ignore[arg-type]
    assert "goodput" in cluster.ask("status", JOB, "--json")
    cluster.finish(run)
    assert run.of("failure") == []
