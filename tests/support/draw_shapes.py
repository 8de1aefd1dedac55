"""Random scripts that draw in every place of their loops, from global streams and their own generators.

`Shape.drawn(seed)` chooses the loops of a script. `Shape.source` writes it; with `plain` its loops are empty,
as replicas draw nothing from the script's streams in data loops.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

BATCH = 12
KINDS = ("train", "steps", "inner", "break")

Place = tuple[int, int, int]


@dataclass(frozen=True)
class Shape:
    """One script: the loops of an epoch, and what is around them."""

    seed: int
    loops: tuple[tuple[str, int], ...]
    """Kind and batches of each data loop."""
    epochs: int
    outside: bool
    """A data loop before the epochs."""
    seeds: bool
    """The script sets a seed in each epoch, and before its second epoch loop."""
    second: bool
    """A second epoch loop follows."""
    epochless: bool
    """Its only loop is `adl.steps`, outside of epochs."""
    function: bool
    """The generators are local variables of a function."""

    @classmethod
    def drawn(cls, seed: int) -> Shape:
        """The script of that seed."""
        choose = random.Random(seed)
        loops = tuple((choose.choice(KINDS), choose.randint(1, 3)) for _ in range(choose.randint(1, 3)))
        one, two, three, four, five = (choose.random() for _ in range(5))
        if four < 0.15:
            return cls(seed, (("steps", 3),), 1, one < 0.4, False, False, True, five < 0.5)
        return cls(seed, loops, 2, one < 0.4, two < 0.3, three < 0.4, False, five < 0.5)

    @property
    def all_epochs(self) -> int:
        """Epochs of both loops."""
        return self.epochs + self.second

    def boundaries(self) -> list[Place]:
        """Where a batch is handed out: (epoch, number of the loop, samples handed out before)."""
        return [
            (epoch, number, BATCH * batch)
            for epoch in range(self.all_epochs)
            for number, (kind, batches) in enumerate(self.loops)
            for batch in range(min(batches, 2) if kind == "break" else batches)
        ]

    def source(self, plain: bool = False, own: bool = False) -> str:
        """The script; with `own` its loops' bodies also draw from its own generators."""
        body = [*_COMMON.splitlines()]
        loaders = [f"loader{n} = Loader({BATCH * size})" for n, (_, size) in enumerate(self.loops)]
        body += [*loaders, f"other = Loader({2 * BATCH})", "draw('start')"]
        body += ["for _ in other:", "    noise()", "draw('outside')"] if self.outside else []
        if self.epochless:
            body += ["for step in steps(3):", "    here(0, 0, 12)", "    train()", "draw('end')"]
        else:
            body += [f"for epoch in epochs_until({self.epochs}):", *self._epoch()]
            body += ["draw('end')"]
        if self.second:
            body += ["torch.manual_seed(77)", "random.seed(77)"] if self.seeds else []
            body += ["draw('again')", f"for epoch in epochs_until({self.all_epochs}):", *self._epoch()]
            body += ["draw('last')"]
        if self.function:
            body = ["def main():", *("    " + line for line in body), "main()"]
        return "\n".join([f"OWN = {own}", *(_PLAIN if plain else _ELASTIC).splitlines(), *body, ""])

    def _epoch(self) -> list[str]:
        lines = ["torch.manual_seed(100 + epoch)", "np.random.seed(epoch)"] if self.seeds else []
        lines += ["draw(epoch, 0)", "once(epoch)"]
        for number, (kind, batches) in enumerate(self.loops):
            loop = f"steps({batches})" if kind == "steps" else f"loader{number}"
            unit = BATCH if kind == "steps" else 1
            lines += [f"for batch in {loop}:", f"    here(epoch, {number}, {unit})", "    train()"]
            lines += ["    for _ in other:", "        noise()"] if kind == "inner" else []
            if kind == "break" and batches > 1:
                lines += [f"    if handed_out() >= {BATCH}:", "        break"]
            lines += [f"draw(epoch, {number + 1})"]
        return ["    " + line for line in lines]


_PLAIN = """
OUT = None
drawn = []
import random
import numpy as np
import torch
done = 0
def epochs_until(count):
    global done
    for done in range(done, count):
        yield done
        done += 1
def once(epoch): pass
def Loader(size): return []
def steps(count): return []
def wrapped(net, optimizer): return net
"""

_ELASTIC = """
import json
import os
import random
import time
import numpy as np
import torch
import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session
from loop_events import OUT, here
adl.init_process_group("gloo")
epochs_until, steps = adl.remaining_epochs_until, adl.steps
def once(epoch):
    found = adl.once_per_epoch(time.time_ns)
    with (OUT / f"once-{os.getpid()}").open("a") as file:
        file.write(f"{epoch} {found}\\n")
def Loader(size): return adl.AdaptiveDataLoader(range(size), batch_size=12, shuffle=True)
def wrapped(net, optimizer): return adl.AdaptiveDataParallel(net, optimizer)
def handed_out(): return adl.current_dataloader().current_index
"""

_COMMON = """
import json
from types import SimpleNamespace
torch.manual_seed(5)
random.seed(5)
np.random.seed(5)
array, text, tensors = np.random.default_rng(1), random.Random(2), torch.Generator().manual_seed(3)
many = {"old": np.random.RandomState(4)}
class Sets:
    def __init__(self):
        self.inside = np.random.Generator(np.random.Philox(6))
sets = Sets()
def noise():
    found = [torch.rand(()).item(), float(np.random.rand()), random.random()]
    return found + (generated() if OWN else [])
def generated():
    return [
        float(array.random()), text.gauss(0, 1), torch.rand((), generator=tensors).item(),
        float(many["old"].rand()), float(sets.inside.random()),
    ]
def draw(*place):
    found = noise()[:3] + generated()
    if OUT is None:
        drawn.append([place, found])
    else:
        with (OUT / f"draws-{os.getpid()}").open("a") as file:
            file.write(json.dumps([place, found]) + "\\n")
net = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
model = wrapped(net, optimizer)
def train():
    noise()
    optimizer.zero_grad()
    model(torch.ones(4, 1)).square().mean().backward()
    optimizer.step()
"""
