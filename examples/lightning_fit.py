"""Train a small network on made data with Lightning, while replicas come and go.

adaptdl-run --standalone --nproc-per-node=1:2 --rdzv-id=points examples/lightning_fit.py
adaptdl scale points --replicas 2                in another terminal
"""

import argparse

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from adaptdl_elastic.torch.frameworks.lightning import ElasticStrategy


def points(size, seed):
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layers(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.layers(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--output", default="lightning-fit")
    options = parser.parse_args()
    trainer = L.Trainer(
        max_epochs=options.epochs,
        accumulate_grad_batches=2,
        strategy=ElasticStrategy(),
        default_root_dir=options.output,
        enable_progress_bar=False,
    )
    trainer.fit(
        Net(),
        DataLoader(points(options.samples, 0), batch_size=16, shuffle=True),
        DataLoader(points(200, 1), batch_size=100),
    )
    if trainer.is_global_zero:
        print(f"loss on the evaluation set: {trainer.callback_metrics['val_loss']:.3f}")


if __name__ == "__main__":
    main()
