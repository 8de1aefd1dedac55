"""The estimators on linear regression, whose |G|² and tr Σ are known in closed form."""

from __future__ import annotations

import contextlib
from typing import Any

import insides
import numpy as np
import parallel_cases as cases
import pytest
import regression
import replicas
import torch
from fake_loader import FakeLoader
from regression import Run
from torch.utils._python_dispatch import TorchDispatchMode

from adaptdl_elastic.torch._gradient.estimator import Measurement
from adaptdl_elastic.torch.gradient_noise_scale import AdamGradientNoiseScale, GradientNoiseScale
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel

pytestmark = pytest.mark.usefixtures("alone")

STEPS = 600  # of all seeds together
# at a high rate |G|² is that of the first steps: more seeds, and batches that tell it better
LEARNING_RATES = pytest.mark.parametrize(
    "run",
    [
        pytest.param(Run(), id="0.0"),
        pytest.param(Run(0.01), id="0.01", marks=pytest.mark.exhaustive),
        pytest.param(Run(0.1, local=256, steps=40), id="0.1", marks=pytest.mark.exhaustive),
    ],
)


def assert_true(found: dict[str, list[float]], tolerance: float) -> None:
    """Every mean, of every group, within `tolerance` of the closed form."""
    for name, relative in found.items():
        assert relative == pytest.approx([1.0] * len(relative), abs=tolerance), name


