"""Train with worker processes of a kind: of a data loader (fork, spawn, persistent), or of a pool."""

import multiprocessing
import sys
import time
from pathlib import Path

import torch

import adaptdl_elastic.torch as adl


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        return torch.ones(1) * index


def main(kind):
    adl.init_process_group("gloo")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    model = adl.AdaptiveDataParallel(model, optimizer)
    pool = multiprocessing.get_context("fork").Pool(2) if kind == "pool" else None
    options = {
        "spawn": {"multiprocessing_context": "spawn", "num_workers": 1},
        "persistent": {"persistent_workers": True, "num_workers": 2},
        "fork": {"num_workers": 2},
    }
    loader = adl.AdaptiveDataLoader(Numbers(), batch_size=4, **options.get(kind, {}))
    for _ in adl.remaining_epochs_until(100):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            time.sleep(0.05)
            if pool is not None:
                assert pool.map(abs, [-1, -2]) == [1, 2]
            Path("stepped").touch()


if __name__ == "__main__":
    main(sys.argv[1])
