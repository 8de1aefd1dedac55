"""Train a small BERT to fill in masked words, as AdaptDL's BERT example does.

    python examples/adaptdl/bert.py
    adaptdl-run --standalone --nproc-per-node=1:2 examples/adaptdl/bert.py --autoscale-bsz

The sentences are made here: arithmetic progressions, so that a hidden word follows from the others.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import adaptdl_elastic.env
import adaptdl_elastic.torch as adl

WORDS = 32
MASK = WORDS
"""Token that stands for a hidden word."""
HIDDEN_SHARE, KEPT_SHARE, RANDOM_SHARE = 0.15, 0.1, 0.1
IGNORED = -100
"""Label of a word that is not hidden, which `cross_entropy` leaves out."""


def make_sentences(count, length, seed):
    """Return `count` sentences of `length` tokens in 0…WORDS-1."""
    random = torch.Generator().manual_seed(seed)
    start = torch.randint(WORDS, (count, 1), generator=random)
    step = torch.randint(1, 4, (count, 1), generator=random)
    return TensorDataset((start + step * torch.arange(length)) % WORDS)


def hide(tokens):
    """Hide words as BERT does (Devlin et al. 2019, arXiv:1810.04805, section 3.1).

    Returns:
        The tokens with some words replaced, and the labels: the word where one is hidden, IGNORED elsewhere.
    """
    hidden = torch.rand(tokens.shape) < HIDDEN_SHARE
    hidden[:, 0] |= ~hidden.any(1)  # one at least in each sentence
    labels = tokens.masked_fill(~hidden, IGNORED)
    kind = torch.rand(tokens.shape)
    shown = tokens.masked_fill(hidden & (kind >= KEPT_SHARE + RANDOM_SHARE), MASK)
    drawn = hidden & (kind >= KEPT_SHARE) & (kind < KEPT_SHARE + RANDOM_SHARE)
    return torch.where(drawn, torch.randint(WORDS, tokens.shape), shown), labels


class Bert(nn.Module):
    """Return the logits of every word at each place of sentences of shape (batch, length)."""

    def __init__(self, length, size, heads, layers):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS + 1, size), nn.Embedding(length, size)
        self.norm = nn.LayerNorm(size)
        layer = nn.TransformerEncoderLayer(size, heads, 4 * size, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.bias = nn.Parameter(torch.zeros(WORDS))

    def forward(self, tokens):
        places = torch.arange(tokens.size(1), device=tokens.device)
        hidden = self.encoder(self.norm(self.words(tokens) + self.places(places)))
        return hidden @ self.words.weight[:WORDS].T + self.bias


def masked_loss(model, tokens):
    shown, labels = hide(tokens.cpu())
    logits = model(shown.to(tokens.device))
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten().to(tokens.device), ignore_index=IGNORED)


def train(model, loader, optimizer, scheduler, device, epoch):
    model.train()
    stats = adl.Accumulator()
    for (tokens,) in loader:
        tokens = tokens.to(device)
        optimizer.zero_grad()
        loss = masked_loss(model, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        stats["loss_sum"] += loss.item() * len(tokens)
        stats["total"] += len(tokens)
    scheduler.step()
    with stats.synchronized():
        report("train", epoch, stats)


def evaluate(model, loader, device, epoch):
    model.eval()
    stats = adl.Accumulator()
    with torch.no_grad():
        for (tokens,) in loader:
            stats["loss_sum"] += masked_loss(model, tokens.to(device)).item() * len(tokens)
            stats["total"] += len(tokens)
    with stats.synchronized():
        report("valid", epoch, stats)


def report(kind, epoch, stats):
    if adaptdl_elastic.env.replica_rank() == 0:
        print(f"epoch {epoch} {kind}: loss {stats['loss_sum'] / stats['total']:.4f}")


def main():
    parser = argparse.ArgumentParser(description="Masked language model, as in AdaptDL's BERT example")
    parser.add_argument("--bs", type=int, default=32, help="initial batch size")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--length", type=int, default=16, help="words of a sentence")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--autoscale-bsz", action="store_true", help="let the batch size adapt")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    adl.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

    trainloader = adl.AdaptiveDataLoader(
        make_sentences(args.samples, args.length, seed=1), batch_size=args.bs, shuffle=True, drop_last=True
    )
    if args.autoscale_bsz:
        trainloader.autoscale_batch_size(1024, local_bsz_bounds=(16, 256), gradient_accumulation=True)
    validloader = adl.AdaptiveDataLoader(
        make_sentences(args.samples // 10, args.length, seed=2), batch_size=64
    )

    model = Bert(args.length, args.size, heads=4, layers=2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    warm_up = 2
    scheduler = LambdaLR(
        optimizer,
        lambda epoch: min((epoch + 1) / warm_up, max(args.epochs - epoch, 1) / args.epochs),
    )
    model = adl.AdaptiveDataParallel(model, optimizer, scheduler)

    for epoch in adl.remaining_epochs_until(args.epochs):
        train(model, trainloader, optimizer, scheduler, device, epoch)
        evaluate(model, validloader, device, epoch)


if __name__ == "__main__":
    main()