@LEARNING_RATES
def test_one_replica_splits_its_batch_by_signs(run: Run) -> None:
    """Where AdaptDL's differenced estimator has |G|² = 0 at a learning rate of 0.1."""
    assert_true(regression.train_seeds(run, STEPS // run.steps), 0.1)


def test_one_replica_measures_by_the_rows_of_half_of_the_samples() -> None:
    assert_true(regression.train_seeds(Run(rows=True), 4), 0.05)


@pytest.mark.processes
@LEARNING_RATES
def test_replicas_are_the_parts_of_a_batch(run: Run) -> None:
    for found in replicas.run(regression.train_seeds, 2, run, STEPS // run.steps):
        assert_true(found, 0.05)


def test_measured_now_and_then_the_means_are_the_same() -> None:
    assert_true(regression.train_seeds(Run(0.03, local=128, steps=100, every_step=False), 6), 0.15)


@pytest.mark.parametrize("every_step", [True, False])
def test_adam_on_one_replica(every_step: bool) -> None:
    """In Adam's metric; the first step, which has none yet, is not measured."""
    run = Run(3e-3, steps=200, settle=50, adam=True, every_step=every_step)
    assert_true(regression.train_seeds(run, 2), 0.25)


ELSEWHERE = {
    "four replicas": (4, Run(0.01, steps=60)),
    "adam, two replicas": (2, Run(3e-3, settle=50, adam=True)),
    "adam, by group, accumulating": (2, Run(3e-3, settle=50, adam=True, by_group=True, micro_batches=2)),
    "by group": (2, Run(0.01, steps=100, by_group=True)),
    "by group, one replica": (1, Run(0.01, by_group=True)),
    "accumulating": (2, Run(0.01, steps=100, micro_batches=3)),
    "accumulating on one replica": (1, Run(0.01, micro_batches=4)),
    "GradScaler": (2, Run(0.01, steps=100, loss_scale=1024.0)),
    "GradScaler, adam, one replica": (1, Run(3e-3, settle=50, adam=True, loss_scale=64.0)),
}


@pytest.mark.processes
@pytest.mark.parametrize("case", ELSEWHERE)
def test_estimates_are_those_of_the_closed_form(case: str) -> None:
    count, run = ELSEWHERE[case]
    for found in replicas.run(regression.train_seeds, count, run, 2):
        assert_true(found, 0.25 if count == 1 else 0.1)


def test_the_closed_form_is_right() -> None:
    problem = regression.Problem(features=8)
    delta = torch.linspace(-1, 1, 8)
    x, noise = problem.batch(400_000, torch.Generator().manual_seed(0))
    gradients = x * (x @ delta[:, None] - noise)
    sqr, var = problem.truth(delta)
    assert float(gradients.mean(0).square().sum()) == pytest.approx(sqr, rel=0.02)
    assert float(gradients.var(0).sum()) == pytest.approx(var, rel=0.02)


def short_batches(
    sizes: list[int],
    steps: int,
    batch_size: int = 64,
    returns_loss: bool = False,
    known: bool = True,
    successive: bool = False,
) -> tuple[AdaptiveDataParallel, dict[int, list[tuple[float, float]]]]:
    """Train at a learning rate of 0 on batches of `sizes` in turn; sqr and var measured, by size."""
    problem = regression.Problem(features=64)

    class Loss(regression.Halves):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            output = super().forward(x)
            return output if y is None else (0.5 * (output - y) ** 2).mean()

    model = Loss(problem)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    adp = AdaptiveDataParallel(model, sgd)
    cases.measure_always(adp)
    insides.seed_signs(adp, 0)
    if successive:
        insides.compare_successive_gradients(adp)
    record, seen = adp.gns.record, dict[int, list[tuple[float, float]]]()

    def keep(measurement: Measurement, step: int) -> bool:
        told = float(measurement.sqr.sum()), float(measurement.var.sum()) * batch_size
        seen.setdefault(sizes[step % len(sizes)], []).append(told)
        return record(measurement, step)

    adp.gns.record = keep  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        size = sizes[step % len(sizes)]
        x, y = problem.batch(size, generator)
        with FakeLoader([[size]], batch_size, max(sizes)) if known else contextlib.nullcontext():
            sgd.zero_grad()
            (adp(x, y) if returns_loss else (0.5 * (adp(x) - y) ** 2).mean()).backward()
            sgd.step()
    insides.collect(adp)
    return adp, seen


def test_the_variance_of_a_short_batch_is_that_of_its_samples() -> None:
    """Not of the initial batch size, although the learning rate stays that of it."""
    adp, seen = short_batches([64, 32], 400)
    truth = regression.Problem(features=64).truth(torch.full((64,), 0.5))
    for size in (64, 32):
        sqr, var = np.mean(seen[size], axis=0)
        assert (sqr, var) == (pytest.approx(truth[0], rel=0.1), pytest.approx(truth[1], rel=0.1)), size
    assert adp.scale == 1.0
    assert adp.gns.batches_seen == pytest.approx(200 * 1.5)
    assert adp.gns.get_progress() == 400.0, "taken at the initial learning rate: an iteration each"


@pytest.mark.parametrize("known", [True, False], ids=["of an elastic loader", "of another loader"])
def test_a_last_batch_of_one_sample_is_not_measured_and_changes_nothing(known: bool) -> None:
    adp, seen = short_batches([64, 64, 1], 30, known=known)
    assert set(seen) == {64}
    assert len(seen[64]) == 20
    assert adp._sampler._split_works


def test_batches_of_one_sample_are_compared_with_their_predecessors() -> None:
    _, seen = short_batches([1], 1000, batch_size=1)
    truth = regression.Problem(features=64).truth(torch.full((64,), 0.5))
    assert np.mean(seen[1], axis=0)[1] == pytest.approx(truth[1], rel=0.15)


def test_successive_gradients_of_different_sizes_are_not_compared() -> None:
    _, seen = short_batches([64, 64, 64, 40], 41, returns_loss=True, successive=True)
    assert set(seen) == {64}


def test_a_loss_computed_in_forward_is_measured_on_half_of_the_batch() -> None:
    """Of an even and of an odd batch; a single step's estimates have no bias."""
    _, seen = short_batches([64, 33], 400, returns_loss=True)
    truth = regression.Problem(features=64).truth(torch.full((64,), 0.5))
    for size in (64, 33):
        sqr, var = np.mean(seen[size], axis=0)
        assert (sqr, var) == (pytest.approx(truth[0], rel=0.1), pytest.approx(truth[1], rel=0.1)), size


def optimizer(groups: int = 1) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(2))]} for _ in range(groups)], lr=0.1)


