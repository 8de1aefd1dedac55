"""A script in the shape of AdaptDL's MNIST tutorial: only its imports say `adaptdl_elastic`.

python examples/adaptdl_tutorial.py --data DIR            DIR holds MNIST's idx files; digits without it
adaptdl-run --standalone --nproc-per-node=1:2 examples/adaptdl_tutorial.py
"""

import argparse
import os

import torch
import torch.nn.functional as F
from image_data import load
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR

import adaptdl_elastic.env
import adaptdl_elastic.torch as adl


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, 1)
        self.conv2 = nn.Conv2d(16, 32, 3, 1)
        self.dropout = nn.Dropout(0.25)
        self.fc1 = nn.Linear(32 * 12 * 12, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(self.dropout(x.flatten(1))))
        return F.log_softmax(self.fc2(x), dim=1)


def train(args, model, device, loader, optimizer, epoch):
    model.train()
    for step, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if step % args.log_interval == 0 and adaptdl_elastic.env.replica_rank() == 0:
            print(
                f"epoch {epoch} step {step}: loss {loss.item():.4f}, batch size {loader.current_batch_size}"
            )


def test(model, device, loader):
    model.eval()
    stats = adl.Accumulator()
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(device), target.to(device)
            output = model(data)
            stats["loss_sum"] += F.nll_loss(output, target, reduction="sum").item()
            stats["correct"] += output.argmax(dim=1).eq(target).sum().item()
            stats["total"] += target.size(0)
    with stats.synchronized():
        return stats["loss_sum"] / stats["total"], stats["correct"] / stats["total"]


def main():
    parser = argparse.ArgumentParser(description="MNIST, as in AdaptDL's tutorial")
    parser.add_argument("--data", help="directory with MNIST's four idx files (default: what is there)")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--test-batch-size", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--save-model", help="file for the trained weights")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    adl.init_process_group("nccl" if use_cuda else "gloo")

    images = load(args.data)
    train_loader = adl.AdaptiveDataLoader(
        images.train, batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    train_loader.autoscale_batch_size(1024, local_bsz_bounds=(32, 128))
    test_loader = adl.AdaptiveDataLoader(images.test, batch_size=args.test_batch_size)

    model = Net().to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    model = adl.AdaptiveDataParallel(model, optimizer, scheduler)

    writer = None
    if "ADAPTDL_TENSORBOARD_LOGDIR" in os.environ and adaptdl_elastic.env.replica_rank() == 0:
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(os.environ["ADAPTDL_TENSORBOARD_LOGDIR"])
    for epoch in adl.remaining_epochs_until(args.epochs):
        train(args, model, device, train_loader, optimizer, epoch)
        loss, accuracy = test(model, device, test_loader)
        scheduler.step()
        if writer is not None:
            writer.add_scalar("Test/Accuracy", accuracy, epoch)
            train_loader.to_tensorboard(writer, epoch, tag_prefix="AdaptDL/Data")
            model.to_tensorboard(writer, epoch, tag_prefix="AdaptDL/Model")
        if adaptdl_elastic.env.replica_rank() == 0:
            print(f"epoch {epoch} held out: loss {loss:.4f}, accuracy {accuracy:.4f}")

    if args.save_model and adaptdl_elastic.env.replica_rank() == 0:
        torch.save(model.module.state_dict(), args.save_model)


if __name__ == "__main__":
    main()
