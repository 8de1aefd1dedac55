"""Train a ResNet-18 on small colour images, as AdaptDL's CIFAR-10 example does.

    python examples/adaptdl/cifar.py
    adaptdl-run --standalone --nproc-per-node=1:2 examples/adaptdl/cifar.py --autoscale-bsz

The images are made here: each class is a coloured pattern under noise.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import TensorDataset

import adaptdl_elastic.env
import adaptdl_elastic.torch as adl

CLASSES = 10
PATTERN_SEED = 100


def make_images(count, seed):
    """Return `count` images of shape (3, 32, 32) and their classes."""
    patterns = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(PATTERN_SEED))
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=random)
    images = F.interpolate(patterns[labels], scale_factor=4)
    return TensorDataset(images + torch.randn(images.shape, generator=random), labels)


class Block(nn.Module):
    """Add two 3 × 3 convolutions to their input (He et al. 2016, arXiv:1512.03385, figure 2)."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x))


def resnet18(width):
    layers = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(4):
        for stride in (1 if stage == 0 else 2, 1):
            layers.append(Block(inputs, width << stage, stride))
            inputs = width << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def train(net, loader, optimizer, device, epoch):
    net.train()
    stats = adl.Accumulator()
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = F.cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()
        stats["loss_sum"] += loss.item() * targets.size(0)
        stats["correct"] += outputs.argmax(1).eq(targets).sum().item()
        stats["total"] += targets.size(0)
    with stats.synchronized():
        report("train", epoch, stats)


def valid(net, loader, device, epoch):
    net.eval()
    stats = adl.Accumulator()
    with torch.no_grad():
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            outputs = net(inputs)
            stats["loss_sum"] += F.cross_entropy(outputs, targets, reduction="sum").item()
            stats["correct"] += outputs.argmax(1).eq(targets).sum().item()
            stats["total"] += targets.size(0)
    with stats.synchronized():
        report("valid", epoch, stats)


def report(kind, epoch, stats):
    if adaptdl_elastic.env.replica_rank() == 0:
        loss, accuracy = stats["loss_sum"] / stats["total"], stats["correct"] / stats["total"]
        print(f"epoch {epoch} {kind}: loss {loss:.4f}, accuracy {accuracy:.4f}, {stats['total']} samples")


def main():
    parser = argparse.ArgumentParser(description="ResNet-18 on images, as in AdaptDL's CIFAR-10 example")
    parser.add_argument("--bs", type=int, default=128, help="initial batch size")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--width", type=int, default=8, help="channels of the first stage (ResNet-18: 64)")
    parser.add_argument("--autoscale-bsz", action="store_true", help="let the batch size adapt")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    adl.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

    trainloader = adl.AdaptiveDataLoader(
        make_images(args.samples, seed=1), batch_size=args.bs, shuffle=True, drop_last=True
    )
    if args.autoscale_bsz:
        trainloader.autoscale_batch_size(4096, local_bsz_bounds=(32, 1024), gradient_accumulation=True)
    validloader = adl.AdaptiveDataLoader(make_images(args.samples // 5, seed=2), batch_size=100)

    net = resnet18(args.width).to(device)
    optimizer = torch.optim.SGD(
        [{"params": [parameter]} for parameter in net.parameters()],
        lr=args.lr,
        momentum=0.9,
        weight_decay=5e-4,
    )
    scheduler = MultiStepLR(optimizer, [args.epochs // 2, args.epochs * 3 // 4], 0.1)
    net = adl.AdaptiveDataParallel(net, optimizer, scheduler)

    for epoch in adl.remaining_epochs_until(args.epochs):
        train(net, trainloader, optimizer, device, epoch)
        valid(net, validloader, device, epoch)
        scheduler.step()


if __name__ == "__main__":
    main()
