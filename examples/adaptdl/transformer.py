"""Train a transformer on one long text by truncated back-propagation, as AdaptDL's example does.

    python examples/adaptdl/transformer.py
    adaptdl-run --standalone --nproc-per-node=1:2 examples/adaptdl/transformer.py --autoscale-bsz

The text is made here: a random grammar in which each word depends on the two before it.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR

import adaptdl_elastic.env
import adaptdl_elastic.torch as adl
from adaptdl_elastic.torch.iterator import AdaptiveBPTTIterator

WORDS = 64
GRAMMAR_SEED = 100
CHOICES = 4
"""Words that may follow two given words."""


def make_text(count, seed):
    """Return `count` tokens in 0…WORDS-1."""
    grammar = torch.randint(
        WORDS, (WORDS, WORDS, CHOICES), generator=torch.Generator().manual_seed(GRAMMAR_SEED)
    ).tolist()
    choices = torch.randint(CHOICES, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    text = [0, 1]
    for choice in choices[2:]:
        text.append(grammar[text[-2]][text[-1]][choice])
    return torch.tensor(text[:count])


class Transformer(nn.Module):
    """Predict the next word at each place of texts of shape (length, batch)."""

    def __init__(self, size, heads, layers, dropout):
        super().__init__()
        self.size = size
        self.embed = nn.Embedding(WORDS, size)
        layer = nn.TransformerEncoderLayer(size, heads, 2 * size, dropout)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decode = nn.Linear(size, WORDS)

    def forward(self, text):
        length = len(text)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        hidden = self.embed(text) * math.sqrt(self.size) + self.positions(length).to(text.device)
        return self.decode(self.encoder(hidden, mask))

    def positions(self, length):
        """Return sines and cosines of each position (Vaswani et al. 2017, arXiv:1706.03762, section 3.5)."""
        frequencies = torch.exp(torch.arange(0, self.size, 2) * (-math.log(10000.0) / self.size))
        angles = torch.arange(length)[:, None] * frequencies
        return torch.stack((angles.sin(), angles.cos()), -1).reshape(length, 1, self.size)


def train(model, iterator, optimizer, epoch):
    model.train()
    stats = adl.Accumulator()
    for batch in iterator:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.text).flatten(0, 1), batch.target.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        stats["loss_sum"] += loss.item() * batch.target.numel()
        stats["total"] += batch.target.numel()
    with stats.synchronized():
        report("train", epoch, stats)


def evaluate(model, iterator, epoch):
    model.eval()
    stats = adl.Accumulator()
    with torch.no_grad():
        for batch in iterator:
            loss = F.cross_entropy(model(batch.text).flatten(0, 1), batch.target.flatten(), reduction="sum")
            stats["loss_sum"] += loss.item()
            stats["total"] += batch.target.numel()
    with stats.synchronized():
        report("valid", epoch, stats)


def report(kind, epoch, stats):
    if adaptdl_elastic.env.replica_rank() == 0:
        loss = stats["loss_sum"] / stats["total"]
        print(f"epoch {epoch} {kind}: loss {loss:.4f}, perplexity {math.exp(loss):.2f}")


def main():
    parser = argparse.ArgumentParser(description="Transformer language model, as in AdaptDL's example")
    parser.add_argument("--bs", type=int, default=32, help="initial number of streams")
    parser.add_argument("--bptt", type=int, default=32, help="tokens of a stream in a batch")
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--autoscale-bsz", action="store_true", help="let the batch size adapt")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    adl.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

    limits = {"max_batch_size": 256, "local_bsz_bounds": (8, 128)} if args.autoscale_bsz else {}
    train_iterator = AdaptiveBPTTIterator(
        make_text(args.tokens, seed=1), batch_size=args.bs, bptt_len=args.bptt, device=device, **limits
    )
    valid_iterator = AdaptiveBPTTIterator(
        make_text(args.tokens // 10, seed=2), batch_size=10, bptt_len=args.bptt, device=device
    )

    model = Transformer(args.size, heads=4, layers=2, dropout=0.1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, 1, 0.95)
    model = adl.AdaptiveDataParallel(model, optimizer, scheduler)

    for epoch in adl.remaining_epochs_until(args.epochs):
        train(model, train_iterator, optimizer, epoch)
        evaluate(model, valid_iterator, epoch)
        scheduler.step()


if __name__ == "__main__":
    main()
