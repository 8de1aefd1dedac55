"""What replicas do in tests/training/test_parallel.py. Every function runs inside of a gloo group."""

from __future__ import annotations

import copy
import itertools
import os
import threading
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import insides
import torch
import torch.distributed as dist
from fake_loader import FakeLoader
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from adaptdl_elastic.torch._gradient import comm_hook
from adaptdl_elastic.torch._process_group import backends
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel
from adaptdl_elastic.torch.scaling_rules import AdamScale, AdaScale

Parameters = list[torch.Tensor]


class Net(nn.Module):
    """A bit of everything: convolution, batch normalisation, dropout, a buffer, two parameter groups."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(144, 16),
        )
        self.head = nn.Linear(16, 3)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        if unused:
            self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(x)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    head = [p for name, p in model.named_parameters() if name.startswith("head")]
    rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
    groups = [{"params": rest, "lr": 0.05}, {"params": head, "lr": 0.1}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-3)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


OPTIMIZERS = {"sgd": sgd, "adam": adam}


def data(step: int, count: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return (
        torch.randn(count, 1, 8, 8, generator=generator),
        torch.randint(0, 3, (count,), generator=generator),
    )


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, first: int = 0) -> None:
    loss = nn.CrossEntropyLoss()
    for step in range(first, first + count):
        torch.manual_seed(step)  # dropout
        inputs, targets = data(step)
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()


def measure_always(adp: AdaptiveDataParallel) -> None:
    adp.gns.gap = 1
    adp.gns.settles_after = 0


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([v.detach().double().flatten() for v in model.state_dict().values()])


def same_as_ddp(optimizer: str, unused: bool, kwargs: dict[str, Any]) -> tuple[bool, float, float]:
    """Whether 6 steps of AdaptiveDataParallel, each of them sampled, equal DDP's bit for bit."""
    torch.manual_seed(0)
    model = Net(unused)
    plain, adaptive = copy.deepcopy(model), copy.deepcopy(model)
    theirs, ours = OPTIMIZERS[optimizer](plain), OPTIMIZERS[optimizer](adaptive)
    adp = AdaptiveDataParallel(adaptive, ours, **kwargs)
    measure_always(adp)
    steps(DistributedDataParallel(plain, **kwargs), theirs, 6)
    steps(adp, ours, 6)
    insides.collect(adp)
    return bool(torch.equal(flat(plain), flat(adaptive))), adp.gns.sqr_avg(), adp.gns.var_avg()


def sparse_as_ddp(kind: str, accumulate: bool = False) -> tuple[bool, float, float]:
    """The same of an embedding with sparse gradients, in windows of two micro-batches if `accumulate`."""
    torch.manual_seed(0)
    embedding = [nn.Embedding(40, 4, sparse=True)]
    model = nn.Sequential(*embedding, *([nn.Linear(4, 3)] if kind == "SGD" else []))
    plain, adaptive = copy.deepcopy(model), copy.deepcopy(model)
    theirs, ours = (getattr(torch.optim, kind)(list(m.parameters()), lr=0.1) for m in (plain, adaptive))
    rule = AdaScale() if kind == "SGD" else AdamScale()
    adp, ddp = AdaptiveDataParallel(adaptive, ours, scaling_rule=rule), DistributedDataParallel(plain)
    measure_always(adp)
    size = dist.get_world_size()
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        words = torch.randint(0, 40, (2, 8), generator=generator)
        theirs.zero_grad()
        ddp(words.flatten()).square().mean().backward()
        theirs.step()
        parts = words if accumulate else words.view(1, 16)
        with FakeLoader([[parts.shape[1]] * size] * len(parts), 16 * size, parts.shape[1]) as loader:
            for loader.chunk, part in enumerate(parts):
                ours.zero_grad()
                adp(part).square().mean().backward()
                ours.step()
    insides.collect(adp)
    close = torch.allclose(flat(plain), flat(adaptive), rtol=1e-5, atol=1e-7)
    return close, adp.gns.sqr_avg(), adp.gns.var_avg()


def buffers_are_rank_0s() -> torch.Tensor:
    """Running means after evaluation has begun."""
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model)
    adp = AdaptiveDataParallel(model, optimizer)
    steps(adp, optimizer, 3)
    adp.eval()
    adp(data(9)[0])
    return model.body[1].running_mean.clone()


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 1)


