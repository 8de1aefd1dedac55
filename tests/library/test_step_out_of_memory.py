"""A step that does not fit is repeated: everything is as if it had fitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import Script
from small_memory import Net

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session


def train(most: int, set_to_none: bool, **ddp: Any) -> list[Any]:
    """Train with everything that a step changes; what is left of it."""
    torch.manual_seed(1)
    adl.init_process_group("gloo")
    data = torch.utils.data.TensorDataset(torch.randn(40, 2), torch.randn(40, 1))
    loader = adl.AdaptiveDataLoader(data, batch_size=8, shuffle=True)
    net = Net(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    model = adl.AdaptiveDataParallel(net, optimizer, scheduler, scaler, **ddp)
    kept: list[Any] = []
    for epoch in adl.remaining_epochs_until(2):
        sums = adl.Accumulator()
        for step, (inputs, targets) in enumerate(loader):
            net.most = most if (epoch, step) >= (0, 2) else 10**9
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1e3, error_if_nonfinite=True)
            scaler.step(optimizer)
            scaler.update()
            if adl.is_optim_step():
                scheduler.step()
            sums["seen"] += len(inputs)
        with sums.synchronized():
            kept.append(sums["seen"])
    torch.distributed.destroy_process_group()
    return [*kept, scheduler.last_epoch, scaler.get_scale(), _session.current().step, net.weight.detach()]


@pytest.mark.parametrize(
    ("set_to_none", "ddp"), [(True, {}), (False, {}), (True, {"gradient_as_bucket_view": True})]
)
def test_the_result_is_that_of_batches_that_fit(
    script: Script, tmp_path: Path, set_to_none: bool, ddp: dict[str, Any]
) -> None:
    *expected, weights = train(10**9, set_to_none, **ddp)
    script.restart(ADAPTDL_CHECKPOINT_PATH=str(tmp_path / "others"))
    *found, repeated = train(4, set_to_none, **ddp)
    assert found == expected
    assert found[:2] == [40, 40]
    torch.testing.assert_close(repeated, weights)
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [event["largest"] for event in events if event["event"] == "memory_limit"] == [4]


@pytest.mark.parametrize(
    ("ddp", "set_to_none", "why"),
    [
        ({"static_graph": True}, True, "static_graph=True"),
        ({"find_unused_parameters": True}, True, "find_unused_parameters=True"),
        ({"gradient_as_bucket_view": True}, False, "gradient_as_bucket_view=True without"),
    ],
)
def test_settings_of_ddp_with_which_a_step_cannot_be_repeated(
    script: Script, ddp: dict[str, Any], set_to_none: bool, why: str
) -> None:
    with pytest.raises(torch.OutOfMemoryError, match=f"cannot be repeated in smaller batches: {why}"):
        train(4, set_to_none, **ddp)


@pytest.mark.parametrize(("batch", "fits"), [(7, 4), (8, 4), (6, 3)])
def test_steps_in_smaller_batches_are_timed_also_where_these_are_not_equal(
    script: Script, monkeypatch: pytest.MonkeyPatch, batch: int, fits: int
) -> None:
    torch.manual_seed(1)
    adl.init_process_group("gloo")
    loader = adl.AdaptiveDataLoader(torch.randn(5 * batch, 2), batch_size=batch)
    net = Net(2, 1)
    net.most = fits
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = adl.AdaptiveDataParallel(net, optimizer)
    timed: list[bool] = []
    monkeypatch.setattr(
        _session.current().metrics, "profile_step_commit", lambda accumulating: timed.append(accumulating)
    )
    for _ in adl.remaining_epochs_until(1):
        for inputs in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    assert len(timed) >= 2 * 3  # the first batches of an iterator, and a step that is repeated, do not count
    assert timed.count(True) == timed.count(False)


def test_a_job_begins_with_the_limit_of_earlier_jobs_of_its_script(script: Script) -> None:
    """No batch has more samples, so no step is lost; a limit of the job's own counts before it."""
    script.set(ADAPTDL_MEMORY_LIMIT="4")
    sizes: list[int] = []

    def train(epochs: int) -> None:
        if not torch.distributed.is_initialized():
            adl.init_process_group("gloo")
        data: Any = torch.randn(16, 2)
        loader = adl.AdaptiveDataLoader(data, batch_size=8)
        loader.autoscale_batch_size(8)
        net = Net(2, 1)
        net.most = 4
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = adl.AdaptiveDataParallel(net, optimizer)
        for _ in adl.remaining_epochs_until(epochs):
            for inputs in loader:
                sizes.append(len(inputs))
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()

    train(1)
    assert sizes == [4, 4, 4, 4]
    assert _session.current().step == 2
    script.restart(ADAPTDL_MEMORY_LIMIT="3")
    del sizes[:]
    train(2)
    assert max(sizes) == 4
