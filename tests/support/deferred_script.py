"""Run SCRIPT, which says "gloo", on the deferred backend, or on NCCL where BACKEND says so.

HELD holds an all-reduce back on one replica of the deferred backend.
It is JSON: [first rank, step, how many all-reduces of that step come before it]. Training begins when
it is known that the self-test has passed, so that a death in the first step is survived.
"""

import gc
import json
import os
import runpy
import time
from pathlib import Path

import deferred_backend
import torch

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session
from adaptdl_elastic.torch._process_group import capability


def connect(_):
    init_process_group(BACKEND)
    session = _session.current()
    known = capability.known_capability(session)
    if not session.joining and known is not None:
        while not session.consensus.round_open and "failed" not in known.why:
            time.sleep(0.001)  # then to be carried out at the first boundary


def count_after(reinit):
    """Return `reinit` of a model that also writes how many bytes of tensors this process holds after it."""

    def counting(model):
        reinit(model)
        gc.collect()
        tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
        held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        with Path(os.environ["OUT"], f"held-{adl.world_size()}").open("a") as file:
            print(sum(held.values()), file=file)

    return counting


# the self-test imports the backend in processes of its own
os.environ["PYTHONPATH"] = f"{Path(__file__).parent}:{os.environ['PYTHONPATH']}"
if "COUNTED" in os.environ:
    adl.AdaptiveDataParallel.reinit_process_group = count_after(adl.AdaptiveDataParallel.reinit_process_group)
BACKEND = os.environ.get("BACKEND", "deferred")
if BACKEND == "nccl":
    if torch.cuda.device_count() == 1:
        # Several ranks share a GPU if NCCL takes each for a host of its own.
        os.environ.update(NCCL_HOSTID=str(os.getpid()), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    wrap = adl.AdaptiveDataParallel
    adl.AdaptiveDataParallel = lambda model, *args, **options: wrap(model.cuda(), *args, **options)
rank, *place = json.loads(os.environ.get("HELD", "[-1, 0, 0]"))
if rank == int(os.environ["ADAPTDL_REPLICA_RANK"]):
    deferred_backend.HELD.add(tuple(place))
init_process_group = adl.init_process_group
adl.init_process_group = connect
runpy.run_path(os.environ["SCRIPT"], run_name="__main__")
