"""Train a BERT encoder to fill in masked words, with AdaptDL's API as AdaptDL's BERT example uses it.

adaptdl-run --standalone --nproc-per-node=1:2 examples/adaptdl/bert.py --autoscale-bsz

The loader is made in every epoch, and the batch is masked by its collate_fn. Sentences are drawn at the
start: arithmetic sequences of words, so that a masked word follows from its neighbours.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import adaptdl_elastic.env as env
import adaptdl_elastic.torch as adl

WORDS, MASK, LENGTH = 100, 100, 16


def sentences(size, seed):
    random = torch.Generator().manual_seed(seed)
    first, step = torch.randint(WORDS, (2, size, 1), generator=random)
    return TensorDataset((first + step % 5 * torch.arange(LENGTH)) % WORDS)


def masked(samples):
    """Return a batch of which 15 % is masked, and the words that were there; -100 is not to be guessed."""
    words = torch.stack([words for (words,) in samples])
    chosen = torch.rand(words.shape) < 0.15
    chosen[:, 0] |= ~chosen.any(dim=1)
    return words.masked_fill(chosen, MASK), words.masked_fill(~chosen, -100)


class Bert(nn.Module):
    """A small encoder with learned positions and a head that shares the words' embedding."""

    def __init__(self, width):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS + 1, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        hidden = self.words(tokens) + self.positions.weight
        return self.norm(self.encoder(hidden)) @ self.words.weight[:WORDS].T


def loss_of(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--bs", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--autoscale-bsz", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    adl.init_process_group("nccl" if device == "cuda" else "gloo")
    train, held_out = sentences(args.samples, 1), sentences(args.samples // 10, 2)
    model = Bert(args.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    model = adl.AdaptiveDataParallel(model, optimizer, scheduler)

    for epoch in adl.remaining_epochs_until(args.epochs):
        loader = adl.AdaptiveDataLoader(train, batch_size=args.bs, shuffle=True, collate_fn=masked)
        if args.autoscale_bsz:
            loader.autoscale_batch_size(1024, local_bsz_bounds=(8, 256))
        model.train()
        for tokens, targets in loader:
            optimizer.zero_grad()
            loss = loss_of(model(tokens.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
        scheduler.step()
        if env.replica_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")

    model.eval()
    stats = adl.Accumulator()
    for tokens, targets in adl.AdaptiveDataLoader(held_out, batch_size=args.bs, collate_fn=masked):
        with torch.no_grad():
            outputs = model(tokens.to(device)).cpu()
        chosen = targets >= 0
        stats["right"] += outputs.argmax(dim=-1).eq(targets)[chosen].sum().item()
        stats["words"] += chosen.sum().item()
    with stats.synchronized():
        if env.replica_rank() == 0:
            print(f"masked words that were found: {stats['right'] / stats['words']:.3f}")


if __name__ == "__main__":
    main()
