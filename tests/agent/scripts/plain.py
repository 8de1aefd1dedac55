"""A script without the library, as under torchrun: `plain.py [what to do]`."""

import os
import signal
import sys
import time

what = sys.argv[1] if len(sys.argv) > 1 else "hello"
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
if what == "raise":
    raise ValueError("boom")
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "sleep":
    time.sleep(1000)
if what == "ddp":
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.full((3, 4), float(dist.get_rank()))).sum().backward()
    print(f"gradient {model.module.weight.grad.sum().item()}", flush=True)
    dist.destroy_process_group()
