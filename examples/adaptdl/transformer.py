"""Train a language model by truncated back-propagation through time, as AdaptDL's transformer example does.

adaptdl-run --standalone --nproc-per-node=1:2 examples/adaptdl/transformer.py --autoscale-bsz

The text is drawn at the start: a Markov chain over `--words` words, each with four successors.
"""

import argparse
import copy
import math

import torch
from torch import nn

import adaptdl_elastic.env as env
import adaptdl_elastic.torch as adl
from adaptdl_elastic.torch.iterator import AdaptiveBPTTIterator


def text(length, words, seed):
    """Return tokens of the chain."""
    successors = torch.randint(words, (words, 4), generator=torch.Generator().manual_seed(0)).tolist()
    choices = torch.randint(4, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    tokens = [0]
    for choice in choices:
        tokens.append(successors[tokens[-1]][choice])
    return torch.tensor(tokens)


class Model(nn.Module):
    """A transformer encoder that sees only what came before."""

    def __init__(self, words, width):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(words, width), nn.Embedding(512, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, words)

    def forward(self, tokens):
        places = torch.arange(len(tokens), device=tokens.device)[:, None]
        mask = nn.Transformer.generate_square_subsequent_mask(len(tokens), device=tokens.device)
        hidden = self.embedding(tokens) + self.positions(places)
        return self.decoder(self.encoder(hidden, mask, is_causal=True))


def loss_of(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def evaluate(model, iterator):
    """Return the mean loss over all replicas."""
    model.eval()
    stats = adl.Accumulator()
    with torch.no_grad():
        for batch in iterator:
            stats["loss"] += loss_of(model(batch.text), batch.target).item() * batch.text.numel()
            stats["total"] += batch.text.numel()
    with stats.synchronized():
        return stats["loss"] / stats["total"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=200_000, help="tokens of the text")
    parser.add_argument("--words", type=int, default=200)
    parser.add_argument("--bs", type=int, default=20)
    parser.add_argument("--bptt", type=int, default=35)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--autoscale-bsz", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    adl.init_process_group("nccl" if device == "cuda" else "gloo")
    limits = {"max_batch_size": 32 * args.bs, "local_bsz_bounds": (4, 256)} if args.autoscale_bsz else {}
    train_iter, valid_iter, test_iter = (
        AdaptiveBPTTIterator(text(size, args.words, seed), args.bs, args.bptt, device=device, **more)
        for seed, size, more in ((1, args.samples, limits), (2, 4000, {}), (3, 4000, {}))
    )
    model = Model(args.words, args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.95)
    model = adl.AdaptiveDataParallel(model, optimizer, scheduler)

    best, best_model = math.inf, model
    for epoch in adl.remaining_epochs_until(args.epochs):
        model.train()
        for batch in train_iter:
            optimizer.zero_grad()
            loss = loss_of(model(batch.text), batch.target)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        valid_loss = evaluate(model, valid_iter)
        if env.replica_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}, held out {valid_loss:.3f}")
        if valid_loss < best:
            best, best_model = valid_loss, copy.deepcopy(model.module)
        scheduler.step()
    test_loss = evaluate(best_model, test_iter)
    if env.replica_rank() == 0:
        print(f"test: loss {test_loss:.3f}, perplexity {math.exp(test_loss):.1f}")


if __name__ == "__main__":
    main()
