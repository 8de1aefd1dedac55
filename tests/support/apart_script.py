"""Scripts whose replicas do not all do the same, by accident or for a reason. LOOP says which one.

lazy: a loader is made when it is first needed, and that is in another epoch on a replica that joins.
fickle: a variable that is another one on a replica that joins decides which loop comes first.
early: such a variable decides that there have been enough epochs.
alone: one replica has a data loop of its own. leave: one leaves an evaluation loop before the others.
slow: one needs longer than the others for what follows the last loop. fail: one ends with an error there,
once the other one waits for it.
"""

import atexit
import json
import os
import time
from pathlib import Path

import torch
from long_steps import wait
from signs import sign
from step_records import note

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session
from adaptdl_elastic.reducer import LOOPS

S = {"kind": "", "epochs": 4, "size": 48, "rank": 0, "pace": 0.0, **json.loads(os.environ["LOOP"])}
OUT = Path(os.environ["OUT"])


def loader(shuffle=False):
    return adl.AdaptiveDataLoader(range(S["size"]), batch_size=12, shuffle=shuffle)


def train(model, optimizer, data, epoch):
    model.train()
    for batch in data:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        note(loop="train", epoch=epoch, samples=batch.tolist(), training=data.training)
        optimizer.step()
        pause(epoch)


def evaluate(data, epoch):
    for count, batch in enumerate(data):
        note(loop="evaluate", epoch=epoch, samples=batch.tolist(), training=data.training)
        pause(epoch)
        if S["kind"] == "leave" and (epoch, count) == (1, 1):
            sign("there")
            while not _session.current().consensus.round_open:  # a checkpoint is asked for
                time.sleep(0.001)
            if adl.rank() == S["rank"]:
                break


def pause(epoch):
    if adl.batch_counts():
        wait(OUT, S["pace"], epoch)


def awaited():
    """Whether the other replica has come to the end, and waits for this one, which is rank 0."""
    calls = _session.current().reducer.calls
    return any(sequence >> 56 == LOOPS and call.contributions for sequence, call in list(calls.items()))


def main():
    if S["kind"] == "slow":
        atexit.register((OUT / f"ended-{os.environ['RANK']}").touch)  # after all that comes later
    torch.manual_seed(int(os.environ.get("SEED", os.getpid())))  # of its own: orders have to be agreed on
    adl.init_process_group("gloo")
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = adl.AdaptiveDataParallel(net, optimizer)
    data, evaluation = (None, None) if S["kind"] == "lazy" else (loader(shuffle=True), loader())
    joins = "ADAPTDL_JOIN" in os.environ
    for epoch in adl.remaining_epochs_until(S["epochs"]):
        if data is None:
            data = loader(shuffle=True)
        if S["kind"] == "fickle" and joins:
            evaluate(evaluation, epoch)
        train(model, optimizer, data, epoch)
        if S["kind"] == "early" and not joins and (OUT / "hurry").exists():
            break
        if epoch > 0 and S["kind"] != "fickle":
            if evaluation is None:
                evaluation = loader()
            if S["kind"] != "alone" or adl.rank() == S["rank"]:
                evaluate(evaluation, epoch)
        if S["kind"] == "fail" and epoch + 1 == S["epochs"] and adl.rank() == 0:
            while not awaited():
                time.sleep(0.001)
            raise ArithmeticError("by this replica")
        if epoch + 1 == S["epochs"] and adl.rank() == S["rank"]:
            end = time.monotonic() + 3
            while S["kind"] == "slow" and not (OUT / "ended-0").exists() and time.monotonic() < end:
                time.sleep(0.01)
    torch.save(net.state_dict(), OUT / f"weights-{adl.rank()}")


if __name__ == "__main__":
    main()
