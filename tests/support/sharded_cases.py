"""What the replicas of tests/training/test_fully_sharded.py do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import insides
import pytest
import torch
from fake_loader import FakeLoader
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint
from adaptdl_elastic.torch._bootstrap import current_session
from adaptdl_elastic.torch._process_group import placeholder
from adaptdl_elastic.torch._process_group.backends import Gloo
from adaptdl_elastic.torch._sharded import fully_shard as private
from adaptdl_elastic.torch._sharded.layout import Layout
from adaptdl_elastic.torch._sharded.reshard import Resharding
from adaptdl_elastic.torch.scaling_rules import SqrtScale

needs_tested_torch = pytest.mark.skipif(
    not torch.__version__.startswith(private.TESTED), reason="torch's interface was not tested"
)


def network(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))


def sharded(seed: int = 0) -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    net = network(seed)
    fully_shard(net[0])
    fully_shard(net)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs = torch.arange(20.0).view(4, 5) / 20
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(net: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in net.state_dict().items()
    }


def save(folder: str) -> dict[str, Any]:
    """Train a step, save it in `folder`, and return the weights after a further step as lists."""
    net, optimizer = sharded()
    model = adl.AdaptiveFSDP(net, optimizer)
    step(model, optimizer)
    checkpoint.save_state(insides.state(model), folder)
    step(model, optimizer)
    return {name: value.tolist() for name, value in weights(net).items()}


def load(folder: str) -> dict[str, Any]:
    """Load what `save` has saved into another model, and return the weights after a further step."""
    net, optimizer = sharded(seed=1)
    model = adl.AdaptiveFSDP(net, optimizer)
    assert checkpoint.load_state(insides.state(model), folder)
    step(model, optimizer)
    return {name: value.tolist() for name, value in weights(net).items()}


def with_copies(copies: int) -> dict[str, Any]:
    """Train three steps on batches of two samples a replica; return weights, statistics and groups."""
    net, optimizer = sharded()
    model = adl.AdaptiveFSDP(net, optimizer, copies=copies)
    rank = torch.distributed.get_rank()
    for turn in range(3):
        inputs = torch.randn(2, 5, generator=torch.Generator().manual_seed(turn * 10 + rank))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    adl.AdaptiveFSDP.begin_step(model)  # which reads the measurement of the last step
    return {
        "weights": {name: value.tolist() for name, value in weights(net).items()},
        "statistics": [model.gns.sqr_avg(), model.gns.var_avg()],
        "needed": model.needed_groups(),
    }


class Tied(torch.nn.Module):
    """A network with a tied and a frozen weight; one layer may be computed again in the backward pass."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.again = again
        self.into, self.middle, self.out = torch.nn.Linear(5, 7), torch.nn.Linear(7, 7), torch.nn.Linear(7, 5)
        self.frozen = torch.nn.Linear(5, 5).requires_grad_(False)
        self.tied = torch.nn.Linear(7, 5)
        self.tied.weight = self.out.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.into(self.frozen(x)))
        if self.again:
            hidden = torch.utils.checkpoint.checkpoint(self.middle, hidden, use_reentrant=False)
        else:
            hidden = self.middle(hidden)
        out: torch.Tensor = self.out(hidden) + self.tied(hidden)
        return out


def kinds_with_copies(copies: int, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """Train three steps of models and optimizers of several kinds; return their weights."""
    found = {}
    rank = torch.distributed.get_rank()
    for kind in kinds:
        net = Tied(again=kind == "again")
        if kind == "compiled":
            net.middle.compile(backend="aot_eager")
        low = torch.bfloat16 if kind == "bfloat16" else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        fully_shard(net.middle, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
        whole, biases = (
            [one for name, one in net.named_parameters() if name.endswith(end)] for end in ("weight", "bias")
        )
        groups = [{"params": whole}, {"params": biases, "lr": 0.02, "weight_decay": 0.0}]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.1)
        if kind == "momentum":
            optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        model = adl.AdaptiveFSDP(net, optimizer, name=kind, copies=copies)
        for turn in range(3):
            for half in range(2):
                seed = turn * 20 + half * 10 + rank
                inputs = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed))
                model(inputs).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found[kind] = {name: value.tolist() for name, value in weights(net).items()}
    return found


def newcomer(copies: int) -> bool:
    """Run a batch that does not count, as a replica does that has not joined three others yet."""
    torch.distributed.destroy_process_group()
    session = current_session()
    session.newcomer, session.dry = SimpleNamespace(before_epochs=False), True
    placeholder.enter("gloo", 1, 4)
    net, optimizer = sharded()
    step(adl.AdaptiveFSDP(net, optimizer, copies=copies), optimizer)
    placeholder.leave()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return True


