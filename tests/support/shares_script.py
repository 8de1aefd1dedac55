"""A training script whose replicas have unequal speeds; its final weights tell how often each sample counted.

The loss of a batch is the mean of w[i] over its samples, and the learning rate is the batch size. So a step
that averages over the samples of all replicas moves w[i] of each of them by exactly -1, whatever each replica
took. Settings come as JSON in SHARES.
"""

import json
import os
import signal
import time
from pathlib import Path

import torch

import adaptdl_elastic.torch as adl
from adaptdl_elastic.torch.scaling_rules import LinearScale

S = {
    "samples": 64 * 30,
    "batch": 64,
    "epochs": 1,
    "seconds": 0.001,  # per sample, at speed 1
    "speeds": [1.0, 0.4],  # by rank
    "share": True,
    "die": None,  # step in which rank 1 kills itself
    **json.loads(os.environ.get("SHARES", "{}")),
}
OUT = Path(os.environ["OUT"])
count = 0


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(S["samples"], dtype=torch.float64))

    def forward(self, index):
        if adl.batch_counts():
            speed = S["speeds"][adl.rank()] if adl.rank() < len(S["speeds"]) else 1.0
            time.sleep(len(index) * S["seconds"] / speed)
        return self.w[index]


adl.init_process_group("gloo")
torch.manual_seed(0)
net = Model()
optimizer = torch.optim.SGD(net.parameters(), lr=float(S["batch"]))
model = adl.AdaptiveDataParallel(net, optimizer, scaling_rule=LinearScale())
loader = adl.AdaptiveDataLoader(range(S["samples"]), batch_size=S["batch"], shuffle=True)
loader.share_by_speed(S["share"])

with (OUT / f"steps-{os.getpid()}").open("w", buffering=1) as steps:
    for _ in adl.remaining_epochs_until(S["epochs"]):
        for index in loader:
            if S["die"] == count and adl.rank() == 1 and int(os.environ.get("ADAPTDL_NUM_RESTARTS", 0)) == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(index).mean().backward()
            optimizer.step()
            count += 1
            line = {
                "time": time.monotonic(),
                "rank": adl.rank(),
                "size": adl.world_size(),
                "took": len(index),
            }
            steps.write(json.dumps(line) + "\n")

(OUT / f"weights-{adl.rank()}").write_text(json.dumps(net.w.tolist()))
