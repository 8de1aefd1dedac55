"""A script that trains a model for each of three folds, the second slowly until there is a file "hurry"."""

import os
import time
from pathlib import Path

import signs
import torch

import adaptdl_elastic.torch as adl

OUT = Path(os.environ["OUT"])

adl.init_process_group("gloo")
samples = torch.arange(144.0).view(72, 2) / 144
scores = [adl.Value(f"score {fold}", 0.0) for fold in range(3)]
for fold in range(3):
    torch.manual_seed(fold)
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = adl.AdaptiveDataParallel(net, optimizer, name=f"fold {fold}")
    numbers = torch.randperm(72)[:48]
    loader = adl.AdaptiveDataLoader(samples[numbers], batch_size=12, shuffle=True)
    for _ in adl.remaining_epochs_until((2, 24, 3)[fold], name=f"fold {fold}"):
        drawn = torch.rand(())
        for batch in loader:
            optimizer.zero_grad()
            model(batch * (1 + drawn)).square().mean().backward()
            optimizer.step()
            if fold == 1 and not (OUT / "hurry").exists():
                signs.sign("second")
                time.sleep(0.5)
    scores[fold].value = net.weight.sum().item()
torch.save([[score.value for score in scores], adl.finished_epochs()], OUT / f"result-{adl.rank()}")
