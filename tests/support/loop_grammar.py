"""Random training scripts as people write them, and the same scripts in plain torch.

`Spec.drawn(seed)` chooses what a script has: one or two data loops in each epoch, `enumerate`, `break`, an
accumulator, an evaluation loop, a collective in the body, a scheduler, an evaluation loop inside a training
loop, a second loader that is read beside the first, steps without a loader, in epochs or without;
`Spec.source` writes it. Every script with epochs uses names of its loops' bodies behind the loops: `loss`,
`outputs`, and `i` of `enumerate`. Data come in
order, so that plain torch hands out the same batches, and everything is in float64.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

BATCH = 12  # 1, 2, 3 or 4 replicas divide it: each step has the same samples on any number of them
CHAOS = (
    1000  # seeds from here on are those of `make chaos`: only they have loops outside of epochs that go on
)


@dataclass(frozen=True)
class Loop:
    """One data loop of an epoch."""

    kind: str  # "train" or "evaluate"
    size: int  # samples of its data set
    numbered: bool  # by enumerate
    counted: bool  # in an accumulator
    left_at: int | None  # samples after which `break` leaves it; None: it runs to its end
    inside: bool  # another loop evaluates in its body
    beside: (
        str | None
    )  # how a second loader is read in it: "zip", or "endless" by next(); None: there is none
    steps: bool  # it counts steps, and has no loader
    beside_size: int  # samples of the second loader's data set; with "zip" as many as `size` or more
    rare: str | None  # what assigns `rare` in the first batch: "if", "try", "function"; None: nothing does


@dataclass(frozen=True)
class Spec:
    """One script."""

    seed: int
    epochs: int
    loops: tuple[Loop, ...]
    scheduler: bool
    collective: bool  # in the bodies
    before: bool  # a loop that evaluates before the first epoch
    after: bool  # one behind the last epoch
    epochless: bool  # its one loop is outside of epochs

    @classmethod
    def drawn(cls, seed: int) -> Spec:
        """The script of that seed."""
        choose = random.Random(seed)
        kinds = choose.choice([["train"], ["train", "evaluate"], ["train", "train"], ["evaluate", "train"]])
        spec = cls(
            seed=seed,
            epochs=choose.randint(1, 3),
            loops=tuple(_loop(choose, kind) for kind in kinds),
            scheduler=choose.random() < 0.5,
            collective=choose.random() < 0.3,
            before=choose.random() < 0.3,
            after=choose.random() < 0.4,
            epochless=False,
        )
        choose = random.Random(f"rare names of {seed}")
        loops = tuple(replace(loop, rare=choose.choice([None, *_RARE])) for loop in spec.loops)
        choose = random.Random(f"steps of {seed}")
        loops = tuple(replace(loop, steps=choose.random() < 0.25) for loop in loops)
        if len(loops) == 1 and seed >= CHAOS and choose.random() < 0.4:
            only = replace(loops[0], steps=True, counted=False, left_at=None)
            return replace(spec, loops=(only,), epochs=1, scheduler=False, epochless=True)
        return replace(spec, loops=loops)

    def without_collective(self) -> Spec:
        """The same without a collective in the bodies: a death in one of those is a failure."""
        return replace(self, collective=False)

    def boundaries(self) -> list[tuple[int, int, int]]:
        """Where a batch is handed out: (epoch, number of the loop, samples handed out before)."""
        return [
            (epoch, number, index)
            for epoch in range(self.epochs)
            for number, loop in enumerate(self.loops)
            for index in range(0, loop.size if loop.left_at is None else loop.left_at, BATCH)
        ]

    def leaves_at(self, place: tuple[int, int, int]) -> bool:
        """Whether the batch of that place is left by `break`."""
        _, number, index = place
        return self.loops[number].left_at == index + BATCH

    def source(self, plain: bool = False) -> str:
        """The script; with `plain` what it would be in plain torch."""
        lines = [*_PLAIN.splitlines()] if plain else [*_ELASTIC.splitlines()]
        lines += _COMMON.splitlines()
        for number, loop in enumerate(self.loops):
            lines.append(f"loader{number} = Loader(range({loop.size}), batch_size={BATCH})")
            lines.append(f"beside{number} = Loader(range({loop.beside_size}), batch_size={BATCH})")
            lines.append(f"inside{number} = Loader(range(20), batch_size={BATCH})")
        lines += _OUTSIDE if self.before else []
        lines.append("epoch = 0" if self.epochless else f"for epoch in epochs_until({self.epochs}):")
        for number, loop in enumerate(self.loops):
            lines += [("" if self.epochless else "    ") + line for line in self._lines(number, loop)]
        lines += ["    scheduler.step()"] if self.scheduler else []
        rare = [f"rare{number}" for number, loop in enumerate(self.loops) if loop.rare]
        lines += [f"assert {name} == epoch == {self.epochs - 1}, ({name}, epoch)" for name in rare]
        lines += _OUTSIDE if self.after else []
        return "\n".join([*lines, "result()", ""])

    def _lines(self, number: int, loop: Loop) -> list[str]:
        train = loop.kind == "train"
        lines = ["net.train()" if train else "net.eval()"]
        lines += ["sums = Accumulator()"] if loop.counted else []
        loader, variables = f"loader{number}", "index"
        if loop.steps:
            loader, variables = f"steps({loop.size // BATCH})", "step"
        if loop.beside == "zip":
            loader, variables = f"zip({loader}, beside{number})", f"({variables}, beside)"
        if loop.numbered:
            loader, variables = f"enumerate({loader})", f"i, {variables}"
        unit = BATCH if loop.steps else 1
        body = [f"here(epoch, {number}, {unit})"]
        body += [line.replace("rare", f"rare{number}") for line in _RARE[loop.rare]] if loop.rare else []
        if loop.steps:
            body += [f"index = torch.arange({BATCH} * step, {BATCH} * (step + 1))[rank() :: world_size()]"]
        if loop.beside == "endless":
            lines += [f"more = endless(beside{number})"]
            body += ["beside = next(more)"]
        if train:
            body += ["optimizer.zero_grad()", "outputs = net(index)", "loss = loss_of(outputs, index)"]
            body += ["loss = loss + (outputs * targets[beside]).mean()"] if loop.beside else []
            body += ["loss.backward()", "optimizer.step()"]
        else:
            body += ["with torch.no_grad():", "    outputs = net(index)", "loss = loss_of(outputs, index)"]
        body += ["mean = loss.detach().clone()", "dist.all_reduce(mean)"] if self.collective else []
        if loop.counted:
            body += ['sums["samples"] += len(index)', 'sums["places"] += float((index + 1).sum())']
            body += [] if train else ['sums["loss"] += loss.item() * len(index)']
            body += ['sums["beside"] += float((beside * index).sum())'] if loop.beside else []
        body += [*_inside(number, loop.counted), *(["net.train()"] if train else [])] if loop.inside else []
        if loop.left_at is not None:
            body += [f"if handed_out() * {unit} + {BATCH} >= {loop.left_at}:", "    break"]
        lines += [f"for {variables} in {loader}:", *("    " + line for line in body)]
        lines += [f"assert rare{number} == epoch, (rare{number}, epoch)"] if loop.rare else []
        used = ["loss.item()", "outputs.shape", *(["i"] if loop.numbered else [])]
        used += ["mean.item()"] if self.collective else []
        used += ["beside.shape"] if loop.beside else []
        used += ["j"] if loop.inside else []
        lines.append(f"use({', '.join(used)})")
        if loop.counted:
            lines += ["with sums.synchronized():", f"    total(epoch, {number}, dict(sums))"]
        return lines


_OUTSIDE = [
    "net.eval()",
    "for i, index in enumerate(loader0):",
    "    with torch.no_grad():",
    "        outputs = net(index)",
    "use(i, outputs.shape)",
]


def _inside(number: int, counted: bool) -> list[str]:
    """A loop in the body of another one."""
    lines = ["net.eval()", f"for j, index in enumerate(inside{number}):"]
    lines += ["    with torch.no_grad():", "        outputs = net(index)"]
    return [*lines, *(['    sums["inside"] += float(outputs.sum())'] if counted else [])]


def _loop(choose: random.Random, kind: str) -> Loop:
    batches, beside = choose.randint(1, 4), choose.choice([None, None, "zip", "endless"])
    return Loop(
        kind=kind,
        size=batches * BATCH,
        numbered=choose.random() < 0.5,
        counted=choose.random() < 0.6,
        left_at=choose.randint(1, batches) * BATCH if choose.random() < 0.3 else None,
        inside=choose.random() < 0.25,
        beside=beside,
        steps=False,
        beside_size=choose.randint(batches if beside == "zip" else 1, 4) * BATCH,
        rare=None,
    )


_RARE = {
    "if": ["if handed_out() == 0:", "    rare = epoch"],
    "try": ["try:", "    rare = {0: epoch}[handed_out()]", "except KeyError:", "    pass"],
    "function": [
        *("def first(number):", "    global rare", "    rare = number", "def batch(at):"),
        *("    return (lambda: first(epoch))() if at == 0 else None", "batch(handed_out())"),
    ],
}


_PLAIN = """
import contextlib
import torch
from collections import Counter
from torch.utils.data import DataLoader as Loader
import torch.distributed as dist
seen = Counter()
def here(epoch, number, unit):
    seen.clear()
