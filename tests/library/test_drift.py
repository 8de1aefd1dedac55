"""Replicas that drift apart end with an error, and right scripts are not accused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_agent
import loop_script_path
import pytest
import torch
from fake_agent import FakeAgent

from adaptdl_elastic.torch._runtime import drift

pytestmark = pytest.mark.processes


run = partial(fake_agent.running, loop_script_path.DRIFT)


def errors(job: FakeAgent) -> list[str]:
    """Return the last line of each replica, all of which must have failed."""
    assert [each.join() for each in job.running] == [1] * len(job.running), job.outputs()
    return [each.text().splitlines()[-1] for each in job.running]


@pytest.mark.parametrize("no_sync", [False, True])
def test_a_clause_on_len_loader_after_growth_is_an_error_with_the_remedy(
    tmp_path: Path, no_sync: bool
) -> None:
    with run(tmp_path, 1, no_sync=no_sync, grows=True) as job:
        job.wait_for("step")
        job.rescale(2)
        for line in errors(job):
            assert "at sample 120 of epoch 0" in line, job.outputs()
            assert "adl.expected_batches()" in line


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("step", "stepped 1 times on rank 0 and 0 times on rank 1"),
        ("edit", "the parameters of ranks 0 and 1 differ in epoch 0"),
        ("parameter", "the parameters of ranks 0 and 1 differ in epoch 0"),
    ],
)
def test_a_change_on_one_rank_alone_is_an_error(tmp_path: Path, kind: str, found: str) -> None:
    with run(tmp_path, 2, kind=kind, epochs=1) as job:
        for line in errors(job):
            assert "ReplicasApartError: drift_script.py:" in line
            assert found in line


@pytest.mark.parametrize(
    "given",
    [{"kind": "right"}, {"kind": "right", "no_sync": True}, {"kind": "scaler"}, {"kind": "gan"}],
    ids=str,
)
def test_right_scripts_are_not_accused_over_a_change(tmp_path: Path, given: dict[str, Any]) -> None:
    with run(tmp_path, 1, **given, grows=True) as job:
        job.wait_for("step")
        job.rescale(2)
        job.finish()
    weights = [torch.load(tmp_path / f"weights-{rank}") for rank in range(2)]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


@pytest.mark.parametrize("dies", [0, 2])
def test_a_death_in_mid_loop_is_no_drift(tmp_path: Path, dies: int) -> None:
    with run(tmp_path, 3, kind="plain", dies=dies) as job:
        job.bury(dies)
        job.survive()
        job.finish()


def test_a_subclass_of_tensor_that_hides_its_bits_is_not_compared() -> None:
    class Hidden(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert func is torch.ops.aten.detach.default, func
            return args[0]

    net = torch.nn.Linear(2, 1)
    hidden = torch.Tensor._make_wrapper_subclass(Hidden, (2, 4))
    net.hidden = torch.nn.Parameter(hidden, requires_grad=False)
    model = SimpleNamespace(module=net, has_own_process_group=False)
    session: Any = SimpleNamespace(models=[model])
    assert len(drift.DriftWatch(session, print).digest()) == 1
