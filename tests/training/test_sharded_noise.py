"""The gradient noise of a sharded model is that of AdaptiveDataParallel on the same data."""

from __future__ import annotations

from typing import Any

import pytest
import replicas
import sharded_cases
import torch

pytestmark = sharded_cases.needs_tested_torch


@pytest.mark.slow
@pytest.mark.processes
def test_noise_of_two_replicas_is_that_of_a_plain_model() -> None:
    """Nearly, in mixed precision."""
    reduced = {torch.bfloat16: "adamw", torch.float16: "sgd", torch.float32: "sgd"}
    cases: list[tuple[str, int, dict[str, Any]]] = [
        *((kind, passes, {}) for kind in ("sgd", "adamw") for passes in (1, 2)),
        *((kind, 1, {"param_dtype": torch.bfloat16, "reduce_dtype": one}) for one, kind in reduced.items()),
    ]
    results = replicas.run(sharded_cases.noises, 2, cases)
    assert results[0] == results[1]
    for (kind, _, policy), (plain, sharded) in zip(cases, results[0], strict=True):
        assert plain["measured"] == (20 if kind == "sgd" else 10)  # Adam's first ten steps are not
        assert sharded["measured"] == plain["measured"]
        assert sharded["steps"] == plain["steps"] == 20
        assert min(plain["sqr"] + plain["var"]) > 0.01
        for key in ("sqr", "var") if policy else ("sqr", "var", "gain"):
            assert sharded[key] == pytest.approx(plain[key], rel=0.1 if policy else 1e-4), (kind, policy, key)


@pytest.mark.usefixtures("alone")
def test_a_single_replica_compares_successive_steps() -> None:
    once = sharded_cases.noise("sgd", 1, True, {})
    assert once["measured"] == 10  # each takes two steps
    assert min(once["var"]) > 0.01
    twice = sharded_cases.noise("sgd", 2, True, {})
    assert (twice["measured"], twice["steps"]) == (0, 20)


EVEN = [[[2, 2]] * 3] * 8
UNEVEN = [*EVEN, [[2, 2], [2, 1], [1, 0]], [[3, 2]], *EVEN]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("first", "set_to_none"), [(True, True), (False, True), (False, False)])
def test_windows_of_several_batches_train_as_those_of_a_plain_model(first: bool, set_to_none: bool) -> None:
    (plain, sharded), _ = replicas.run(sharded_cases.windows, 2, UNEVEN, 4, first, set_to_none)
    assert_same_training(plain, sharded)
    # The sharded model compares six gradients in each window, the plain one two.
    assert sharded["noise"] == pytest.approx(plain["noise"], rel=0.5)


@pytest.mark.usefixtures("alone")
def test_windows_of_a_single_replica_train_and_are_measured_as_those_of_a_plain_model() -> None:
    plan = [[[4]] * 3] * 8
    plain, sharded = sharded_cases.windows([*plan, [[4], [3], [0]], *plan], 4, True)
    assert_same_training(plain, sharded)
    assert sharded["steps"] == 17
    assert sharded["noise"] == pytest.approx(plain["noise"], rel=1e-4)


def assert_same_training(plain: dict[str, Any], sharded: dict[str, Any]) -> None:
    assert sharded["steps"] == plain["steps"]
    assert sharded["weights"].keys() == plain["weights"].keys()
    for name, value in plain["weights"].items():
        torch.testing.assert_close(
            torch.tensor(sharded["weights"][name]), torch.tensor(value), rtol=1e-4, atol=1e-5
        )