def handed_out():
    return handed
epochs_until = range
class Accumulator(Counter):
    @contextlib.contextmanager
    def synchronized(self):
        yield self
class Loader(Loader):
    outermost = None
    def __iter__(self):
        global handed
        Loader.outermost = outermost = Loader.outermost or self
        try:
            for number, batch in enumerate(super().__iter__()):
                if outermost is self:
                    handed = 12 * number
                yield batch
        finally:
            if outermost is self:
                Loader.outermost = None
def steps(count):
    global handed
    Loader.outermost = "steps"
    try:
        for number in range(count):
            handed = number
            yield number
    finally:
        Loader.outermost = None
rank, world_size = lambda: 0, lambda: 1
def wrapped(module, optimizer, scheduler):
    return module
dist = type("dist", (), {"all_reduce": lambda tensor: None})
totals, OUT = {}, None
"""

_ELASTIC = """
import torch
import torch.distributed as dist
import adaptdl_elastic.torch as adl
from adaptdl_elastic.torch import Accumulator, AdaptiveDataLoader as Loader
from adaptdl_elastic.torch.scaling_rules import LinearScale
from loop_events import OUT, here, totals
epochs_until, steps, rank, world_size = adl.remaining_epochs_until, adl.steps, adl.rank, adl.world_size
def handed_out():
    return adl.current_dataloader().current_index
def wrapped(module, optimizer, scheduler):
    return adl.AdaptiveDataParallel(module, optimizer, scheduler, scaling_rule=LinearScale())
adl.init_process_group("gloo")
"""

_COMMON = """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(48))
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.register_buffer("x", torch.randn(48, 4), persistent=False)
    def forward(self, index):
        return self.w[index] + self.layers(self.x[index])[:, 0]
def use(*values):
    assert all(value == value for value in values), values
def endless(loader):
    while True:
        yield from loader
def total(epoch, number, sums):
    totals[f"{epoch} {number}"] = sums
def loss_of(outputs, index):
    return (outputs - targets[index]).square().mean()
def result():
    if OUT is not None:
        torch.save({"model": module.state_dict(), "lr": optimizer.param_groups[0]["lr"]},
                   OUT / f"result-{adl.rank()}")
torch.set_default_dtype(torch.float64)
torch.manual_seed(3)
module = Model()
targets = torch.randn(48)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
net = wrapped(module, optimizer, scheduler)
"""
