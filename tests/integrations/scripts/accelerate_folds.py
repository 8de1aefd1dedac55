"""Train a model for each of three folds with one Accelerator, as Accelerate's cross_validation.py does.

STOP: number of the batch before which the script saves a checkpoint and ends; -1: none.
"""

import os
import sys

import torch
from torch.utils.data import DataLoader

from adaptdl_elastic import checkpoint
from adaptdl_elastic.torch.frameworks.accelerate import Accelerator

accelerator, batches, stop = Accelerator(cpu=True), 0, int(os.environ["STOP"])
samples = torch.arange(48.0).view(24, 2) / 48
for fold in range(3):
    torch.manual_seed(fold)
    training = DataLoader(samples[torch.arange(24) % 3 != fold], batch_size=4, shuffle=True)
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, training = accelerator.prepare(net, optimizer, training)
    for _ in accelerator.epochs(2):
        for batch in training:
            if batches == stop:
                checkpoint.save_all_states()
                sys.exit()
            batches += 1
            loss = model(batch + 0.1 * torch.randn(batch.shape)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    print(fold, net.weight.tolist(), net.bias.item())