def fed(sqr: float, var: float) -> GradientNoiseScale:
    gns = GradientNoiseScale(None, optimizer())
    gns.record(Measurement(np.array([sqr + var]), np.array([var]), 1.0), 0)
    return gns


def test_gain_and_progress() -> None:
    gns = fed(2.0, 6.0)
    assert (gns.sqr_avg(), gns.var_avg()) == (2.0, 6.0)
    assert gns.gain(1.0) == 1.0
    assert gns.gain(3.0) == pytest.approx((6 + 2) / (6 / 3 + 2))
    gns.set_progress(10.0)
    gns.advance(3.0)
    assert gns.get_progress() == pytest.approx(12.0)
    assert gns.batches_seen == 3.0


def test_the_gain_is_1_before_the_first_measurement() -> None:
    assert GradientNoiseScale(None, optimizer()).gain(8.0) == 1.0


def test_inf_and_nan_are_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="adaptdl_elastic")
    gns = fed(2.0, 6.0)
    assert not gns.record(Measurement(np.array([np.inf]), np.array([1.0]), 1.0), 3)
    assert gns.skipped == 0, "the step was taken"
    assert "step 3" in caplog.text
    assert gns.sqr_avg() == 2.0


def test_accumulation_is_counted() -> None:
    gns = GradientNoiseScale(None, optimizer(), accum_scale=2.0)
    assert gns.accum_scale == 2.0
    assert gns.should_zero_grad
    gns.count_micro_batch()
    assert gns.accum_count == 1
    assert not gns.should_zero_grad
    gns.set_accum_scale(4.0)
    assert gns.should_zero_grad


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_a_number_above_zero(scale: float) -> None:
    gns = fed(1.0, 1.0)
    with pytest.raises(ValueError, match="scale"):
        gns.gain(scale)
    with pytest.raises(ValueError, match="scale"):
        gns.set_accum_scale(scale)


def test_other_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="smoothing"):
        GradientNoiseScale(None, optimizer(), smoothing=1.0)
    with pytest.raises(ValueError, match="progress"):
        fed(1.0, 1.0).set_progress(-1.0)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_preconditioner_is_what_torchs_optimizer_divides_by(kind: Any, amsgrad: bool) -> None:
    """Adam's step without momentum is −lr·g/P: P read off a step of torch's own."""
    if kind is torch.optim.RMSprop and amsgrad:
        pytest.skip("RMSprop has no amsgrad")
    torch.manual_seed(0)
    options = {"alpha": 0.9} if kind is torch.optim.RMSprop else {"betas": (0.0, 0.9), "amsgrad": amsgrad}
    if kind is torch.optim.AdamW:
        options["weight_decay"] = 0.0
    weight = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
    theirs = kind([weight], lr=1.0, **options)
    gns = AdamGradientNoiseScale(None, theirs)
    assert gns.preconditioner is not None
    assert gns.preconditioner(weight, theirs.param_groups[0]) is None, "nothing to divide by yet"
    for _ in range(5):
        before = weight.detach().clone()
        weight.grad = torch.randn(3, 4, dtype=torch.float64)
        theirs.step()
    divisor = gns.preconditioner(weight, theirs.param_groups[0])
    assert divisor is not None
    step = (weight.detach() - before).flatten()
    torch.testing.assert_close(-weight.grad.flatten() / divisor(slice(None)), step)


