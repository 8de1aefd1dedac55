"""A script in the shape of torchvision's reference for classification, on made images, for framework_runs.

A network with BatchNorm, SGD with momentum, a warm-up and a cosine, an average of the weights, label
smoothing, clipping, a progress bar, the accuracy, and a checkpoint of the best one. Until OUT/hurry exists a
step takes PACE, and longer and longer from the tenth epoch on.
"""

import argparse
import copy
import json
import os
import sys
from pathlib import Path

import torch
from long_steps import wait
from step_records import record
from torch import nn
from torch.optim.swa_utils import AveragedModel

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint

try:
    from tqdm import tqdm
except ImportError:

    class tqdm:
        """The part of tqdm that a loop uses."""

        def __init__(self, batches, desc):
            self.batches, self.desc, self.n = batches, desc, 0

        def __iter__(self):
            try:
                for batch in self.batches:
                    yield batch
                    self.n += 1
            finally:
                print(f"{self.desc}: {self.n} of {len(self.batches)}", file=sys.stderr)


OUT = Path(os.environ["OUT"])
CLASSES = 4


class Images(torch.utils.data.Dataset):
    """Noise around the picture of a class."""

    def __init__(self, size, seed):
        pictures = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(CLASSES, (size,), generator=generator)
        self.images = pictures[self.targets] + torch.randn(size, 3, 8, 8, generator=generator)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index], index


class Best(checkpoint.State):
    """The best accuracy, and the samples of every epoch."""

    def __init__(self):
        super().__init__("best")
        self.accuracy, self.samples = 0.0, []
        checkpoint.load_state(self)

    def save(self, file):
        file.write(json.dumps([self.accuracy, self.samples]).encode())

    def load(self, file):
        self.accuracy, self.samples = json.load(file)


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )


def parameter_groups(model, weight_decay):
    """No weight decay for the parameters of BatchNorm and for biases."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def digest(model):
    return sum(p.detach().double().abs().sum().item() for p in model.parameters())


def count_correct(sums, output, target):
    sums["correct"] += (output.argmax(1) == target).sum().item()
    sums["samples"] += len(target)


def train_one_epoch(args, model, criterion, optimizer, loader, epoch, model_ema):
    model.train()
    sums = adl.Accumulator()
    for image, target, index in tqdm(loader, desc=f"Epoch {epoch}"):
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()
        position = adl.current_dataloader().current_index
        if position // args.batch_size % args.model_ema_steps == 0:
            model_ema.update_parameters(model)
            if epoch < args.lr_warmup_epochs:
                model_ema.n_averaged.fill_(0)  # the average begins behind the warm-up
        count_correct(sums, output, target)
        if adl.batch_counts():
            record(
                epoch=epoch,
                samples=index.tolist(),
                local=adl.current_dataloader().local_samples,
                index=position,
                digests=[digest(model), digest(model_ema)],
            )
        wait(OUT, float(os.environ["PACE"]) * max(1, epoch / 10) ** 2)
    with sums.synchronized():
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {sums['correct'] / sums['samples']:.3f}")
        return sums["samples"]


def evaluate(model, criterion, loader, log_suffix=""):
    model.eval()
    sums = adl.Accumulator()
    with torch.inference_mode():
        for image, target, _ in tqdm(loader, desc=f"Test {log_suffix}"):
            output = model(image)
            loss = criterion(output, target)
            count_correct(sums, output, target)
            wait(OUT, float(os.environ["PACE"]) / 4)
    with sums.synchronized():
        accuracy = sums["correct"] / sums["samples"]
    print(f"test {log_suffix}: loss {loss.item():.3f}, accuracy {accuracy:.3f}")
    return accuracy


def main(args):
    torch.set_num_threads(1)
    torch.manual_seed(3)
    adl.init_process_group("gloo")
    loader = adl.AdaptiveDataLoader(Images(args.size, 1), batch_size=args.batch_size, shuffle=True)
    loader_test = adl.AdaptiveDataLoader(Images(40, 2), batch_size=10)
    net = network()
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)
    groups = parameter_groups(net, args.weight_decay)
    optimizer = torch.optim.SGD(groups, lr=args.lr, momentum=args.momentum, nesterov=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=args.lr_warmup_epochs)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs - args.lr_warmup_epochs)
    lr_scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [warm_up, cosine], milestones=[args.lr_warmup_epochs]
    )
    model = adl.AdaptiveDataParallel(net, optimizer, lr_scheduler)
    decay = args.model_ema_decay
    model_ema = AveragedModel(net, avg_fn=lambda e, m, _: decay * e + (1 - decay) * m, use_buffers=True)
    best = Best()
    for epoch in adl.remaining_epochs_until(args.epochs):
        samples = train_one_epoch(args, model, criterion, optimizer, loader, epoch, model_ema)
        lr_scheduler.step()
        evaluate(model, criterion, loader_test)
        accuracy = evaluate(model_ema, criterion, loader_test, log_suffix="EMA")
        best.samples.append(samples)
        if accuracy > best.accuracy:
            best.accuracy = accuracy
            if adl.rank() == 0:
                kept = {"model": net.state_dict(), "model_ema": model_ema.state_dict(), "epoch": epoch}
                torch.save(copy.deepcopy(kept), OUT / "best.pt")
    if adl.rank() == 0:
        torch.save(net.state_dict() | model_ema.state_dict(), OUT / "final.pt")
        summary = {
            "n_averaged": model_ema.n_averaged.item(),
            "last_epoch": [one.last_epoch for one in (lr_scheduler, warm_up, cosine)],
            "lr": [group["lr"] for group in optimizer.param_groups],
            "samples": best.samples,
            "accuracy": best.accuracy,
        }
        (OUT / "summary.json").write_text(json.dumps(summary))


def get_args_parser():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--clip-grad-norm", type=float, default=1.0)
    parser.add_argument("--lr-warmup-epochs", type=int, default=2)
    parser.add_argument("--model-ema-steps", type=int, default=4)
    parser.add_argument("--model-ema-decay", type=float, default=0.9)
    return parser


if __name__ == "__main__":
    main(get_args_parser().parse_args())