def adaptive(model: Any = None, rate: float = 0.1, **options: Any) -> AdaptiveDataParallel:
    """Wrap this model, or a linear one, that SGD trains."""
    model = linear() if model is None else model
    return AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=rate), **options)


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    """Take a step of least squares, and return the loss before it."""
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def samples(count: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(200, 6, generator=generator), torch.randn(200, 1, generator=generator)
    return x[start : start + count], y[start : start + count]


def windows(
    plan: Sequence[Sequence[Sequence[int]]],
    batch_size: int,
    clip: float | None = None,
    amp: bool = False,
    ddp: dict[str, Any] | None = None,
    compiled: str | None = None,
) -> Parameters:
    """Train a linear model on windows of micro-batches, [windows][micro-batches][replicas] samples each.

    Samples are handed out in order: to all replicas of a micro-batch, then the next one. The loop is
    written as AdaptDL's tutorial has it: everything once per batch.
    """
    rank = dist.get_rank()
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=amp)
    module: Any = torch.compile(model, backend=compiled) if compiled else model
    adp = AdaptiveDataParallel(module, optimizer, mp_scaler=scaler, **(ddp or {}))
    measure_always(adp)
    position = 0
    for window in plan:
        with FakeLoader(window, batch_size, current_local_bsz=max(map(max, window))) as loader:
            for chunk, sizes in enumerate(window):
                loader.chunk = chunk
                start = position + sum(sizes[:rank])
                count = sizes[rank]
                x, y = samples(count or 1, start if count else 0)  # a filler where there is nothing left
                optimizer.zero_grad()
                scaler.scale(((adp(x) - y) ** 2).mean()).backward()
                if clip is not None:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(adp.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                position += sum(sizes)
    return [p.detach().clone() for p in model.parameters()]


def one_by_one(batches: Sequence[int], clip: float | None = None) -> Parameters:
    """The oracle: torch's SGD on whole batches of those sizes."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    position = 0
    for count in batches:
        x, y = samples(count, position)
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        position += count
    return [p.detach().clone() for p in model.parameters()]


WINDOWS = [[8, 8, 8], [8, 8, 8], [8, 8, 5], [8, 8, 8]]
Gan = tuple[bool, float, list[torch.Tensor], list[torch.Tensor], float]


_numbers = itertools.count()


def gans() -> dict[str, Gan]:
    """Every kind of a GAN's loop, with and without bucket views."""
    bodies = ("judge first", "generator first", "stepping last")
    views: list[dict[str, Any]] = [{}, {"gradient_as_bucket_view": True}]
    return {f"{body} {options}": _gan(body, options) for body in bodies for options in views}


def _gan(body: str, options: dict[str, Any]) -> Gan:
    """Train a GAN in whole batches and in windows of three micro-batches, and with DDP in whole batches.

    Args:
        body: `judge first` or `generator first`, stepping in every batch; `stepping last`: where windows end.
        options: Of both.

    Returns:
        Whether whole batches give the parameters of DDP bit for bit; the least variance of the two models;
        the judge's parameters with DDP and in windows; its variance there.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    loss = nn.BCEWithLogitsLoss()

    def ones(output: torch.Tensor) -> torch.Tensor:
        return loss(output, torch.ones_like(output))

    def train(wrap: Any, plans: list[list[int]], rate: float) -> list[Any]:
        torch.manual_seed(0)
        generator, judge = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        g_optimizer = torch.optim.SGD(generator.parameters(), lr=rate)
        d_optimizer = torch.optim.SGD(judge.parameters(), lr=0.5)
        g_model, d_model = wrap(generator, g_optimizer, "g"), wrap(judge, d_optimizer, "d")
        data = torch.Generator().manual_seed(rank)
        for plan in plans:
            real, noise = (torch.randn(sum(plan), width, generator=data) for width in (6, 4))
            with FakeLoader([[count] * size for count in plan], 24 * size, plan[0]) as loader:
                for loader.chunk, (x, z) in enumerate(zip(real.split(plan), noise.split(plan), strict=True)):
                    fake = g_model(z)

                    def train_judge(x: torch.Tensor = x, fake: torch.Tensor = fake) -> None:
                        if body != "stepping last":
                            d_optimizer.zero_grad()
                        ones(d_model(x)).backward()
                        ones(-d_model(fake.detach())).backward()

                    def train_generator(fake: torch.Tensor = fake) -> None:
                        g_optimizer.zero_grad()
                        ones(d_model(fake)).backward()
                        g_optimizer.step()

                    if body == "generator first":
                        train_generator()
                        fake = g_model(z)
                        train_judge(fake=fake)
                        d_optimizer.step()
                    elif body == "judge first":
                        train_judge()
                        d_optimizer.step()
                        train_generator()
                    else:
                        train_judge()
                        if loader.is_optim_step():
                            d_optimizer.step()
                        d_optimizer.zero_grad()
        return [g_model, d_model]

    def plain(model: nn.Module, *_: Any) -> nn.Module:
        return DistributedDataParallel(model, **options)

    def adaptive(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> nn.Module:
        adp = AdaptiveDataParallel(
            model, optimizer, name=f"{name} {body} {options} {next(_numbers)}", **options
        )
        measure_always(adp)
        return adp

    theirs, whole = (train(wrap, [[24]] * 4, 0.05) for wrap in (plain, adaptive))
    same = all(torch.equal(flat(a.module), flat(b.module)) for a, b in zip(theirs, whole, strict=True))
    # others see the generator in mid-window, so it does not move
    (_, judge), (_, ours) = train(plain, [[24], [24], [21], [24]], 0.0), train(adaptive, WINDOWS, 0.0)
    for adp in (*whole, ours):
        insides.collect(adp)
    least = min(adp.gns.var_avg() for adp in whole[body == "stepping last" :])
    trained = [[p.detach() for p in net.parameters()] for net in (judge, ours)]
    return same, least, *trained, ours.gns.var_avg()


def a_replica_dies(folder: str) -> tuple[bool, bool, list[float], int]:
    """Rank 2 of 3 dies inside of its backward pass; the others go on in the same processes."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = Net()
    optimizer = sgd(model)
    adp = AdaptiveDataParallel(model, optimizer)
    measure_always(adp)
    adp.absorb_failures()
    steps(adp, optimizer, 3)
    before = [p.detach().clone() for p in model.parameters()]
    if rank == 2:
        model.body[0].weight.register_hook(lambda _: os._exit(0))
    inputs, targets = data(3)
    optimizer.zero_grad()
    # as the agent tells: gloo may forget an operation when its connection ends
    told = threading.Timer(3.0, adp.giving_up("a replica died"))
    told.start()
    nn.functional.cross_entropy(adp(inputs), targets).backward()  # must not raise
    told.cancel()
    told.join()
    finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    optimizer.step()
    unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert adp.failure is not None
    assert adp.gns.steps == 3
    if adp.stuck:
        backends.keep()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=2)
    adp.clear_failure()
    adp.reinit_process_group()
    assert adp.failure is None
    steps(adp, optimizer, 3, first=3)
    adp.sync_buffers()
    insides.collect(adp)
    return unchanged, finite, flat(model).tolist(), adp.gns.steps


