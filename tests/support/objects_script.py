"""A script that trains with objects that the library was not given: an average, and further schedulers.

LOOP: epochs; pace, seconds of a batch; passes, backward passes of a step, as nanoGPT makes them;
dies, whether the process kills itself in the third epoch.
The file "break" lets rank 1 die in the middle of a step.
"""

import json
import os
import signal
from pathlib import Path

import torch
from cycle_scheduler import CycleScheduler
from long_steps import wait
from torch.optim.swa_utils import AveragedModel

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint

S = {"epochs": 5, "pace": 0.02, "dies": False, "passes": 1, **json.loads(os.environ["LOOP"])}
OUT = Path(os.environ["OUT"])

torch.manual_seed(3)
adl.init_process_group("gloo")
samples = torch.randn(96, 4)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
ema = AveragedModel(net, use_buffers=True)
frozen = torch.nn.Linear(1000, 1)
registered = AveragedModel(net)
hidden = [AveragedModel(net)]


class Registered(checkpoint.TensorState):
    def state_dict(self):
        return registered.state_dict()

    def load_state_dict(self, state):
        registered.load_state_dict(state)


class Trainer:
    def __init__(self):
        self.average = AveragedModel(net)

    def fit(self):
        loader = adl.AdaptiveDataLoader(samples, batch_size=12, shuffle=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        model = adl.AdaptiveDataParallel(net, optimizer, scheduler)
        warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=20)  # changes a loaded rate
        cycle = CycleScheduler(optimizer, 0.9, 50, "momentum")
        for epoch in adl.remaining_epochs_until(S["epochs"]):
            for batch in loader:
                optimizer.zero_grad()
                for turn in range(S["passes"]):
                    last = turn == S["passes"] - 1
                    model.require_backward_grad_sync = last
                    loss = model(batch).square().mean() / S["passes"]
                    if last and adl.rank() == 1 and (OUT / "break").exists():  # the other one waits for it
                        os.kill(os.getpid(), signal.SIGKILL)
                    loss.backward()
                optimizer.step()
                if adl.batch_counts():
                    for average in (ema, registered, self.average, *hidden):
                        average.update_parameters(net)
                    warm_up.step()
                    cycle.step()
                if S["dies"] and epoch == 2 and adl.current_dataloader().current_index == 48:
                    os.kill(os.getpid(), signal.SIGKILL)
                wait(OUT, S["pace"], epoch)
            scheduler.step()
        states = checkpoint.snapshot_states(["adaptdl-script-objects"])["adaptdl-script-objects"]
        torch.save(
            {
                "ema": ema.state_dict(),
                "registered": registered.state_dict(),
                "average": self.average.state_dict(),
                "net": net.state_dict(),
                "warm_up": (warm_up.last_epoch, optimizer.param_groups[0]["lr"]),
                "cycle": (cycle.phase, [vars(phase) for phase in cycle.phases]),
                "momentum": optimizer.param_groups[0]["momentum"],
                "saved": sorted(states),
            },
            OUT / f"result-{adl.rank()}",
        )


if __name__ == "__main__":
    kept = Registered("registered")
    checkpoint.load_state(kept)
    Trainer().fit()
