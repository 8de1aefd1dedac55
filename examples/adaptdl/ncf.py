"""Train a recommender (neural collaborative filtering), as AdaptDL's NCF example does.

    python examples/adaptdl/ncf.py
    adaptdl-run --standalone --nproc-per-node=1:2 examples/adaptdl/ncf.py --autoscale-bsz

The ratings are made here: each user likes the items whose hidden properties agree with the user's.
New items that a user has not chosen are drawn for every epoch.
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import adaptdl_elastic.env
import adaptdl_elastic.torch as adl


def make_ratings(users, items, per_user):
    """Return for each user the items that the user has chosen, shape (users, per_user), the best one last."""
    random = np.random.default_rng(100)
    scores = random.normal(size=(users, 4)) @ random.normal(size=(4, items))
    scores += random.normal(size=scores.shape) * 0.5
    return np.argsort(scores, axis=1)[:, -per_user:]


class Interactions(torch.utils.data.Dataset):
    """Hold chosen items (label 1) and, for each, `negatives` items that the user has not chosen (label 0)."""

    def __init__(self, chosen, items, negatives):
        self.chosen, self.items, self.negatives = chosen, items, negatives
        self.draw_negatives(0)

    def draw_negatives(self, epoch):
        """Draw other items that the users have not chosen: the same ones on every replica."""
        random = np.random.default_rng(epoch)
        users, per_user = self.chosen.shape
        known = np.zeros((users, self.items), bool)
        np.put_along_axis(known, self.chosen, True, axis=1)
        user = np.repeat(np.arange(users), per_user * self.negatives)
        item = random.integers(self.items, size=user.shape)
        while (taken := known[user, item]).any():
            item[taken] = random.integers(self.items, size=int(taken.sum()))
        positive = np.repeat(np.arange(users), per_user)
        self.users = torch.from_numpy(np.concatenate((positive, user)))
        self.item_ids = torch.from_numpy(np.concatenate((self.chosen.ravel(), item)))
        self.labels = torch.cat((torch.ones(len(positive)), torch.zeros(len(user))))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.users[index], self.item_ids[index], self.labels[index]


class NCF(nn.Module):
    """Combine a product of factors with a perceptron (He et al. 2017, arXiv:1708.05031, section 3.4)."""

    def __init__(self, users, items, factors):
        super().__init__()
        self.user_product, self.item_product = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.user_mlp, self.item_mlp = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.mlp = nn.Sequential(
            nn.Linear(2 * factors, factors), nn.ReLU(), nn.Linear(factors, factors), nn.ReLU()
        )
        self.predict = nn.Linear(2 * factors, 1)

    def forward(self, user, item):
        product = self.user_product(user) * self.item_product(item)
        joined = self.mlp(torch.cat((self.user_mlp(user), self.item_mlp(item)), -1))
        return self.predict(torch.cat((product, joined), -1))[:, 0]


def hit_rate(model, held_out, chosen, items, device):
    """Return how often the held-out item is among the 10 best of all that the user has not chosen yet."""
    model.eval()
    hits = 0
    with torch.no_grad():
        for user, item in enumerate(held_out):
            scores = model.module(
                torch.full((items,), user, device=device), torch.arange(items, device=device)
            )
            scores[torch.from_numpy(chosen[user]).to(device)] = -float("inf")
            hits += int(item) in scores.topk(10).indices.tolist()
    return hits / len(held_out)


def main():
    parser = argparse.ArgumentParser(description="Neural collaborative filtering, as in AdaptDL's example")
    parser.add_argument("--bs", type=int, default=256, help="initial batch size")
    parser.add_argument("--lr", type=float, default=0.002)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--autoscale-bsz", action="store_true", help="let the batch size adapt")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    adl.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

    ratings = make_ratings(args.users, args.items, per_user=11)
    chosen, held_out = ratings[:, :-1], ratings[:, -1]
    dataset = Interactions(chosen, args.items, negatives=4)
    loader = adl.AdaptiveDataLoader(dataset, batch_size=args.bs, shuffle=True, drop_last=True)
    if args.autoscale_bsz:
        loader.autoscale_batch_size(8192, local_bsz_bounds=(32, 4096))

    model = NCF(args.users, args.items, factors=16).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model = adl.AdaptiveDataParallel(model, optimizer)

    for epoch in adl.remaining_epochs_until(args.epochs):
        model.train()
        dataset.draw_negatives(epoch)
        stats = adl.Accumulator()
        for user, item, label in loader:
            user, item, label = user.to(device), item.to(device), label.to(device)
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(model(user, item), label)
            loss.backward()
            optimizer.step()
            stats["loss_sum"] += loss.item() * len(label)
            stats["total"] += len(label)
        hits = hit_rate(model, held_out, chosen, args.items, device)
        with stats.synchronized():
            if adaptdl_elastic.env.replica_rank() == 0:
                print(f"epoch {epoch}: loss {stats['loss_sum'] / stats['total']:.4f}, hit rate {hits:.3f}")


if __name__ == "__main__":
    main()
