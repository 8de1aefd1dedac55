"""A training script in which one replica is slow, or hangs. Settings come as JSON in the variable LAG."""

import json
import os
import signal
import threading
import time

import torch
import torch.distributed as dist

import adaptdl_elastic.torch as adl

S = {
    "samples": 4096,
    "batch": 24,
    "epochs": 1,
    "rank": 1,
    "slow": {},  # what the replica `rank` is slow in: seconds per batch, by data, forward and communication
    "from": 0,  # first step in which it is
    "until": 10**9,  # first step in which it is not any more
    "hang": None,  # how the replica `rank` hangs
    "step": 5,  # in which step
    **json.loads(os.environ.get("LAG", "{}")),
}
FOREVER = 10_000.0

count = 0


def mine() -> bool:
    return adl.rank() == S["rank"]


def wait(part: str) -> None:
    if mine() and S["from"] <= count < S["until"]:
        time.sleep(S["slow"].get(part, 0.0))


def hang(where: str) -> None:
    """Hang here, if this is the replica and the place to."""
    if (
        S["hang"] != where
        or not mine()
        or count != S["step"]
        or int(os.environ.get("ADAPTDL_NUM_RESTARTS", 0))
    ):
        return
    if where == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif where == "collective":
        dist.barrier()
    elif where == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    else:
        time.sleep(FOREVER)


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return S["samples"]

    def __getitem__(self, index):
        return torch.randn(4)

    def __getitems__(self, indices):
        wait("data")
        hang("data")
        return [self[index] for index in indices]


class Model(torch.nn.Linear):
    def forward(self, inputs):
        wait("forward")
        for where in ("forward", "stopped", "collective", "lock"):
            hang(where)
        return super().forward(inputs)


adl.init_process_group("gloo")
torch.manual_seed(0)
net = Model(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
model = adl.AdaptiveDataParallel(net, optimizer)
loader = adl.AdaptiveDataLoader(Samples(), batch_size=S["batch"], shuffle=True)

if S["slow"].get("communication"):
    plain = dist.all_reduce

    def slow_all_reduce(tensor, *args, **kwargs):
        if tensor.numel() == 5:  # the gradients
            wait("communication")
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = slow_all_reduce

for _ in adl.remaining_epochs_until(S["epochs"]):
    for inputs in loader:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        hang("step")
        optimizer.step()
        count += 1
    if S["hang"] == "evaluation":
        sums = adl.Accumulator()
        count = S["step"]
        hang("evaluation")
        with sums.synchronized():
            pass
