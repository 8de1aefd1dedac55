"""A script in which replicas die at chosen places, and that writes down what every attempt of a step saw.

Half of the loss is the mean of w[i] over the batch, so that w tells how often each sample was applied; the
other half is a small regression with momentum, clipping, a scheduler and a GradScaler. Float64 throughout.
LOOP holds settings as JSON. Who is meant by a rank is who had it at first:

faults: [rank, step, bucket, what] at an all-reduce of gradients: "before" and "after" die there, "miss" does
not get its result.
tears: [rank, tag, count]: as rank 0, dies when the result of that collective has reached rank 1 only.
deaths: [rank, function, count]: dies at that call of a function of `state_transfer`.
"""

import json
import logging
import os
import time
from pathlib import Path

import insides
import torch
import torch.distributed as dist
from dying import die, get_into_trouble, tear
from signs import sign
from step_records import note

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session
from adaptdl_elastic.torch._elastic import state_transfer
from adaptdl_elastic.torch._gradient import comm_hook
from adaptdl_elastic.torch.scaling_rules import LinearScale

S = {
    "epochs": 3, "size": 240, "batch": 12, "evaluate": True, "workers": 0, "accumulate": 0, "autoscale": 0,
    "pace": 0.0, "faults": [], "tears": [], "deaths": [], **json.loads(os.environ["LOOP"]),
}  # fmt: skip
OUT = Path(os.environ["OUT"])
FIRST_RANK = int(os.environ["ADAPTDL_REPLICA_RANK"])
JOINS = "ADAPTDL_JOIN" in os.environ
TOTAL = S["epochs"] * S["size"] // S["batch"]
reduce_bucket = comm_hook.reduce_bucket
counts = {}  # all-reduces by step


def mine(what):
    return [] if JOINS else [rest for rank, *rest in S[what] if rank == FIRST_RANK]


def faulty(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    step = _session.current().step
    number = counts[step] = counts.get(step, -1) + 1
    what = [what for *place, what in mine("faults") if place == [step, number]]
    if "before" in what:
        die()
    future = reduce_bucket(state, bucket)
    if "after" in what:
        die()
    if "miss" in what and state.world_size > 1:
        future.wait()
        state.fail(RuntimeError("the result of this bucket did not arrive"))
    return future


def die_in(name, left):
    function = getattr(state_transfer, name)

    def counted(*args, **options):
        nonlocal left
        left -= 1
        if not left:
            die()
        return function(*args, **options)

    setattr(state_transfer, name, counted)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(S["size"]))
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.register_buffer("x", torch.randn(S["size"], 8), persistent=False)

    def forward(self, index):
        return self.w[index], self.net(self.x[index])[:, 0]


def work():
    """What a step takes. The last ones so much that training outlasts whatever is done to it."""
    session = _session.current()
    if not adl.batch_counts():
        return
    sign("at", step=session.step)
    if not (OUT / "hurry").exists():
        time.sleep(S["pace"] * (10 if session.step > 0.8 * TOTAL else 1))


def main():
    for tag, count in mine("tears"):
        tear(tag, count)
    for name, count in mine("deaths"):
        die_in(name, count)
    get_into_trouble()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    model = Model()
    targets = torch.randn(S["size"])
    adl.init_process_group("gloo")
    comm_hook.reduce_bucket = faulty
    numbers = range(S["size"])
    data = adl.AdaptiveDataLoader(numbers, batch_size=S["batch"], shuffle=True, num_workers=S["workers"])
    if S["accumulate"]:
        high = -(-S["batch"] // (S["accumulate"] + 1))
        data.autoscale_batch_size(S["batch"], local_bsz_bounds=(1, high), gradient_accumulation=True)
        insides.keep_batch_size(data)  # accumulate, and stay at this batch size
    if S["autoscale"]:
        data.autoscale_batch_size(S["autoscale"], local_bsz_bounds=(1, S["autoscale"]))
    evaluation = adl.AdaptiveDataLoader(numbers, batch_size=20)
    groups = [{"params": [model.w], "lr": 1.0}, {"params": model.net.parameters(), "momentum": 0.9}]
    optimizer = torch.optim.SGD(groups, lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda step: 0.98**step])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
    model = adl.AdaptiveDataParallel(
        model, optimizer, scheduler, scaler, scaling_rule=LinearScale(), bucket_cap_mb=0.0005
    )
    for epoch in adl.remaining_epochs_until(S["epochs"]):
        model.train()
        for index in data:
            optimizer.zero_grad()
            w, out = model(index)
            losses = w + (out - targets[index]) ** 2
            helper, session = adl.current_dataloader(), _session.current()
            note(
                loop="train", generation=session.generation, step=session.step, epoch=epoch,
                index=helper.current_index, samples=index.tolist()[: helper.local_samples],
                loss=losses[: helper.local_samples].sum().item(),
            )  # fmt: skip
            scaler.scale(losses.mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.module.net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            if helper.is_optim_step():
                scheduler.step()
            work()
        model.eval()
        sums = adl.Accumulator()
        for index in evaluation if S["evaluate"] else ():
            with torch.no_grad():
                model(index)
            sums["seen"] += len(index)
        with sums.synchronized():
            assert not S["evaluate"] or sums["seen"] == S["size"], sums["seen"]
    result = {
        "w": model.module.w.detach(),
        "net": [p.detach() for p in model.module.net.parameters()],
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
        "steps": _session.current().step,
    }
    torch.save(result, OUT / f"result-{adl.rank()}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()
