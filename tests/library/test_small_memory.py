"""Batches that do not fit into memory: at most one step is lost, and no replica restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake_agent
import generations
import pytest
import torch
from fake_agent import FakeAgent

from adaptdl_elastic.protocol.messages import Stop

pytestmark = [pytest.mark.processes, pytest.mark.exhaustive]

SIZE, BATCH = 240, 24
LONG = 5 * SIZE
"""Samples of a loop that does not end before what is done to it."""


start = fake_agent.starts("hello", size=SIZE, batch=BATCH)


def applied(folder: Path, replicas: int, size: int = SIZE) -> None:
    """Every sample was applied exactly once, with the weight that it has in a batch of `BATCH`."""
    for rank in range(replicas):
        weights = torch.load(folder / f"weights-{rank}")
        torch.testing.assert_close(-weights * BATCH, torch.ones(size, dtype=torch.float64))


def trained(folder: Path) -> list[dict[str, Any]]:
    return [line for line in generations.records(folder) if line["loop"] == "train"]


@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
@pytest.mark.parametrize(("replicas", "rank"), [(1, 0), (2, 1), (2, None)])
@pytest.mark.essential
def test_the_batch_becomes_smaller(
    start: Any, tmp_path: Path, where: str, replicas: int, rank: int | None
) -> None:
    size = LONG if where == "forward" else SIZE  # after a forward pass the limit comes a few steps later
    job = start(replicas, fits=[where, rank, 5], size=size, pace=0.05)
    job.wait_for_event("memory_limit")
    job.finish()
    applied(tmp_path, replicas, size)
    seen = trained(tmp_path)
    largest = 3  # 24 or 12 samples, and half as many until they fit
    assert max(line["local"] for line in seen if line["index"] >= size - BATCH) == largest
    assert {line["window"] for line in seen} == {BATCH}
    assert "cannot be split" not in job.outputs(), "the measurement of noise does not end with it either"


@pytest.mark.parametrize(
    "loop",
    [
        {"accumulate": 1, "fits": ["forward", 0, 4]},  # the first of a step's two batches does not fit
        {"accumulate": 1, "fits": ["backward", 0, 4]},
        {"stream": True, "fits": ["backward", 1, 5]},
        {"size": 250, "drop_last": True, "fits": ["backward", 1, 5]},
        {"batch": 10, "fits": ["backward", None, 2]},  # 5 samples of a replica, in passes of 2, 2 and 1
    ],
)
def test_other_loops(start: Any, tmp_path: Path, loop: dict[str, Any]) -> None:
    job = start(2, **loop)
    job.finish()
    batch, size = loop.get("batch", BATCH), loop.get("size", SIZE)
    first, second = (torch.load(tmp_path / f"weights-{rank}") for rank in range(2))
    assert torch.equal(first, second)
    applied = (-first * batch).round(decimals=6)
    assert applied.sum() == size // batch * batch
    assert set(applied.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_first_batch_of_a_newcomer(start: Any, tmp_path: Path, where: str) -> None:
    job = start(1, fits=[where, 1, 5], size=LONG, pace=0.05)
    job.wait_for("step")
    job.rescale(2)
    job.finish()
    applied(tmp_path, 2, LONG)
    assert job.generation == 1
    assert min(line["local"] for line in trained(tmp_path) if line["rank"] == 1) == 3


def test_a_death_after_the_batch_has_become_smaller(start: Any, tmp_path: Path) -> None:
    job = start(2, fits=["backward", 1, 5], size=LONG, pace=0.05)
    job.wait_for_event("memory_limit")
    job.recover(1)
    job.finish()
    applied(tmp_path, 1, LONG)
    assert max(line["local"] for line in trained(tmp_path) if line["replicas"] == 1) in (3, 6)


def test_a_restart_begins_with_batches_that_fit(start: Any, tmp_path: Path) -> None:
    job = start(2, fits=["backward", None, 5], size=LONG, pace=0.05)
    job.wait_for_event("memory_limit")
    for each in job.running:
        each.channel.send(Stop("x"))
    assert [each.join() for each in job.running] == [143, 143]
    job.start(1)
    job.finish()
    applied(tmp_path, 1, LONG)
    assert {line["local"] for line in trained(tmp_path) if line["replicas"] == 1} == {3}


def test_an_evaluation_whose_batches_do_not_fit(start: Any, tmp_path: Path) -> None:
    job = start(2, fits=["evaluation", 0, 2], evaluate=1)
    job.finish()  # the script checks what was evaluated
    applied(tmp_path, 2)
    assert "rank 0: it is computed in parts of 2" in job.all[0].text()
    assert job.all[0].text().count("does not fit") == 1


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.essential
def test_not_even_one_sample_fits(start: Any, tmp_path: Path, where: str) -> None:
    job = start(1, fits=[where, 0, 0])
    assert job.running[0].join() == 1
    assert (
        "OneSampleError: not even one sample fits into memory (1 samples, where 0 fit)" in job.all[0].text()
    )


def test_gradients_that_are_really_nan_are_not_taken_for_it(start: Any, tmp_path: Path) -> None:
    job = start(2, nan=3)
    job.finish()
    weights = torch.load(tmp_path / "weights-0")
    assert weights.isnan().all(), "a step of nan is a step, as in torch"
    assert "does not fit" not in job.outputs()


def test_a_peer_dies_in_the_step_that_does_not_fit(start: Any, tmp_path: Path) -> None:
    job = start(3, fits=["backward", 0, 5], die=[2, "train", 0, 1])
    job.bury(2)
    job.survive()
    job.finish()
    applied(tmp_path, 2)


def test_a_loop_that_is_left_after_a_step_that_did_not_fit(start: Any, tmp_path: Path) -> None:
    job = start(2, fits=["backward", 1, 5], leave=1, epochs=2)
    job.finish()
    seen = trained(tmp_path)
    assert {line["local"] for line in seen if line["epoch"] == 0} == {12}
    assert {line["local"] for line in seen if line["epoch"] == 1} == {6}


def test_the_limit_is_searched_for_where_the_script_gives_no_bound(start: Any, tmp_path: Path) -> None:
    """24 samples fit, and 48 would not: the search tries 12, 24, 48, 36, 30 and 27."""
    job = start(2, fits=["forward", None, 30], autoscale=960, search=True, size=20 * SIZE, pace=0.01)
    event = job.wait_for_event("memory_limit")
    assert event["fields"]["largest"] == 27
    assert "30 samples fit into the memory of rank" in event["fields"]["message"]
    job.finish()
    assert max(line["local"] for line in trained(tmp_path)) <= 27
    assert "does not fit" not in job.outputs()


MEASURED = """
import torch
import adaptdl_elastic.torch as adl
from adaptdl_elastic.torch._gradient import comm_hook
bucket, calls = comm_hook.Norms.bucket, []
def exhausted(*args):
    calls.append(args)
    if adl.rank() == adl.world_size() - 1 and len(calls) > 2 and len(calls) % 3:
        raise torch.OutOfMemoryError("no memory for a norm")
    return bucket(*args)
