"""A batch that does not count leaves the names that the loop's body sets, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import insides
import numpy as np
import pytest
import torch
from fresh import Script
from torch.utils.data import IterableDataset

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session, checkpoint
from adaptdl_elastic.torch.iterator import AdaptiveBPTTIterator


class Average(checkpoint.TensorState):
    """A State that is too large to be copied at every step."""

    def __init__(self) -> None:
        super().__init__("average")
        self.values = torch.zeros(5000)

    def state_dict(self) -> Any:
        return {"values": self.values}

    def load_state_dict(self, state_dict: Any) -> None:
        self.values.copy_(state_dict["values"])


class Counter(checkpoint.State):
    def __init__(self) -> None:
        super().__init__("counter")
        self.count = 0

    def save(self, fileobj: Any) -> None:
        fileobj.write(bytes([self.count]))

    def load(self, fileobj: Any) -> None:
        self.count = fileobj.read()[0]


def everything(optimizers: list[Any], states: list[Any], sums: Any) -> list[Any]:
    """What a batch may change, as plain data."""
    average, counter = states
    values: list[Any] = [average.values.tolist(), counter.count, dict(insides.state(sums).updates)]
    for model, optimizer, scheduler, scaler in optimizers:
        values += [{k: v.tolist() for k, v in model.state_dict().items()}, str(optimizer.state_dict())]
        values += [None if scheduler is None else scheduler.state_dict(), scaler and scaler.state_dict()]
        values += [[param.grad for param in model.parameters()]]
    return values


def test_all_that_the_body_changes_is_put_back(script: Script, tmp_path: Path) -> None:
    """Of a wrapped model with a scheduler and a GradScaler, and of a plain one beside it."""

    def run(stop: bool) -> int:
        torch.manual_seed(1)
        adl.init_process_group("gloo")
        loader = adl.AdaptiveDataLoader(range(6), batch_size=2)
        net = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout())
        plain = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
        beside = torch.optim.Adam(plain.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        model = adl.AdaptiveDataParallel(net, optimizer, scheduler, scaler)
        average, counter = states = [Average(), Counter()]
        for state in states:
            checkpoint.load_state(state)
        optimizers = [(net, optimizer, scheduler, scaler), (plain, beside, None, None)]
        effects = 0
        for _ in adl.remaining_epochs_until(1):
            sums = adl.Accumulator()
            before = everything(optimizers, states, sums)
            for batch in loader:
                optimizer.zero_grad()
                beside.zero_grad()
                loss = model(batch[:, None].float()).sum() + plain(batch[:, None].float()).sum()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                beside.step()
                scheduler.step()
                average.values += 1
                counter.count += 1
                sums["seen"] += len(batch)
                with sums.synchronized():
                    assert sums["seen"] > 0
                adl.report(loss=loss.item())
                random.random(), np.random.random()
                with torch.no_grad():  # as clipping of weights does
                    for param in [*net.parameters(), *plain.parameters()]:
                        param.add_(1.0)
                assert all(param.grad is not None for param in net.parameters())
                effects += adl.batch_counts()
            if not stop:
                assert everything(optimizers, states, sums) == before
            assert loss.item() == loss.item()
            for _ in loader:
                if stop:
                    checkpoint.save_all_states()
                    break
            if stop:
                break
        return effects

    assert run(stop=True) == 3
    events = (tmp_path / "events").read_text().count('"metrics"')
    _session.current().close()
    script.restart()
    torch.distributed.destroy_process_group()
    assert run(stop=False) == 0
    assert (tmp_path / "events").read_text().count('"metrics"') == events


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


@pytest.mark.parametrize(
    "kind", ["stream", "tokens", "drop_last", pytest.param("workers", marks=pytest.mark.processes)]
)
def test_loaders_of_every_kind_have_such_a_batch(script: Script, kind: str) -> None:
    def run(stop: bool) -> list[tuple[bool, list[int]]]:
        loaders: dict[str, Any] = {
            "stream": lambda: adl.AdaptiveDataLoader(Stream(), batch_size=2),
            "tokens": lambda: AdaptiveBPTTIterator(torch.arange(13), batch_size=2, bptt_len=2),
            "workers": lambda: adl.AdaptiveDataLoader(range(6), batch_size=2, num_workers=1),
            "drop_last": lambda: adl.AdaptiveDataLoader(range(7), batch_size=2, drop_last=True),
        }
        loader, seen = loaders[kind](), []
        for _ in adl.remaining_epochs_until(1):
            for batch in loader:
                first = batch.text.flatten() if kind == "tokens" else batch
                seen.append((adl.batch_counts(), first.tolist()))
            for _ in adl.AdaptiveDataLoader(range(2)):
                if stop:
                    checkpoint.save_all_states()
                    return seen
        return seen

    first = run(stop=True)
    assert [counts for counts, _ in first] == [True] * 3
    script.restart()
    assert run(stop=False) == [(False, first[0][1])]


def test_is_optim_step_asks_the_loop_under_way(script: Script) -> None:
    loader = adl.AdaptiveDataLoader(range(8), batch_size=4)
    loader.autoscale_batch_size(4, local_bsz_bounds=(1, 2), gradient_accumulation=True)
    insides.helper(loader).train()
    assert adl.is_optim_step()
    assert adl.batch_counts()
    found: list[bool] = []
    for _ in adl.remaining_epochs_until(1):
        for _ in loader:
            found.append(adl.is_optim_step())
            if len(found) == 4:
                break
    assert found == [False, True, False, True]
