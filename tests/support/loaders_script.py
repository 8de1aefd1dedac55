"""A training script over a loader of another kind, whose records tell which samples were applied.

LOOP holds settings as JSON: "kind" of the loader, "size", "batch", "epochs", "pace" and "stop" [epoch,
batches]. The data are the numbers below "size"; a batch is a tensor of them, or a dict with one.
"""

import json
import os
import random
from pathlib import Path

import torch
from long_steps import wait
from step_records import record, stop
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

import adaptdl_elastic.torch as adl

S = {
    "kind": "sampler", "size": 60, "batch": 6, "epochs": 1, "pace": 0.0, "stop": None, "workers": 0,
    "autoscale": 0, **json.loads(os.environ["LOOP"]),
}  # fmt: skip
OUT, KIND, SIZE = Path(os.environ["OUT"]), S["kind"], S["size"]


class Numbers(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return index


class Shuffled(Sampler):
    """Draws its order from Python's global stream."""

    def __iter__(self):
        order = list(range(SIZE))
        random.shuffle(order)
        return iter(order)


class Buckets(Sampler):
    """Batches of neighbours, in a random order; the length of sample i is i."""

    def __iter__(self):
        ends = torch.randperm(-(-SIZE // S["batch"]))
        for bucket in ends.tolist():
            yield list(range(bucket * S["batch"], min(SIZE, (bucket + 1) * S["batch"])))


class Stream(IterableDataset):
    """Divides itself among the workers if "divided"; its order is drawn from a global stream."""

    def __iter__(self):
        numbers = list(range(SIZE))
        if "drawn" in KIND:
            random.shuffle(numbers)
        info = get_worker_info()
        if info is not None and "divided" in KIND:
            numbers = numbers[info.id :: info.num_workers]
        return iter(numbers)


def hf(iterable):
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"number": list(range(SIZE))}).with_format("torch")
    if not iterable:
        return rows
    return rows.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=10).with_format("torch")


def made():
    options = {"num_workers": S["workers"]}
    if KIND == "sampler":
        return adl.AdaptiveDataLoader(Numbers(), S["batch"], sampler=Shuffled(), **options)
    if KIND == "weighted":
        sampler = WeightedRandomSampler(torch.ones(SIZE), SIZE, generator=torch.Generator())
        return adl.AdaptiveDataLoader(Numbers(), S["batch"], sampler=sampler, **options)
    if KIND == "batch sampler":
        return adl.AdaptiveDataLoader(Numbers(), batch_sampler=Buckets(), **options)
    if KIND == "loader":
        return adl.AdaptiveDataLoader.from_loader(
            DataLoader(Numbers(), batch_sampler=BatchSampler(Shuffled(), S["batch"], False), **options)
        )
    if KIND == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(Numbers(), batch_size=S["batch"], shuffle=True, **options)
        return adl.AdaptiveDataLoader.from_loader(loader)
    if KIND == "hf map":
        return adl.AdaptiveDataLoader(hf(False), S["batch"], shuffle=True, **options)
    if KIND == "hf iterable":
        return adl.AdaptiveDataLoader(hf(True), S["batch"], **options)
    if KIND == "accelerate":
        import accelerate

        return accelerate.Accelerator(cpu=True).prepare(
            adl.AdaptiveDataLoader(Numbers(), S["batch"], shuffle=True, **options)
        )
    assert "stream" in KIND, KIND
    return adl.AdaptiveDataLoader(Stream(), S["batch"], **options)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))

    def forward(self, index):
        return self.w[index]


def main():
    torch.manual_seed(5)
    random.seed(5 if "ADAPTDL_JOIN" not in os.environ else 6)
    adl.init_process_group("gloo")
    loader = made()
    if S["autoscale"]:
        loader.autoscale_batch_size(S["autoscale"])
    module = Model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = adl.AdaptiveDataParallel(module, optimizer)
    for epoch in adl.remaining_epochs_until(S["epochs"]):
        for count, batch in enumerate(loader, 1):
            numbers = batch["number"] if isinstance(batch, dict) else batch
            helper = adl.current_dataloader()
            record(
                epoch=epoch, samples=numbers.tolist(), local=helper.local_samples, index=helper.current_index,
                window=helper.window_samples,
            )  # fmt: skip
            if S["stop"] == [epoch, count]:
                stop()
            optimizer.zero_grad()
            model(numbers).mean().backward()
            optimizer.step()
            wait(OUT, S["pace"] * (5 if helper.current_index > SIZE / 2 else 1))


if __name__ == "__main__":
    main()