def turned() -> dict[str, Any]:
    """Give the parts to the replicas in reversed order, then divide the model again."""
    net, optimizer = sharded()
    model = adl.AdaptiveFSDP(net, optimizer)
    step(model, optimizer)
    before, held = weights(net), [*net.parameters()]
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    order = [[place] for place in reversed(range(count))]
    group = Gloo("gloo")
    with torch.no_grad():
        Resharding(net, optimizer, group, rank, Layout(count).holders, order).hand_over()
        parts = [part.shape[0] for part in map(private.local, net.parameters())]
        info = private.mesh_info(torch.device("cpu"))
        Resharding(net, optimizer, group, rank, order, Layout(count).holders).spread(info)
    assert all(one is other for one, other in zip(held, net.parameters(), strict=True))
    after = weights(net)
    step(model, optimizer)
    return {
        "equal": all(torch.equal(value, after[name]) for name, value in before.items()),
        "parts": parts,
        "next": {name: value.tolist() for name, value in weights(net).items()},
    }


class Branches(torch.nn.Module):
    """A model with a parameter that never gets a gradient and one that gets it in some passes only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(5, 7)
        self.unused = torch.nn.Linear(7, 3)
        self.last = torch.nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def noises(cases: list[tuple[str, int, dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Return what was measured of a plain and of a sharded model, for each case."""
    plain = {case: noise(*case, False, {}) for case in dict.fromkeys(case[:2] for case in cases)}
    return [[plain[kind, passes], noise(kind, passes, True, mixed)] for kind, passes, mixed in cases]


def noise(kind: str, passes: int, shard: bool, mixed: dict[str, Any]) -> dict[str, Any]:
    """Train on other data on each replica, measured in each step, and return what was measured.

    Args:
        kind: Optimizer.
        passes: Backward passes of each step.
        shard: Whether to shard the model.
        mixed: Arguments of MixedPrecisionPolicy.
    """
    net = Branches()
    if shard:
        policy = MixedPrecisionPolicy(**mixed)
        for layer in (net.first, net.last):
            fully_shard(layer, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
    groups = [
        {"params": [*net.first.parameters(), net.last.bias]},
        {"params": [net.last.weight, *net.unused.parameters()]},
    ]
    optimizer: Any = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind](groups, lr=0.01)
    name = f"{kind} {passes} {shard} {mixed}"
    if shard:
        model: Any = adl.AdaptiveFSDP(net, optimizer, name=name)
    else:
        model = adl.AdaptiveDataParallel(net, optimizer, name=name, find_unused_parameters=True)
    model.gns.gap = 1
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    for _ in range(20):
        for _ in range(passes):
            x = torch.randn(4, 5, generator=generator)
            (model(x).float() - x[:, :3].sin()).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    insides.state(model).sync()
    gns = model.gns
    return {
        "sqr": gns.raw_sqr_avg.tolist(),
        "var": gns.raw_var_avg.tolist(),
        "gain": gns.gain(4.0),
        "steps": gns.steps,
        "measured": sum(count for count, *_ in gns.state_dict()["moments"]["cells"]),
    }


def windows(
    plan: list[list[list[int]]], batch_size: int, first: bool, set_to_none: bool = True
) -> list[dict[str, Any]]:
    """Train a plain and a sharded model on windows, [windows][micro-batches][replicas] samples each.

    Args:
        plan: The windows.
        batch_size: Initial batch size.
        first: Whether the loop calls `zero_grad` before the backward pass, or after the step.
        set_to_none: Argument of `zero_grad`.
    """
    return [_windows(plan, batch_size, first, set_to_none, shard) for shard in (False, True)]


def _windows(
    plan: list[list[list[int]]], batch_size: int, first: bool, set_to_none: bool, shard: bool
) -> dict[str, Any]:
    net, rank = network(), torch.distributed.get_rank()
    if shard:
        fully_shard(net[0])
        fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    wrap: Any = adl.AdaptiveFSDP if shard else adl.AdaptiveDataParallel
    # not AdaScale, which depends on what is measured
    model = wrap(net, optimizer, name=f"{shard} {first} {set_to_none}", scaling_rule=SqrtScale())
    model.gns.gap = 1
    samples = torch.randn(1000, 5, generator=torch.Generator().manual_seed(7))
    position = 0
    for window in plan:
        with FakeLoader(window, batch_size, current_local_bsz=max(map(max, window))) as loader:
            for loader.chunk, sizes in enumerate(window):
                start, count = position + sum(sizes[:rank]), sizes[rank]
                x = samples[start : start + count] if count else samples[:1]  # a filler
                if first:
                    optimizer.zero_grad(set_to_none=set_to_none)
                (model(x) - x[:, :3].sin()).square().mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                if not first:
                    optimizer.zero_grad(set_to_none=set_to_none)
                position += sum(sizes)
    insides.state(model).sync()
    return {
        "weights": {name: value.tolist() for name, value in weights(net).items()},
        "noise": [model.gns.sqr_avg(), model.gns.var_avg()],
        "progress": model.gns.get_progress(),
        "steps": model.gns.steps,
    }
