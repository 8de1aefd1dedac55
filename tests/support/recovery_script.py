"""Everything that a step changes besides parameters, and faults at a chosen (rank, step, bucket).

LOOP holds settings as JSON. `faults` is a list of [rank, step, bucket, what], `bucket` counting the
all-reduces of that step: "die" kills the replica as it comes to it; "miss" lets its result arrive
everywhere but here. `kind` chooses a script that is written in another way. Averages of its parameters are
too large to be copied at every step; `large` is another way to keep one more of them. `dies_giving`
is the rank of a replica that dies when it has given the first part of its state to another one.
"""

import functools
import json
import logging
import os
import random
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session, checkpoint
from adaptdl_elastic.torch._elastic import regroup, state_transfer
from adaptdl_elastic.torch._gradient import comm_hook
from adaptdl_elastic.torch._runtime import position

S = {
    "epochs": 2, "size": 240, "batch": 12, "pace": 0.0, "faults": [], "kind": "all", "norm": False,
    "optimizer": "sgd", "leave": 0, "leavers": [], "evaluate": False, "busy": None,
    "large": None, "dies_giving": None, "drop_last": False,
    **json.loads(os.environ["LOOP"]),
}  # fmt: skip
OUT = Path(os.environ["OUT"])
TOTAL = S["epochs"] * S["size"] // S["batch"]
reduce_bucket = comm_hook.reduce_bucket
counts = {}  # all-reduces by step


def faulty(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    step = _session.current().step
    here = [int(os.environ["FIRST_RANK"]), step, counts.get(step, 0)]
    counts[step] = here[2] + 1
    faults = [what for *place, what in S["faults"] if place == here]
    if "die" in faults:
        wait_for("begun", step)
        os.kill(os.getpid(), signal.SIGKILL)
    future = reduce_bucket(state, bucket)
    if "miss" in faults:
        future.wait()
        wait_for("ended", step)
        state.fail(RuntimeError("the result of this bucket did not arrive"))
    return future


def mark(what, step):
    if S["faults"]:
        (OUT / f"{what}-{step}-{os.environ['FIRST_RANK']}").touch()


def wait_for(what, step):
    """Until all who have no fault of their own are at that place."""
    faulty_ranks = {fault[0] for fault in S["faults"]}
    for rank in set(range(int(os.environ["WORLD_SIZE"]))) - faulty_ranks:
        while not (OUT / f"{what}-{step}-{rank}").exists():
            time.sleep(0.001)


def die_giving():
    send, sent = state_transfer.send_bucket, []

    def send_once(*given):
        if sent:
            os.kill(os.getpid(), signal.SIGKILL)
        sent.append(send(*given))

    state_transfer.send_bucket = send_once


def be_busy():
    """At the end of the first epoch one replica is, until it is told that it may go on.

    Until then an hour passes at each look of the others at the clock when they form another generation.
    """
    if S["busy"] == int(os.environ["FIRST_RANK"]):
        (OUT / "busy").touch()
        while not (OUT / "free").exists():
            time.sleep(0.01)
        return
    clock, form, hours = time.monotonic, regroup.form, [0]

    def hasty():
        hours[0] += not (OUT / "free").exists()
        if hours[0] == 20:
            (OUT / f"patient-{os.getpid()}").touch()
        return clock() + 3600 * hours[0]

    def hastily(*given, **options):
        time.monotonic = hasty
        try:
            form(*given, **options)
        finally:
            time.monotonic = clock

    regroup.form = hastily


class Counter(checkpoint.State):
    def __init__(self):
        super().__init__("counter")
        self.count = 0
        checkpoint.load_state(self)

    def save(self, fileobj):
        fileobj.write(str(self.count).encode())

    def load(self, fileobj):
        self.count = int(fileobj.read())


class Parts(Counter):
    """A counter whose parts the replicas are to add up."""

    def sync(self):
        pass


class Mean(checkpoint.TensorState):
    """Of a tensor as it was after each step."""

    def __init__(self, name, size):
        super().__init__(name)
        self.mean = torch.zeros(size)
        checkpoint.load_state(self)

    def add(self, value):
        self.mean.data.mul_(0.9).add_(value, alpha=0.1)  # what does not count as a change for autograd

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state_dict):
        self.mean.copy_(state_dict["mean"])


class Large(Mean):
    """An average of 1000 elements, whose name is the way in which it is kept."""

    def __init__(self, name):
        super().__init__(name, 1000)

    def add(self, value):
        if self.name == "replaced":
            self.mean = 0.9 * self.mean + 0.1 * value
        elif self.name == "copied":
            self.mean.lerp_(value.expand(1000), 0.1)
        else:
            super().add(value)

    def state_dict(self):
        return {"mean": self.mean.clone() if self.name == "copied" else self.mean}


