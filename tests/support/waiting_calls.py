"""In a newcomer's default group: call all of torch.distributed that talks to others; print how that ends."""

import json
import sys
import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from adaptdl_elastic import _session
from adaptdl_elastic.torch._process_group import placeholder, script_collectives

SIZE = 3


def calls():
    one, many = torch.ones(2), [torch.zeros(2) for _ in range(SIZE)]
    whole = torch.zeros(2 * SIZE)
    return {
        "broadcast": lambda: dist.broadcast(one, 0),
        "all_reduce": lambda: dist.all_reduce(one, async_op=True),
        "reduce": lambda: dist.reduce(one, 0),
        "all_gather": lambda: dist.all_gather(many, one),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, one),
        "gather": lambda: dist.gather(one, None, 0),
        "scatter": lambda: dist.scatter(one, None, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(one, many),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one, whole),
        "all_to_all": lambda: dist.all_to_all(many, [each.clone() for each in many]),
        "all_to_all_single": lambda: dist.all_to_all_single(whole, whole.clone()),
        "send": lambda: dist.send(one, 0),
        "recv": lambda: dist.recv(one),
        "isend": lambda: dist.isend(one, 0),
        "irecv": lambda: dist.irecv(one, 0),
        "batch_isend_irecv": lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, one, 0)]),
        "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0),
        "all_gather_object": lambda: dist.all_gather_object([None] * SIZE, 1),
        "gather_object": lambda: dist.gather_object(1, None, 0),
        "scatter_object_list": lambda: dist.scatter_object_list([None], None, 0),
        "send_object_list": lambda: dist.send_object_list([1], 0),
        "recv_object_list": lambda: dist.recv_object_list([1], 0),
        "new_group": lambda: dist.new_group([0, 1]),
        "new_subgroups": lambda: dist.new_subgroups(1),
        "a collective": lambda: functional.all_reduce(one, "sum", dist.group.WORLD).sum().item(),
        "a collective (allgather)": lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1)),
    }


def main():
    warnings.simplefilter("ignore")
    _session.current().channel = object()  # as under an agent
    script_collectives.watch()
    assert dist.broadcast.__code__.co_filename == script_collectives.__file__
    placeholder.enter("gloo", 2, SIZE)
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (2, SIZE, "gloo")
    dist.barrier()  # moves no data
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier()
    for name, call in calls().items():
        code = None
        print(f"{name}:", file=sys.stderr, end=" ", flush=True)
        try:
            call()
        except SystemExit as end:
            code = end.code
        print(json.dumps([name, code]))
    placeholder.leave()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.new_group([0])  # all is as it was
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