comm_hook.Norms.bucket = exhausted
torch.manual_seed(3)
adl.init_process_group("gloo")
loader = adl.AdaptiveDataLoader(torch.randn(96, 2), batch_size=8)
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = adl.AdaptiveDataParallel(net, optimizer)
model.gns.gap = 2
for epoch in adl.remaining_epochs_until(2):
    for inputs in loader:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        assert len(inputs) * adl.world_size() == 8
assert len(calls) > 6
torch.save(net.weight, f"{os.environ['OUT']}/weight-{adl.rank()}")
"""


@pytest.mark.parametrize("replicas", [1, 2])
def test_memory_is_exhausted_while_gradients_are_measured(tmp_path: Path, replicas: int) -> None:
    """The step counts, in batches of the same size; it is only not measured."""
    script = tmp_path / "script.py"
    script.write_text("import os" + MEASURED)
    with FakeAgent(script, tmp_path, OUT=str(tmp_path), ADAPTDL_CHECKPOINT_INTERVAL="0") as job:
        job.start(replicas)
        job.finish()
    torch.manual_seed(3)
    data, net = torch.randn(96, 2), torch.nn.Linear(2, 1)
    for _ in range(2):
        for inputs in data.split(8):
            net.zero_grad()
            net(inputs).square().mean().backward()
            with torch.no_grad():
                for param in net.parameters():
                    assert param.grad is not None
                    param -= 0.1 * param.grad
    for rank in range(replicas):
        torch.testing.assert_close(torch.load(tmp_path / f"weight-{rank}"), net.weight)
