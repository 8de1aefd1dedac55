"""A script without the library, as under torchrun: `plain.py [what to do]`."""

import os
import signal
import sys

what = sys.argv[1] if len(sys.argv) > 1 else "hello"
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}", flush=True)
if what == "raise":
    raise ValueError("boom")
if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "peer":  # the first time rank 1 is killed before a collective, which ends with an error on rank 0
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.barrier()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()
