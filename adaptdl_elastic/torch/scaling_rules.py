"""Scale the learning rate with the batch size.

A rule multiplies each parameter group's learning rate by a factor during `optimizer.step()` and restores it
afterwards. So schedulers, checkpoints and the script see the learning rate for the initial batch size. S
below is the *scale*: batch size / initial batch size.

======================  =====================================  ==========================================
rule                    factor                                 source
======================  =====================================  ==========================================
`AdaScale`              (var + sqr)/(var/S + sqr), per group   Johnson et al., ICML 2020
`AdamScale`             the same of preconditioned gradients,  square root for Adam: Malladi et al.,
                        to the power ½                         NeurIPS 2022; gain for S: AdaptDL
`LinearScale`           S                                      Goyal et al., 2017
`SqrtScale`             √S                                     Krizhevsky, 2014
`AdamSqrtScale`         √S; β₁, β₂, ε and the weight decay     Malladi et al., NeurIPS 2022; decay:
                        follow                                 Wang and Aitchison, 2024
`LEGWScale`             √S, warmed up over S times the epochs  You et al., SC 2019
======================  =====================================  ==========================================

To define another rule, override `ScalingRuleBase.scale_lr`, and `ScalingRuleBase.scale_options` if options
other than the learning rate change with the batch size.
"""

from __future__ import annotations

import functools
import logging
import math
import numbers
import types
from typing import Any

import numpy as np
import torch

from adaptdl_elastic import _session
from adaptdl_elastic._interfaces import ScaledModel
from adaptdl_elastic._torch_versions import muon
from adaptdl_elastic.torch._gradient.estimator import Array

__all__ = [
    "AdaScale",
    "AdamScale",
    "AdamSqrtScale",
    "LEGWScale",
    "LinearScale",
    "ScalingRuleBase",
    "SqrtScale",
    "default_rule",
]

logger = logging.getLogger(__name__)


