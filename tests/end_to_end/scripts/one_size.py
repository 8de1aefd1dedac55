"""A training script that works with one size only: it reshapes its output to `--batch-size` samples.

Until there is a file `hurry` in the working directory a step takes a while, however many samples it has.
"""

import argparse
import time
from pathlib import Path

import torch

import adaptdl_elastic.torch as adl

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--autoscale", type=int, default=0, help="largest batch size")
args = parser.parse_args()

torch.manual_seed(3)
adl.init_process_group("gloo")
data = torch.utils.data.TensorDataset(torch.randn(8192, 4), torch.randn(8192, 3))
loader = adl.AdaptiveDataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True)
if args.autoscale:
    loader.autoscale_batch_size(args.autoscale)
net = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
model = adl.AdaptiveDataParallel(net, optimizer)
for _ in adl.remaining_epochs_until(2):
    for inputs, wanted in loader:
        optimizer.zero_grad()
        output = model(inputs).view(args.batch_size, 3)
        (output - wanted).square().mean().backward()
        optimizer.step()
        if not Path("hurry").exists():
            time.sleep(0.1)
