"""AdaptiveDataParallel against DistributedDataParallel and torch's optimizers."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import insides
import numpy as np
import parallel_cases as cases
import pytest
import replicas
import torch
from fake_loader import FakeLoader
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from adaptdl_elastic import _session, checkpoint
from adaptdl_elastic._session import Identity
from adaptdl_elastic.torch import scaling_rules
from adaptdl_elastic.torch._gradient.estimator import Measurement
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel

pytestmark = pytest.mark.usefixtures("alone")

DDP_OPTIONS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"bucket_cap_mb": 0.001},
]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("options", DDP_OPTIONS, ids=str)
def test_one_replica_trains_bit_for_bit_as_ddp(optimizer: str, options: dict[str, Any]) -> None:
    unused = bool(options.get("find_unused_parameters"))
    same, _, var = cases.same_as_ddp(optimizer, unused, options)
    assert same
    assert var > 0.0


@pytest.mark.processes
def test_replicas_train_bit_for_bit_as_ddp() -> None:
    given: list[tuple[str, bool, dict[str, Any]]] = [("adam", False, {})]
    given += [("sgd", "find_unused_parameters" in one, one) for one in DDP_OPTIONS]
    for case, *results in zip(given, *replicas.run(replicas.each, 3, cases.same_as_ddp, given), strict=True):
        assert [same for same, *_ in results] == [True] * 3, case
        assert len({(sqr, var) for _, sqr, var in results}) == 1, f"the statistics differ: {case}"
        assert results[0][2] > 0.0, case


@pytest.mark.processes
@pytest.mark.parametrize("count", [1, 2])
def test_sparse_gradients_train_as_with_ddp(count: int) -> None:
    given = [*itertools.product(("SGD", "SparseAdam"), (False, True))]
    for found in replicas.run(replicas.each, count, cases.sparse_as_ddp, given):
        for case, (same, sqr, var) in zip(given, found, strict=True):
            assert same, case
            assert sqr + var > 0.0, case


@pytest.mark.processes
def test_batch_norm_buffers_are_rank_0s_when_evaluating() -> None:
    first, second = replicas.run(cases.buffers_are_rank_0s, 2)
    assert torch.equal(first, second)


@pytest.mark.processes
@pytest.mark.parametrize("count", [1, 2])
def test_a_gan_trains_and_accumulates_as_with_ddp(count: int) -> None:
    """Its judge is not trained on the generator's loss, which goes through it behind or before its own."""
    for found in replicas.run(cases.gans, count):
        for body, (same, least, plain, ours, variance) in found.items():
            assert same, f"{body}, in whole batches"
            assert least > 0.0, body
            torch.testing.assert_close(ours, plain, msg=lambda text, body=body: f"{body}: {text}")
            assert variance == pytest.approx(found["judge first {}"][-1], rel=1e-4), body
            assert variance > 0.0


@pytest.mark.processes
def test_survivors_of_a_lost_replica_go_on_in_their_processes(tmp_path: Path) -> None:
    first, second, third = replicas.run(cases.a_replica_dies, 3, str(tmp_path), dies=2)
    assert third is None
    for unchanged, finite, _, count in (first, second):
        assert unchanged, "the step that lost a replica must not commit"
        assert finite, "zeros, not nan"
        assert count == 6
    assert first[2] == second[2], "the survivors disagree"


@pytest.mark.processes
def test_a_process_group_made_anew_changes_nothing(tmp_path: Path) -> None:
    assert replicas.run(cases.same_size_again, 2, str(tmp_path)) == [True, True]


