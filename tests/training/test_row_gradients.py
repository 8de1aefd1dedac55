"""Gradients of half of the samples, taken out of the training's own backward pass."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import insides
import parallel_cases as cases
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from adaptdl_elastic import _session
from adaptdl_elastic.torch._gradient.estimator import Measurement
from adaptdl_elastic.torch._gradient.measurement import ROWS, SIGNS
from adaptdl_elastic.torch._gradient.row_gradients import HalfOfSamples, KnownForms, digests
from adaptdl_elastic.torch.parallel import AdaptiveDataParallel

pytestmark = pytest.mark.usefixtures("alone")

COUNT = 16


class Positions(nn.Module):
    """A small GPT: positions without a dimension of samples, tied weights, a scale, a scalar."""

    def __init__(self, dropout: float = 0.0, batch_first: bool = True) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 32), nn.Embedding(20, 32, padding_idx=3)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=batch_first)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.tokens.weight
        self.scale, self.shift = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(1))
        self.batch_first = batch_first

    def forward(self, x: torch.Tensor) -> Any:
        places = self.positions(torch.arange(x.shape[int(self.batch_first)]))
        inner = self.tokens(x) + (places if self.batch_first else places[:, None])
        return self.head(self.norm(self.body(inner) * self.scale + self.shift))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(8, 16, 2, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.inner(x)[0][:, -1])


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.frozen = nn.Parameter(torch.randn(61)), nn.Parameter(torch.ones(1), False)

    def forward(self, index: torch.Tensor) -> Any:
        again = (self.table[index] ** 2, "no tensor")
        return {"value": self.table[index] * self.frozen, "again": again}


class Half(nn.Module):
    """Runs in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Positions(0.1)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


def convolutions(norm: nn.Module) -> nn.Module:
    grouped = nn.Conv2d(8, 8, 3, groups=2, bias=False)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), norm, nn.ReLU(), grouped, nn.Flatten(), nn.Linear(288, 4)
    )


def tokens(length: int = 20) -> torch.Tensor:
    return torch.randint(0, 50, (COUNT, length))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)),
        lambda: torch.randn(COUNT, 8),
    ),
    "sequences without bias": (
        lambda: nn.Sequential(nn.Linear(8, 16, bias=False), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4)),
        lambda: torch.randn(COUNT, 5, 8),
    ),
    "transformer with tied weights": (Positions, tokens),
    "transformer with dropout": (lambda: Positions(0.1), tokens),
    "as many positions as samples": (Positions, lambda: tokens(COUNT)),
    "half precision": (Half, tokens),
    "convolutions": (lambda: convolutions(nn.GroupNorm(2, 8)), lambda: torch.randn(COUNT, 3, 16, 16)),
    "fixed batch norm": (
        lambda: convolutions(nn.BatchNorm2d(8).eval()),
        lambda: torch.randn(COUNT, 3, 16, 16),
    ),
    "recurrent": (Recurrent, lambda: torch.randn(COUNT, 7, 8)),
    "indexed parameter, dict and tuple outputs": (Table, lambda: torch.randint(0, 61, (COUNT,))),
    "weight norm, PReLU, RMSNorm": (
        lambda: nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)),
            nn.PReLU(),
            nn.RMSNorm(16),
            nn.Linear(16, 4),
        ),
        lambda: torch.randn(COUNT, 8),
    ),
}


class Mixed(nn.Module):
    """One sample sees another's input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.inner(x)
        return hidden + 0.5 * hidden.roll(1, 0)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(checkpoint(lambda y: self.first(y).tanh(), x, use_reentrant=False))


class Scores(nn.Module):
    """Samples are compared with encoded texts, as by CLIP: the texts' network is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = Positions(), Positions()

    def forward(self, x: torch.Tensor) -> Any:
        return self.images(x).mean(1) @ self.texts(x).mean(1).t()


