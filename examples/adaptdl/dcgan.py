"""Train a DCGAN, with AdaptDL's API as AdaptDL's example uses it: two models, two optimizers, one loader.

adaptdl-run --standalone --nproc-per-node=1:2 examples/adaptdl/dcgan.py --autoscale-bsz

The images are drawn at the start: bright discs of any place and radius, 32 × 32.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import adaptdl_elastic.env as env
import adaptdl_elastic.torch as adl


def discs(size):
    """Return images of discs, with values from -1 to 1."""
    random = torch.Generator().manual_seed(1)
    x, y, radius = (
        torch.rand(3, size, 1, 1, generator=random) * 12 + torch.tensor([10, 10, 3.0])[:, None, None, None]
    )
    row, column = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    inside = radius - ((row - x) ** 2 + (column - y) ** 2).sqrt()
    return TensorDataset(torch.tanh(inside)[:, None])


def generator(noise, width):
    return nn.Sequential(
        *(nn.ConvTranspose2d(noise, 4 * width, 4, bias=False), nn.BatchNorm2d(4 * width), nn.ReLU()),
        *(
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
        ),
        *(nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.ConvTranspose2d(width, 1, 4, 2, 1, bias=False), nn.Tanh()),
    )


def discriminator(width):
    return nn.Sequential(
        *(nn.Conv2d(1, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(2 * width, 4 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(4 * width), nn.LeakyReLU(0.2)),
        *(nn.Conv2d(4 * width, 1, 4, bias=False), nn.Flatten(0)),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--bs", type=int, default=64)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.0002)
    parser.add_argument("--autoscale-bsz", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    device, noise = "cuda" if torch.cuda.is_available() else "cpu", 64
    adl.init_process_group("nccl" if device == "cuda" else "gloo")
    loader = adl.AdaptiveDataLoader(discs(args.samples), batch_size=args.bs, shuffle=True)
    if args.autoscale_bsz:
        loader.autoscale_batch_size(1024, local_bsz_bounds=(16, 256))
    net_g, net_d = generator(noise, args.width).to(device), discriminator(args.width).to(device)
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=args.lr, betas=(0.5, 0.999))
    net_d = adl.AdaptiveDataParallel(net_d, optimizer_d, name="discriminator")
    net_g = adl.AdaptiveDataParallel(net_g, optimizer_g, name="generator")
    judge = nn.functional.binary_cross_entropy_with_logits

    for epoch in adl.remaining_epochs_until(args.epochs):
        for (real,) in loader:
            real = real.to(device)
            yes, no = torch.ones(len(real), device=device), torch.zeros(len(real), device=device)
            fake = net_g(torch.randn(len(real), noise, 1, 1, device=device))
            optimizer_d.zero_grad()
            both = net_d(torch.cat([real, fake.detach()]))
            loss_d = judge(both, torch.cat([yes, no]))
            loss_d.backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            loss_g = judge(net_d(fake), yes)
            loss_g.backward()
            optimizer_g.step()
        if env.replica_rank() == 0:
            print(f"epoch {epoch}: discriminator {loss_d.item():.3f}, generator {loss_g.item():.3f}")


if __name__ == "__main__":
    main()
