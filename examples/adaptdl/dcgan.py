"""Train a generator and a discriminator of images, as AdaptDL's DCGAN example does.

    python examples/adaptdl/dcgan.py
    adaptdl-run --standalone --nproc-per-node=1:2 examples/adaptdl/dcgan.py

The images are made here: bright discs of random places and sizes. Two models with two optimizers are
trained in one loop, so each has a name of its own.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import adaptdl_elastic.env
import adaptdl_elastic.torch as adl

NOISE = 32


def make_discs(count, seed):
    """Return `count` images of shape (1, 16, 16) with values in -1…1."""
    random = torch.Generator().manual_seed(seed)
    centre = torch.rand(count, 2, 1, 1, generator=random) * 8 + 4
    radius = torch.rand(count, 1, 1, generator=random) * 3 + 2
    place = torch.arange(16.0)
    distance = (centre[:, 0] - place[:, None]).square() + (centre[:, 1] - place).square()
    return TensorDataset((radius - distance.sqrt()).tanh().unsqueeze(1))


def weights_init(module):
    """Draw weights as Radford et al. (2016, arXiv:1511.06434, section 4) do."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


def generator(width):
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 2 * width, 4, 1, 0, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def discriminator(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 1, 4, 1, 0, bias=False),
        nn.Flatten(0),
    )


def judged(outputs, real):
    return F.binary_cross_entropy_with_logits(outputs, torch.full_like(outputs, float(real)))


def train(net_g, net_d, optimizer_g, optimizer_d, loader, device):
    """Train both for an epoch; return the mean losses of the discriminator and the generator."""
    net_g.train()
    net_d.train()
    stats = adl.Accumulator()
    for (images,) in loader:
        images = images.to(device)
        noise = torch.randn(len(images), NOISE, 1, 1, device=device)
        fakes = net_g(noise)

        optimizer_d.zero_grad()
        both = net_d(torch.cat((images, fakes.detach())))
        loss_d = judged(both[: len(images)], real=True) + judged(both[len(images) :], real=False)
        loss_d.backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = judged(net_d.module(fakes), real=True)
        loss_g.backward()
        optimizer_g.step()

        stats["d"] += loss_d.item() * len(images)
        stats["g"] += loss_g.item() * len(images)
        stats["total"] += len(images)
    with stats.synchronized():
        return stats["d"] / stats["total"], stats["g"] / stats["total"]


def main():
    parser = argparse.ArgumentParser(description="DCGAN, as in AdaptDL's example")
    parser.add_argument("--bs", type=int, default=64, help="initial batch size")
    parser.add_argument("--lr", type=float, default=0.0002)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--save", help="file for 64 generated images")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    adl.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

    loader = adl.AdaptiveDataLoader(
        make_discs(args.samples, seed=1), batch_size=args.bs, shuffle=True, drop_last=True
    )

    net_g = generator(args.width).apply(weights_init).to(device)
    net_d = discriminator(args.width).apply(weights_init).to(device)
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=args.lr, betas=(0.5, 0.999))
    net_g = adl.AdaptiveDataParallel(net_g, optimizer_g, name="generator")
    net_d = adl.AdaptiveDataParallel(net_d, optimizer_d, name="discriminator")

    for epoch in adl.remaining_epochs_until(args.epochs):
        loss_d, loss_g = train(net_g, net_d, optimizer_g, optimizer_d, loader, device)
        if adaptdl_elastic.env.replica_rank() == 0:
            print(f"epoch {epoch}: loss of the discriminator {loss_d:.4f}, of the generator {loss_g:.4f}")

    if args.save and adaptdl_elastic.env.replica_rank() == 0:
        net_g.eval()
        with torch.no_grad():
            torch.save(net_g.module(torch.randn(64, NOISE, 1, 1, device=device)).cpu(), args.save)


if __name__ == "__main__":
    main()
