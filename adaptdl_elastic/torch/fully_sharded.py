"""Provide AdaptiveFSDP, which trains a model that torch's `fully_shard` has divided among the replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from adaptdl_elastic._interfaces import ElasticLoader, ModelSnapshot
from adaptdl_elastic.reducer import PeerLostError
from adaptdl_elastic.torch._data.registry import registry
from adaptdl_elastic.torch._elastic.survivors import UnrecoverableStateError
from adaptdl_elastic.torch._gradient.estimator import Array
from adaptdl_elastic.torch._model_arguments import check_arguments
from adaptdl_elastic.torch._optimizer_steps import ModelCopies, StepsModel
from adaptdl_elastic.torch._process_group.backends import Group, patiently, present
from adaptdl_elastic.torch._sharded import fully_shard
from adaptdl_elastic.torch._sharded.doubt import StepInDoubt
from adaptdl_elastic.torch._sharded.layout import Layout
from adaptdl_elastic.torch._sharded.links import Links
from adaptdl_elastic.torch._sharded.model_state import ShardedModelState
from adaptdl_elastic.torch._sharded.noise import ShardedNoise
from adaptdl_elastic.torch._sharded.reshard import Ranks, Resharding
from adaptdl_elastic.torch._sharded.window import ShardedWindow
from adaptdl_elastic.torch.scaling_rules import ScalingRuleBase

__all__ = ["AdaptiveFSDP"]


class AdaptiveFSDP(StepsModel):
    """Train a model that `fully_shard` (FSDP2) was applied to, while the number of replicas changes in place.

    Apply `fully_shard` as usual, without a mesh, and make the optimizer afterwards. When replicas come or go,
    the parameters and the optimizer's states are divided again, in memory; references to parameters stay
    valid. Model, optimizer and scheduler are part of every checkpoint. If the job continues from a
    checkpoint, they are loaded here.

    With `copies=2` two replicas hold each part, and the death of a replica costs one step, which is repeated:
    the others go on in their processes with what they hold. So many copies need an even number of replicas;
    with an odd one there is one copy of each part until another replica comes or goes. Without copies, or if
    both holders of a part die, the job restarts from its newest checkpoint. Without copies one is saved after
    each change of the number of replicas. The copies communicate by gloo; NCCL is not supported yet.

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
        copies: Replicas that hold each part of the model: 1 or 2.

    Raises:
        TypeError: an argument has the wrong type, or `mp_scaler` is given.
        ValueError: `copies` is neither 1 nor 2, or is 2 with NCCL; the model is sharded in a way that is not
            supported; or the optimizer is in use already.
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
        copies: int = 1,
    ) -> None:
        if copies not in (1, 2):
            raise ValueError(f"copies must be 1 or 2, got {copies!r}")
        check_arguments(model, optimizer, lr_scheduler, mp_scaler, scaling_rule, {}, sharded=True)
        if copies > 1 and "nccl" in (backend := torch.distributed.get_backend()):
            raise ValueError(
                f"copies=2 communicates by gloo only, and the backend is {backend}: leave it out"
            )
        why = fully_shard.why_not(model)
        if why is not None:
            raise ValueError(f"this model cannot be an AdaptiveFSDP: {why}")
        super().__init__()
        self.module = model
        self._make(name, optimizer, lr_scheduler, None, scaling_rule)
        self._groups = [*fully_shard.groups(model)]
        self._device = next(model.parameters()).device
        self._copies, self._layout = copies, Layout(torch.distributed.get_world_size())
        self._links = Links(self._session) if copies > 1 else None
        # the step that another replica may have taken or not, and what this one held before it
        self._doubt: StepInDoubt | None = None
        # the part that this replica holds
        self._part = self._layout.part(torch.distributed.get_rank())
        # the parts of this replica belong to two layouts
        self._mixed = False
        self._window = ShardedWindow(self._optimized)
        # there was a backward pass since the last `step` or `zero_grad`
        self._passed = False
        # there was a step since the last `zero_grad` of the optimizer
        self._stepped = False
        self._sampler = ShardedNoise(self._session, self.gns, self._optimized, lambda: self._layout)
        parts = {"lr_scheduler": lr_scheduler, "statistics": self.gns}
        self._state = ShardedModelState(
            *(name, model, optimizer, parts, self._batch_sizes, self._sampler.collect),
            lambda: self._layout,
        )
        fully_shard.observe(model, self._sampler, self._reducing, self._weigh, self._links)
        self.scaling_rule.initialize(self, optimizer, patch_optimizer=True)
        self._restore()
        if copies > 1 and self._session.newcomer is None and self._layout.parts > 1:
            self._divide(self._layout.holders)
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
        if self.failure is not None:
            # there is nothing to clip or to unscale, for which replicas would communicate
            super().zero_grad(set_to_none=True)
            return
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
        rank, layout = self._session.rank, Layout.of(len(order), self._copies)
        takers = [[order[place] for place in places] for places in layout.holders]
        self._move(self._layout.holders, takers, Resharding.hand_over)
        self._layout = layout
        if rank in order:
            self._part = layout.part(order.index(rank))

    def reinit_process_group(self) -> None:
        """Divide the model among the replicas of torch's current default process group. A collective.

        Raises:
            UnrecoverableStateError: a part of the model is lost.
        """
        session = self._session
        assert session.reducer is not None
        own = []
        if self._mixed or session.newcomer is None:
            own = [(0 if self._mixed else self._layout.parts, self._part, session.rank)]
        found = session.reducer.allreduce(own, lambda a, b: [*a, *b], tag="holders")
        parts = {count for count, _, _ in found}
        holders = [[rank for _, part, rank in found if part == one] for one in range(max(parts))]
        if len(parts) != 1 or 0 in parts:
            raise UnrecoverableStateError("a replica was lost while parts of the model moved")
        if not all(holders):
            raise UnrecoverableStateError("replicas were lost that held all copies of a part of the model")
        self._divide(holders)
        self._sampler.renew()
        self._window.reset()
        self.gns.reset_accumulation()

    def _divide(self, holders: Ranks) -> None:
        """Divide the model among all replicas of the default process group. A collective.

        Args:
            holders: Ranks of the replicas that hold each part now.
        """
        layout = Layout.of(torch.distributed.get_world_size(), self._copies)
        info: list[Any] = []

        def connect() -> None:
            links, device = self._links, self._device
            info.append(fully_shard.mesh_info(device) if links is None else links.connect(layout, device))

        self._doubt = None
        # a replica that is lost until then has taken only its own part with it
        patiently(self._session, present(self._session) or Group(""), connect)
        self._move(holders, layout.holders, lambda moving: moving.spread(info[0]))
        self._layout, self._part = layout, layout.part(torch.distributed.get_rank())

    def _move(self, holders: Ranks, takers: Ranks, how: Callable[[Resharding], None]) -> None:
        """Move parts of the model between replicas; they are of two layouts until all have moved.

        Args:
            holders: Ranks of the replicas that hold each part now.
            takers: Ranks of the replicas that will hold each new part.
            how: Moves them.
        """
        session = self._session
        group = present(session) or Group("")
        moving = Resharding(self.module, self.optimizer, group, session.rank, holders, takers)

        def transfer() -> None:
            with torch.no_grad():
                how(moving)

        self._mixed = True
        patiently(session, group, transfer)
        self._mixed = False

    @property
    def has_own_process_group(self) -> bool:
        """False: the model is sharded over torch's default process group."""
        return False

    def why_not_resilient(self) -> str | None:
        """Return why the death of a replica cannot be survived: its part of the model is lost."""
        if self._layout.copies > 1:
            alone = len(self._session.models) == 1
            return None if alone else "parts of a sharded model have copies only where it is the only model"
        why = "a dead replica's part of a sharded model is only in the checkpoint"
        odd = self._copies > 1 and self._layout.parts > 1
        return f"{why}: {self._layout.parts} replicas cannot hold two copies" if odd else why

    def needed_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that hold each part, of which one has to live."""
        return tuple(map(tuple, self._layout.holders)) if self._layout.copies > 1 else ()

    # A step. Without copies failures raise, and the job restarts from its checkpoint.

    def absorb_failures(self) -> None:
        """Let collectives that fail give zeros from now on. `failure` has the reason."""
        if self._links is not None:
            self._links.absorb = True
            self._sampler.absorb()

    @property
    def failure(self) -> BaseException | None:
        """Why the present step was not taken, or may not have been taken by others."""
        if self._doubt is not None:
            return self._doubt.reason
        return None if self._links is None else self._links.failure

    def clear_failure(self) -> None:
        """Do nothing: `reinit_process_group` does."""

    def giving_up(self, reason: str) -> Callable[[], None]:
        """Return a function without effect: torch's collective fails, or the agent ends the process."""
        return lambda: None

    @property
    def stuck(self) -> bool:
        """Whether the process group runs an operation that may never end."""
        return self._session.transfer_stuck or (self._links is not None and self._sampler.stuck)

    def confirm_step(self) -> bool:
        """Keep the step in doubt, of which another replica is certain; return False if there is none."""
        doubt, self._doubt = self._doubt, None
        return doubt is not None

    @property
    def attempted_steps(self) -> int:
        """Steps that were taken or skipped, without one in doubt."""
        return super().attempted_steps - (self._doubt is not None)

    def snapshot_step(self, last: ModelSnapshot | None) -> ModelSnapshot:
        """Copy what a step may change besides parameters. A step in doubt keeps copies of its parameters."""
        return _Snapshot(self, last)

    def take_back(self) -> None:
        """Undo the step in doubt, if there is one."""
        doubt, self._doubt = self._doubt, None
        if doubt is not None:
            doubt.put_back(self.optimizer)
            self.gns.load_state_dict(doubt.statistics)

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
        recovery = self._session.recovery
        if self.failure is not None:
            recovery.before_step(left_out=True)
            return False
        registry().speed.clock.stepping()
        self._sampler.collect()
        self._comparison.options(self.name, self.optimizer)
        if self._layout.copies > 1 and recovery.armed:
            self._agree_to_step()
        recovery.before_step(left_out=self._doubt is not None)
        return True

    def _agree_to_step(self) -> None:
        """Wait until the gradients of all replicas are complete.

        A step that one replica takes and another cannot take would leave parts of different steps. If a
        replica is lost here, it is not known whether the others are waiting as well or take the step. This
        replica takes it, and keeps what it held before. The survivors then find out whether one of them is
        certain.
        """
        session = self._session
        assert session.reducer is not None
        try:
            session.reducer.allreduce(None, lambda _a, _b: None, tag="gradients are complete")
        except PeerLostError as error:
            self._doubt = StepInDoubt(error, self.optimizer, self.gns.state_dict())

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


class _Snapshot(ModelCopies):
    """Copy what a step may change besides parameters, and take back a step in doubt."""

    def put_back(self) -> None:
        """Restore all copied values. May be called more than once."""
        self._model.take_back()
        super().put_back()
