"""Gradients of windows whose outputs are differentiated more than once, or not by backward()."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import insides
import parallel_cases as cases
import pytest
import replicas
import torch
from fake_loader import FakeLoader
from torch import nn

import adaptdl_elastic.torch as adl
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel

# torch's own, of DDP and derivatives of derivatives
pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore:Grad strides do not match:UserWarning"),
]

Backward = Callable[[torch.Tensor], None]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def wrapped(model: nn.Module, **options: Any) -> AdaptiveDataParallel:
    adp = cases.adaptive(model, 0.0, **options)
    cases.measure_always(adp)
    return adp


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def penalised(model: Any, x: torch.Tensor) -> torch.Tensor:
    """As WGAN-GP's: the derivative of the output is part of the loss."""
    x = x.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.square().mean() + ((slope.norm(dim=1) - 1) ** 2).mean()


def once(loss: torch.Tensor) -> None:
    loss.backward()


def in_halves(loss: torch.Tensor) -> None:
    (0.5 * loss).backward(retain_graph=True)
    (0.5 * loss).backward()


def squared(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def with_decay(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A term that does not go through the outputs."""
    return squared(model, x) + 0.1 * next(model.parameters()).square().sum()


def two_inputs(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean() + model(2 * x).mean()


@pytest.mark.parametrize(
    ("window", "view"),
    [([[8], [8]], False), ([[8], [5], [3]], False), ([[8], [5], [3]], True), ([[5]], False)],
)
@pytest.mark.parametrize("backward", [once, in_halves])
@pytest.mark.parametrize("loss", [penalised, squared, with_decay, two_inputs])
def test_the_sum_is_the_whole_batchs_gradient(
    window: list[list[int]], view: bool, backward: Backward, loss: Any
) -> None:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    whole = net()
    loss(whole, x[: sum(map(sum, window))]).backward()
    model = net()
    adp = wrapped(model, gradient_as_bucket_view=view)
    position = 0
    with FakeLoader(window, 16, 8) as loader:
        for loader.chunk, (count,) in enumerate(window):
            adp.zero_grad()
            backward(loss(adp, x[position : position + count]))
            position += count
    torch.testing.assert_close(gradient(model), gradient(whole))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("zero", [True, False])
def test_a_pass_behind_step_counts_unless_zero_grad_comes(zero: bool, scaled: bool) -> None:
    """As outside of a window; who sets `.grad` to None instead is not seen, and loses nothing."""
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    whole, model = net(), net()
    parts = x.split(8)
    (whole(x).square().mean() + (0.0 if zero else whole(x[:16]).mean() * 2 / 3)).backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=scaled)
    adp = wrapped(model, mp_scaler=scaler)
    with FakeLoader([[8]] * 3, 24, 8) as loader:
        for loader.chunk, part in enumerate(parts):
            if zero:
                adp.zero_grad()
            scaler.scale(adp(part).square().mean()).backward()
            if loader.chunk == 2:
                break
            scaler.step(adp.optimizer)
            scaler.update()
            scaler.scale(adp(part).mean()).backward()
    torch.testing.assert_close(gradient(model), gradient(whole))


def test_gradients_are_the_same_as_without_the_wrapper() -> None:
    """On uneven batches too."""
    model = net()
    adp = wrapped(model)
    x = torch.randn(5, 6, requires_grad=True)
    with FakeLoader([[8], [5]], 16, 8, chunk=1):
        (ours,) = torch.autograd.grad(adp(x).sum(), x)
        (through,) = torch.autograd.grad(adp(x).sum(), model[0].weight)
    (theirs,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(ours, theirs)
    assert torch.equal(through, torch.autograd.grad(model(x).sum(), model[0].weight)[0])
    assert not adp.gns.accum_count


def test_a_backward_pass_to_given_parameters_counts() -> None:
    whole, model = net(), net()
    x = torch.randn(16, 6)
    whole(x).square().mean().backward()
    adp = wrapped(model)
    with FakeLoader([[8], [8]], 16, 8) as loader:
        for loader.chunk, part in enumerate((x[:8], x[8:])):
            adp(part).square().mean().backward(inputs=list(model.parameters()))
    torch.testing.assert_close(gradient(model), gradient(whole))


def test_outputs_are_not_copied() -> None:
    class Kept(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.output = super().forward(x)
            return self.output

    model = Kept(6, 1)
    adp = wrapped(model)
    with FakeLoader([[8], [8]], 16, 8):
        assert adp(torch.randn(8, 6)) is model.output


def test_a_parameter_that_is_an_output() -> None:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), self.bias

    whole, model = Model(6, 1), Model(6, 1)
    whole.load_state_dict(model.state_dict())
    x = torch.randn(16, 6)
    (whole(x)[0] * whole(x)[1]).mean().backward()
    adp = wrapped(model)
    with FakeLoader([[8], [8]], 16, 8) as loader:
        for loader.chunk, part in enumerate((x[:8], x[8:])):
            output, bias = adp(part)
            (output * bias).mean().backward()
    torch.testing.assert_close(gradient(model), gradient(whole))


@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_fillers_add_nothing_to_several_passes(options: dict[str, Any]) -> None:
    """Real replicas, one of which has no sample in the last micro-batch."""
    for ours, oracle in replicas.run(cases.uneven_passes, 2, options):
        torch.testing.assert_close(ours, oracle)


EVEN = [[4, 4]]
BY_HAND: dict[str, cases.Plan] = {
    "an epoch's end, then an even batch": [(False, EVEN), (False, [[3, 1]]), (True, EVEN)],
    "an end with a filler, then an even batch": [(False, EVEN), (False, [[1, 0]]), (True, EVEN)],
    "a filler first": [(False, [[1, 0]]), (False, [[3, 1]]), (True, EVEN)],
    "synchronised at the end": [(False, EVEN), (False, [[3, 1]]), (True, [[1, 0]])],
    "accumulation, then none": [(False, [[4, 4], [1, 0]]), (True, EVEN)],
    "none, then accumulation": [(False, [[3, 1]]), (True, [[4, 4], [2, 1]])],
    "none, then fillers first": [(False, [[3, 1]]), (True, [[1, 0], [4, 4], [1, 0]])],
    "synchronised in between": [(True, [[3, 1]]), (False, [[2, 1]]), (True, [[4, 4], [2, 1]])],
    "synchronised each time": [(True, [[4, 4], [1, 0]]), (True, [[4, 4], [2, 1]]), (True, EVEN)],
}


@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_accumulating_by_hand_weighs_uneven_batches_like_all(options: dict[str, Any]) -> None:
    for found in replicas.run(cases.by_hand, 2, list(BY_HAND.values()), options):
        for name, (ours, oracle) in zip(BY_HAND, found, strict=True):
            torch.testing.assert_close(ours, oracle, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.processes
def test_a_second_pass_that_ddp_does_not_synchronise_is_said() -> None:
    for message in replicas.run(cases.unsynchronised_pass, 2):
        assert "call backward once" in message


# ScriptPosition that do not end where a window does.

NUMBERS = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))


class Own(adl.AdaptiveDataLoaderMixin):
    """beyond: by how many samples more than it hands out its index goes on."""

    def __init__(self, beyond: int = 0) -> None:
        super().__init__(batch_size=8)
        self.autoscale_batch_size(8, (1, 4), gradient_accumulation=True)
        self._beyond = beyond

    def __iter__(self) -> Iterator[torch.Tensor]:
        helper = self._elastic
        with helper.context():
            if helper.skipdone():
                return
            helper.end_index = len(NUMBERS)
            while (start := helper.current_index) < helper.end_index:
                local = helper.resolve_batch_size()
                with helper.profile():
                    yield NUMBERS[start : start + local]
                    helper.current_index += local + self._beyond


def planned() -> adl.AdaptiveDataLoader[torch.Tensor]:
    loader: adl.AdaptiveDataLoader[torch.Tensor] = adl.AdaptiveDataLoader(NUMBERS, batch_size=8)  # type: ignore[arg-type]
    loader.autoscale_batch_size(8, (1, 4), gradient_accumulation=True)
    return loader


def stepped(loader: Any, leave: Callable[[int], None]) -> list[list[torch.Tensor]]:
    """Gradients of the steps of two epochs; `leave` is called with each batch's number after its step."""
    model = net()
    adp = wrapped(model)
    epochs: list[list[torch.Tensor]] = []
    for _ in adl.remaining_epochs_until(2):
        found: list[torch.Tensor] = []
        epochs.append(found)
        try:
            for number, batch in enumerate(loader):
                adp.zero_grad()
                adp(batch).square().mean().backward()
                if insides.helper(loader).is_optim_step():
                    found.append(gradient(model).clone())
                adp.optimizer.step()
                leave(number)
        except KeyError:
            continue
    return epochs


def of_samples(start: int, stop: int) -> torch.Tensor:
    model = net()
    model(NUMBERS[start:stop]).square().mean().backward()
    return gradient(model)


def raise_key_error(number: int) -> None:
    if number == 2:
        raise KeyError


@pytest.mark.parametrize("loader", [planned, Own])
def test_half_a_window_does_not_go_into_the_next_epochs_first_step(loader: Callable[[], Any]) -> None:
    first, second = stepped(loader(), raise_key_error)
    assert len(first) == 1
    assert len(second) == 1
    torch.testing.assert_close([*first, *second], [of_samples(0, 8)] * 2)


@pytest.mark.parametrize("loader", [planned, Own])
def test_the_last_window_of_a_pass_is_stepped(loader: Callable[[], Any]) -> None:
    """Of loaders of one's own, too, whose windows are not planned."""
    expected = [of_samples(0, 8), of_samples(8, 16), of_samples(16, 20)]
    for found in stepped(loader(), lambda _: None):
        torch.testing.assert_close(found, expected)


def test_a_loader_of_ones_own_that_ends_in_mid_window_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert stepped(Own(beyond=30), lambda _: None) == [[], []]
    assert caplog.text.count("the gradients of its last 1 batches are dropped") == 2


@pytest.mark.parametrize("every", [1, 4])
def test_with_autoscaling_accumulation_by_hand_does_not_make_epochs_longer(every: int) -> None:
    """An epoch is as much progress as one pass makes, which is that of fewer steps."""
    loader: Any = adl.AdaptiveDataLoader(torch.randn(160, 6), batch_size=8)  # type: ignore[arg-type]
    loader.autoscale_batch_size(8)
    adp = wrapped(net())
    for epoch in adl.remaining_epochs_until(2):
        samples = 0
        for number, batch in enumerate(loader):
            (adp(batch).square().mean() / every).backward()
            samples += len(batch)
            if (number + 1) % every == 0:
                adp.optimizer.step()
                adp.zero_grad()
        assert samples == 160
        assert adp.gns.steps == 20 / every * (epoch + 1)


# The same, measured.


def variance(backward: Backward, twice: bool = False) -> tuple[float, float]:
    """Mean sqr and var at a learning rate of 0."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1, bias=False)
    adp = cases.adaptive(model, 0.0, name=f"{backward} {twice}")
    cases.measure_always(adp)
    insides.seed_signs(adp, 0)
    for _ in range(400):
        x = torch.randn(16, 6, requires_grad=True)
        adp.zero_grad()
        output = adp(x)
        if twice:
            torch.autograd.grad(output.sum(), x, retain_graph=True)
        backward((output - torch.randn(16, 1)).square().mean())
        adp.optimizer.step()
    insides.collect(adp)
    return adp.gns.sqr_avg(), adp.gns.var_avg()


def test_halves_of_a_loss_and_derivatives_on_the_side_are_measured_as_one_loss() -> None:
    sqr, var = variance(once)
    assert variance(in_halves) == (pytest.approx(sqr, rel=0.2), pytest.approx(var, rel=0.1))
    assert variance(once, twice=True) == (pytest.approx(sqr, rel=0.2), pytest.approx(var, rel=0.1))


def test_a_gradient_penalty_is_measured_by_successive_gradients(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    adp = wrapped(model)
    for _ in range(6):
        adp.zero_grad()
        penalised(adp, torch.randn(16, 6)).backward()
        adp.optimizer.step()
    insides.collect(adp)
    assert adp.gns.var_avg() > 0.0
    assert caplog.text.count("its derivatives are part of the loss") == 1


def test_the_first_micro_batch_is_all_of_its_passes() -> None:
    """D(real) and D(fake), accumulating on one replica."""

    def moments(joint: bool) -> tuple[float, float]:
        torch.manual_seed(0)
        model = nn.Linear(32, 1, bias=False)
        nn.init.constant_(model.weight, 0.2)
        adp = cases.adaptive(model, 0.0, name=f"{joint}")
        cases.measure_always(adp)
        for _ in range(20):
            with FakeLoader([[16], [16]], 32, 16) as loader:
                for loader.chunk in range(2):
                    losses = [
                        (0.5 * (adp(torch.randn(16, 32)) - torch.randn(16, 1)) ** 2).mean() for _ in range(2)
                    ]
                    adp.optimizer.zero_grad()
                    if joint:
                        sum(losses).backward()  # type: ignore[union-attr]
                    else:
                        losses[0].backward()
                        losses[1].backward()
                    adp.optimizer.step()
        insides.collect(adp)
        return adp.gns.sqr_avg(), adp.gns.var_avg()

    together, apart = moments(True), moments(False)
    assert apart == (pytest.approx(together[0], rel=1e-3), pytest.approx(together[1], rel=1e-3))
