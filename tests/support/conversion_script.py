"""The README's DistributedDataParallel script, before and after its conversion.

LOOP: converted; ranks, the number that the script was written for; batch, the batch size of each. Each rank
writes the samples and the learning rate of its steps, and the weights at the end.
"""

import json
import os
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import adaptdl_elastic.torch as adl

S = {"batch": 32, **json.loads(os.environ["LOOP"])}
EPOCHS = 2
# the order of the samples does not matter, since all are equal
dataset = TensorDataset(torch.ones(256, 3), torch.full((256, 1), 2.0))
net = torch.nn.Linear(3, 1)
torch.nn.init.constant_(net.weight, 0.5)
torch.nn.init.zeros_(net.bias)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
if S["converted"]:
    adl.init_process_group("gloo")
    loader = adl.AdaptiveDataLoader(dataset, batch_size=int(S["batch"] * S["ranks"]), shuffle=True)
    model = adl.AdaptiveDataParallel(net, optimizer, scheduler)
    epochs = adl.remaining_epochs_until(EPOCHS)
else:
    torch.distributed.init_process_group("gloo")
    loader = DataLoader(dataset, batch_size=S["batch"], sampler=DistributedSampler(dataset))
    model = DistributedDataParallel(net)
    epochs = range(EPOCHS)
steps = []
for _ in epochs:
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        steps.append((len(inputs), optimizer.param_groups[0]["lr"]))
        optimizer.step()
    scheduler.step()
name = f"{'after' if S['converted'] else 'before'}-{os.environ['RANK']}"
Path(os.environ["OUT"], name).write_text(json.dumps([steps, net.weight.tolist()]))
