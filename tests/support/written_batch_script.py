"""A script whose schedule counts on `len(loader)`.

LOOP: batch; size, of the data set; epochs; norm, whether the model has a BatchNorm; pace, in seconds;
most, samples that a replica may have in a pass.
Rank 0 writes the length of the loader, the number of the schedule's steps, and the weights.
"""

import json
import os
from pathlib import Path

import torch
from long_steps import wait
from signs import sign
from torch.utils.data import TensorDataset

import adaptdl_elastic.torch as adl

S = {
    "batch": 8,
    "size": 120,
    "epochs": 2,
    "norm": False,
    "most": 0,
    "pace": 0.0,
    **json.loads(os.environ["LOOP"]),
}
OUT = Path(os.environ["OUT"])

torch.manual_seed(1)
data = torch.randn(S["size"], 4, generator=torch.Generator().manual_seed(2))
adl.init_process_group("gloo")
loader = adl.AdaptiveDataLoader(TensorDataset(data, data.sum(1, keepdim=True)), S["batch"], shuffle=True)
net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3) if S["norm"] else torch.nn.Tanh())
net.append(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
if S["most"]:
    loader.autoscale_batch_size(S["batch"], (1, S["most"]), gradient_accumulation=True)
steps = S["epochs"] * (-(-S["size"] // S["batch"]) if S["most"] else len(loader))
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps, cycle_momentum=False)
model = adl.AdaptiveDataParallel(net, optimizer, scheduler)
for epoch in adl.remaining_epochs_until(S["epochs"]):
    counted = adl.Accumulator()
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if adl.is_optim_step():
            scheduler.step()
        counted["samples"] += len(inputs)
        sign("step")
        wait(OUT, S["pace"], epoch)
    with counted.synchronized():
        assert counted["samples"] == S["size"], counted["samples"]
if adl.rank() == 0:
    weights = torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
    (OUT / "result").write_text(json.dumps([len(loader), scheduler.last_epoch, weights]))
