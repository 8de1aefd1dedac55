"""From the squared norms of one step to the gradient noise scale, without waiting for them.

A sampled step leaves small tensors (0-d and [groups]) on the device, and a small all-reduce that is still
running. They are read when the next step begins; by then they are complete.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from adaptdl_elastic._interfaces import Reporter
from adaptdl_elastic.torch._gradient import grad_scaler, half_pass
from adaptdl_elastic.torch._gradient.accumulation import Batch
from adaptdl_elastic.torch._gradient.chunked_forward import is_out_of_memory
from adaptdl_elastic.torch._gradient.comm_hook import HookState, Recording
from adaptdl_elastic.torch._gradient.estimator import Measurement, balanced_signs
from adaptdl_elastic.torch._gradient.half_pass import ForwardPass
from adaptdl_elastic.torch._gradient.noise_scale import GradientNoiseScale
from adaptdl_elastic.torch._gradient.pace import Pace, gap
from adaptdl_elastic.torch._gradient.row_gradients import (
    Digests,
    HalfOfSamples,
    KnownForms,
    RowGradients,
    digests,
)
from adaptdl_elastic.torch._process_group.backends import Group

logger = logging.getLogger(__name__)

# names in reports of the estimators, by what they compare
REPLICAS = "gradients of replicas"
MICRO_BATCHES = "first micro-batch"
ROWS = "half of the batch by its rows"
SIGNS = "two halves of the batch by signs"
HALF = "half of the batch again"
SUCCESSIVE = "successive steps"

# Costs in plain steps until they have been seen. A sharded model's are not timed.
_COSTS = {REPLICAS: 0.08, MICRO_BATCHES: 0.08, ROWS: 0.3, SIGNS: 0.8, HALF: 0.8, SUCCESSIVE: 0.08}

_PATIENCE = timedelta(seconds=60)

# successive batches of one sample that cannot be ends of epochs: a loss of shape [1], or all are
_SINGLES = 3


class _SingleSampleError(Exception):
    """This batch cannot be split; other batches can."""


@dataclass
class _Pending:
    """Hold a measurement that is not complete yet."""

    step: int
    scale: float
    estimator: str
    # returns [2, groups] on the host: |ḡ|², V; of several replicas [3, groups]: the mean of their costs, too
    finish: Callable[[], torch.Tensor]


class Sampler:
    """Decide which steps are measured, and by which estimator.

    Args:
        gns: the statistics.
        hook: the communication hook.
        scaler: the GradScaler in use, or None.
        again: whether a batch can be walked or run again on a part of its samples.
        now: returns the time in seconds.
    """

    def __init__(
        self,
        gns: GradientNoiseScale,
        hook: HookState,
        scaler: Any,
        *,
        again: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gns, self._hook, self._scaler = gns, hook, scaler
        self._pace = Pace(_COSTS, now)
        # cost of measuring that the replicas have agreed on
        self._agreed: float | None = None
        self._batch = Batch()
        self._sampled = False
        self._recordings: list[Recording] = []
        # variances of signed gradients, by forward pass
        self._variances: dict[object, torch.Tensor] = {}
        # |g₁|² of the window's first micro-batch
        self._first: torch.Tensor | None = None
        # |ḡ|², if the hook has not seen all of ḡ
        self._mean: torch.Tensor | None = None
        self._pending: _Pending | None = None
        # its own: measuring must not change the script's random numbers
        self._generator = torch.Generator()
        self._split_works = self._half_works = again
        self._forms = KnownForms()
        # this step's gradients are taken from the rows of half of the samples
        self._by_rows = False
        # forward passes to run again on half of their samples
        self._passes: dict[object, ForwardPass] = {}
        # the step whose gradient the hook has kept
        self._kept_step, self._kept_size = -1, 0.0
        # successive batches that seemed to have one sample
        self._singles = 0
        # a warning was given that the optimizer has no preconditioner
        self._said = False
        # the forward passes of this step are to run again on half of their samples
        self._halves = False
        # something was measured since this was last reset
        self.news = False
        # name of the estimator of the last measurement
        self.estimator = ""

    def begin(self, batch: Batch, synchronised: bool) -> bool:
        """Begin a forward pass; return whether its gradient is to be split by signs."""
        self._batch = batch
        self._sampled, self._halves = batch.measurable and self._gns.due(), False
        self._by_rows = False
        self._hook.recording = None
        if not self._sampled:
            return False
        self._hook.norms.lacking.clear()
        if synchronised:
            self._hook.recording = Recording(cost=self._pace.cost(REPLICAS))
            self._recordings.append(self._hook.recording)
        single = batch.replicas == 1 and batch.micro_batches == 1
        split = single and self._split_works and batch.local != 1
        self._halves = single and not split and self._half_works and batch.local != 1
        if not single or split or self._halves:
            self._hook.kept = None
        elif (
            self._hook.kept is None
            or self._kept_step + 1 != self._gns.steps
            # another batch size has another variance
            or self._kept_size != batch.size
        ):
            self._hook.kept = {}
        return split

    def split(
        self, key: object, edges: list[Any], gradients: Sequence[torch.Tensor | None], local: int | None
    ) -> None:
        """Measure V = |g±|²: from rows of half of the samples, or by a walk through the graph below `edges`.

        Args:
            key: the forward pass.
            edges: where the walk continues.
            gradients: of all backward passes through that forward pass so far; two parts of one loss that are
                walked one after the other are measured as one.
            local: samples on this replica; None: unknown.
        """
        if not self._split_works:
            return
        reached = [(e, g) for e, g in zip(edges, gradients, strict=True) if g is not None]
        below, signals = [edge for edge, _ in reached], [gradient for _, gradient in reached]
        with self._hook.stopwatch.running(signals[0].device):
            self._split(key, below, signals, local)

    def _split(self, key: object, edges: list[Any], gradients: list[torch.Tensor], local: int | None) -> None:
        params = [p for group in self._gns.optimizer.param_groups for p in group["params"] if p.requires_grad]
        try:
            count, dims = self._samples(gradients, local)
            rows = self._rows(edges, gradients, dims, count) if key not in self._variances else None
            if rows is not None and not self._forms.count(rows.key):
                self._listen(key, rows, None)
                return
            signs = balanced_signs(count, self._generator) if rows is None else rows.half.each
            signed = _signed(gradients, dims, signs)
            grads = torch.autograd.grad(edges, params, signed, retain_graph=True, allow_unused=True)
        except _SingleSampleError:
            # not measured: the next step is sampled instead
            self._sampled = False
            return
        except (RuntimeError, ValueError) as error:
            # the walk itself may fit; and smaller batches follow if it does not
            if is_out_of_memory(error):
                self._sampled = False
                return
            self.can_not_split(str(error).splitlines()[0])
            return
        pairs = {p: g for p, g in zip(params, grads, strict=True) if g is not None}
        self._variances[key] = self._hook.norms.squares(pairs.items())
        if rows is not None:
            self._variances[key] *= rows.half.factor
            try:
                walked = digests(pairs)
            except Exception as error:
                # a kind of gradient that was not foreseen
                logger.info("the gradient of some samples is not compared: %s", error)
                return
            self._listen(key, rows, walked)

    def _rows(
        self, edges: list[Any], gradients: list[torch.Tensor], dims: list[int], count: int
    ) -> RowGradients | None:
        """Return what takes some samples' gradient from this pass; None if their rows are not known.

        A further pass through the same output is walked, with the sum of its gradients.
        """
        if count < 2:
            return None
        try:
            half = HalfOfSamples(count, self._generator)
            rows = RowGradients(edges, list(zip(gradients, dims, strict=True)), half)
        except Exception:
            # a graph that was not foreseen
            return None
        return None if self._forms.refused(rows.key) else rows

    def _listen(self, key: object, rows: RowGradients, walked: Digests | None) -> None:
        """Take the gradients of some samples, or compare them with those of a walk with the same signs."""
        stop = rows.listen(self._hook.stopwatch)

        def ended() -> None:
            stop()
            try:
                with self._hook.stopwatch.running(rows.device):
                    self._taken(key, rows, walked)
            except Exception as error:
                # the training pass has ended well
                logger.info("the gradient of some samples is not measured: %s", error)
                self._sampled = self._sampled and walked is not None

        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def _taken(self, key: object, rows: RowGradients, walked: Digests | None) -> None:
        if walked is not None:
            self._forms.decide(rows.key, rows.agrees(walked))
        elif rows.error is None:
            self._by_rows = True
            self._variances[key] = rows.half.factor * self._hook.norms.squares(rows.sums.items())
        else:
            self._sampled = False
            if not is_out_of_memory(rows.error):
                self._forms.decide(rows.key, False)

    @property
    def halves(self) -> bool:
        """Whether this step's forward passes are to be made again on half of their samples."""
        return self._halves

    def forward_pass(self, key: object, one: ForwardPass) -> None:
        """Keep a forward pass with the gradients of its outputs, to make it again on half of the batch."""
        self._passes[key] = one

    def can_not_split(self, reason: str) -> None:
        """Run the model on half of a batch instead, from the next step on."""
        if not self._split_works:
            return
        self._split_works = self._sampled = False
        logger.info(
            "gradient noise is measured by running the model again on half of a batch, on few steps, while "
            "there is one replica and no accumulation: the batch's gradient cannot be split (%s)",
            reason,
        )

    def can_not_halve(self, reason: str) -> None:
        """Compare successive gradients instead, from the next step on."""
        if not self._half_works:
            return
        self._split_works = self._half_works = self._halves = self._sampled = False
        logger.warning(
            "gradient noise is estimated from successive steps, less well at high learning rates, "
            "while there is one replica and no accumulation: the batch cannot be split (%s)",
            reason,
        )

    def before_step(self) -> None:
        """Make the forward passes of a sampled step again, on half of their samples."""
        if not (self._sampled and self._halves and self._passes):
            return
        own = [row for r in self._recordings[-1:] for row in r.own]
        pairs = [(p, p.grad) for group in self._gns.optimizer.param_groups for p in group["params"]]
        mean = [(p, grad) for p, grad in pairs if grad is not None]
        if not own or any(param.grad is not None for param in self._hook.norms.lacking):
            return
        sqr = _total(own) if self._mean is None else self._mean
        passes = list(self._passes.values())
        self._singles = self._singles + 1 if min(one.count for one in passes) == 1 else 0
        if 0 < self._singles < _SINGLES:
            # not measured: the next step is sampled instead
            self._sampled = False
            return
        try:
            with self._hook.stopwatch.running(own[0].device):
                found = half_pass.variance(passes, mean, sqr, self._hook.norms, self._generator)
        except Exception as error:
            # the script's own model runs, on a batch of another size
            if is_out_of_memory(error):
                # not measured: the next step is sampled instead
                self._sampled = False
                return
            self.can_not_halve(str(error).partition("\n")[0] or type(error).__name__)
            return
        self._variances["halves"] = found

    def _samples(self, gradients: list[torch.Tensor], local: int | None) -> tuple[int, list[int]]:
        """Return the number of samples, and their dimension in each gradient."""
        count = local if local is not None else gradients[0].shape[0] if gradients[0].ndim else 0
        self._singles = self._singles + 1 if count == 1 else 0
        if 0 < self._singles < _SINGLES:
            raise _SingleSampleError
        found = []
        for gradient in gradients:
            dims = [d for d, size in enumerate(gradient.shape) if size == count]
            if not dims:
                raise ValueError(
                    f"an output of shape {list(gradient.shape)} has no dimension of {count} samples"
                )
            known = self._batch.dimension
            found.append(known if known in dims else dims[0])
        return count, found

    def first_part(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Measure the gradient of the window's first micro-batch, a part if there is one replica."""
        if self._sampled and self._batch.replicas == 1 and self._batch.micro_batches > 1:
            self._first = self._hook.norms.squares(pairs)

    def whole(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Measure the step's gradient, if there is one replica and the hook was not called."""
        if self._sampled and self._batch.replicas == 1:
            self._mean = self._hook.norms.squares(pairs)

    def drop(self) -> None:
        """Forget the measurements of a step that will not be taken, or has been taken.

        A forward pass that was made already will still be measured: `zero_grad` may come between it and its
        backward pass.
        """
        self.drop_passes()
        self._first = None

    def drop_passes(self) -> None:
        """Do the same, but keep the measurement of the window's first micro-batch."""
        coming = self._hook.recording
        self._recordings = [coming] if coming is not None and not coming.own else []
        self._variances, self._passes, self._mean = {}, {}, None

    def close(self, scale: float) -> None:
        """Start to collect the measurements of a step that was taken."""
        recordings = [r for r in self._recordings if r.own]
        step = self._gns.steps
        if recordings and self._sampled and self._complete():
            found = self._moments(recordings)
            if found is None and self._hook.kept:
                # the next step's gradient is compared with it
                self._kept_step, self._kept_size = step, scale
            else:
                way = SUCCESSIVE if found is None else found[0]
                steps = gap(self._cost(way), step, self._gns.settled)
                # Replicas measure every step at first. If a script lets only some of them step, that is found
                # one batch later, and until then the others would take part in no measurement.
                self._gns.measured(steps if self._batch.replicas == 1 else min(steps, max(step // 32, 1)))
            if found is not None:
                estimator, moments = found
                self._pending = _Pending(step, scale, estimator, self._unscaled(moments, recordings[0]))
        self.drop()

    def _cost(self, way: str) -> float:
        """Return the cost of a measurement in plain steps; the same on all replicas."""
        if self._batch.replicas == 1:
            return self._pace.cost(way)
        return _COSTS[way] if self._agreed is None else self._agreed

    def _complete(self) -> bool:
        """Return after the step whether every gradient had its divisor before the step. All replicas agree.

        A parameter lacks the divisor in its first step with a gradient, and has it afterwards.
        """
        norms = self._hook.norms
        if not norms.lacking:
            return True
        if norms.divisible(norms.lacking):
            return False
        if norms.divisible(p for group in self._gns.optimizer.param_groups for p in group["params"]):
            # parameters without a divisor got no gradient
            return True
        if not self._said:
            self._said = True
            logger.warning(
                "%s keeps no second moment of its gradients, which the noise scale of AdamScale is measured "
                "with: nothing is measured, every gain is 1 and the learning rate is not scaled; pass "
                "scaling_rule=AdaScale(), LinearScale() or SqrtScale() instead",
                type(self._gns.optimizer).__name__,
            )
        self._gns.measured(gap(_COSTS[SIGNS], self._gns.steps, settled=True))
        return False

    def collect(self) -> None:
        """Read the pending measurement, if there is one."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            mean_sqr, variance, *costs = pending.finish().numpy().copy()
        except RuntimeError as error:
            # the small all-reduce lost a replica after the gradients' own
            if not self._hook.absorb:
                raise
            logger.info("the statistics of step %d are lost with a replica: %s", pending.step, error)
            return
        self.estimator = pending.estimator
        self._pace.measured(pending.estimator, self._hook.stopwatch.take(), pending.step)
        for cost in costs:
            self._agreed = float(cost[0])
        self.news |= self._gns.record(Measurement(mean_sqr, variance, pending.scale), pending.step)

    def report(self, reporter: Reporter, name: str) -> None:
        """Report what is known of the gradients of the model `name` after a step."""
        gns = self._gns
        gns.health.stepped()
        reporter.report_problem(f"gradients of {name}", gns.health.problem)
        reporter.report_problem(f"the variance of the gradients of {name}", gns.health.equal)
        if self.news:
            self.news = False
            reporter.update_grad_params(name, gns.sqr_avg(), gns.var_avg(), gns.sqr_error(), self.estimator)

    def _moments(self, recordings: list[Recording]) -> tuple[str, Callable[[], torch.Tensor]] | None:
        """Return the estimator's name, and a function that returns |ḡ|² and V; None: not measured.

        The function's result has shape [2, groups] and is on the device. That of several replicas has a third
        row, the mean of their costs.
        """
        replicas, parts = self._batch.replicas, self._batch.parts
        first, variances = self._first, self._variances
        if replicas > 1:
            return REPLICAS, lambda: of_replicas(recordings, parts, self._hook.link)
        mean = _total(recordings[-1].own) if self._mean is None else self._mean
        if self._batch.micro_batches > 1 and first is not None:
            return MICRO_BATCHES, lambda: torch.stack([mean, (first - mean) / (parts - 1)])
        if variances:
            name = HALF if self._halves else ROWS if self._by_rows else SIGNS
            return name, lambda: torch.stack([mean, _total(list(variances.values()))])
        change = recordings[-1].change
        if change and len(change) == len(recordings[-1].own):
            self._hook.kept = None
            return SUCCESSIVE, lambda: torch.stack([mean, _total(change) / 2.0])
        return None

    def _unscaled(
        self, moments: Callable[[], torch.Tensor], recording: Recording
    ) -> Callable[[], torch.Tensor]:
        """Return `moments` without the present loss scale, on the host; on a GPU the copy starts now."""
        loss_scale = grad_scaler.loss_scale(self._scaler)
        # a new tensor, because the scaler updates its own in place
        square = loss_scale * loss_scale

        def unscaled() -> torch.Tensor:
            result = moments()
            result[:2] /= square
            return result

        if not recording.own[0].is_cuda:
            return unscaled
        device = unscaled()
        host = torch.empty(device.shape, dtype=device.dtype, pin_memory=True)
        host.copy_(device, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def finish() -> torch.Tensor:
            copied.synchronize()
            return host

        return finish


def _signed(gradients: list[torch.Tensor], dims: list[int], signs: torch.Tensor) -> list[torch.Tensor]:
    """Return gradients with each sample's multiplied by its sign."""
    shapes = [[-1 if d == dim else 1 for d in range(g.ndim)] for g, dim in zip(gradients, dims, strict=True)]
    return [g * signs.to(g.device, g.dtype).view(shape) for g, shape in zip(gradients, shapes, strict=True)]


def _total(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(rows).sum(0)


def of_replicas(recordings: list[Recording], parts: float, link: Group | None = None) -> torch.Tensor:
    """Return |ḡ|² of the last backward pass, the sum of V over all backward passes, and the cost if known.

    Replica r has the part p_r of the N samples, so ḡ = Σ p_r g_r. G is the true gradient, S the variance of
    one sample's gradient. The expectation of |ḡ|² is |G|² + S/N. With P = 1 / Σ p_r² (`parts`, which is R if
    all parts are equal), the expectation of Σ |p_r g_r|² is |G|²/P + S/N. So
    V = (P Σ |p_r g_r|² - |ḡ|²) / (P - 1) is an unbiased estimate of S/N, the variance of ḡ.

    A step may have a second synchronised pass: D(real), then D(fake). It adds its gradient to the present
    average. That average is the same on all replicas, so the difference of the norms does not change. The
    gradients of a sharded model are those of each pass alone (`Recording.whole`), with the same difference.
    """
    variance: torch.Tensor | float = 0.0
    for recording in recordings:
        # The other replicas sent it long ago, but may have died since. On a GPU the device waits, so there is
        # no limit.
        if recording.own[0].is_cuda:
            recording.work.wait()
        elif link is not None:
            link.wait([recording.work], _PATIENCE)
        else:
            recording.work.wait(_PATIENCE)
        mean = _total(recording.average)
        # of buffers that were multiplied by p_r already
        assert recording.reduced is not None
        variance = variance + (parts * recording.reduced - mean) / (parts - 1)
        if recording.whole is not None:
            mean = recording.whole
    rows = [mean, torch.as_tensor(variance)]
    return torch.stack(rows if recording.mean_cost is None else [*rows, recording.mean_cost.expand_as(mean)])
