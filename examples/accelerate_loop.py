"""Train a small network on made data with Accelerate, while replicas come and go.

adaptdl-run --standalone --nproc-per-node=1:2 --rdzv-id=points examples/accelerate_loop.py
adaptdl scale points --replicas 2                in another terminal
"""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

from adaptdl_elastic.torch.frameworks.accelerate import Accelerator


def points(size, seed):
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4000)
    options = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    training = DataLoader(points(options.samples, 0), batch_size=16, shuffle=True)
    validation = DataLoader(points(200, 1), batch_size=100)
    model, optimizer, training, validation, scheduler = accelerator.prepare(
        model, optimizer, training, validation, scheduler
    )
    for epoch in accelerator.epochs(options.epochs):
        model.train()
        for x, y in training:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses = [torch.nn.functional.mse_loss(model(x), y) for x, y in validation]
        accelerator.print(f"epoch {epoch}: loss {torch.stack(losses).mean():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
