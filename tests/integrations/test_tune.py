"""Ray Tune with real Ray: trials that grow, end early, fail, and go on after their node's death."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [
    pytest.mark.needs("ray"),
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(600),
]

HEAD = """
import json, os, pathlib, signal, time
import ray, torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
import adaptdl_elastic.torch as adl
from adaptdl_elastic.tune import AdaptDLScheduler, AdaptDLTrainableCreator, report

HERE = pathlib.Path.cwd()

def train(config, checkpoint_dir=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    model = adl.AdaptiveDataParallel(model, optimizer)
    x = torch.randn(800, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = adl.AdaptiveDataLoader(data, batch_size=16)
    for epoch in adl.remaining_epochs_until(config.get("epochs", 4)):
        for a, b in loader:
            optimizer.zero_grad()
            loss = (model(a) - b).square().mean()
            loss.backward()
            optimizer.step()
            if config.get("slow") and not (HERE / "go-on").exists():
                time.sleep(len(a) / 400)
        if config["lr"] > 90:
            raise SystemExit("this rate is refused")
        report(mean_loss=loss)

def fit(space, scheduler=None, failures=0, concurrent=2, save_every=0, address=None, **running):
    here = {} if address else {"num_cpus": 3, "include_dashboard": False}
    ray.init(address=address or "local", log_to_driver=False, **here)
    return tune.Tuner(
        AdaptDLTrainableCreator(train),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="mean_loss",
            mode="min",
            scheduler=scheduler or AdaptDLScheduler(),
            max_concurrent_trials=concurrent,
        ),
        run_config=tune.RunConfig(
            storage_path=str(HERE / "results"),
            failure_config=tune.FailureConfig(max_failures=failures),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=save_every),
            **running,
        ),
    ).fit()

def tell(**found):
    (HERE / "found.json").write_text(json.dumps(found))
"""

SHARE = """
class GoOn(tune.Callback):
    def on_trial_result(self, iteration, trials, trial, result, **more):
        if result["replicas"] > 1:
            (HERE / "go-on").touch()

space = {"lr": tune.grid_search([0.01, 0.1, 99]), "slow": True, "epochs": 40}
found = fit(space, callbacks=[GoOn()])
best = found.get_best_result()
tell(
    ends={one.config["lr"]: [one.metrics.get("training_iteration"), str(one.error or "")] for one in found},
    best=best.config["lr"],
)
"""
STOP = """
scheduler = AdaptDLScheduler(ASHAScheduler(max_t=4, grace_period=1, reduction_factor=2))
found = fit({"lr": tune.grid_search([0.1, 1e-9])}, scheduler, concurrent=1)
tell(ends={one.config["lr"]: one.metrics["training_iteration"] for one in found})
"""
KILL = """
import threading
from ray.cluster_utils import Cluster

class Kill(tune.Callback):
    seen = []
    def on_trial_result(self, iteration, trials, trial, result, **more):
        self.seen.append([trial.trial_id, result["training_iteration"], result["epoch"]])
        if len({one for one, *_ in self.seen}) == 2 and result["training_iteration"] >= 2:
            (HERE / "go-on").touch()

def kill():
    while not (HERE / "go-on").exists():
        time.sleep(0.1)
    cluster.remove_node(second, allow_graceful=False)

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
threading.Thread(target=kill, daemon=True).start()
space = {"lr": tune.grid_search([0.01, 0.02]), "slow": True, "epochs": 6}
found = fit(space, failures=3, save_every=1, address=cluster.address, callbacks=[Kill()])
ends = [[one.metrics["training_iteration"], str(one.error or "")] for one in found]
tell(seen=Kill.seen, ends=ends)
ray.shutdown()
cluster.shutdown()
"""


def run(folder: Path, body: str) -> dict[str, Any]:
    """Run a program that searches; return what it tells. No process of a trial may be left."""
    (folder / "search.py").write_text(HEAD + body)
    done = subprocess.run(
        [sys.executable, "search.py"], cwd=folder, capture_output=True, text=True, timeout=400,
        env={**os.environ, "SEARCH": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    left = [process for process in psutil.process_iter(["cmdline", "environ"]) if _of(process, folder)]
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def _of(process: psutil.Process, folder: Path) -> bool:
    """Return whether a process is one of the program's: of Ray, an agent or a replica."""
    return bool(process.info["environ"]) and process.info["environ"].get("SEARCH") == str(folder)


def test_trials_share_a_node_and_one_that_fails_is_one_error(tmp_path: Path) -> None:
    """The two that remain on three slots go on once one of them has more than one replica."""
    found = run(tmp_path, SHARE)
    assert (tmp_path / "go-on").exists(), "no trial grew"
    assert found["best"] == 0.1
    assert found["ends"]["0.01"] == found["ends"]["0.1"] == [40, ""]
    assert "this rate is refused" in found["ends"]["99"][1]


def test_a_scheduler_of_ray_ends_a_trial_early(tmp_path: Path) -> None:
    ends = run(tmp_path, STOP)["ends"]
    assert ends["0.1"] == 4
    assert ends["1e-09"] == 1


def test_a_trial_whose_node_dies_goes_on_elsewhere_from_its_checkpoint(tmp_path: Path) -> None:
    """Two Ray nodes with a trial each; no report is lost, and none is counted twice."""
    found = run(tmp_path, KILL)
    assert found["ends"] == [[6, ""], [6, ""]]
    assert all(iteration == epoch + 1 for _, iteration, epoch in found["seen"]), found["seen"]
    for trial in {trial for trial, *_ in found["seen"]}:
        assert {epoch for one, _, epoch in found["seen"] if one == trial} == set(range(6))


def test_the_example_finds_a_rate(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "tune_ray.py"
    variables = {**os.environ, "HOME": str(tmp_path), "RAY_ADDRESS": "local"}
    done = subprocess.run(
        [sys.executable, example, "--trials", "2", "--epochs", "1"],
        cwd=tmp_path, capture_output=True, text=True, timeout=400, env=variables,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "best: accuracy 0." in done.stdout