class Routed(nn.Module):
    """Experts see some of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x: torch.Tensor) -> Any:
        rows = x.flatten(0, 1)
        for layer in self.layers:
            chosen = torch.arange(0, len(rows), 3)
            rows = rows + rows.index_add(0, chosen, layer(rows[chosen]).tanh())
        return rows.view(x.shape)


def below_zeros() -> nn.Module:
    """A batch norm whose gradients of zero decide nothing."""
    norm: Any = convolutions(nn.BatchNorm2d(8))
    nn.init.zeros_(norm[-1].weight)
    return norm  # type: ignore[no-any-return]


MIXING: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "batch norm": (lambda: convolutions(nn.BatchNorm2d(8)), lambda: torch.randn(COUNT, 3, 16, 16)),
    "samples that see one another": (Mixed, lambda: torch.randn(COUNT, 8)),
    "checkpointing": (Checkpointed, lambda: torch.randn(COUNT, 8)),
    "sequences first": (lambda: Positions(batch_first=False), lambda: tokens().T.contiguous()),
    "gradients of zero": (below_zeros, lambda: torch.randn(COUNT, 3, 16, 16)),
    # every path through them would be followed, of which there are 2 to the number of layers
    "texts beside the samples": (Scores, tokens),
    "experts beside the samples": (Routed, lambda: torch.randn(COUNT, 5, 8)),
}


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return (output["value"] ** 2 + output["again"][0]).mean()
    mean: torch.Tensor = (output.float() ** 2).mean()
    return mean


def train(make: Callable[[], nn.Module], batch: Callable[[], torch.Tensor], *, plain: bool) -> Any:
    """Train four steps, all of them measured if not `plain`; return parameters and estimators' names."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped: Any = model
    if not plain:
        wrapped = AdaptiveDataParallel(model, optimizer)
        cases.measure_always(wrapped)
    seen = []
    for step in range(4):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss_of(wrapped(batch())).backward()
        optimizer.step()
        if not plain:
            insides.collect(wrapped)
            seen.append(insides.estimator(wrapped))
    if not plain:
        _session.reset()
    return [p.detach() for p in model.parameters()], seen


@pytest.mark.parametrize("name", CASES)
def test_rows_give_what_a_walk_gives_and_training_is_the_same(name: str) -> None:
    """Some steps are walked as well; others are measured from rows only if both were equal."""
    ours, seen = train(*CASES[name], plain=False)
    assert seen == [SIGNS, SIGNS, ROWS, SIGNS]
    plain, _ = train(*CASES[name], plain=True)
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", MIXING)
def test_a_graph_for_which_rows_are_wrong_or_not_kept_is_walked(name: str) -> None:
    _, seen = train(*MIXING[name], plain=False)
    assert seen == [SIGNS] * 4


class Sometimes(nn.Module):
    """Mixes samples in later batches, by a branch that the first batch did not take."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count = nn.Linear(8, 4), 0

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        hidden = self.inner(x)
        return hidden if self.count < 4 else hidden + 0.5 * hidden.roll(1, 0)


def test_another_branch_of_the_model_is_compared_again() -> None:
    _, seen = train(Sometimes, lambda: torch.randn(COUNT, 8), plain=False)
    assert seen == [SIGNS, SIGNS, ROWS, SIGNS]


def test_forms_are_compared_again_and_the_oldest_are_forgotten() -> None:
    forms = KnownForms()
    compared = [forms.count("one") for _ in range(64)]
    assert [place + 1 for place, now in enumerate(compared) if now] == [1, 2, 4, 8, 16, 32, 64]
    forms.decide("one", None)
    assert forms.count("one"), "a comparison that told nothing is made again"
    forms.decide("one", False)
    assert forms.refused("one")
    for other in range(256):
        forms.count(other)
    assert not forms.refused("one")


def test_a_failed_backward_pass_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    adp = cases.adaptive(model)
    optimizer = adp.optimizer
    cases.measure_always(adp)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("of the script")

    for step in range(3):
        handle = model[0].weight.register_hook(fail) if step == 2 else None
        optimizer.zero_grad()
        x = torch.randn(COUNT, 8, requires_grad=True)
        seen = weakref.ref(x)
        loss = adp(x).square().mean()
        if handle is None:
            loss.backward()
        else:
            with pytest.raises(ValueError, match="of the script"):
                loss.backward()
        optimizer.step()
        del x, loss
    del adp, model, optimizer, handle
    gc.collect()
    assert seen() is None


def test_a_backward_pass_through_two_forward_passes_adds_their_variances() -> None:
    """Two passes with equal batches have twice the variance of one."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    adp = cases.adaptive(model, 0.0)
    optimizer = adp.optimizer
    cases.measure_always(adp)
    found: dict[int, list[float]] = {1: [], 2: []}
    record = adp.gns.record
    for step in range(200):
        x = [torch.randn(COUNT, 8), torch.randn(COUNT, 8)]
        passes = 1 + step % 2
        adp.gns.record = lambda one, at, n=passes: (
            bool(found[n].append(float(one.variance.sum()))) or record(one, at)
        )  # type: ignore[method-assign, misc, assignment]
        optimizer.zero_grad()
        sum((loss_of(adp(part)) for part in x[:passes]), torch.zeros(())).backward()
        optimizer.step()
        insides.collect(adp)
    assert insides.estimator(adp) == ROWS
    mean = {n: sum(values) / len(values) for n, values in found.items()}
    assert mean[2] == pytest.approx(2 * mean[1], rel=0.25)


