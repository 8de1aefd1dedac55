"""A script of torchrun's users: it meets the others as told, adds up by DDP, and says what it was given.

`torchrun_user.py [init method] [how it ends]`: "fail-once" exits 3 in the first generation, "fail" in each.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

method, *rest = [*sys.argv[1:], "env://"]
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "MASTER_ADDR")
names += ("MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID")
# one write, since torchrun's replicas share a pipe
sys.stdout.write(json.dumps({name: os.environ[name] for name in names}) + "\n")
sys.stdout.flush()
print(f"to stderr from {os.environ['RANK']}", file=sys.stderr, flush=True)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
model(torch.full((1, 1), rank + 1.0)).backward()
print(
    f"sum {model.module.weight.grad.item() * size:g} launched {dist.is_torchelastic_launched()}", flush=True
)
dist.destroy_process_group()
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if "fail" in rest or ("fail-once" in rest and first):
    sys.exit(3)
