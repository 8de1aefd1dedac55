"""Train ResNet-18 on small colour images, with AdaptDL's API as AdaptDL's CIFAR example uses it.

adaptdl-run --standalone --nproc-per-node=1:2 examples/adaptdl/cifar.py --autoscale-bsz

The images are drawn at the start: ten classes of coloured stripes under noise, 32 × 32.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import adaptdl_elastic.torch as adl


def stripes(size, seed):
    """Return images of stripes whose colour and width tell their class."""
    random = torch.Generator().manual_seed(seed)
    classes = torch.randint(10, (size,), generator=random)
    waves = torch.sin(torch.arange(32)[None, :] * (0.3 + 0.15 * classes[:, None]))
    colours = torch.stack([torch.cos(classes + k) for k in range(3)], dim=1)
    images = colours[:, :, None, None] * waves[:, None, None, :].expand(-1, -1, 32, -1)
    return TensorDataset(images + 0.3 * torch.randn(size, 3, 32, 32, generator=random), classes)


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width_in, width, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.shortcut = nn.Identity()
        if stride != 1 or width_in != width:
            conv = nn.Conv2d(width_in, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x):
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


def resnet18(width):
    """ResNet-18 for 32 × 32 images; `width` is 64 in the paper (He et al., 2016)."""
    layers = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for stage in range(4):
        out = width << stage
        before = out if stage == 0 else out // 2
        layers += [Block(before, out, 1 if stage == 0 else 2), Block(out, out, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


def run(model, loader, device, optimizer=None):
    """Train for one epoch, or evaluate without an optimizer; return the mean loss and the accuracy."""
    model.train(optimizer is not None)
    stats = adl.Accumulator()
    with torch.set_grad_enabled(optimizer is not None):
        for images, classes in loader:
            images, classes = images.to(device), classes.to(device)
            outputs = model(images)
            loss = F.cross_entropy(outputs, classes)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            stats["loss"] += loss.item() * len(classes)
            stats["correct"] += outputs.argmax(dim=1).eq(classes).sum().item()
            stats["total"] += len(classes)
    with stats.synchronized():
        return stats["loss"] / stats["total"], stats["correct"] / stats["total"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--bs", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=64, help="channels of the first convolution")
    parser.add_argument("--autoscale-bsz", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    adl.init_process_group("nccl" if device == "cuda" else "gloo")
    train_loader = adl.AdaptiveDataLoader(stripes(args.samples, 1), batch_size=args.bs, shuffle=True)
    if args.autoscale_bsz:
        train_loader.autoscale_batch_size(4096, local_bsz_bounds=(32, 1024), gradient_accumulation=True)
    valid_loader = adl.AdaptiveDataLoader(stripes(args.samples // 5, 2), batch_size=args.bs)

    net = resnet18(args.width).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 45], 0.1)
    net = adl.AdaptiveDataParallel(net, optimizer, scheduler)

    for epoch in adl.remaining_epochs_until(args.epochs):
        train_loss, _ = run(net, train_loader, device, optimizer)
        valid_loss, accuracy = run(net, valid_loader, device)
        scheduler.step()
        if adl.rank() == 0:
            print(f"epoch {epoch}: loss {train_loss:.3f}, held out {valid_loss:.3f}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
