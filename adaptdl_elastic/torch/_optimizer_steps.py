"""Decide when the optimizer of a model steps, record what a step has done, and undo one that failed.

`scaling_rules` replaces the methods of the optimizer by ones that ask here, and `_gradient.grad_scaler` those
of a GradScaler.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from adaptdl_elastic import checkpoint
from adaptdl_elastic._interfaces import ElasticLoader, ModelSnapshot
from adaptdl_elastic.checkpoint.state_copy import copies_beside
from adaptdl_elastic.torch._bootstrap import current_session
from adaptdl_elastic.torch._data.registry import registry
from adaptdl_elastic.torch._gradient import grad_scaler
from adaptdl_elastic.torch._gradient.accumulation import Batch, Window
from adaptdl_elastic.torch._gradient.comm_hook import HookState
from adaptdl_elastic.torch._gradient.estimator import Array
from adaptdl_elastic.torch._gradient.measurement import Sampler
from adaptdl_elastic.torch._gradient.model_state import BatchSizes, ModelState
from adaptdl_elastic.torch._gradient.noise_scale import AdamGradientNoiseScale, GradientNoiseScale
from adaptdl_elastic.torch._gradient.out_of_memory import guards, settle
from adaptdl_elastic.torch._model_arguments import OWNER
from adaptdl_elastic.torch._runtime.position import script_position
from adaptdl_elastic.torch._sharded.noise import ShardedNoise
from adaptdl_elastic.torch._sharded.window import ShardedWindow
from adaptdl_elastic.torch.scaling_rules import ScalingRuleBase, default_rule

logger = logging.getLogger(__name__)


class StepsModel(torch.nn.Module):
    """Keep the optimizer of a model of every kind, its steps, its window and its gradient statistics."""

    module: torch.nn.Module
    training: bool
    _kind: str
    """Name of the public class, for messages."""
    _sampler: Sampler | ShardedNoise
    _state: checkpoint.State
    _window: Window | ShardedWindow

    def _make(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
        mp_scaler: Any,
        scaling_rule: ScalingRuleBase | None,
    ) -> None:
        """Set the attributes of all models. `super().__init__` of the constructor comes before."""
        self._session = current_session()
        self.name = name
        self.optimizer, self.lr_scheduler, self.mp_scaler = optimizer, lr_scheduler, mp_scaler
        # why a failed step cannot be undone
        self.irreparable: str | None = None
        self._trained = frozenset(id(one) for one in self._parameters_now() if one.requires_grad)
        self.scaling_rule = default_rule(optimizer) if scaling_rule is None else scaling_rule
        kind = AdamGradientNoiseScale if self.scaling_rule.preconditioned else GradientNoiseScale
        self.gns: GradientNoiseScale = kind(self, optimizer, mp_scaler)
        self._batch = Batch()
        self._batch_sizes = BatchSizes()
        self._comparison = registry().comparison

    def _restore(self) -> None:
        """Mark the optimizer as one that is in use, and load the checkpoint."""
        setattr(self.optimizer, OWNER, self.name)
        checkpoint.load_state(self._state)
        self._comparison.restored(self.name, self.optimizer)

    def _parameters_now(self) -> Iterable[torch.Tensor]:
        """Return the model's parameters, whether they are gathered at present or not."""
        return self.module.parameters()

    @property
    def progress(self) -> float:
        """Progress so far, in steps at the initial batch size."""
        return self.gns.get_progress()

    @property
    def gain(self) -> float:
        """Steps at the initial batch size that a step at the current one is worth, from 1 to `scale`."""
        return self.gns.gain(self.scale)

    @property
    def last_gain(self) -> float:
        """Steps at the initial batch size as which the newest step of the optimizer counts."""
        return self.gns.last_gain

    @property
    def scale(self) -> float:
        """Batch size of the current step / initial batch size; 1 without an AdaptiveDataLoader."""
        return self._batch.scale

    @property
    def lr_factor(self) -> float | Array:
        """Current factor of the learning rate by the scaling rule: a number, or one per parameter group."""
        return self.scaling_rule.scale_lr(self.scale)

    @property
    def initial_batch_size(self) -> int | None:
        """Batch size over all replicas that the data loader was made with; None before its first batch."""
        return self._batch_sizes.last

    @property
    def window_under_way(self) -> bool:
        """Whether gradients have been accumulated since the last step."""
        return self._window.under_way

    def statistics(self) -> dict[str, Any]:
        """Return the gradient statistics, to be sent to other replicas."""
        return self.gns.state_dict()

    def load_statistics(self, statistics: dict[str, Any]) -> None:
        """Replace the gradient statistics by another replica's `statistics`."""
        self.gns.load_state_dict(statistics)

    @property
    def stepping(self) -> bool:
        """Whether `optimizer.step()` steps now: not in the middle of a window or in a dry batch."""
        session = self._session
        if session.dry:
            return False
        loader = session.loader
        return loader is None or not loader.training or bool(loader.is_optim_step())

    @property
    def failure(self) -> BaseException | None:
        """Why the gradients of the current step could not be synchronised; None if they could."""
        return None

    def confirm_step(self) -> bool:
        """Return False: a step that failed elsewhere was not taken here."""
        return False

    @property
    def accumulates_by_hand(self) -> bool:
        """Whether the script adds up gradients of several windows, and has not stepped yet."""
        raise NotImplementedError

    @property
    def attempted_steps(self) -> int:
        """Steps that were taken, or skipped because gradients were not finite."""
        return self.gns.steps + self.gns.skipped

    @property
    def thawed(self) -> bool:
        """Whether a parameter requires gradients only since after construction; torch does not know it."""
        return any(one.requires_grad and id(one) not in self._trained for one in self._parameters_now())

    def refuse_thawed(self, why: str) -> None:
        """Raise RuntimeError, with the reason `why`, if the model is `thawed`."""
        if self.thawed:
            raise RuntimeError(
                f"parameters require gradients that did not when {self._kind} was made: {why}. Let "
                f"them require gradients from the start, in a parameter group whose learning rate is 0 until "
                f"they are to train"
            )

    def snapshot_step(self, last: ModelSnapshot | None) -> ModelSnapshot:
        """Copy what a step may change besides parameters; use the memory of `last` again if it fits."""
        return ModelCopies(self, last)

    # Batches and their window.

    def _begin_batch(self, replicas: int, by_hand: bool = False) -> Batch:
        """Prepare for the gradients of the data loader's current batch.

        Args:
            replicas: Number of replicas that share the batch.
            by_hand: Whether the script itself accumulates several windows, without synchronisation.
        """
        loader = self._session.loader
        if loader is not None and self.training:
            loader.train()
        if loader is None or not (loader.training or loader.training_loader_undecided):
            # a validation loop in which gradients are not turned off
            scale = self.gns.accum_scale
            self._batch = Batch(replicas=replicas, parts=replicas, size=scale, scale=scale)
        else:
            self._check_loader(loader)
            saved = self._batch_sizes.use(loader.key, loader.batch_size)
            if saved is not None:
                self._change_units(saved, loader.batch_size)
            self._batch = Batch.of(loader, replicas, by_hand)
            self.gns.set_accum_scale(self._batch.size / self._batch.micro_batches)
        return self._batch

    def _check_loader(self, loader: ElasticLoader) -> None:
        """Raise RuntimeError if the model cannot be trained with `loader`."""

    def _change_units(self, saved: int, initial: int) -> None:
        """Convert the statistics of a checkpoint from initial batch size `saved` to `initial`."""
        logger.warning(
            "the checkpoint is of batch_size=%d, and it is %d now: gradient statistics begin anew, and "
            "progress is counted in steps of the new size",
            saved,
            initial,
        )
        progress = self.progress
        self.gns.change_units(initial / saved)
        first: object = self._session.models[0]
        if progress and first is self:
            script_position().start_progress *= self.progress / progress

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; do nothing in the middle of an accumulation window."""
        if self.begin_zero_grad():
            super().zero_grad(set_to_none=set_to_none)

    def begin_zero_grad(self) -> bool:
        """Return whether `zero_grad` is to drop all gradients now: not in the middle of a window."""
        raise NotImplementedError

    def drop_window(self) -> None:
        """Drop the gradients of an accumulation window that will not be stepped."""
        if self._window.under_way:
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        self._sampler.drop()
        self._window.reset()
        self.gns.reset_accumulation()
        super().zero_grad(set_to_none=True)

    # Steps.

    def _may_step(self, closure: bool) -> bool:
        """Return whether the optimizer is to step now, as far as all models need it.

        Raises:
            RuntimeError: parameter groups were added, or a closure is used with gradient accumulation.
        """
        if len(self.optimizer.param_groups) != self.gns.groups:
            raise RuntimeError(
                f"the optimizer has {len(self.optimizer.param_groups)} parameter groups now, and had "
                f"{self.gns.groups} when {self._kind} was made: add all groups before, with requires_grad or "
                f"a learning rate of 0 for those that are to train later"
            )
        if closure and not (self.stepping or self._session.dry):
            raise RuntimeError(
                "optimizer.step(closure) cannot be combined with gradient accumulation: call "
                "autoscale_batch_size(..., gradient_accumulation=False)"
            )
        return self.stepping

    def end_step(self, factor: float | Array) -> None:
        """Record that the optimizer has stepped at learning rates times `factor`. Called by scaling rules."""
        self._sampler.close(self._batch.size)
        self._window.reset()
        self.gns.advance(self.scale, self._batch.size)
        metrics = self._session.metrics
        self._sampler.report(metrics, self.name)
        metrics.update_gain(self.name, self.gain, mean(factor))


class OptimizerSteps(StepsModel, DistributedDataParallel):
    """Decide when the optimizer of a model steps. `AdaptiveDataParallel` adds forward and backward passes."""

    _window: Window
    _hook: HookState
    _sampler: Sampler
    _state: ModelState
    # in this generation, whose rank 0 saves
    _save_prepared: bool
    # the script accumulates by hand
    _user_no_sync: bool
    # False during a forward pass whose gradients are not synchronised
    _synchronised: bool

    def to_tensorboard(self, writer: Any, global_step: int, tag_prefix: str = "") -> None:
        """Write gradient statistics, gain, progress and learning-rate factors to TensorBoard.

        Does nothing on ranks other than 0. `Learning_Rate_Factor` is the mean over parameter groups,
        `Learning_Rate_Factor/0` is the factor of the first group.

        Args:
            writer: A torch.utils.tensorboard.SummaryWriter.
            global_step: Step under which the values are written.
            tag_prefix: Prefix of the tags; a `/` is appended if it lacks one.
        """
        if self._session.rank != 0:
            return
        prefix = tag_prefix if not tag_prefix or tag_prefix.endswith("/") else tag_prefix + "/"
        scalars = {
            "Gradient_Norm_Sqr": self.gns.sqr_avg(),
            "Gradient_Variance": self.gns.var_avg(),
            "Gain": self.gain,
            "Scale": self.scale,
            "Progress": self.gns.get_progress(),
        }
        factor, groups = self.lr_factor, len(self.optimizer.param_groups)
        scalars["Learning_Rate_Factor"] = mean(factor)
        if groups > 1 and not isinstance(factor, float | int):
            scalars |= {f"Learning_Rate_Factor/{index}": float(factor[index]) for index in range(groups)}
        for tag, scalar in scalars.items():
            writer.add_scalar(prefix + tag, scalar, global_step)

    @property
    def failure(self) -> BaseException | None:
        """Why the gradients of the current step could not be synchronised; None if they could."""
        return self._hook.failure

    def begin_step(self, closure: bool = False) -> bool:
        """Return whether the optimizer is to step now. Called by scaling rules.

        Args:
            closure: Whether the script gave a closure to `optimizer.step`.

        Raises:
            RuntimeError: parameter groups were added, a closure is used with gradient accumulation, or
                `zero_grad` was called in some batches of the window only.
        """
        session = self._session
        if not self._may_step(closure):
            self.step_left_out()
            return False
        if self._hook.suspect:
            settle(guards())
        if self._window.apart and self._hook.failure is None:
            raise RuntimeError(
                "optimizer.step() with gradients of a backward pass that zero_grad() has dropped so far, in "
                "other batches: with gradient accumulation call zero_grad() at the same place of every batch"
            )
        if self._hook.failure is not None:
            self.irreparable = grad_scaler.why_irreparable(self.mp_scaler)
            session.recovery.before_step(left_out=True)
            return False
        self._hook.clock.stepping()
        loader = session.loader
        # the model is in eval(), e.g. to freeze BatchNorm
        if loader is not None and not loader.training:
            loader.train()
        self._sampler.collect()
        self._sampler.before_step()
        self._comparison.options(self.name, self.optimizer)
        session.recovery.before_step(left_out=False)
        return True

    def end_step(self, factor: float | Array) -> None:
        """Record that the optimizer has stepped at learning rates times `factor`. Called by scaling rules."""
        if grad_scaler.skipped(self.optimizer):
            self.skipped_step()
            return
        super().end_step(factor)
        if not self._save_prepared:
            self._save_prepared = True
            self._state.prepare_save()

    def skipped_step(self) -> None:
        """Record that the optimizer did not step as gradients were inf or nan. Called by GradScaler hooks."""
        if self.failure is not None:
            self._session.recovery.before_step(left_out=True)
            return
        self._sampler.drop()
        self._window.reset()
        self.gns.reset_accumulation()
        self.gns.skipped += 1
        self.gns.last_gain = 0.0
        self.gns.health.skipped(self.gns.steps, lambda: float(grad_scaler.loss_scale(self.mp_scaler)))
        self._session.metrics.report_problem(f"gradients of {self.name}", self.gns.health.problem)
        logger.info("step %d skipped: its gradients are inf or nan", self.gns.steps)

    def step_left_out(self) -> None:
        """Record a call of `optimizer.step()` in the middle of a window, which does not step."""
        self._window.step_left_out()

    def begin_zero_grad(self) -> bool:
        """Return whether `zero_grad` is to drop all gradients now. Called by scaling rules.

        In the middle of a window, only the gradients since the last `optimizer.step()` call are dropped, and
        the result is False.
        """
        if self._window.under_way:
            if self._window.drop_since_step(self._batch.place):
                self._sampler.drop_passes()
            return False
        self._window.reset()
        self._sampler.drop()
        return True


def mean(factor: float | Array) -> float:
    """Return the mean of a learning-rate factor over the parameter groups."""
    return float(factor) if isinstance(factor, float | int) else float(sum(factor) / len(factor))


class ModelCopies:
    """Copy what a step may change of one model besides its parameters, when a window begins."""

    def __init__(self, model: Any, last: object) -> None:
        self._model = model
        self._attempted = model.attempted_steps
        self._by_hand = model.accumulates_by_hand
        self._hyperparameters = _hyperparameters(model.optimizer)
        scheduler, scaler = model.lr_scheduler, model.mp_scaler
        self._scheduler = None if scheduler is None else scheduler.state_dict()
        self._scaler = _scale_of(scaler)
        buffers = [*model.module.buffers()]
        before = last._buffers if isinstance(last, ModelCopies) else None
        self._buffers: list[torch.Tensor] = copies_beside(buffers, before) if buffers else []

    def why_irreparable(self) -> str | None:
        """Return why the step cannot be put back; None if it can."""
        model = self._model
        if model.irreparable is not None:
            return str(model.irreparable)
        # what a failed step has accumulated since its own beginning is computed again
        if self._by_hand or (model.accumulates_by_hand and model.failure is None):
            return "what it had accumulated by hand, over several batches, is lost"
        if model.attempted_steps != self._attempted:
            return "a part of the step was taken already (several models or several steps in one batch)"
        unknown = model.lr_scheduler is None and hasattr(model.optimizer.step, "_wrapped_by_lr_sched")
        if unknown and _hyperparameters(model.optimizer) != self._hyperparameters:
            return "a scheduler changed the learning rate, and AdaptiveDataParallel was given no lr_scheduler"
        return None

    def put_back(self) -> None:
        """Restore all copied values. May be called more than once."""
        model = self._model
        with torch.no_grad():
            for buffer, before in zip(model.module.buffers(), self._buffers, strict=True):
                buffer.copy_(before)
        for group, values in zip(model.optimizer.param_groups, self._hyperparameters, strict=True):
            group.update(values)
        if self._scheduler is not None:
            model.lr_scheduler.load_state_dict(self._scheduler)
        if self._scaler is not None:
            scaler = model.mp_scaler
            scaler._scale, scaler._growth_tracker = (None if t is None else t.clone() for t in self._scaler)
            scaler._per_optimizer_states.clear()


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def _scale_of(scaler: Any) -> list[torch.Tensor | None] | None:
    """Return GradScaler's two tensors, which it makes at its first use, without waiting for the device."""
    if scaler is None or not scaler.is_enabled():
        return None
    tensors = [getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)]
    return [None if tensor is None else tensor.clone() for tensor in tensors]
