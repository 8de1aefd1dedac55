"""Replicas that read the same data, or share them twice, say so on stderr, as events, in `adaptdl status`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import generations
import numpy as np
import pytest
import torch

from adaptdl_elastic.torch._data.batch_comparison import digest
from adaptdl_elastic.torch._gradient.gradient_health import LEAST_STEPS, GradientHealth

SCRIPT = Path(__file__).parents[1] / "support" / "shared_data_script.py"
SAME_BATCHES = "trains adaptdl-dataparallel on the same batches: a plain DataLoader is read whole"
SAME_INPUTS = "on the same inputs, though the loader hands out different samples"
SPEED = ("the speed of replica", "the progress of replica")
NO_VARIANCE = "the gradient has had no variance since step 0"


def run(kind: str, replicas: int, folder: Path, code: int = 0) -> tuple[list[dict[str, Any]], str]:
    """The warnings about data among the events, and what all replicas printed.

    On a busy machine one replica may really be slower than the others, which is a warning, too.
    """
    log = folder / "events"
    log.touch()
    ended = generations.run(
        SCRIPT, replicas, folder, LOOP=json.dumps({"kind": kind}), ADAPTDL_EVENT_LOG=str(log)
    )
    output = "".join(one.output for one in ended)
    assert [one.code for one in ended] == [code] * replicas, output
    events = [json.loads(line) for line in log.read_text().splitlines()]
    warnings = [event for event in events if event["event"].startswith("warning")]
    return [one for one in warnings if not one["about"].startswith(SPEED)], output


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("plain", [SAME_BATCHES, NO_VARIANCE]),
        ("equal noise", [SAME_INPUTS, NO_VARIANCE]),
        ("divided stream", ["the replicas read different samples from the stream of loader 0"]),
        ("remade", ["another loader reads the samplers of an AdaptiveDataLoader"]),
        ("own rate", ["such as its learning rate, differ between the replicas"]),
    ],
)
def test_wrong_data_are_said_once_with_a_remedy(kind: str, messages: list[str], tmp_path: Path) -> None:
    # with learning rates of their own the replicas drift apart, which ends the job at the epoch's end
    events, printed = run(kind, 2, tmp_path, code=int(kind == "own rate"))
    assert [event["event"] for event in events] == ["warning"] * len(messages)
    said = [event["message"] for event in events]
    for message in messages:
        (found,) = [one for one in said if message in one]
        assert printed.count(found) == 1


@pytest.mark.processes
@pytest.mark.parametrize(("kind", "replicas"), [("sound", 3), ("stream", 2), ("own noise", 2), ("plain", 1)])
def test_sound_data_are_not_spoken_of(kind: str, replicas: int, tmp_path: Path) -> None:
    events, printed = run(kind, replicas, tmp_path)
    assert events == []
    assert "same" not in printed


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning", "ignore:.*[Ss]parse.*:UserWarning")
def test_a_tensor_that_cannot_be_compared_has_no_digest() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for odd in (
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        nested,
        torch.empty(3, device="meta"),
    ):
        assert digest((torch.ones(2), {"odd": odd})) is None


def test_numbers_anywhere_in_a_batch_count() -> None:
    images = torch.zeros(8, 3, 224, 224)
    other = images.clone()
    other[:, :, 80:140, 80:140] = 1.0
    assert digest(images) != digest(other)
    conjugate = torch.complex(torch.ones(3), torch.ones(3)).conj()
    assert digest(conjugate) == digest(conjugate.resolve_conj())


def test_a_digest_is_that_of_what_is_inside() -> None:
    values: list[Any] = [
        torch.zeros(3),
        torch.zeros(4),
        torch.zeros(3, dtype=torch.int32),
        torch.ones(3, dtype=torch.bfloat16),
        {"a": torch.zeros(3), "b": 1},
        {"a": torch.zeros(3), "b": 2},
        np.arange(3),
        np.arange(1, 4),
        [1, "x"],
        [1, "y"],
        object(),
    ]
    assert len({digest(value) for value in values}) == len(values)
    assert digest({"a": torch.arange(3), "b": "x"}) == digest({"a": torch.arange(3), "b": "x"})
    assert digest(torch.zeros(0)) == digest(torch.zeros(0))


def test_a_gradient_without_variance_is_a_problem_until_it_has_some() -> None:
    health = GradientHealth()
    for step in range(LEAST_STEPS - 1):
        health.varied(step, 2.0, 0.0)
        assert health.equal is None
    health.varied(LEAST_STEPS - 1, 2.0, 1e-8)  # what rounding leaves
    assert "since step 0" in str(health.equal)
    health.varied(LEAST_STEPS, 2.0, 0.01)
    assert health.equal is None


def test_no_gradient_at_all_is_not_one_without_variance() -> None:
    health = GradientHealth()
    for step in range(2 * LEAST_STEPS):
        health.varied(step, 0.0, 0.0)
    assert health.equal is None