class ScalingRuleBase:
    """Wrap `optimizer.step()` and `optimizer.zero_grad()` with a scaling rule.

    Subclasses override `scale_lr`. Each AdaptiveDataParallel needs its own object.

    Attributes:
        preconditioned: Whether the noise scale is that of the gradient after Adam's preconditioning.
    """

    preconditioned = False
    doubt = ""
    """Warning to be logged in the first step in which a loader autoscales its batch size; "": none."""

    def __init__(self) -> None:
        self._adp: ScaledModel | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._step: Any = None
        self._zero_grad: Any = None

    @property
    def adp(self) -> ScaledModel:
        """Model that uses the rule; RuntimeError before `initialize`."""
        if self._adp is None:
            raise RuntimeError(
                f"{type(self).__name__} is not in use yet: give it to AdaptiveDataParallel as scaling_rule"
            )
        return self._adp

    def initialize(
        self, adp: ScaledModel, optimizer: torch.optim.Optimizer, patch_optimizer: bool = False
    ) -> None:
        """Use the rule for a model.

        Args:
            adp: The model.
            optimizer: Optimizer of the model.
            patch_optimizer: Whether to replace `optimizer.step` and `optimizer.zero_grad` by the rule's.

        Raises:
            RuntimeError: the rule is in use for another model.
        """
        if self._adp is not None and self._adp is not adp:
            raise RuntimeError(f"one {type(self).__name__} serves one model: make another for this one")
        self._adp, self._optimizer = adp, optimizer
        self._step, self._zero_grad = optimizer.step, optimizer.zero_grad
        if patch_optimizer:
            # Bound methods: torch's schedulers unbind `step` and wrap the function.
            def step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
                return self.step(*args, **kwargs)

            def zero_grad(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
                self.zero_grad(*args, **kwargs)

            # Keep the marks of schedulers that have wrapped `step` before: they warn if a mark is missing.
            functools.update_wrapper(step, getattr(self._step, "__func__", self._step))
            optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
            optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]

    def scale_lr(self, scale: float) -> float | Array:
        """Return the factor of the learning rate at `scale`: a number, or one per parameter group."""
        raise NotImplementedError(f"{type(self).__name__} does not say how the learning rate scales")

    def scale_options(self, scale: float, group: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a parameter group, other than `lr`, that differ at `scale`, by name."""
        return {}

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer at the scaled learning rate; do nothing in the middle of a window."""
        adp = self.adp
        if not adp.begin_step(closure=bool(args or kwargs.get("closure"))):
            return None
        scale = adp.scale
        assert self._optimizer is not None
        if self.doubt and (trainer := _session.current().training_loader) is not None and trainer.adaptive:
            logger.warning("%s", self.doubt)
            self.doubt = ""
        factor = self.scale_lr(scale)
        options = [self.scale_options(scale, group) for group in self._optimizer.param_groups]
        before = _replace(self._optimizer, factor, options)
        try:
            result = self._step(*args, **kwargs)
        finally:
            for group, values in before:
                group.update(values)
        adp.end_step(factor)
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Drop the gradients; do nothing in the middle of an accumulation window."""
        if self.adp.begin_zero_grad():
            self._zero_grad(*args, **kwargs)


def _replace(
    optimizer: torch.optim.Optimizer, factor: float | Array, options: list[dict[str, Any]]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Multiply the learning rates by `factor`, and replace options of the parameter groups.

    Args:
        optimizer: Optimizer to change.
        factor: Factor of all groups or of each one; 1 changes nothing.
        options: Options to replace, for each group.

    Returns:
        Each group that has changed, with the former values.
    """
    groups = optimizer.param_groups
    factors = _by_group(factor, len(groups))
    if not all(math.isfinite(f) and f >= 0.0 for f in factors):
        raise ValueError(f"the scaling rule's factor of the learning rate must be 0 or more, got {factors}")
    before = []
    for group, f, changed in zip(groups, factors, options, strict=True):
        if f != 1.0:
            changed = {"lr": group["lr"] * f, **changed}  # for a tensor a new tensor: the old one stays
        if changed:
            before.append((group, {name: group[name] for name in changed}, changed))
    for group, _, changed in before:
        group.update(changed)
    return [(group, values) for group, values, _ in before]


def _by_group(factor: float | Array, groups: int) -> list[float]:
    if isinstance(factor, float):  # the usual case, handled apart: NumPy is slow for single numbers
        return [factor] * groups
    if np.ndim(factor) and np.shape(factor) != (groups,):
        raise ValueError(
            f"the scaling rule gave factors of shape {np.shape(factor)} to {groups} parameter groups: "
            f"one number, or one per group; add groups before AdaptiveDataParallel is made"
        )
    values: list[float] = np.broadcast_to(np.asarray(factor, dtype=np.float64), (groups,)).tolist()
    return values


class AdaScale(ScalingRuleBase):
    """Scale by AdaScale (Johnson, Agrawal, Gu, Guestrin, *AdaScale SGD*, ICML 2020), for SGD. The default.

    The factor of each parameter group is its gain r = (var + sqr)/(var/S + sqr). It is 1 if gradients have no
    noise, so that a larger batch has no benefit, and S if gradients are all noise. AdaScale is derived for
    SGD, also with momentum (section 4 of the paper).

    Args:
        power: Exponent of the gain, > 0 and ≤ 1. With ½ the factor is √S if gradients are all noise. That
            suits optimizers whose update does not grow with the gradient, such as Muon.
    """

    def __init__(self, power: float = 1.0) -> None:
        super().__init__()
        if not (_finite(power) and 0.0 < power <= 1.0):
            raise ValueError(f"power must be above 0 and at most 1, got {power!r}")
        self.power = power

    def scale_lr(self, scale: float) -> float | Array:
        """Return AdaScale's gain r to the power `power` by parameter group, shape [groups]."""
        if scale == 1.0:
            return 1.0
        gain: float | Array = self.adp.gns.lr_gain(scale)
        return gain if self.power == 1.0 else gain**self.power


class AdamScale(AdaScale):
    """Scale by AdaScale's gain of preconditioned gradients, to the power `power` (½). For Adam and AdamW.

    The noise scale is that of g/P, where P = √(v̂) + ε is Adam's denominator before the step. If gradients
    are all noise, the factor is √S, the square-root rule for adaptive methods (Malladi, Lyu, Panigrahi,
    Arora, *On the SDEs and Scaling Rules for Adaptive Gradient Algorithms*, NeurIPS 2022). If gradients have
    no noise, the factor is 1. This rule is the default for Adam and AdamW. It also suits other optimizers
    that divide by a second moment.

    Args:
        power: Exponent of the gain, > 0 and ≤ 1.
    """

    preconditioned = True

    def __init__(self, power: float = 0.5) -> None:
        super().__init__(power)


class LinearScale(ScalingRuleBase):
    """Scale by S (Goyal et al., *Accurate, Large Minibatch SGD*, 2017)."""

    def scale_lr(self, scale: float) -> float | Array:
        """Return S."""
        return scale


class SqrtScale(ScalingRuleBase):
    """Scale by √S (Krizhevsky, *One Weird Trick for Parallelizing Convolutional Neural Networks*, 2014)."""

    def scale_lr(self, scale: float) -> float | Array:
        """Return √S."""
        return math.sqrt(scale)


class AdamSqrtScale(SqrtScale):
    """Scale Adam and AdamW by √S, with β₁, β₂, ε and the weight decay.

    Malladi, Lyu, Panigrahi, Arora (*On the SDEs and Scaling Rules for Adaptive Gradient Algorithms*, NeurIPS
    2022, definition 5.3) derive which changes keep the path of Adam over samples, where noise dominates the
    gradient::

        lr' = √S · lr      1 − βᵢ' = S · (1 − βᵢ)      ε' = ε / √S

    AdamW's parameters are an average over about 1/(lr · decay) steps (Wang and Aitchison, *How to set AdamW's
    weight decay as you scale model and dataset size*, 2024, arXiv 2405.13698). The same number of samples
    needs lr' · decay' = S · lr · decay, so decay' = √S · decay.

    The derivation holds for S below 1/(1 − β₁), 10 for the usual β₁ of 0.9. Above it β₁' is 0, which the
    paper does not cover. The bias correction counts steps and takes β' as if it had been used from the first
    step.

    Args:
        weight_decay: Whether the weight decay follows. Only AdamW's is of this kind, so Adam's stays.
    """

    preconditioned = True

    def __init__(self, weight_decay: bool = True) -> None:
        super().__init__()
        self.weight_decay = weight_decay

    def initialize(
        self, adp: ScaledModel, optimizer: torch.optim.Optimizer, patch_optimizer: bool = False
    ) -> None:
        """Use the rule for a model.

        Raises:
            ValueError: a parameter group of the optimizer has no `betas` and `eps`, or the optimizer is
                schedule-free: its β₁ is no decay of a mean, and `eval()` needs the one of the steps.
        """
        if type(optimizer).__name__ in _SCHEDULE_FREE:
            raise ValueError(
                f"AdamSqrtScale changes betas, which {type(optimizer).__name__} uses unlike Adam: "
                f"take AdamScale or SqrtScale"
            )
        if any("betas" not in group or "eps" not in group for group in optimizer.param_groups):
            raise ValueError(
                f"AdamSqrtScale changes betas and eps, which {type(optimizer).__name__} does not have: "
                f"use it with Adam or AdamW, or take SqrtScale"
            )
        super().initialize(adp, optimizer, patch_optimizer)

    def scale_options(self, scale: float, group: dict[str, Any]) -> dict[str, Any]:
        """Return `betas`, `eps` and, for AdamW, `weight_decay` at `scale`."""
        if scale == 1.0:
            return {}
        first, second = (max(0.0, 1.0 - scale * (1.0 - float(beta))) for beta in group["betas"])
        options = {"betas": (first, second), "eps": group["eps"] / math.sqrt(scale)}
        if self.weight_decay and group.get("decoupled_weight_decay"):
            options["weight_decay"] = group["weight_decay"] * math.sqrt(scale)
        return options


class LEGWScale(ScalingRuleBase):
    """Scale by √S with a warm-up (You et al., *Large-Batch Training for LSTM and Beyond*, SC 2019).

    In this linear-epoch gradual warm-up (LEGW), the factor grows linearly to √S over S · base_warmup_epochs
    epochs. Epochs are counted in samples seen, so that the batch size may change meanwhile. The rule needs an
    AdaptiveDataLoader, which knows the initial batch size.

    Args:
        base_warmup_epochs: Warm-up epochs at the initial batch size, ≥ 0.
        data_size: Samples in an epoch, > 0.
    """

    def __init__(self, base_warmup_epochs: float, data_size: int) -> None:
        super().__init__()
        if not (_finite(base_warmup_epochs) and base_warmup_epochs >= 0):
            raise ValueError(f"base_warmup_epochs must be 0 or more, got {base_warmup_epochs!r}")
        if not (_finite(data_size) and data_size > 0):
            raise ValueError(f"data_size is the number of samples in an epoch, got {data_size!r}")
        self._warmup_epochs = base_warmup_epochs
        self._data_size = data_size

    def scale_lr(self, scale: float) -> float | Array:
        """Return √S · min(1, epochs / (S · base_warmup_epochs)); epochs include this step's samples.

        Raises:
            RuntimeError: there is no AdaptiveDataLoader.
        """
        initial = self.adp.initial_batch_size
        if initial is None:
            raise RuntimeError("LEGWScale counts epochs: train from an AdaptiveDataLoader")
        warmup = scale * self._warmup_epochs
        epochs = (self.adp.gns.batches_seen + scale) * initial / self._data_size
        return math.sqrt(scale) * (min(1.0, epochs / warmup) if warmup else 1.0)


def _finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)