def test_the_weights_sum_to_zero_and_their_squares_to_the_inverse_of_the_factor() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in range(2, 70):
        half = HalfOfSamples(count, generator)
        assert float(half.each.sum()) == pytest.approx(0, abs=1e-4)
        assert float((half.each**2).sum()) * half.factor == pytest.approx(count)
        assert int(half.mask.sum()) == count // 2


def samples_own(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of each sample's loss, shape [samples, parameters]."""
    rows = [torch.autograd.grad(loss_of(model(one[None])), list(model.parameters())) for one in x]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows]).double()


@pytest.mark.parametrize("count", [2, 3, 16, 17])
def test_measurements_of_one_batch_have_the_mean_that_its_samples_gradients_give(count: int) -> None:
    """The mean over all halves is the unbiased variance; one sample has most of the gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))
    x = torch.randn(count, 5, 8)
    x[0] *= 30.0
    own = samples_own(model, x)
    mean_sqr, variance = float(own.mean(0).square().sum()), float(own.var(0).sum()) / count
    adp = cases.adaptive(model, 0.0)
    cases.measure_always(adp)
    found: list[float] = []
    record = adp.gns.record

    def keep(one: Measurement, step: int) -> bool:
        if insides.estimator(adp) == ROWS:
            assert float(one.mean_sqr.sum()) == pytest.approx(mean_sqr, rel=1e-4)
            found.append(float(one.variance.sum()))
        return record(one, step)

    adp.gns.record = keep  # type: ignore[method-assign]
    for _ in range(120):
        adp.optimizer.zero_grad()
        loss_of(adp(x)).backward()
        adp.optimizer.step()
    insides.collect(adp)
    assert len(found) > 100
    assert sum(found) / len(found) == pytest.approx(variance, rel=0.1)
    # the sample with most of the gradient counts in each measurement
    assert min(found) > 0.4 * variance
    assert max(found) < 2.5 * variance


def test_a_step_that_is_measured_has_a_sixth_more_operations() -> None:
    """Half of the samples pass through a third of the operations again."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    adp = AdaptiveDataParallel(model, optimizer)

    def operations() -> int:
        optimizer.zero_grad()
        with FlopCounterMode(display=False) as counter:
            functional.mse_loss(adp(torch.randn(64, 64)), torch.zeros(64, 64)).backward()
        optimizer.step()
        return counter.get_total_flops()

    cases.measure_always(adp)
    operations()
    operations()
    measured = operations()
    adp.gns.gap = 1000
    operations()
    assert operations() * 1.1 < measured < operations() * 1.18


@pytest.mark.parametrize("shape", [(), (9,), (1, 40), (30, 20), (8, 4, 3, 3)])
def test_the_digest_of_a_gradient_is_as_large_as_the_gradient(shape: tuple[int, ...]) -> None:
    params = [torch.randn(shape) for _ in range(400)]
    norms, products = torch.stack([*digests({param: param for param in params}).values()]).T
    assert (products / norms).square().mean().item() == pytest.approx(1.0, abs=0.3)