def same_size_again(folder: str) -> bool:
    """Whether re-making the group and the reducer leaves training as it would have been, bit for bit."""
    torch.manual_seed(0)
    model = Net()
    straight, remade = copy.deepcopy(model), copy.deepcopy(model)
    first, second = sgd(straight), sgd(remade)
    steps(AdaptiveDataParallel(straight, first, name="straight", broadcast_buffers=False), first, 6)
    adp = AdaptiveDataParallel(remade, second, broadcast_buffers=False)
    steps(adp, second, 3)
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=size)
    adp.reinit_process_group()
    steps(adp, second, 3, first=3)
    return bool(torch.equal(flat(straight), flat(remade)))


def uneven_passes(options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two losses, one after the other, on [[4, 4], [1, 0]] samples; the gradient, and that of all nine."""
    rank = dist.get_rank()
    model, whole = linear(), linear()
    adp = adaptive(model, 0.0, **options)
    window = [[4, 4], [1, 0]]
    start = 0
    for _ in range(2):  # with gradient_as_bucket_view the second window finds buckets filled
        start = 0
        with FakeLoader(window, 16, 4) as loader:
            for loader.chunk, sizes in enumerate(window):
                adp.zero_grad(set_to_none=False)
                count = sizes[rank]
                x, y = samples(count or 1, start + sum(sizes[:rank]) if count else 100)
                (adp(x) - y).square().mean().backward()
                (adp(3 * x) - y).square().mean().backward()
                adp.optimizer.step()
                start += sum(sizes)
        ours = _gradient(model)
    x, y = samples(9)
    ((whole(x) - y).square().mean() + (whole(3 * x) - y).square().mean()).backward()
    return ours, _gradient(whole)


def unsynchronised_pass() -> str:
    """What is said of two backward passes through one forward pass, with replicas and accumulation."""
    adp = adaptive(rate=0.0)
    with FakeLoader([[4, 4], [4, 4]], 16, 4) as loader:
        for loader.chunk in range(2):
            loss = adp(samples(4)[0]).square().mean()
            loss.backward(retain_graph=True)
            try:
                loss.backward()
            except RuntimeError as error:
                return str(error)
    return ""


def evaluate_alone(options: dict[str, Any]) -> torch.Tensor:
    """Running means that rank 0 evaluates with, which alone has a batch, and rank 1 would."""
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch has a new name for one
        adp = AdaptiveDataParallel(model, optimizer, **options)
    steps(adp, optimizer, 3)
    adp.eval()
    with FakeLoader([[1, 0]], 2, 1):
        adp.data_loop_begins()  # as the helper's context does
        with torch.no_grad():
            if dist.get_rank() == 0:
                adp(data(9)[0])
        means = model.body[1].running_mean.clone()
    adp.train()
    steps(adp, optimizer, 2, first=3)  # and both go on
    return means


Plan = Sequence[tuple[bool, Sequence[Sequence[int]]]]


def by_hand(plans: Sequence[Plan], options: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The gradient of each plan's windows, (synchronised, [micro-batches][replicas]), and what it should be.

    The script steps after all of them only: it is the sum of what each alone would leave.
    """
    rank = dist.get_rank()
    model, whole = linear(), linear()
    adp = adaptive(model, 0.0, **options)
    found = []
    for plan in plans:
        adp.zero_grad()
        whole.zero_grad()
        start = 0
        for synchronised, window in plan:
            x, y = samples(sum(map(sum, window)), start)
            (whole(x) - y).square().mean().backward()
            with FakeLoader(window, 8, 4) as loader, nullcontext() if synchronised else adp.no_sync():
                for loader.chunk, sizes in enumerate(window):
                    count = sizes[rank]
                    x, y = samples(count or 1, start + sum(sizes[:rank]) if count else 100)
                    (adp(x) - y).square().mean().backward()
                    start += sum(sizes)
        found.append((_gradient(model), _gradient(whole)))
        adp.optimizer.step()
    return found


def accumulated(kind: str) -> tuple[int, list[torch.Tensor]]:
    """Run nanoGPT's loop, six steps of four passes, and return the calls of the hook and all gradients.

    Args:
        kind: "DDP"; "flag", AdaptiveDataParallel whose flag the loop sets; or "no_sync".
    """
    model, calls, found = linear(), 0, list[torch.Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours = comm_hook.reduce_bucket

    def counting(state: Any, bucket: dist.GradBucket) -> Any:
        nonlocal calls
        calls += 1
        return allreduce_hook(None, bucket) if state is None else ours(state, bucket)

    counting.__annotations__ = {}  # torch refuses annotations that are strings
    comm_hook.reduce_bucket = counting
    ddp: Any
    if kind == "DDP":
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, counting)
    else:
        ddp = AdaptiveDataParallel(model, optimizer)
    comm_hook.reduce_bucket = ours
    for step in range(6):
        for micro_step in range(4):
            last = micro_step == 3
            if kind != "no_sync":
                ddp.require_backward_grad_sync = last
            x, y = samples(4, 16 * step + 4 * micro_step + 100 * dist.get_rank())
            with ddp.no_sync() if kind == "no_sync" and not last else nullcontext():
                loss = (ddp(x) - y).square().mean() / 4
            loss.backward()
        found.append(_gradient(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return calls, found


def _gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def buffers_of_some() -> float | None:
    """What a buffer is after `sync_buffers` in a process group of ranks 1 and 2 only, whose first is 1."""
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    if rank == 0:
        return None
    model = linear()
    model.register_buffer("own", torch.zeros(()))
    adp = adaptive(model, 0.0, process_group=group)
    own: Any = model.own
    own.fill_(rank)
    adp.data_loop_begins()
    return float(own)
