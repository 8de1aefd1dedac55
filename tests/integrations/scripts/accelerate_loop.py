"""An Accelerate loop on made data, whose records tell which samples were trained with; see framework_runs.

SETTINGS: "batch", "epochs", "accumulation". Until OUT/hurry exists a step takes PACE.
"""

import json
import os
import time
from pathlib import Path

import torch
import torchmetrics
from step_records import record
from torch.utils.data import DataLoader, TensorDataset

import adaptdl_elastic.torch as adl
from adaptdl_elastic.torch.frameworks.accelerate import Accelerator

OUT, SIZE = Path(os.environ["OUT"]), int(os.environ["SIZE"])
S = json.loads(os.environ["SETTINGS"])


def points(size):
    x = torch.randn(size, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True), torch.arange(size))


def main():
    torch.manual_seed(5)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=S["accumulation"], log_with="tensorboard", project_dir=OUT
    )
    accelerator.init_trackers("board")
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    model, optimizer, training, validation, scheduler = accelerator.prepare(
        model,
        optimizer,
        DataLoader(points(SIZE), S["batch"], shuffle=True),
        DataLoader(points(20), 10),
        scheduler,
    )
    for epoch in accelerator.epochs(S["epochs"]):
        for x, y, numbers in training:
            with accelerator.accumulate(model):
                helper = adl.current_dataloader()
                record(
                    epoch=epoch, samples=numbers.tolist(), local=helper.local_samples,
                    index=helper.current_index,
                )  # fmt: skip
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.log({"loss": loss.item()})
            if not (OUT / "hurry").exists():
                time.sleep(float(os.environ.get("PACE", "0")))
        model.eval()
        with torch.no_grad():
            losses = [torch.nn.functional.mse_loss(model.module(x), y) for x, y, _ in validation]
        held_out = accelerator.gather_for_metrics(torch.stack(losses)).mean()
        metric = torchmetrics.SumMetric()
        metric.update(accelerator.gather_for_metrics(torch.ones(20)))
        counted = int(metric.compute())
        model.train()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), OUT / "final.pt")
    if accelerator.is_main_process:
        summary = {"rate": scheduler.get_last_lr()[0], "validation": held_out.item(), "counted": counted}
        (OUT / "summary.json").write_text(json.dumps(summary))
    accelerator.end_training()


main()
