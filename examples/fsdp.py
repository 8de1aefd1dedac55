"""Train a small transformer, divided among the replicas by fully_shard, while replicas come and go.

adaptdl-run --standalone --nproc-per-node=1:2 --rdzv-id=shards examples/fsdp.py
adaptdl scale shards --replicas 2                in another terminal
"""

import argparse
import time

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import adaptdl_elastic.torch as adl


def sequences(size):
    tokens = torch.randint(0, 50, (size, 17), generator=torch.Generator().manual_seed(0)).cumsum(1) % 50
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


class Model(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = torch.nn.Linear(width, 50)

    def forward(self, tokens):
        mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait after each step")
    options = parser.parse_args()
    adl.init_process_group("gloo")
    loader = adl.AdaptiveDataLoader(sequences(options.samples), batch_size=20, shuffle=True)
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = adl.AdaptiveFSDP(model, optimizer)
    for epoch in adl.remaining_epochs_until(options.epochs):
        for tokens, following in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            time.sleep(options.pace)
        adl.report(epoch=epoch, replicas=adl.world_size())


if __name__ == "__main__":
    main()
