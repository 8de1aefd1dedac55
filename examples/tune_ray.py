"""Search a learning rate with Ray Tune; the trials share the replicas of a node by goodput.

In a clone of the repository:

pip install '.[ray]'
python examples/tune_ray.py --trials 8 --epochs 10
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from image_data import load
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from torch import nn

import adaptdl_elastic.torch as adl
from adaptdl_elastic.tune import AdaptDLScheduler, AdaptDLTrainableCreator, report


def train(config: dict[str, Any]) -> None:
    """Train a trial; Ray gives the config, and each replica of the trial calls this function."""
    torch.manual_seed(0)
    data = load(None)
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(10))
    model(data.train[0][0][None])  # makes the lazy layers
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    model = adl.AdaptiveDataParallel(model, optimizer)
    loader = adl.AdaptiveDataLoader(data.train, batch_size=32, shuffle=True)
    loader.autoscale_batch_size(512)
    for _ in adl.remaining_epochs_until(config["epochs"]):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        report(accuracy=accuracy(model, data.test))


@torch.no_grad()
def accuracy(model: nn.Module, data: torch.utils.data.Dataset[Any]) -> float:
    """Return the share of images that the model classifies right, of all replicas' images."""
    right = adl.Accumulator()
    for images, labels in adl.AdaptiveDataLoader(data, batch_size=256):
        right["right"] += int((model(images).argmax(1) == labels).sum())
        right["all"] += len(labels)
    with right.synchronized():
        return right["right"] / right["all"]


def main() -> None:
    """Search, and print the best trial."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--storage", help="folder or s3://bucket/prefix that all Ray nodes can use")
    given = parser.parse_args()
    scheduler = AdaptDLScheduler(ASHAScheduler(max_t=given.epochs, grace_period=1))
    found = tune.Tuner(
        AdaptDLTrainableCreator(train),
        param_space={"lr": tune.loguniform(1e-3, 1.0), "epochs": given.epochs},
        tune_config=tune.TuneConfig(
            metric="accuracy", mode="max", num_samples=given.trials, scheduler=scheduler
        ),
        run_config=tune.RunConfig(
            storage_path=given.storage,
            failure_config=tune.FailureConfig(max_failures=3),  # spot machines are taken away
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
        ),
    ).fit()
    best = found.get_best_result()
    print(f"best: accuracy {best.metrics['accuracy']:.4f} with lr={best.config['lr']:.4g}")


if __name__ == "__main__":
    main()
