"""A training script whose final weights tell how often every sample was applied.

The loss of a batch is the mean of w[i] over its samples, and LinearScale multiplies the learning rate 1
with window / batch_size: each application of sample i in a window of n samples moves w[i] by
-max(1, n / batch_size) / n. Settings come as JSON in LOOP.
"""

import gc
import json
import os
import threading
import time
from pathlib import Path

import insides
import signs
import small_memory
import torch
from dying import die, get_into_trouble, tear
from step_records import note, stop
from torch.utils.data import Dataset, get_worker_info

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session
from adaptdl_elastic.torch._gradient import out_of_memory
from adaptdl_elastic.torch._process_group.backends.gloo import Gloo
from adaptdl_elastic.torch.scaling_rules import LinearScale

S = {
    "size": 61, "batch": 8, "epochs": 1, "shuffle": True, "workers": 0, "accumulate": 0, "evaluate": 0,
    "stop": None, "seed": 5, "drop_last": False, "stream": False, "persistent": False, "pace": 0.0,
    "autoscale": 0, "torn": None, "torn then": None, "die": None, "fresh": False, "outside": False,
    "mortal": False, "evaluation pace": 0.0,
    "late": 0.0,  # seconds of a step in the second half, until something is to be agreed on
    # samples that fit into memory: in which pass, on which rank (None: all), how many
    "fits": None,
    "search": False,  # look for the largest batch that fits
    "nan": None,  # the batch of an epoch whose loss is nan
    "leave": None,  # the batch of an epoch after which the body leaves the loop
    "forgets": None,  # the generation in whose second step torch never agrees on the order of buckets
    **json.loads(os.environ.get("LOOP", "{}")),
}  # fmt: skip
OUT = Path(os.environ["OUT"])
FROZEN = gc.get_freeze_count()


class Numbers(Dataset):
    def __len__(self):
        return S["size"]

    looked = False

    def __getitem__(self, index):
        if get_worker_info() is not None and not self.looked:
            self.looked = True
            assert gc.get_freeze_count() > FROZEN, "a worker must not free the groups that it inherits"
        return index


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(S["size"]))


class Model(torch.nn.Module):
    nan = False

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(S["size"], dtype=torch.float64))
        if S["mortal"]:
            self.register_buffer("mean", torch.zeros(()))

    def forward(self, index):
        where, rank, most = S["fits"] or (None, None, 0)
        here = rank in (None, adl.rank()) and self.training == (where != "evaluation")
        if here and where in ("forward", "evaluation"):
            small_memory.check(len(index), most)
        if here and where == "backward" and self.training:
            return small_memory.in_backward(self.w[index], most)
        if self.nan:
            return self.w[index] + self.w.sum() * float("nan")
        return self.w[index]


def interrupt(loop, epoch, count):
    if not adl.batch_counts():
        return
    if S["die"] == [int(os.environ.get("RANK", 0)), loop, epoch, count]:
        die()
    if S["stop"] is None:
        return
    rank, *place = S["stop"]
    if [loop, epoch, count] == place:
        stop(rank)  # these steps are too quick for anything to be agreed meanwhile


def work(steps):
    """What a step takes; the second half of them so much that training outlasts whatever is done to it."""
    late, begun, control = _session.current().step > steps / 2, time.monotonic(), _session.current().consensus
    while not (OUT / "hurry").exists():
        calm = late and not control.round_open and control.lost is None
        least = S["pace"] * (5 if late else 1)
        left = begun + (max(least, S["late"]) if calm else least) - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, 0.01))


def forget(generation):
    """Let DDP's only collective in a forward pass never end, as it may with gloo when a replica dies.

    Rank 0 sends nothing and keeps its connections. The others wait where gloo would, with the lock of DDP's
    reducer.
    """
    rebuild, abort, steps = torch._C._distributed_c10d.Reducer._rebuild_buckets, Gloo.abort, set()

    def never(self):
        session = _session.current()
        if session.generation == generation:
            steps.add(session.step)
            if len(steps) == 2:
                signs.sign("forgotten")
                if session.rank == 0:
                    threading.Event().wait()
        return rebuild(self)

    def abort_others(self):
        if _session.current().generation != generation:
            abort(self)

    torch._C._distributed_c10d.Reducer._rebuild_buckets = never
    Gloo.abort = abort_others


