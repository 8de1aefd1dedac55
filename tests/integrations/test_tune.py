"""Ray Tune with real Ray: trials grow, end early, fail, are cloned, and outlive a node and the driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import ended

pytestmark = [
    pytest.mark.needs("ray"),
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(1000),
]

HEAD = """
import json, os, pathlib, signal, time
import ray, torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
import adaptdl_elastic.torch as adl
from adaptdl_elastic.tune import AdaptDLScheduler, AdaptDLTrainableCreator, report

HERE = pathlib.Path.cwd()

def train(config, checkpoint_dir=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model.register_buffer("origin", torch.tensor(config["lr"]))  # of a clone: that of the other trial
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    model = adl.AdaptiveDataParallel(model, optimizer)
    optimizer.param_groups[0]["lr"] = config["lr"]
    x = torch.randn(800, 4)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = adl.AdaptiveDataLoader(data, batch_size=16)
    reported = None
    for epoch in adl.remaining_epochs_until(config.get("epochs", 4)):
        waits = True
        while waits:
            for a, b in loader:
                optimizer.zero_grad()
                loss = (model(a) - b).square().mean()
                loss.backward()
                optimizer.step()
                if config.get("slow") and not (HERE / "go-on").exists():
                    time.sleep(len(a) / 400)
            held = epoch >= config.get("hold_at", 1000) and not (HERE / "go-on").exists()
            waits = held or reported == 2 and config.get("saved_after_3")  # trains until Ray pauses it
            time.sleep(0.2 if waits else 0)  # leaves the processor to the others
        if config["lr"] > 90:
            raise SystemExit("this rate is refused")
        report(mean_loss=loss, rate=optimizer.param_groups[0]["lr"], origin=model.module.origin)
        reported = epoch

def fit(space, scheduler=None, failures=0, concurrent=2, save_every=0, address=None, most=None, **running):
    here = {} if address else {"num_cpus": 3, "include_dashboard": False}
    ray.init(address=address or "local", log_to_driver=False, **here)
    return tune.Tuner(
        AdaptDLTrainableCreator(train, max_workers=most),
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
CLONE = """
class See(tune.Callback):
    seen = []
    def on_trial_result(self, iteration, trials, trial, result, **more):
        names = ("training_iteration", "epoch", "rate", "origin")
        self.seen.append([trial.trial_id[-1], *(result[name] for name in names)])

scheduler = PopulationBasedTraining(
    perturbation_interval=3, time_attr="training_iteration", quantile_fraction=0.5, resample_probability=0,
    hyperparam_mutations={"lr": tune.uniform(0.01, 0.05)}, synch=True,
)
space = {"lr": tune.grid_search([0.02, 1e-6]), "epochs": 6, "saved_after_3": True}
found = fit(space, AdaptDLScheduler(scheduler), most=1, callbacks=[See()])
tell(seen=See.seen, errors=[str(one.error or "") for one in found])
"""
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
DIE = """
def written(trials):
    # whether Ray has written a state in which all trials have reported twice; it writes files bit by bit
    staged = list(pathlib.Path(trials[0].storage.experiment_driver_staging_path).glob("*state-*.json"))
    for file in staged:
        copy = pathlib.Path(trials[0].storage.experiment_fs_path) / file.name
        if not copy.exists() or copy.stat().st_mtime_ns < file.stat().st_mtime_ns:
            return False
        if copy.read_bytes() != file.read_bytes():
            return False
    known = [json.loads(file.read_text())["trial_data"] for file in staged if "experiment" in file.name]
    results = [json.loads(metadata)["last_result"] for trials in known for _, metadata in trials]
    return len(results) == 2 and all(result.get("training_iteration", 0) > 1 for result in results)

class See(tune.Callback):
    def on_trial_result(self, iteration, trials, trial, result, **more):
        seen = [os.getpid(), trial.trial_id, result["training_iteration"], result["epoch"]]
        with (HERE / "seen.jsonl").open("a") as file:
            file.write(json.dumps(seen) + "\\n")

    def on_step_end(self, iteration, trials, **more):
        if not (HERE / "go-on").exists() and trials and written(trials):
            os.kill(os.getpid(), signal.SIGKILL)

space = {"lr": tune.grid_search([0.01, 0.02]), "hold_at": 4, "epochs": 6}
fit(space, save_every=1, address=os.environ["CLUSTER"], callbacks=[See()])
"""
RESTORE = """
(HERE / "go-on").touch()
ray.init(address=os.environ["CLUSTER"], log_to_driver=False)
(place,) = (HERE / "results").iterdir()
found = tune.Tuner.restore(str(place), AdaptDLTrainableCreator(train)).fit()
tell(ends=[[one.metrics["training_iteration"], str(one.error or "")] for one in found])
"""


def run(folder: Path, body: str) -> dict[str, Any]:
    """Run a program that searches; return what it tells. No process of a trial may be left."""
    done = search(folder, body)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    nothing_is_left(folder)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


def search(folder: Path, body: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program that searches, and wait for its end."""
    (folder / "search.py").write_text(HEAD + body)
    return ended(
        [sys.executable, "search.py"], folder, env={**variables_of(folder), **variables}, timeout=900
    )


def variables_of(folder: Path) -> dict[str, str]:
    """Mark the program's processes; let Ray's workers have as much of a busy processor as others have."""
    return {**os.environ, "SEARCH": str(folder), "RAY_worker_niceness": "0"}


def nothing_is_left(folder: Path, what: str = "") -> None:
    """Check that the program's processes end, or those with `what` in their command."""
    found = psutil.process_iter(["cmdline", "environ"])
    left = [process for process in found if _of(process, folder) and what in str(process.info["cmdline"])]
    _, alive = psutil.wait_procs(left, timeout=60)
    assert not alive


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


def test_a_clone_goes_on_from_the_other_trial_with_a_rate_of_its_own(tmp_path: Path) -> None:
    """Both trials are saved and resumed at the third report, and at the last, when their jobs are done."""
    found = run(tmp_path, CLONE)
    assert found["errors"] == ["", ""]
    assert all(iteration == epoch + 1 for _, iteration, epoch, *_ in found["seen"]), found["seen"]
    for trial in "01":
        assert [epoch for one, _, epoch, *_ in found["seen"] if one == trial] == list(range(6)), found["seen"]
    clone = [(rate, origin) for trial, _, _, rate, origin in found["seen"] if trial == "1"]
    assert clone[:3] == [(1e-6, pytest.approx(1e-6))] * 3
    assert clone[3] in [(rate, pytest.approx(0.02)) for rate in (0.016, 0.024)]


@pytest.mark.timeout(2000)  # two searches
def test_a_search_whose_driver_is_killed_is_restored(tmp_path: Path) -> None:
    """The Ray cluster lives on; the trials go on from the checkpoints of which Ray has written a note."""
    variables = {"TUNE_GLOBAL_CHECKPOINT_S": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=variables_of(tmp_path),
    ) as cluster:  # fmt: skip
        assert cluster.stdout is not None
        variables["CLUSTER"] = cluster.stdout.readline().strip()
        killed = search(tmp_path, DIE, **variables)
        assert killed.returncode == -signal.SIGKILL, killed.stdout[-3000:] + killed.stderr[-3000:]
        nothing_is_left(tmp_path, "adaptdl_elastic.agent")
        restored = search(tmp_path, RESTORE, **variables)
        assert restored.returncode == 0, restored.stdout[-3000:] + restored.stderr[-3000:]
    nothing_is_left(tmp_path)
    assert json.loads((tmp_path / "found.json").read_text())["ends"] == [[6, ""], [6, ""]]
    seen = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert all(iteration == epoch + 1 for *_, iteration, epoch in seen), seen
    second = seen[-1][0]
    for trial in {trial for _, trial, *_ in seen}:
        epochs = [epoch for driver, one, _, epoch in seen if (driver, one) == (second, trial)]
        assert epochs == list(range(epochs[0], 6)), seen
        assert epochs[0] > 0, "it goes on from a checkpoint"


def test_the_example_finds_a_rate(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "tune_ray.py"
    variables = {**variables_of(tmp_path), "HOME": str(tmp_path), "RAY_ADDRESS": "local"}
    done = ended(
        [sys.executable, example, "--trials", "2", "--epochs", "1"], tmp_path, env=variables, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "best: accuracy 0." in done.stdout