_DERIVED_FOR_SGD = (torch.optim.SGD,)
_DERIVED_FOR_ADAM = (torch.optim.Adam, torch.optim.AdamW)
# Package `schedulefree` (Defazio et al., *The Road Less Scheduled*, 2024): the step is that of the optimizer
# which the name begins with, and the learning rate is read in each step.
_SCHEDULE_FREE = {
    "SGDScheduleFree": "SGD",
    "AdamWScheduleFree": "Adam",
    "RAdamScheduleFree": "Adam",
}


def default_rule(optimizer: torch.optim.Optimizer) -> ScalingRuleBase:
    """Return the rule for an optimizer that is given none.

    It is AdamScale for Adam and AdamW, and AdaScale for SGD. The optimizers of package `schedulefree` get the
    rule of the optimizer they are made from. Muon gets AdaScale's gain to the power ½: its update is
    orthogonalised and so does not grow with the gradient, and Liu et al. (*Muon is Scalable for LLM
    Training*, 2025, arXiv 2502.16982) give it the learning rates of AdamW. Other optimizers get AdaScale,
    with a warning once the batch size is autoscaled.
    """
    rule = AdaScale()
    kind = _SCHEDULE_FREE.get(type(optimizer).__name__)
    if kind == "Adam" or isinstance(optimizer, _DERIVED_FOR_ADAM):
        return AdamScale()
    if isinstance(optimizer, muon()):
        return AdaScale(power=0.5)
    if kind is None and not isinstance(optimizer, _DERIVED_FOR_SGD):
        rule.doubt = (
            f"AdaScale, derived for SGD, is chosen to scale the learning rate of {type(optimizer).__name__}: "
            f"pass scaling_rule=AdaScale() to say that this is meant, AdamScale() if it divides by a second "
            f"moment as Adam does, LinearScale() or SqrtScale() otherwise"
        )
    return rule
