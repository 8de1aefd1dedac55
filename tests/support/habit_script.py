"""Scripts that do what cannot be done in place, each in the way that HABIT names.

LOOP holds settings. "given": AdaptiveDataParallel is given what the habit is about, as it should be.
"""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from long_steps import wait

import adaptdl_elastic.torch as adl
from adaptdl_elastic import collective

S = {"habit": "", "given": False, "epochs": 18, "size": 48, "pace": 0.3, **json.loads(os.environ["LOOP"])}
OUT = Path(os.environ["OUT"])
OWN = torch.Generator()  # other numbers on each replica
RESULTS = {}


class Wrapped:
    """A scheduler of a script's own, around one of torch's."""

    def __init__(self, inner):
        self.inner = inner

    def step(self):
        self.inner.step()

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)


def between(epoch):
    """Agree on numbers that each replica has drawn by itself, in every way whose results are kept."""
    own, names = torch.rand(3, generator=OWN), [OWN.initial_seed(), str(epoch)]
    dist.broadcast(own, 0)
    total = torch.rand(2, generator=OWN)
    dist.all_reduce(total, op=dist.ReduceOp.MAX)
    dist.broadcast_object_list(names, src=0)
    drawn = [collective.broadcast(torch.rand(1, generator=OWN).item()) for _ in range(2)]
    drawn.append(collective.allreduce(torch.rand(1, generator=OWN).item(), max))
    RESULTS[epoch] = [*own.tolist(), *total.tolist(), *names, *drawn]


def main():
    habit = S["habit"]
    torch.manual_seed(3)
    adl.init_process_group("gloo")
    if habit == "results":
        OWN.manual_seed(os.getpid())
        between(None)
    if habit == "barrier":
        dist.barrier()
    elif habit == "gather":
        dist.all_gather([torch.zeros(1) for _ in range(adl.world_size())], torch.ones(1))
    elif habit == "large":
        dist.broadcast(torch.ones(100_000), 0)
    elif habit == "new group":
        dist.new_group([0])
    elif habit == "plain DDP":
        own = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    loader = adl.AdaptiveDataLoader(range(S["size"]), batch_size=12, shuffle=True)
    evaluation = adl.AdaptiveDataLoader(range(S["size"]), batch_size=12)
    net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    net[0].requires_grad_(habit != "thaw")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if habit == "nested scheduler":
        parts = [scheduler, torch.optim.lr_scheduler.ConstantLR(optimizer)]
        scheduler = Wrapped(torch.optim.lr_scheduler.ChainedScheduler(parts))
    schedulers = [scheduler]
    if habit == "hidden scheduler":
        del scheduler
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    model = adl.AdaptiveDataParallel(
        net,
        optimizer,
        lr_scheduler=scheduler if S["given"] else None,
        mp_scaler=scaler if S["given"] else None,
    )
    if habit == "dry run":  # all of it is replaced when a newcomer joins
        model(torch.ones(2, 1)).sum().backward()
        model.zero_grad()
    for epoch in adl.remaining_epochs_until(S["epochs"]):
        for batch in loader:
            optimizer.zero_grad()
            loss = model(batch[:, None].float() / S["size"]).mean()
            if habit == "scaler":
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            if habit == "plain DDP":
                own(torch.ones(1, 1)).sum().backward()
            if habit != "inference":
                wait(OUT, S["pace"], epoch)
        if habit == "inference":  # almost all of the time is spent there
            with torch.inference_mode():
                for batch in evaluation:
                    model(batch[:, None].float())
                    wait(OUT, S["pace"], epoch)
        if "scheduler" in habit:
            schedulers[0].step()
        if epoch == 1:
            net[0].requires_grad_(True)
        if habit == "late group" and epoch == 1:
            dist.new_group()
        if habit == "results":
            between(epoch)
    torch.save([p.detach() for p in net.parameters()], OUT / f"result-{adl.rank()}")
    torch.save(RESULTS, OUT / f"results-{adl.rank()}")


if __name__ == "__main__":
    main()
