"""How long a checkpoint holds the training step, and how long it takes to write and to load.

python benchmarks/checkpoint.py --params 10M

A model of that many parameters with Adam (three tensors of its size) is trained on dummy steps of a fixed
CPU cost; every few steps a background checkpoint is taken. Reported are medians: the hold (the time that
`save_all_states` takes from the loop), the longest step while a checkpoint is being written against the
median step without one, the write in the background, and the verified load.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from typing import Any

import torch
from figures import here

from adaptdl_elastic import _session, checkpoint


class Model(checkpoint.TensorState):
    def __init__(self, parameters: int) -> None:
        super().__init__("model")
        size = parameters // 10
        self.tensors = {f"{kind}{n}": torch.randn(size) for kind in "pmv" for n in range(10)}

    def state_dict(self) -> Any:
        return self.tensors

    def load_state_dict(self, state_dict: Any) -> None:
        for name, tensor in state_dict.items():
            self.tensors[name].copy_(tensor)


def step(a: torch.Tensor, b: torch.Tensor) -> float:
    begun = time.perf_counter()
    for _ in range(4):
        torch.mm(a, b)
    return time.perf_counter() - begun


def measure(parameters: int, saves: int, folder: str) -> dict[str, float]:
    os.environ["ADAPTDL_CHECKPOINT_PATH"] = folder
    _session.reset()
    model = Model(parameters)
    a, b = torch.randn(2, 400, 400)
    quiet = [step(a, b) for _ in range(50)]
    holds, writes, during, busy = [], [], [], []
    for _ in range(saves):
        done: list[checkpoint.Saved] = []
        begun = time.perf_counter()
        checkpoint.save_all_states(kind="request", background=True, done=done.append)
        holds.append(time.perf_counter() - begun)
        used = time.process_time() - time.thread_time()
        while not done:
            during.append(step(a, b))
        busy.append(time.process_time() - time.thread_time() - used)
        writes.append(done[0].seconds)
    _session.reset()
    loads = []
    for _ in range(3):
        again = Model(parameters)
        begun = time.perf_counter()
        assert checkpoint.load_state(again)
        loads.append(time.perf_counter() - begun)
        assert torch.equal(again.tensors["p0"], model.tensors["p0"])
        _session.reset()
    clone = time.perf_counter()
    _ = [tensor.clone() for tensor in model.tensors.values()]
    return {
        "megabytes": 3 * 4 * parameters / 1e6,
        "hold_s": statistics.median(holds),
        "plain_clone_s": time.perf_counter() - clone,
        "write_s": statistics.median(writes),
        "write_cpu_s": statistics.median(busy),
        "load_s": statistics.median(loads),
        "step_quiet_s": statistics.median(quiet),
        "step_during_save_s": statistics.median(during),
        "longest_step_during_save_s": max(during),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--params", default="10M", help="parameters, e.g. 10M")
    parser.add_argument("--saves", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    parameters = int(float(args.params.rstrip("M")) * 1e6)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(parameters, args.saves, folder)
    print(json.dumps({**result, **here(), "params": args.params}, indent=1))


if __name__ == "__main__":
    main()