def assert_close(ours: cases.Parameters, oracle: cases.Parameters) -> None:
    for a, b in zip(ours, oracle, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


EVEN = [[[4], [4], [4]]] * 4
UNEVEN = [[[4], [4]], [[4], [4]], [[4], [3]], [[2]]]


@pytest.mark.parametrize("plan", [EVEN, UNEVEN], ids=["even", "uneven end"])
@pytest.mark.parametrize("clip", [None, 0.3], ids=["", "clipped"])
@pytest.mark.parametrize("amp", [False, True], ids=["", "scaler"])
def test_accumulated_micro_batches_are_one_batch(
    plan: list[list[list[int]]], clip: float | None, amp: bool
) -> None:
    sizes = [sum(map(sum, window)) for window in plan]
    assert_close(cases.windows(plan, max(sizes), clip, amp), cases.one_by_one(sizes, clip))


TWO = [[[4, 4], [4, 4]], [[4, 4], [3, 2]], [[1, 1]], [[2, 1]], [[1, 0]]]
THREE = [[[2, 2, 2]], [[2, 2, 1]], [[1, 1, 0]]]


@pytest.mark.processes
@pytest.mark.parametrize("plan", [TWO, THREE], ids=["two replicas, accumulating", "three replicas"])
def test_the_uneven_end_of_an_epoch_weighs_every_sample_the_same(plan: list[list[list[int]]]) -> None:
    sizes = [sum(map(sum, window)) for window in plan]
    results = replicas.run(cases.windows, len(plan[0][0]), plan, max(sizes))
    for ours in results:
        assert_close(ours, cases.one_by_one(sizes))


@pytest.mark.processes
@pytest.mark.parametrize("plan", [EVEN, TWO], ids=["one replica", "two replicas"])
def test_ddps_options_go_with_accumulation(plan: list[list[list[int]]]) -> None:
    sizes = [sum(map(sum, window)) for window in plan]
    options = [one for one in DDP_OPTIONS[1:] if "static_graph" not in one]
    given = [(plan, max(sizes), 0.3, False, one) for one in options]
    for found in replicas.run(replicas.each, len(plan[0][0]), cases.windows, given):
        for ours in found:
            assert_close(ours, cases.one_by_one(sizes, 0.3))


def test_a_static_graph_can_not_accumulate() -> None:
    """DDP counts gradients over all passes up to the first synchronised one, and then waits for as many."""
    with pytest.raises(RuntimeError, match="static_graph=True cannot be combined"):
        cases.windows(EVEN, 12, ddp={"static_graph": True})


@pytest.mark.processes
def test_compiled_models_go_with_replicas_and_accumulation() -> None:
    sizes = [sum(map(sum, window)) for window in TWO]
    arguments = (TWO, max(sizes), None, False, None, "aot_eager")
    for ours in replicas.run(cases.windows, 2, *arguments, timeout=240):
        assert_close(ours, cases.one_by_one(sizes))


def test_gradients_are_out_of_sight_while_they_accumulate() -> None:
    adp = cases.adaptive()
    model, optimizer = adp.module, adp.optimizer
    x, y = cases.samples(4)
    with FakeLoader([[4], [4]], 8, 4) as loader:
        ((adp(x) - y) ** 2).mean().backward()
        assert model.weight.grad is None
        assert adp.gns.accum_count == 1
        assert not adp.gns.should_zero_grad
        before = model.weight.clone()
        optimizer.step()
        adp.zero_grad()
        assert torch.equal(before, model.weight)
        loader.chunk = 1
        ((adp(x) - y) ** 2).mean().backward()
        assert model.weight.grad is not None
        optimizer.step()
        assert not torch.equal(before, model.weight)
        assert adp.gns.should_zero_grad


@pytest.mark.processes
@pytest.mark.parametrize("count", [1, 2])
def test_nanogpts_flag_makes_the_all_reduces_and_gradients_of_ddp(count: int) -> None:
    ddp, flag, no_sync = (replicas.run(cases.accumulated, count, kind) for kind in ("DDP", "flag", "no_sync"))
    for rank in range(count):
        assert (ddp[rank][0], flag[rank][0], no_sync[rank][0]) == (6, 6, 6)
        for theirs, ours, same in zip(ddp[rank][1], flag[rank][1], no_sync[rank][1], strict=True):
            assert torch.equal(ours, same)
            torch.testing.assert_close(ours, theirs)
    assert not torch.equal(flag[0][1][0], flag[0][1][1])


def test_the_flag_of_a_script_that_accumulates_outlasts_a_change_in_place() -> None:
    adp = cases.adaptive()
    adp.require_backward_grad_sync = False
    adp.reinit_process_group()
    adp(cases.samples(4)[0])
    assert not adp.require_backward_grad_sync
    adp.require_backward_grad_sync = True
    adp(cases.samples(4)[0])
    assert adp.require_backward_grad_sync


def test_the_flag_that_a_script_reads_is_what_it_has_set() -> None:
    adp = cases.adaptive()
    with adp.no_sync():
        assert not adp.require_backward_grad_sync
        adp(cases.samples(4)[0])
        assert not adp.require_backward_grad_sync
    # as Accelerate does: what was read is set again
    before, adp.require_backward_grad_sync = adp.require_backward_grad_sync, True
    adp.require_backward_grad_sync = before
    assert adp.require_backward_grad_sync


@pytest.mark.filterwarnings("ignore:Converting a tensor:UserWarning")  # LBFGS of torch 2.8
def test_a_closure_can_not_accumulate() -> None:
    model = cases.linear()
    optimizer = torch.optim.LBFGS(model.parameters())
    adp = AdaptiveDataParallel(model, optimizer, scaling_rule=scaling_rules.LinearScale())
    x, y = cases.samples(4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((adp(x) - y) ** 2).mean()
        loss.backward()
        return loss

    before = closure()
    optimizer.step(closure)
    assert closure() < before
    with FakeLoader([[4], [4]], 8, 4):
        closure()
        with pytest.raises(RuntimeError, match="gradient_accumulation=False"):
            optimizer.step(closure)


# Mixed precision.


def test_the_loss_scale_does_not_show_in_the_statistics() -> None:
    def variance(scale: float) -> float:
        model = cases.linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        adp = AdaptiveDataParallel(model, optimizer, mp_scaler=scaler, name=f"scale {scale}")
        cases.measure_always(adp)
        insides.seed_signs(adp, 0)
        for step in range(6):
            x, y = cases.samples(16, 16 * step)
            optimizer.zero_grad()
            scaler.scale(((adp(x) - y) ** 2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        insides.collect(adp)
        return adp.gns.var_avg()

    assert variance(1.0) == pytest.approx(variance(1024.0), rel=1e-4)


def test_steps_with_inf_are_skipped_and_said(caplog: pytest.LogCaptureFixture) -> None:
    model = cases.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    adp = AdaptiveDataParallel(model, optimizer, mp_scaler=scaler)
    cases.measure_always(adp)
    caplog.set_level(logging.INFO, logger="adaptdl_elastic")
    for step in range(4):
        x, y = cases.samples(8)
        optimizer.zero_grad()
        loss = ((adp(x) - y) ** 2).mean()
        scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    insides.collect(adp)
    assert adp.gns.steps == 3
    assert adp.gns.get_progress() == 3.0
    assert adp.gns.skipped == 1
    assert "inf or nan" in caplog.text
    assert adp.gns.var_avg() < float("inf")
    assert scaler.get_scale() == 1.0, "the scaler has backed off once"


# Statistics.


def test_statistics_are_kept_by_parameter_group() -> None:
    def moments(groups: int) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
        split = [model.parameters()] if groups == 1 else [model[0].parameters(), model[2].parameters()]
        optimizer = torch.optim.SGD([{"params": list(params)} for params in split], lr=0.0)
        adp = AdaptiveDataParallel(model, optimizer, name=f"{groups} groups")
        cases.measure_always(adp)
        insides.seed_signs(adp, 0)
        for step in range(5):
            cases.fit(adp, optimizer, *cases.samples(16, 16 * step))
        insides.collect(adp)
        return adp.gns.raw_sqr_avg, adp.gns.raw_var_avg

    (sqr, var), (one_sqr, one_var) = moments(2), moments(1)
    assert sqr.shape == var.shape == (2,)
    assert sqr.sum() == pytest.approx(one_sqr[0])
    assert var.sum() == pytest.approx(one_var[0])


@pytest.mark.parametrize("batch_first", [True, False])
def test_as_many_time_steps_as_samples_are_not_taken_for_samples(batch_first: bool) -> None:
    """Where the loader says along which dimension its samples lie; else it is the first of that size."""
    model = nn.Linear(6, 1, bias=False)
    adp = cases.adaptive(model, 0.0)
    cases.measure_always(adp)
    draw = torch.Generator().manual_seed(1)
    with FakeLoader([[8]], 8, 8, sample_dimension=None if batch_first else 1):
        for _ in range(40):
            # All time steps of a sample are alike, and no two samples: over time there is no variance.
            x = torch.randn(8, 1, 6, generator=draw).expand(8, 8, 6)
            adp.zero_grad()
            (adp(x if batch_first else x.transpose(0, 1)) - 1.0).square().mean().backward()
            adp.optimizer.step()
    insides.collect(adp)
    one = torch.stack([2 * (model(v) - 1.0) * v for v in torch.randn(4000, 6, generator=draw)])
    assert adp.gns.var_avg() == pytest.approx(one.var(0).sum().item() / 8, rel=0.3)


def test_a_model_whose_inputs_have_no_samples_is_measured_by_successive_gradients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            assert len(x) == 8, "this model knows one batch size"
            return (self.layer(x) - y).square().mean()

    adp = cases.adaptive(Model(), 0.001)
    cases.measure_always(adp)
    for step in range(12):
        adp.optimizer.zero_grad()
        adp(*cases.samples(8, 8 * step)).backward()
        adp.optimizer.step()
    assert adp.gns.var_avg() > 0.0
    assert caplog.text.count("successive steps") == 1, "said once"


@dataclass(frozen=True)
class Answer:
    """An output that torch's pytree does not know."""

    scores: torch.Tensor
    others: Any = None


class Answers(OrderedDict[str, Any]):
    """Another one, as some libraries return."""


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: Answer(x, {"n": 3}),
        lambda x: Answers(scores=x, n=3),
        lambda x: (Answers(a=[Answer(x)]), None),
    ],
)
def test_outputs_of_every_kind_that_ddp_knows_accumulate(wrap: Callable[[torch.Tensor], Any]) -> None:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return wrap(super().forward(x))

    def scores(output: Any) -> torch.Tensor:
        while not isinstance(output, torch.Tensor):
            output = output.scores if isinstance(output, Answer) else next(iter(as_list(output)))
        return output

    def as_list(output: Any) -> list[Any]:
        return list(output.values()) if isinstance(output, dict) else list(output)

    model = Model(6, 1)
    adp, inputs = cases.adaptive(model), torch.randn(8, 6)
    expected = torch.autograd.grad(scores(model(inputs)).square().mean(), list(model.parameters()))
    with FakeLoader([[4], [4]], 8, 4) as loader:
        for loader.chunk in range(2):
            output = adp(inputs[4 * loader.chunk :][:4])
            assert type(output) is type(wrap(inputs))
            scores(output).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_model_without_tensor_outputs_can_not_accumulate() -> None:
    class Box:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return Box(super().forward(x))

    adp = cases.adaptive(Model(6, 1))
    with FakeLoader([[4], [4]], 8, 4), pytest.raises(RuntimeError, match="holds no tensor"):
        adp(torch.randn(4, 6))


def test_compiled_models() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    x, y = cases.samples(16)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        adp = cases.adaptive(torch.compile(model, backend="aot_eager"))
        cases.measure_always(adp)
        for _ in range(5):
            losses.append(cases.fit(adp, adp.optimizer, x, y))
    assert losses[-1] < losses[0]
    assert adp.gns.var_avg() > 0.0


# What surrounds it.


def test_a_parameter_without_gradient_is_ddps_error_or_left_alone() -> None:
    model = cases.Net(unused=True)
    optimizer = cases.sgd(model)
    adp = AdaptiveDataParallel(model, optimizer)
    with pytest.raises(RuntimeError, match="find_unused_parameters"):
        cases.steps(adp, optimizer, 2)


def test_schedulers_before_and_after_step_without_complaint() -> None:
    model = cases.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    adp = AdaptiveDataParallel(model, optimizer, before)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        cases.fit(adp, optimizer, *cases.samples(4))
        before.step()
        after.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 16)


def test_training_goes_on_from_a_checkpoint_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAPTDL_CHECKPOINT_PATH", str(tmp_path))

    def build() -> tuple[AdaptiveDataParallel, torch.optim.Optimizer]:
        _session.reset()
        torch.manual_seed(0)
        model = cases.Net()
        optimizer = cases.adam(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        adp = AdaptiveDataParallel(model, optimizer, scheduler, torch.amp.GradScaler("cpu"))
        cases.measure_always(adp)
        return adp, optimizer

    adp, optimizer = build()
    cases.steps(adp, optimizer, 4)
    adp.lr_scheduler.step()
    checkpoint.save_all_states(kind="request")
    cases.steps(adp, optimizer, 3, first=4)
    resumed, resumed_optimizer = build()
    assert resumed.gns.steps == 4
    assert resumed.gns.get_progress() == 4.0
    cases.steps(resumed, resumed_optimizer, 3, first=4)
    assert torch.equal(cases.flat(adp.module), cases.flat(resumed.module))


def test_two_models_need_two_names() -> None:
    cases.adaptive()
    with pytest.raises(ValueError, match="name"):
        cases.adaptive()


def test_wrong_arguments_are_named() -> None:
    model, other = cases.linear(), cases.linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    other_scheduler = torch.optim.lr_scheduler.StepLR(foreign, 1)
    wrong: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (TypeError, "model must be", ("model", optimizer), {}),
        (TypeError, "optimizer must be", (model, "sgd"), {}),
        (TypeError, "lr_scheduler.*got 0.1", (model, optimizer, 0.1), {}),
        (TypeError, "lr_scheduler.*StepLR", (model, optimizer, torch.optim.lr_scheduler.StepLR), {}),
        (ValueError, "another optimizer", (model, optimizer, other_scheduler), {}),
        (TypeError, "mp_scaler", (model, optimizer), {"mp_scaler": 3}),
        (TypeError, "scaling_rule", (model, optimizer), {"scaling_rule": scaling_rules.AdaScale}),
        (TypeError, "unknown argument 'colour'", (model, optimizer), {"colour": 1}),
        (TypeError, "pass the model itself", (DistributedDataParallel(model), optimizer), {}),
        (ValueError, "no parameter of the model", (model, foreign), {}),
    ]
    for kind, message, arguments, options in wrong:
        with pytest.raises(kind, match=message):
            AdaptiveDataParallel(*arguments, **options)
    AdaptiveDataParallel(model, optimizer)  # as after a mistake in a notebook


def test_an_optimizer_is_not_scaled_by_two_rules() -> None:
    """It would step at the learning rate times both factors."""
    first, second = cases.linear(), cases.linear()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    AdaptiveDataParallel(first, optimizer, name="first")
    with pytest.raises(ValueError, match="'first' already: make one for each"):
        AdaptiveDataParallel(second, optimizer, name="second")


class Writer(dict[str, float]):
    """What was written to TensorBoard at step 7, by tag."""

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert step == 7
        self[tag] = value


def test_tensorboard_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    adp, writer = cases.adaptive(), Writer()
    adp.to_tensorboard(writer, 7, "train")
    assert writer["train/Gain"] == 1.0
    assert writer["train/Learning_Rate_Factor"] == 1.0
    assert not [tag for tag in writer if "Factor/" in tag], "one group: AdaptDL's tag says all"
    assert {"train/Gradient_Norm_Sqr", "train/Gradient_Variance", "train/Progress"} < writer.keys()
    monkeypatch.setattr(_session.current(), "identity", Identity(rank=1, replicas=2))
    adp.to_tensorboard(None, 7)  # as the loader's: others than rank 0 need no writer


def test_adamscale_for_an_optimizer_without_second_moments_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    adp = cases.adaptive(rate=0.01, scaling_rule=scaling_rules.AdamScale())
    adp.gns.gap = 40
    for step in range(70):
        cases.fit(adp, adp.optimizer, *cases.samples(16, step))
    insides.collect(adp)
    assert not adp.gns.known
    assert adp.gns.lr_gain(8.0).tolist() == [1.0]
    assert caplog.text.count("SGD keeps no second moment") == 1
    assert "AdaScale()" in caplog.text
    assert adp.gns._next == 90, "it is not tried in every step"


def test_factors_of_several_groups_are_told_apart_and_their_mean_by_adaptdls_tag() -> None:
    model, writer = cases.linear(), Writer()
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    adp = AdaptiveDataParallel(model, torch.optim.SGD(groups, lr=0.1))
    sqr, var = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    adp.gns.record(Measurement(sqr + var, var, 1.0), 0)
    insides.scale_next_batch(adp, 3.0)
    adp.to_tensorboard(writer, 7)
    factors = {tag: value for tag, value in writer.items() if tag.startswith("Learning_Rate_Factor")}
    assert factors == {
        "Learning_Rate_Factor": pytest.approx(2.0),
        "Learning_Rate_Factor/0": pytest.approx(1.0),
        "Learning_Rate_Factor/1": pytest.approx(3.0),
    }


def test_a_model_in_eval_is_trained_if_its_optimizer_steps() -> None:
    """To freeze BatchNorm's running means. Uneven batches weigh what they should from the first one on."""
    adp, whole = cases.adaptive(), cases.linear()
    adp.eval()
    x, y = cases.samples(4)
    with FakeLoader([[3]], 4, 3, training_loader_undecided=True) as loader:
        ((adp(x[:3]) - y[:3]) ** 2).mean().backward()
        assert not loader.training
        adp.optimizer.step()
        assert loader.training
    assert adp.initial_batch_size == 4
    cases.fit(whole, torch.optim.SGD(whole.parameters(), lr=0.1), x[:3], y[:3])
    assert_close([p.detach() for p in adp.parameters()], [p.detach() for p in whole.parameters()])


@pytest.mark.parametrize("clip", [False, True])
def test_a_fused_optimizers_steps_with_inf_are_not_counted(clip: bool) -> None:
    model = cases.linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    adp = AdaptiveDataParallel(model, optimizer, mp_scaler=scaler)
    for step in range(4):
        optimizer.zero_grad()
        loss = adp(cases.samples(8)[0]).square().mean()
        scaler.scale(loss * (float("inf") if step in (1, 2) else 1.0)).backward()
        if clip:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert (adp.gns.steps, adp.gns.skipped, adp.gns.get_progress()) == (2, 2, 2.0)


@pytest.mark.parametrize("unscale", [False, True])
def test_accumulating_with_a_gradscaler_that_was_not_given_names_the_remedy(unscale: bool) -> None:
    adp = cases.adaptive()
    optimizer, scaler = adp.optimizer, torch.amp.GradScaler("cpu", init_scale=4.0)
    with FakeLoader([[4], [4]], 8, 4):
        scaler.scale(adp(cases.samples(4)[0]).square().mean()).backward()
        with pytest.raises(RuntimeError, match="pass it as mp_scaler"):
            scaler.unscale_(optimizer) if unscale else scaler.step(optimizer)


def test_parameter_groups_that_come_later_are_refused() -> None:
    model = cases.linear()
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    adp = AdaptiveDataParallel(model, optimizer)
    optimizer.add_param_group({"params": [model.bias]})
    adp(cases.samples(4)[0]).square().mean().backward()
    with pytest.raises(RuntimeError, match="2 parameter groups now, and had 1"):
        optimizer.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel])
