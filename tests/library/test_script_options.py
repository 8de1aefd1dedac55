"""Options that a script sets otherwise than its checkpoint are named, and one setting says which count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fresh import Script
from torch.optim import lr_scheduler

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint
from adaptdl_elastic.torch._gradient import script_options

Schedule = Callable[[Any], Any] | None
SCRIPTS = "ADAPTDL_OPTIONS_FROM"

SCHEDULES: dict[str, Schedule] = {
    "none": None,
    "StepLR": lambda one: lr_scheduler.StepLR(one, 2, 0.5),
    "warmup from 0": lambda one: lr_scheduler.LambdaLR(one, lambda step: min(step, 4) / 4),
    "cosine": lambda one: lr_scheduler.CosineAnnealingLR(one, 10, eta_min=1e-5),
    "sequence": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.ConstantLR(one, 0.5, 2), lr_scheduler.ExponentialLR(one, 0.9)], [2]
    ),
    "OneCycleLR": lambda one: lr_scheduler.OneCycleLR(one, one.param_groups[0]["lr"] * 3, total_steps=20),
    "on a plateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=1),
}


def train(steps: int, schedule: Schedule, lr: float = 0.1, **options: Any) -> list[float]:
    """Begin or go on, and return the learning rates of the steps."""
    if dist.is_initialized():
        dist.destroy_process_group()
    adl.init_process_group("gloo")
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, **{"momentum": 0.9, **options})
    scheduler = schedule(optimizer) if schedule else None
    model, rates = adl.AdaptiveDataParallel(net, optimizer, scheduler), []
    for _ in range(steps):
        model(torch.ones(2, 1)).mean().backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step(*[1.0] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
    return rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_checkpoint_s_options_count_and_are_named(
    script: Script, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    whole = train(8, SCHEDULES[name])
    script.restart()
    train(5, SCHEDULES[name])
    script.resume()
    assert train(0, SCHEDULES[name]) == []
    assert "options" not in caplog.text
    for _ in range(2):
        script.resume()
        caplog.clear()
        train(0, SCHEDULES[name], lr=0.001, weight_decay=0.1)
    lr = "max_lr (0.003 in the script, 0.3" if name == "OneCycleLR" else "lr (0.001 in the script, 0.1"
    assert lr in caplog.text
    assert "weight_decay (0.1 in the script, 0 in it)" in caplog.text
    assert "the checkpoint's count; ADAPTDL_OPTIONS_FROM=script makes" in caplog.text
    assert len(caplog.records) == 1
    assert "base_lrs" not in caplog.text
    script.resume()
    rates = train(3, SCHEDULES[name], lr=0.001)
    assert rates == pytest.approx(whole[5:])


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_script_s_options_count_and_the_schedule_goes_on_from_its_position(
    script: Script, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    whole = train(8, SCHEDULES[name], lr=0.001)
    script.restart()
    train(5, SCHEDULES[name])
    script.resume(**{SCRIPTS: "script"})
    rates = train(1, SCHEDULES[name], lr=0.001)
    assert "the script's count from here on" in caplog.text
    # once changed, they are those of the checkpoint
    caplog.clear()
    for source in ("script", "checkpoint"):
        script.resume(**{SCRIPTS: source})
        rates += train(1, SCHEDULES[name], lr=0.001)
    assert caplog.text == ""
    assert rates == pytest.approx(whole[5:])


def test_a_schedule_of_another_length_goes_on_from_its_position(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    longer: Schedule = lambda one: lr_scheduler.CosineAnnealingLR(one, 40)  # noqa: E731
    whole = train(15, longer)
    script.restart()
    train(10, lambda one: lr_scheduler.CosineAnnealingLR(one, 10))
    script.resume(**{SCRIPTS: "script"})
    assert train(5, longer) == pytest.approx(whole[10:])
    assert "at its end" not in caplog.text


@pytest.mark.parametrize("name", ["cosine", "OneCycleLR", "StepLR", "sequence"])
def test_a_schedule_that_is_at_its_end_is_named(
    script: Script, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    train(20, SCHEDULES[name])
    script.resume()
    train(0, SCHEDULES[name])
    assert caplog.text.count("is at its end, step 20") == (name in ("cosine", "OneCycleLR"))


def test_a_checkpoint_of_an_older_version_without_options_is_restored(
    script: Script, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr(script_options, "options_of", lambda parts: {})
        train(5, SCHEDULES["StepLR"])
        checkpoint.save_all_states()
    script.restart(**{SCRIPTS: "script"})
    assert train(1, SCHEDULES["StepLR"], lr=0.001) == pytest.approx([0.025])
    assert caplog.text == ""
