"""Of a data loop and one in its body, the one that did not fit gets smaller batches; in a `zip` both do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fresh import Script
from small_memory import Net

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session
from adaptdl_elastic._values import StepOutOfMemory
from adaptdl_elastic.torch._gradient.out_of_memory import find_culprits
from adaptdl_elastic.torch._tuning.memory_limit import memory_limit


class World:
    """Train on two loaders of 16 samples each."""

    def __init__(self, outer: int, inner: int, most: int) -> None:
        torch.manual_seed(1)
        if not torch.distributed.is_initialized():
            adl.init_process_group("gloo")
        self.outer = adl.AdaptiveDataLoader(samples(), batch_size=outer)
        self.inner = adl.AdaptiveDataLoader(samples(), batch_size=inner)
        self.net = Net(2, 1)
        self.net.most = most
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.model = adl.AdaptiveDataParallel(self.net, self.optimizer)


def samples() -> Any:
    return torch.arange(32.0).reshape(16, 2) / 32


@pytest.mark.parametrize("wrapped", [True, False])
def test_an_inner_loop_has_more_batches_and_the_outer_one_stays(script: Script, wrapped: bool) -> None:
    """The outer batch of 4 samples was halved to 1, and the job ended with "not even one sample fits"."""
    world = World(outer=4, inner=8, most=6)
    called = world.model if wrapped else world.net
    bodies = []
    for _ in adl.remaining_epochs_until(1):
        for batch in world.outer:
            world.optimizer.zero_grad()
            sizes = []
            for part in world.inner:
                called(part).square().mean().backward()
                sizes.append(len(part))
            world.optimizer.zero_grad()
            world.model(batch).square().mean().backward()
            world.optimizer.step()
            bodies.append((len(batch), sizes))
    assert bodies == [(4, [8, 8]), *[(4, [4, 4, 4, 4])] * 4]
    assert memory_limit().largest is None
    assert _session.current().step == 4
    script.resume()
    world = World(outer=4, inner=8, most=6)
    for _ in adl.remaining_epochs_until(2):
        for _ in world.outer:
            assert [len(part) for part in world.inner] == [4, 4, 4, 4], "the limit is in the checkpoint"


def test_an_inner_loop_that_fits_keeps_its_batches(script: Script) -> None:
    world = World(outer=8, inner=4, most=4)
    bodies = []
    for _ in adl.remaining_epochs_until(1):
        for batch in world.outer:
            world.optimizer.zero_grad()
            sizes = []
            for part in world.inner:
                world.model(part).square().mean().backward()
                sizes.append(len(part))
            world.model(batch).square().mean().backward()
            world.optimizer.step()
            bodies.append((len(batch), sizes))
    assert bodies == [(8, [4] * 4), *[(4, [4] * 4)] * 4]


@pytest.mark.parametrize(("inner", "most"), [(8, 4), (8, 3), (4, 4), (8, 2)])
def test_loaders_in_a_zip_are_divided_alike(script: Script, inner: int, most: int) -> None:
    """The second loader's batches stayed whole, so it ended first, and half of the epoch was left out."""
    world = World(outer=8, inner=inner, most=most)
    counted: list[tuple[int, int]] = []
    seen: list[torch.Tensor] = []
    for _ in adl.remaining_epochs_until(1):
        for batch, beside in zip(world.outer, world.inner):  # noqa: B905  (what is left of either is not equal)
            before = _session.current().step
            world.optimizer.zero_grad()
            (world.model(batch) * beside.mean()).square().mean().backward()
            world.optimizer.step()
            counted.append((len(batch), len(beside)))
            seen.append(batch)
            assert before < 2
    assert _session.current().step == 2
    repeated = next(number for number, (size, _) in enumerate(counted) if size <= most)
    counted, seen = counted[repeated:], seen[repeated:]
    assert torch.equal(torch.cat(seen), samples())
    assert sum(other for _, other in counted) == 2 * inner
    assert {size / other for size, other in counted} == {8 / inner}


@pytest.mark.parametrize(
    ("outer", "inner", "passed", "found"),
    [
        (8, None, [8], {None: 8}),
        (8, ("1", 4), [4], {"1": 4}),
        (8, ("1", 4), [8], {None: 8}),
        (8, ("1", 4), [], {"1": 4}),  # a model that is called without AdaptiveDataParallel
        (8, ("1", 4), [8, 4], {None: 8, "1": 4}),  # both in one backward pass
        (8, ("1", 8), [8], {"1": 8}),
        (8, ("1", 8), [8, 8], {None: 8, "1": 8}),
        (8, ("1", 1), [1], {None: 8}),
        (1, ("1", 4), [1], {"1": 4}),
        (1, ("1", 1), [1], {}),
        (1, None, [], {}),
    ],
)
def test_culprits_are_found(outer: int, inner: Any, passed: list[int], found: dict[str | None, int]) -> None:
    assert find_culprits(outer, inner, passed) == found


def test_survivors_and_replicas_agree_on_the_smallest_limits(script: Script) -> None:
    limit = memory_limit()
    limit.learn(StepOutOfMemory("x", 8, {"1": 4, "2": 5}))
    limit.learn(StepOutOfMemory("x", None, {"1": 6}))
    assert limit.state_dict() == {"largest": 8, "inner": {"1": 4, "2": 5}}
    limit.agree([limit.state_dict(), {"largest": None, "inner": {"1": 3, "3": 2}}])
    assert limit.state_dict() == {"largest": 8, "inner": {"1": 3, "2": 5, "3": 2}}
