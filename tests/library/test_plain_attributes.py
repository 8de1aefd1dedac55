"""What is the state of a scheduler of the script's own, and what is not."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cycle_scheduler import CycleScheduler, ScheduledOptim

import adaptdl_elastic.torch as adl
from adaptdl_elastic.torch._elastic.plain_attributes import PlainAttributes, changes_options


class Inner:
    """A part of a schedule, which knows its owner."""

    def __init__(self, owner: Any) -> None:
        self.owner, self.steps, self.seen = owner, 0, {"a": [0.5]}


class Schedule:
    """A schedule with attributes of every kind."""

    def __init__(self, optimizer: Any, rank: int) -> None:
        self.optimizer, self.rank, self.best = optimizer, rank, None
        self.parts, self.pair, self.table = [Inner(self)], (Inner(self), rank), {"x": Inner(self), 3: 1}
        self.around = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.options, self.data = SimpleNamespace(rate=0.1), [object()] * 1000
        self.function = lambda: 0

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


class Stepper:
    """An object that steps an optimizer, and reads its options."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()
        self.last = self.optimizer.param_groups[0]["lr"]


def test_only_objects_that_change_an_optimizers_options_have_such_a_state() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    made: list[Any] = [
        Schedule(optimizer, 0),
        CycleScheduler(optimizer, 1.0, 9),
        ScheduledOptim(optimizer, 1.0, 9),
    ]
    assert all(map(changes_options, made))
    trainer: Any = Schedule(optimizer, 0)
    trainer.best_state = torch.zeros(2)  # a part of its state that would not be kept
    stepper = Stepper(optimizer)
    dead = weakref.proxy(stepper)
    del stepper
    others = (Stepper(optimizer), CycleScheduler(None, 1.0, 9), optimizer, CycleScheduler, trainer, dead)
    assert not any(map(changes_options, others))


def test_values_that_have_changed_are_set_and_the_others_stay_those_of_the_process() -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters())
    one: Any = Schedule(optimizer, 0)
    other: Any = Schedule(optimizer, 7)
    saving, loading = PlainAttributes(one), PlainAttributes(other)
    assert not any(saving.state_dict().values())
    one.best, one.options.rate, one.later = 0.25, 0.9, [1]
    one.parts[0].steps, one.pair[0].steps, one.table["x"].steps, one.table[3] = 1, 2, 3, 4
    one.parts[0].seen["a"].append(1.5)
    one.around.last_epoch = 1
    loading.load_state_dict(saving.state_dict())
    assert (other.around.last_epoch, one.around.optimizer) == (1, optimizer)
    one.parts[0].seen["a"].append(2.5)
    assert (other.best, other.rank, other.options.rate) == (0.25, 7, 0.1)
    assert [other.parts[0].steps, other.pair[0].steps, other.table["x"].steps, other.table[3]] == [1, 2, 3, 4]
    assert (other.parts[0].seen, other.later, other.pair[1]) == ({"a": [0.5, 1.5]}, [1], 7)
    # a step that is undone
    loading.load_state_dict({})
    assert (other.best, other.rank, other.parts[0].steps, other.table[3]) == (None, 7, 0, 1)


def test_the_advice_to_give_a_scheduler_to_the_model_says_what_it_needs() -> None:
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(TypeError, match="give its class state_dict"):
        adl.AdaptiveDataParallel(net, optimizer, CycleScheduler(optimizer, 1.0, 9))
