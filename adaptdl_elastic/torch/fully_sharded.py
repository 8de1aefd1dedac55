"""Provide AdaptiveFSDP, which trains a model that torch's `fully_shard` has divided among the replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from adaptdl_elastic._interfaces import ElasticLoader
from adaptdl_elastic.torch._data.registry import registry
from adaptdl_elastic.torch._gradient.estimator import Array
from adaptdl_elastic.torch._model_arguments import check_arguments
from adaptdl_elastic.torch._optimizer_steps import StepsModel
from adaptdl_elastic.torch._process_group.backends import Group, patiently, present
from adaptdl_elastic.torch._sharded import fully_shard, reshard
from adaptdl_elastic.torch._sharded.model_state import ShardedModelState
from adaptdl_elastic.torch._sharded.noise import ShardedNoise
from adaptdl_elastic.torch._sharded.window import ShardedWindow
from adaptdl_elastic.torch.scaling_rules import ScalingRuleBase

__all__ = ["AdaptiveFSDP"]


class AdaptiveFSDP(StepsModel):
    """Train a model that `fully_shard` (FSDP2) was applied to, while the number of replicas changes in place.

    Apply `fully_shard` as usual, without a mesh, and make the optimizer afterwards. When replicas come or go,
    the parameters and the optimizer's states are divided again, in memory; references to parameters stay
    valid. Model, optimizer and scheduler are part of every checkpoint. If the job continues from a
    checkpoint, they are loaded here. After the death of a replica the job restarts from its newest
    checkpoint. One is saved after each change of the number of replicas.

    Gradient noise is measured, so batch size and learning rate adapt as with AdaptiveDataParallel. In an
    accumulation window (`gradient_accumulation=True`) each batch's gradients are added up over the replicas
    at once, so that no replica needs memory for whole gradients; write the loop as if every batch ended with
    a step. A script may also add up the gradients of several steps itself before it calls
    `optimizer.step()`. Changes, checkpoints and stops that are due meanwhile wait for the step.
    `set_requires_gradient_sync(False)` is refused in a training loop, since the gradients that each replica
    keeps for itself would be weighed wrongly in the short last batch of an epoch.

    Losses must be means over the samples of the local batch, as torch's are by default.

    Args:
        model: Model that `fully_shard` was applied to, last to the model itself.
        optimizer: Any torch.optim.Optimizer of its parameters, one per AdaptiveFSDP.
        lr_scheduler: Scheduler to save and restore; the script steps it.
        name: Name of the state in checkpoints, different for each model of a script. A checkpoint of an
            AdaptiveDataParallel of this name can be continued, and the other way round.
        scaling_rule: Rule by which the learning rate follows the batch size; by default `AdamScale` for Adam
            and AdamW, else `AdaScale`.
        mp_scaler: Not supported: None. Training in bfloat16 needs no GradScaler.

    Raises:
        TypeError: an argument has the wrong type, or `mp_scaler` is given.
        ValueError: the model is sharded in a way that is not supported, or the optimizer is in use already.
        RuntimeError: there is no process group.
        CheckpointError: the saved state does not fit.
    """

    _kind = "AdaptiveFSDP"
    own_random_streams: bool = True
    """Whether each replica draws its own random numbers in data loops (dropout, noise)."""

    _window: ShardedWindow
    _sampler: ShardedNoise

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any = None,
        name: str = "adaptdl-dataparallel",
        scaling_rule: ScalingRuleBase | None = None,
        mp_scaler: Any = None,
    ) -> None:
        check_arguments(model, optimizer, lr_scheduler, mp_scaler, scaling_rule, {}, sharded=True)
        why = fully_shard.why_not(model)
        if why is not None:
            raise ValueError(f"this model cannot be an AdaptiveFSDP: {why}")
        super().__init__()
        self.module = model
        self._make(name, optimizer, lr_scheduler, None, scaling_rule)
        self._groups = [*fully_shard.groups(model)]
        self._device = next(model.parameters()).device
        self._window = ShardedWindow(self._optimized)
        # there was a backward pass since the last `step` or `zero_grad`
        self._passed = False
        # there was a step since the last `zero_grad` of the optimizer
        self._stepped = False
        self._sampler = ShardedNoise(self._session, self.gns, self._optimized)
        parts = {"lr_scheduler": lr_scheduler, "statistics": self.gns}
        self._state = ShardedModelState(
            name, model, optimizer, parts, self._batch_sizes, self._sampler.collect
        )
        fully_shard.observe(model, self._sampler, self._reducing, self._weigh)
        self.scaling_rule.initialize(self, optimizer, patch_optimizer=True)
        self._restore()
        self._session.models.append(self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's output."""
        if torch.is_grad_enabled() and not self._session.dry:
            self._sampler.begin(self._begin_batch(self._session.replicas))
        return self.module(*inputs, **kwargs)

    def _check_loader(self, loader: ElasticLoader) -> None:
        """Raise RuntimeError if the script has turned off the synchronisation of gradients."""
        if not fully_shard.synchronises(self._groups):
            raise RuntimeError(
                "AdaptiveFSDP weighs the gradients of each batch as they are synchronised: leave out "
                "set_requires_gradient_sync(False). Gradients of several batches may be added up "
                "without it"
            )

    def _parameters_now(self) -> Iterable[torch.Tensor]:
        return fully_shard.parameters(self.module)

    def _weigh(self, gradients: torch.Tensor) -> None:
        """Multiply this replica's gradients by its share of the samples of the step."""
        weight = self._batch.share * self._batch.weight
        if weight != 1.0:
            gradients.mul_(weight)

    def _reducing(self) -> None:
        """Record that a backward pass adds to the gradients.

        Raises:
            RuntimeError: it would add to gradients that the optimizer has used, which a change drops.
        """
        if self._session.dry:
            return
        self._window.reducing(self._batch, self._ended)
        if self._stepped and not self._passed and self._session.loader is not None:
            parts = (fully_shard.local(one.grad) for one in self._optimized() if one.grad is not None)
            if any(part.any() for part in parts):
                raise RuntimeError(
                    "a backward pass adds to the gradients of the optimizer's last step, which AdaptiveFSDP "
                    "would lose if replicas come or go: call optimizer.zero_grad() after each step"
                )
        self._passed = True
        self._sampler.reducing()

    def _ended(self) -> None:
        """Finish a backward pass. Called when its gradients are complete."""
        batch = self._batch
        self._sampler.ended(batch)
        if batch.accumulating:
            self.gns.count_micro_batch()

    def _optimized(self) -> Iterator[torch.Tensor]:
        return (one for group in self.optimizer.param_groups for one in group["params"])

    # A change of the number of replicas.

    def hand_over(self, order: Sequence[int]) -> None:
        """Give the parts of this replica to those that stay. A collective of the old process group.

        Args:
            order: Old ranks of the replicas that stay, in the order of their new ranks.
        """
        session = self._session
        group = present(session) or Group("")

        def transfer() -> None:
            with torch.no_grad():
                reshard.hand_over(self.module, self.optimizer, group, session.rank, order)

        patiently(session, group, transfer)

    def reinit_process_group(self) -> None:
        """Divide the model among the replicas of torch's current default process group. A collective."""
        session = self._session
        assert session.reducer is not None
        group = present(session) or Group("")
        own = [session.rank] if session.newcomer is None else []
        holders: list[int] = session.reducer.allreduce(own, lambda a, b: [*a, *b], tag="holders")

        def transfer() -> None:
            with torch.no_grad():
                reshard.spread(self.module, self.optimizer, group, session.rank, holders, self._device)

        patiently(session, group, transfer)
        self._sampler.renew()
        self._window.reset()
        self.gns.reset_accumulation()

    @property
    def has_own_process_group(self) -> bool:
        """False: the model is sharded over torch's default process group."""
        return False

    def why_not_resilient(self) -> str | None:
        """Return why the death of a replica cannot be survived: its part of the model is lost."""
        return "a dead replica's part of a sharded model is only in the checkpoint"

    def needed_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return (): `why_not_resilient` says that no death is survived."""
        return ()

    # A step. Failures raise: the job restarts from its checkpoint.

    def absorb_failures(self) -> None:
        """Do nothing: `why_not_resilient` says so."""

    def clear_failure(self) -> None:
        """Do nothing: a failure raises."""

    def giving_up(self, reason: str) -> Callable[[], None]:
        """Return a function without effect: torch's collective fails, or the agent ends the process."""
        return lambda: None

    @property
    def stuck(self) -> bool:
        """False: the process ends after a failure."""
        return False

    def sync_buffers(self, limit: timedelta = timedelta(seconds=60)) -> None:
        """Do nothing: `fully_shard` leaves buffers to each replica. Newcomers get another replica's."""

    def data_loop_begins(self) -> None:
        """Do nothing: `fully_shard` leaves buffers to each replica."""

    @property
    def accumulates_by_hand(self) -> bool:
        """Whether there are gradients that the optimizer has not used yet, so that no change may come now."""
        return self._passed and any(one.grad is not None for one in fully_shard.parameters(self.module))

    def _drop_gradients(self) -> None:
        self._passed = False
        super()._drop_gradients()

    def begin_step(self, closure: bool = False) -> bool:
        """Return whether the optimizer is to step now. Called by the scaling rule.

        Raises:
            RuntimeError: parameter groups were added, or a closure is used with gradient accumulation.
        """
        if not self._may_step(closure):
            return False
        registry().speed.clock.stepping()
        self._sampler.collect()
        self._comparison.options(self.name, self.optimizer)
        self._session.recovery.before_step(left_out=False)
        return True

    def end_step(self, factor: float | Array) -> None:
        """Record that the optimizer has stepped at learning rates times `factor`. Called by scaling rules."""
        self._passed, self._stepped = False, True
        super().end_step(factor)

    def skipped_step(self) -> None:
        """Do nothing: a GradScaler is not supported."""

    def step_left_out(self) -> None:
        """Do nothing: the gradients of the window stay."""

    def begin_zero_grad(self) -> bool:
        """Return whether `zero_grad` is to drop all gradients now: not in the middle of a window."""
        if self._window.under_way:
            return False
        if not self._session.dry:
            self._passed = self._stepped = False
            self._sampler.drop()
        return True
