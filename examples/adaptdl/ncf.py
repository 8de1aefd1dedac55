"""Recommend items by neural collaborative filtering, with AdaptDL's API as AdaptDL's NCF example uses it.

adaptdl-run --standalone --nproc-per-node=1:2 examples/adaptdl/ncf.py --autoscale-bsz

Users and items are drawn at the start: each has a place in a plane, and users like items that are near. The
model is NeuMF (He et al., 2017): a product of embeddings beside layers over other embeddings.
"""

import argparse
from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

import adaptdl_elastic.env as env
import adaptdl_elastic.torch as adl


class Ratings(Dataset):
    """Pairs of a user and an item that the user likes, and as many `negatives` for each that are drawn."""

    def __init__(self, liked, items, negatives):
        self.liked, self.items, self.negatives = liked, items, negatives
        self.known = set(map(tuple, liked.tolist()))
        self.draw(0)

    def draw(self, epoch):
        """Draw other negatives, the same on every replica and when the epoch is run again."""
        random = np.random.default_rng(epoch)
        users = np.repeat(self.liked[:, 0], self.negatives)
        drawn = random.integers(self.items, size=len(users))
        labels = [float(pair in self.known) for pair in zip(users.tolist(), drawn.tolist(), strict=True)]
        self.users = torch.from_numpy(np.concatenate([self.liked[:, 0], users]))
        self.others = torch.from_numpy(np.concatenate([self.liked[:, 1], drawn]))
        self.labels = torch.tensor([1.0] * len(self.liked) + labels)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, number):
        return self.users[number], self.others[number], self.labels[number]


class NeuMF(nn.Module):
    def __init__(self, users, items, width):
        super().__init__()
        self.user_product, self.item_product = nn.Embedding(users, width), nn.Embedding(items, width)
        self.user_layers, self.item_layers = nn.Embedding(users, width), nn.Embedding(items, width)
        sizes = [2 * width, width, width // 2]
        self.layers = nn.Sequential(
            *(part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU()))
        )
        self.last = nn.Linear(width + sizes[-1], 1)

    def forward(self, user, item):
        product = self.user_product(user) * self.item_product(item)
        layers = self.layers(torch.cat([self.user_layers(user), self.item_layers(item)], dim=1))
        return self.last(torch.cat([product, layers], dim=1))[:, 0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument(
        "--samples", type=int, default=20_000, help="pairs of a user and an item for training"
    )
    parser.add_argument("--bs", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--autoscale-bsz", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    adl.init_process_group("nccl" if device == "cuda" else "gloo")
    random, users, items, negatives = np.random.default_rng(0), 200, 300, 4
    places, around = random.random((users, 1, 2)), random.random((1, items, 2))
    near = np.argsort(((places - around) ** 2).sum(axis=2), axis=1)[:, :40]
    pairs = np.array([(user, item) for user in range(users) for item in near[user, 1:]])
    liked = random.permutation(pairs)[: max(args.samples // (1 + negatives), 1)]
    dataset = Ratings(liked, items, negatives)
    train_loader = adl.AdaptiveDataLoader(dataset, batch_size=args.bs, shuffle=True)
    if args.autoscale_bsz:
        train_loader.autoscale_batch_size(32_768, local_bsz_bounds=(32, 4096))
    # for each user one item that is liked, first, and 99 that are not known to be
    test_users = np.repeat(np.arange(users), 100)
    test_items = np.concatenate([[near[user, 0], *random.integers(items, size=99)] for user in range(users)])
    test = torch.utils.data.TensorDataset(torch.from_numpy(test_users), torch.from_numpy(test_items))
    grouped = torch.utils.data.BatchSampler(range(len(test)), batch_size=100, drop_last=False)
    candidates = [test[group] for group in grouped]
    test_loader = adl.AdaptiveDataLoader(candidates, batch_size=8)

    model = NeuMF(users, items, 16).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model = adl.AdaptiveDataParallel(model, optimizer)
    for epoch in adl.remaining_epochs_until(args.epochs):
        model.train()
        train_loader.dataset.draw(epoch)
        for user, item, label in train_loader:
            user, item, label = user.to(device), item.to(device), label.to(device)
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(user, item), label)
            loss.backward()
            optimizer.step()
        model.eval()
        stats = adl.Accumulator()
        for user, item in test_loader:
            with torch.no_grad():
                scores = model(user.flatten().to(device), item.flatten().to(device)).view(user.shape)
            stats["hits"] += (scores[:, 0:1] < scores[:, 1:]).sum(dim=1).lt(10).sum().item()
            stats["users"] += len(user)
        with stats.synchronized():
            if env.replica_rank() == 0:
                print(f"epoch {epoch}: loss {loss.item():.3f}, hit rate {stats['hits'] / stats['users']:.3f}")


if __name__ == "__main__":
    main()