def test_a_seldom_used_element_is_not_all_of_the_noise() -> None:
    """The row of a rare token has no second moment, until the step in which the token comes."""
    weight = torch.nn.Parameter(torch.zeros(10, dtype=torch.float64))
    theirs = torch.optim.AdamW([weight], lr=1e-3)
    gns = AdamGradientNoiseScale(None, theirs)
    assert gns.preconditioner is not None
    for _ in range(20):
        weight.grad = torch.tensor([1.0] * 9 + [0.0], dtype=torch.float64)
        theirs.step()
    divisor = gns.preconditioner(weight, theirs.param_groups[0])
    assert divisor is not None
    assert divisor(slice(None)) == pytest.approx([1.0] * 9 + [(0.9e-3) ** 0.5], rel=1e-3)


def test_statistics_survive_a_checkpoint() -> None:
    before = fed(2.0, 6.0)
    before.advance(3.0)
    after = GradientNoiseScale(None, optimizer())
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict()
    assert after.gain(4.0) == before.gain(4.0)
    with pytest.raises(ValueError, match="parameter groups"):
        GradientNoiseScale(None, optimizer(2)).load_state_dict(before.state_dict())


def old_checkpoint(count: int) -> dict[str, Any]:
    """Of a time when Adam's first step was taken for a gradient of zero; merged with others, or alone."""
    gns = fed(2.0, 6.0)
    for _ in range(20):
        gns.record(Measurement(np.array([8.0]), np.array([6.0]), 1.0), 1)
    state = gns.state_dict()
    nothing = float(np.log(np.finfo(np.float64).tiny))
    others = (count - 1) * np.log([8.0, 6.0])
    seen = [*(nothing + others), 2.0 * (count - 1)]
    square = [*(nothing**2 + (count - 1) * np.log([8.0, 6.0]) ** 2), 4.0 * (count - 1)]
    state["moments"]["cells"].insert(
        0, [count, float(count), [2.0 * (count - 1)], [6.0 * (count - 1)], seen, square]
    )
    return state


def test_a_gradient_of_zero_is_no_measurement() -> None:
    gns = fed(2.0, 6.0)
    before = gns.state_dict()
    gns.record(Measurement(np.zeros(1), np.zeros(1), 1.0), 1)
    assert gns.state_dict() == before


@pytest.mark.parametrize("count", [1, 2, 64])
def test_gradients_of_zero_in_old_checkpoints_are_dropped(count: int) -> None:
    state = old_checkpoint(count)
    gns = GradientNoiseScale(None, optimizer())
    gns.load_state_dict(state)
    assert gns.state_dict()["moments"]["cells"] == state["moments"]["cells"][1:]


def test_a_negative_estimate_does_not_hide_a_change() -> None:
    """V of a first micro-batch may be far below zero, and with it |ḡ|² + (S − 1)·V."""
    gns = GradientNoiseScale(None, optimizer())
    rng = np.random.default_rng(0)
    for step in range(400):
        sqr = 100.0 if step < 200 else 1.0
        variance = sqr * (-0.5 if step == 0 else rng.normal(1.0, 0.1))
        gns.record(Measurement(np.array([2.0 * sqr]), np.array([variance]), 8.0), step)
    assert gns.sqr_avg() == pytest.approx(1.0, rel=0.1)


class Waits(TorchDispatchMode):
    """Count operations for whose result the host waits."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def test_measuring_adam_asks_for_no_number_of_each_parameter() -> None:
    """Each of them would be a wait for the device, if the optimizer keeps its steps there."""

    def waits(adaptive: bool, sampled: bool) -> int:
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
        optimizer = torch.optim.AdamW(model.parameters())
        module: Any = AdaptiveDataParallel(model, optimizer, name=f"{sampled}") if adaptive else model
        if adaptive:
            cases.measure_always(module)
        for step in range(3):  # in the third one nothing is compared with a walk
            if step == 2 and adaptive and not sampled:
                insides.measure_no_more(module)
            with Waits() as counter:
                optimizer.zero_grad()
                module(torch.randn(8, 8)).square().mean().backward()
                optimizer.step()
        return counter.count

    plain = waits(False, False)
    assert waits(True, True) == waits(True, False) == plain
