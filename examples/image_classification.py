"""Train a small network on real images, on as many replicas as pay.

python examples/image_classification.py                                      one process, no launcher
adaptdl-run --standalone --nproc-per-node=1:2 examples/image_classification.py
adaptdl-run --nnodes=1:8 --rdzv-endpoint=etcd0:2379 --checkpoint-path=/shared/images \\
    examples/image_classification.py
"""

from __future__ import annotations

import argparse

import torch
from image_data import load
from torch import nn

import adaptdl_elastic.torch as adl


class Net(nn.Module):
    """Two convolutions and two linear layers: 0.4 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class Recurrent(nn.Module):
    """Two layers of GRUs that read the rows of an image downwards and upwards: 31,000 parameters.

    They take 28 small products one after another, whatever the batch: a step has a constant part, so larger
    batches pay.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.GRU(28, 32, num_layers=2, batch_first=True, bidirectional=True, dropout=0.25)
        self.digit = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        states, _ = self.rows(images.flatten(1, 2))
        return self.digit(states.mean(1))


NETS = {"convolutional": Net, "recurrent": Recurrent}


def train(
    model: nn.Module, loader: adl.AdaptiveDataLoader, optimizer: torch.optim.Optimizer, device: str
) -> None:
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()


def evaluate(model: nn.Module, loader: adl.AdaptiveDataLoader, device: str) -> tuple[float, float]:
    """Mean loss and accuracy over the held-out images, of all replicas together."""
    model.eval()
    sums = adl.Accumulator()
    with torch.no_grad():
        for images, labels in loader:
            outputs, labels = model(images.to(device)), labels.to(device)
            sums["loss"] += nn.functional.cross_entropy(outputs, labels, reduction="sum").item()
            sums["correct"] += int((outputs.argmax(1) == labels).sum())
            sums["seen"] += len(labels)
    with sums.synchronized():
        return sums["loss"] / sums["seen"], sums["correct"] / sums["seen"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--data",
        help="folder with MNIST or Fashion-MNIST files, or digits: scikit-learn's (default: what is there)",
    )
    parser.add_argument("--net", choices=NETS, default="convolutional")
    parser.add_argument("--epochs", type=int, help="default: 120 of scikit-learn's digits, 4 of larger sets")
    parser.add_argument("--batch-size", type=int, default=32, help="the batch size that --lr is meant for")
    parser.add_argument("--max-batch-size", type=int, default=1024)
    parser.add_argument("--fixed-batch-size", action="store_true", help="do not adapt the batch size")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = load(args.data)
    epochs = args.epochs or (120 if len(data.train) < 10_000 else 4)

    adl.init_process_group("nccl" if device == "cuda" else "gloo")
    train_loader = adl.AdaptiveDataLoader(data.train, batch_size=args.batch_size, shuffle=True)
    if not args.fixed_batch_size:
        train_loader.autoscale_batch_size(
            args.max_batch_size, local_bsz_bounds=(16, 256), gradient_accumulation=True
        )
    test_loader = adl.AdaptiveDataLoader(data.test, batch_size=250)

    net = NETS[args.net]().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [int(epochs * 0.6), int(epochs * 0.85)], 0.2)
    model = adl.AdaptiveDataParallel(net, optimizer, scheduler)

    for epoch in adl.remaining_epochs_until(epochs):
        train(model, train_loader, optimizer, device)
        loss, accuracy = evaluate(model, test_loader, device)
        scheduler.step()
        adl.report(epoch=epoch, loss=loss, accuracy=accuracy)
        if adl.rank() == 0:
            print(f"{data.name} epoch {epoch}: held-out loss {loss:.4f}, accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