class Average(checkpoint.TensorState):
    """torch's own average of a model."""

    def __init__(self, net):
        super().__init__("average")
        self.model = torch.optim.swa_utils.AveragedModel(
            net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        checkpoint.load_state(self)

    def state_dict(self):
        return self.model.state_dict()

    def load_state_dict(self, state_dict):
        self.model.load_state_dict(state_dict)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Linear(10, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.Tanh()]
        norm = [torch.nn.BatchNorm1d(16)] if S["norm"] else []
        self.layers = torch.nn.Sequential(*layers, *norm, torch.nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)


def optimizer_for(net):
    if S["kind"] == "lbfgs":
        return torch.optim.LBFGS(net.parameters(), lr=0.01, max_iter=2)
    if S["optimizer"] == "adam":
        return torch.optim.AdamW(net.parameters(), lr=0.01)
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def main():
    torch.manual_seed(3)
    torch.set_default_dtype(torch.float64)
    inputs = torch.randn(S["size"], 10)
    targets = (inputs @ torch.randn(10, 1)).tanh()
    adl.init_process_group("gloo")
    comm_hook.reduce_bucket = faulty
    if S["dies_giving"] is not None:
        state_transfer.BUCKET = 1000
    if S["dies_giving"] == adl.rank():
        die_giving()
    loader = adl.AdaptiveDataLoader(
        TensorDataset(inputs, targets), batch_size=S["batch"], shuffle=True, drop_last=S["drop_last"]
    )
    net = Net()
    optimizer = optimizer_for(net)
    scheduler = scaler = None
    if S["kind"] != "lbfgs":
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
    if S["kind"] not in ("lbfgs", "rate by hand"):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=TOTAL + 1)
    model = adl.AdaptiveDataParallel(
        net,
        optimizer,
        None if S["kind"] == "unknown scheduler" else scheduler,
        None if S["kind"] == "unknown scaler" else scaler,
        bucket_cap_mb=0.001,
    )
    model.own_random_streams = False  # the script's own stream is what is to be put back
    other = None
    if S["kind"] == "two models":
        second = Net()
        other = adl.AdaptiveDataParallel(
            second, torch.optim.SGD(second.parameters(), lr=0.05), name="second", bucket_cap_mb=0.001
        )
    torch.manual_seed(100 + adl.rank())
    random.seed(100 + adl.rank())
    first, draws, evaluated, samples = _session.current().step, {}, [], []
    evaluation = adl.AdaptiveDataLoader(TensorDataset(inputs), batch_size=S["batch"])
    sums = adl.Accumulator()
    counter = Parts() if S["kind"] == "parts" else Counter()
    mean, average = Mean("mean", 1), Average(net)
    names = ("of epochs", "after", "replaced", *([S["large"]] if S["large"] else []))
    large = {name: Large(name) for name in names}
    for _ in adl.remaining_epochs_until(S["epochs"]):
        large["of epochs"].add(torch.ones(1))
        for count, (x, y) in enumerate(loader, 1):
            at = _session.current().step
            mark("begun", at)
            draws[at] = (torch.rand(1).item(), random.random())
            optimizer.zero_grad()
            if S["kind"] == "rate by hand":
                for group in optimizer.param_groups:
                    group["lr"] *= 0.99
            bias = net.layers[-1].bias.detach()
            if S["large"] == "before" or (S["large"] == "before once" and at == 10):
                large[S["large"]].add(bias)
            if S["kind"] == "lbfgs":
                optimizer.step(functools.partial(closure, model, x, y))
            else:
                step(model, optimizer, scheduler, scaler, x, y)
            if other is not None:
                other.optimizer.zero_grad()
                torch.nn.functional.mse_loss(other(x), y).backward()
                other.optimizer.step()
            sums["seen"] += len(x)
            counter.count += 1
            mean.add(net.layers[-1].bias.detach())
            for name in large.keys() & {"after", "replaced", "copied"}:
                large[name].add(bias)
            average.model.update_parameters(net)
            mark("ended", at)
            if not (OUT / "hurry").exists():
                time.sleep(S["pace"])  # what a step takes
            if count == S["leave"] and adl.rank() in S["leavers"]:
                break
        for _ in evaluation if S["evaluate"] else ():
            evaluated = [buffer.clone() for buffer in net.buffers()]
        samples.append(position.script_position().samples)
        if S["busy"] is not None and len(samples) == 1:
            be_busy()
    with sums.synchronized():
        seen = sums["seen"]
    result = {
        "parameters": [p.detach() for p in net.parameters()],
        "buffers": evaluated or list(net.buffers()),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler and scheduler.state_dict(),
        "scaler": scaler and scaler.state_dict(),
        "statistics": model.gns.state_dict(),
        "seen": seen,
        "counted": counter.count,
        "mean": mean.mean,
        "large": [one.mean[[0, 500]].tolist() for one in large.values()],
        "average": [p.detach() for p in average.model.parameters()],
        "samples": samples,
        "steps": _session.current().step,
        "first": first,
        "draws": list(draws.values()),
        "seed": 100 + int(os.environ["FIRST_RANK"]),
    }
    torch.save(result, OUT / f"result-{adl.rank()}")


def closure(model, x, y):
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


def step(model, optimizer, scheduler, scaler, x, y):
    loss = torch.nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    if scheduler is not None:
        scheduler.step()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    os.environ.setdefault("FIRST_RANK", os.environ["ADAPTDL_REPLICA_RANK"])
    main()
