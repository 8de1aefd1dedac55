"""An Accelerate loop on made data, whose records tell which samples were trained with, for framework_runs.

SETTINGS: "batch", "epochs", "accumulation", "stop": sample at which the last replica alone asks to end the
epoch, "items": the loss is a mean over items, of which samples have different numbers, "grow": the batch of a
replica is another one after each step. Until OUT/hurry exists a step takes PACE.
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
    if S.get("grow"):
        training.autoscale_batch_size(32, (2, 16))
    if S.get("items"):
        training.weigh_by(lambda batch: (batch[2] % 5).sum())
    steps = adl.Value("steps", 0)
    for epoch in accelerator.epochs(S["epochs"]):
        sums = adl.Accumulator()
        for x, y, numbers in training:
            with accelerator.accumulate(model):
                helper = adl.current_dataloader()
                record(
                    epoch=epoch, samples=numbers.tolist(), local=helper.local_samples,
                    index=helper.current_index,
                )  # fmt: skip
                output = model(x)
                loss = torch.nn.functional.mse_loss(output, y)
                if S.get("items"):
                    items = numbers % 5
                    total = ((output - y).squeeze(1) ** 2 * items).sum()
                    loss = total * accelerator.num_processes / accelerator.gather(items.sum()).sum().clamp(1)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            steps.value += adl.is_optim_step()
            # a boundary is passed only if the batch does not change
            if S.get("grow") and steps.value % 3 == 0:
                helper._change({"atomic": 8 + steps.value % 9, "accumulation": steps.value % 2})
            sums["loss"] += loss.item() * len(y)
            sums["samples"] += len(y)
            accelerator.log({"loss": loss.item()})
            if adl.rank() == adl.world_size() - 1 and helper.current_index >= S.get("stop", 100 * SIZE):
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break
            if not (OUT / "hurry").exists():
                time.sleep(float(os.environ.get("PACE", "0")))
        with sums.synchronized():
            mean = sums["loss"] / sums["samples"]
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
        summary = {"rate": scheduler.get_last_lr()[0], "validation": held_out.item(), "mean": mean}
        summary["steps"] = steps.value
        summary["counted"] = counted
        (OUT / "summary.json").write_text(json.dumps(summary))
    accelerator.end_training()


main()