def test_copies_are_of_the_module(copied: Any) -> None:
    adp = cases.adaptive()
    with pytest.raises(TypeError, match=r"AveragedModel\(model\.module\)"):
        copied(adp)
    copied(adp.module)


def test_progress_is_that_of_the_model_that_has_come_furthest() -> None:
    """A WGAN's judge steps more often than its generator."""
    made = [cases.adaptive(name=name) for name in ("judge", "generator")]
    told = []
    for step in range(6):
        for adp in made if step % 3 == 2 else made[:1]:
            adp(cases.samples(4)[0]).square().mean().backward()
            adp.optimizer.step()
            told.append(_session.current().progress)
    assert told == sorted(told)
    assert told[-1] == 6.0


def test_compiled_from_outside_with_accumulation() -> None:
    """What we do around the module is not compiled: it would be anew for every micro-batch."""
    adp, whole = cases.adaptive(rate=0.0), cases.linear()
    compiled = torch.compile(adp, backend="aot_eager")
    x, _ = cases.samples(48)
    whole(x).square().mean().backward()
    torch._dynamo.reset()
    limited = torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True)
    with limited, FakeLoader([[4]] * 12, 48, 4) as loader:
        for loader.chunk in range(12):
            compiled(x[4 * loader.chunk :][:4]).square().mean().backward()
    assert_close([p.grad for p in adp.parameters()], [p.grad for p in whole.parameters()])


@pytest.mark.processes
@pytest.mark.parametrize(
    "options", [{}, {"forward_sync_buffers": False}, {"broadcast_buffers": False}], ids=str
)
def test_evaluation_on_fewer_samples_than_replicas(options: dict[str, Any]) -> None:
    """A replica without a batch does not leave the other one waiting, and buffers are rank 0's before."""
    first, second = replicas.run(cases.evaluate_alone, 2, options)
    assert (torch.equal(first, second)) == (not options)


@pytest.mark.processes
def test_buffers_in_a_process_group_without_global_rank_0() -> None:
    assert replicas.run(cases.buffers_of_some, 3) == [None, 1.0, 1.0]
