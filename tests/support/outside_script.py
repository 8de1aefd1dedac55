"""A script that trains in a loop of its own, outside of `remaining_epochs_until`.

Before that it looks at its data. The replicas that are no newcomers do so until there is a file "go".
"""

import os
import time
from pathlib import Path

import signs
import torch

import adaptdl_elastic.torch as adl

adl.init_process_group("gloo")
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = adl.AdaptiveDataParallel(net, optimizer)
loader = adl.AdaptiveDataLoader(torch.randn(40, 4), batch_size=8)
newcomer = "ADAPTDL_JOIN" in os.environ
while True:
    for _ in loader:
        signs.sign("look")
        time.sleep(0.0 if newcomer else 0.02)
    if newcomer or Path(os.environ["OUT"], "go").exists():
        break
while True:
    for inputs in loader:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        signs.sign("step")
    if Path(os.environ["OUT"], "hurry").exists():
        break