def main():
    if S["forgets"] is not None:
        forget(S["forgets"])
    for rank, torn in enumerate((S["torn"], S["torn then"])):
        if torn and adl.rank() == rank and "ADAPTDL_JOIN" not in os.environ:
            tear(*torn)
    if S["seed"] is not None:
        torch.manual_seed(S["seed"])
    adl.init_process_group("gloo")
    options = {"num_workers": S["workers"], "drop_last": S["drop_last"]}
    if S["persistent"]:
        options["persistent_workers"] = True
    data = Stream() if S["stream"] else Numbers()
    loader = adl.AdaptiveDataLoader(
        data, batch_size=S["batch"], shuffle=S["shuffle"] and not S["stream"], **options
    )
    if S["search"]:
        out_of_memory.SEARCHED = ("cpu",)
    if S["accumulate"]:
        high = -(-S["batch"] // (S["accumulate"] + 1))
        loader.autoscale_batch_size(S["batch"], local_bsz_bounds=(1, high), gradient_accumulation=True)
        insides.keep_batch_size(loader)  # accumulate, and stay at this batch size
    if S["autoscale"]:
        bounds = None if S["search"] else (1, S["autoscale"])
        loader.autoscale_batch_size(S["autoscale"], local_bsz_bounds=bounds)
    evaluation = adl.AdaptiveDataLoader(Numbers(), batch_size=10)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    # A job that changes in place, but does not survive deaths, lets DDP broadcast buffers.
    ddp = {"find_unused_parameters": True} if S["mortal"] else {}
    model = adl.AdaptiveDataParallel(model, optimizer, scaling_rule=LinearScale(), **ddp)
    get_into_trouble()
    for epoch in adl.remaining_epochs_until(S["epochs"]):
        model.train()
        if S["fresh"]:
            loader = adl.AdaptiveDataLoader(data, batch_size=S["batch"], shuffle=True)
        for count, batch in enumerate(loader, 1):
            interrupt("train", epoch, count)
            helper = adl.current_dataloader()
            note(
                epoch=epoch, loop="train", samples=batch.tolist(), local=helper.local_samples,
                window=helper.window_samples, optim=helper.is_optim_step(), index=helper.current_index,
            )  # fmt: skip
            optimizer.zero_grad()
            model.module.nan = count == S["nan"]
            outputs = model(batch)
            where, rank, most = S["fits"] or (None, None, 0)
            if where == "loss" and rank in (None, adl.rank()):
                outputs = small_memory.in_backward(outputs, most)
            outputs.mean().backward()
            optimizer.step()
            if count == S["leave"]:
                break
            work(S["epochs"] * S["size"] // S["batch"])
        model.eval()
        sums, others = adl.Accumulator(), adl.Accumulator(kept=1)
        if S["outside"]:
            sums["outside"] += 1
        if S["outside"] == "both":
            with sums.synchronized():
                note(loop="outside", epoch=epoch, sum=sums["outside"])
        with others.synchronized():
            others["kept"] += 1
            for count, batch in enumerate(evaluation if S["evaluate"] else (), 1):
                interrupt("evaluate", epoch, count)
                with torch.no_grad():
                    model(batch)
                note(epoch=epoch, loop="evaluate", samples=batch.tolist(), local=len(batch))
                sums["seen"] += len(batch)
                if not (OUT / "hurry").exists():
                    time.sleep(S["evaluation pace"])
            assert others["kept"] == 2, "a loop's end has changed what a block had changed"
        with sums.synchronized():
            assert not S["evaluate"] or sums["seen"] == S["size"], sums["seen"]
            sums.clear()  # those to whom the sums have not come yet get them as they were
    torch.save(model.module.w.detach(), OUT / f"weights-{adl.rank()}")
    note(loop="end", epoch=adl.finished_epochs())


if __name__ == "__main__":
    main()
