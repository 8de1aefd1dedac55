"""Provide AdaptiveDataParallel, a DistributedDataParallel whose batch size may change during training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from adaptdl_elastic._interfaces import ElasticLoader
from adaptdl_elastic.torch._bootstrap import current_session
from adaptdl_elastic.torch._data.registry import registry
from adaptdl_elastic.torch._gradient import comm_hook, grad_scaler, loss_reduction
from adaptdl_elastic.torch._gradient.accumulation import Batch, Window, accumulates, on_backward, watch
from adaptdl_elastic.torch._gradient.half_pass import ForwardPass
from adaptdl_elastic.torch._gradient.measurement import Sampler
from adaptdl_elastic.torch._gradient.model_state import ModelState
from adaptdl_elastic.torch._gradient.out_of_memory import MemoryGuard, Samples
from adaptdl_elastic.torch._model_arguments import check_arguments
from adaptdl_elastic.torch._optimizer_steps import OptimizerSteps
from adaptdl_elastic.torch._process_group import backends
from adaptdl_elastic.torch._runtime.position import script_position
from adaptdl_elastic.torch.scaling_rules import ScalingRuleBase

__all__ = ["AdaptiveDataParallel"]

logger = logging.getLogger(__name__)


class AdaptiveDataParallel(OptimizerSteps):
    """Train a model like DistributedDataParallel, measure gradient noise, and scale the learning rate.

    Use it like `DistributedDataParallel`, also on one replica, after
    `adaptdl_elastic.torch.init_process_group`. `optimizer.step()` and `optimizer.zero_grad()` are replaced by
    those of the scaling rule, which do nothing in the middle of an accumulation window. So write the loop as
    if every batch ended with a step. Model, optimizer, scheduler, scaler and statistics are part of every
    checkpoint. If the job continues from a checkpoint, they are loaded here.

    Losses must be means over the samples of the local batch, as torch's are by default.

    Args:
        model: Model that `optimizer` trains, on its device already.
        optimizer: Any torch.optim.Optimizer, one per AdaptiveDataParallel.
        lr_scheduler: Scheduler to save and restore; the script steps it.
        mp_scaler: The torch.amp.GradScaler in use, if any. Its step, unscale_ and update respect
            accumulation.
        scaling_rule: Rule by which the learning rate follows the batch size; by default `AdamScale` for Adam
            and AdamW, else `AdaScale`.
        name: Name of the state in checkpoints, different for each model of a script.
        **ddp_kwargs: Arguments of DistributedDataParallel.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the arguments do not belong together, or the optimizer is in use already.
        RuntimeError: there is no process group.
        CheckpointError: the saved state does not fit.
    """

    _kind = "AdaptiveDataParallel"
    own_random_streams: bool = True
    """Whether each replica draws its own random numbers in data loops (dropout, noise). If False, all
    replicas draw the same numbers from the script's seed."""
    run_context: Callable[[], AbstractContextManager[None]] = nullcontext
    """Makes the context in which the module runs, also on parts of a batch that does not fit into memory."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any = None,
        mp_scaler: Any = None,
        scaling_rule: ScalingRuleBase | None = None,
        name: str = "adaptdl-dataparallel",
        **ddp_kwargs: Any,
    ) -> None:
        check_arguments(model, optimizer, lr_scheduler, mp_scaler, scaling_rule, ddp_kwargs)
        super().__init__(model, **ddp_kwargs)
        self._ddp_kwargs = ddp_kwargs
        self._make(name, optimizer, lr_scheduler, mp_scaler, scaling_rule)
        self._window = Window(model.parameters())
        self._looked_for_scalers = False
        # autograd's id of the last backward pass
        self._task = -1
        self._memory = MemoryGuard(self._session, model, _current_batch, self, optimizer)
        self._attach_hook()
        # refuses a name in use, before anything is patched
        self._state = self._saved_state()
        self.scaling_rule.initialize(self, optimizer, patch_optimizer=True)
        if mp_scaler is not None:
            grad_scaler.attach(mp_scaler, self, optimizer)
        self._restore()
        self._session.models.append(self)
        self._loss_is_known = False

    def _saved_state(self) -> ModelState:
        parts = {
            "model": self.module,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "mp_scaler": self.mp_scaler,
            "statistics": self.gns,
        }
        collect = lambda: self._sampler.collect()  # noqa: E731  (each generation has another sampler)
        return ModelState(self.name, parts, self._batch_sizes, collect, self._window.reset)

    def _attach_hook(self) -> None:
        """Register the communication hook with the reducer that DDP's constructor has just made."""
        self._save_prepared = False
        # the broadcast of buffers was skipped in the current forward pass
        self._buffers_wait = False
        # as DDP's constructor set it
        self._buffers_are_shared = bool(self.broadcast_buffers)
        # not self: DDP's reducer keeps the hook, and so would keep self, forever
        optimizer = self.optimizer
        norms = comm_hook.Norms(lambda: optimizer.param_groups, self.gns.preconditioner)
        self._hook = comm_hook.HookState(
            norms, self.process_group, self.process_group.size(), clock=registry().speed.clock
        )
        self._hook.synchronises = self._session.consensus.drift.synchronises
        if self.process_group is dist.group.WORLD:
            self._hook.link = backends.present(self._session)
        self._memory.hook = self._hook
        self._memory.reset()
        self._sampler = Sampler(self.gns, self._hook, self.mp_scaler)
        self.register_comm_hook(self._hook, comm_hook.reduce_bucket)

    def hand_over(self, order: Sequence[int]) -> None:
        """Do nothing: every replica holds the whole model."""

    def reinit_process_group(self) -> None:
        """Make DDP's buckets and hook again, for the current default process group and the same parameters.

        Used after a change of the number of replicas in place. Parameters and statistics must be equal on all
        replicas, and no accumulation window may be open. Parameters are not broadcast.
        """
        absorbing = self._hook.absorb
        # not DDP's own
        hooks = [name for name in vars(torch.nn.Module()) if name.endswith("_hooks")]
        kept = {name: vars(self)[name] for name in [*hooks, "_user_no_sync"] if name in vars(self)}
        training = self.training
        super().__init__(self.module, **{**self._ddp_kwargs, "init_sync": False})
        # what the script has set, which the constructors have dropped
        vars(self).update(kept)
        self.training = training
        self._window.reset()
        self.irreparable = None
        self.gns.reset_accumulation()
        self._attach_hook()
        if absorbing:
            self.absorb_failures()

    def absorb_failures(self) -> None:
        """Let the backward pass end without an exception from now on if a replica is lost.

        A failed all-reduce then gives zeros, `failure` holds the reason, and `optimizer.step()` does nothing
        until `clear_failure` or `reinit_process_group` is called. Buffers are no longer broadcast in every
        forward pass, because that would raise too; call `sync_buffers` instead.
        """
        self._hook.absorb = True
        self.broadcast_buffers = False

    def giving_up(self, reason: str) -> Callable[[], None]:
        """Return a function that lets a backward pass of this generation continue with zeros.

        It is for a pass that waits for a lost replica. It may be called in any thread and at any time: it has
        no effect on later generations.
        """
        return partial(self._hook.give_up, RuntimeError(reason))

    @property
    def stuck(self) -> bool:
        """Whether the process group runs an operation that may never end."""
        return self._hook.stuck

    @property
    def has_own_process_group(self) -> bool:
        """Whether the script gave the model another process group than torch's default one."""
        return self._ddp_kwargs.get("process_group") is not None

    @property
    def accumulates_by_hand(self) -> bool:
        """Whether the script is accumulating gradients over several windows in `no_sync()`."""
        return self._window.by_hand

    def why_not_resilient(self) -> str | None:
        """Return why the death of a replica cannot be survived with this model; None if it can."""
        if self.find_unused_parameters:
            return "find_unused_parameters=True needs a collective that cannot be given up"
        if isinstance(self.optimizer, torch.optim.LBFGS):
            return "LBFGS moves parameters in the middle of a step"
        return None

    def needed_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return (): each replica has the whole state."""
        return ()

    def clear_failure(self) -> None:
        """Forget a failure, and drop the gradients of the step that failed."""
        self._hook.failure = self.irreparable = None
        self._hook.recording = None
        self._memory.reset()
        self._drop_gradients()

    def sync_buffers(self, limit: timedelta = timedelta(seconds=60)) -> None:
        """Give every replica rank 0's buffers (e.g. running means). A collective: call it on all replicas.

        Rank 0 is that of the model's process group. Does nothing if the script gave `broadcast_buffers=False`
        or torch's newer `forward_sync_buffers=False`.

        Args:
            limit: How long to wait for the other replicas.
        """
        if not self._buffers_are_shared:
            return
        buffers = [buffer for buffer in self.module.buffers() if buffer.numel()]
        backends.broadcast(buffers, self.process_group, self._hook.link, limit)

    # Forward and backward pass, and step.

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the module's output. Gradients are synchronised only on the last batch of a window."""
        if torch.compiler.is_compiling():
            return _compiled_forward(self, inputs, kwargs)
        if self._session.dry:
            return self._dry_forward(inputs, kwargs)
        begun = self._forward_begins()
        if self.training and self._hook.world_size > 1 and torch.is_grad_enabled():
            self._compare_inputs((inputs, kwargs))
        output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        # that was for DDP's forward pass; a script may read what it has set
        if not self._synchronised:
            self._synchronised = True
        # the broadcast was skipped: let DDP do it in the next forward pass
        if self._buffers_wait:
            self._buffers_wait, self.require_forward_param_sync = False, True
        if not self._loss_is_known and self.training and torch.is_grad_enabled():
            self._examine_loss(output)
        return output if begun is None else self._watch(output, *begun, (inputs, kwargs))

    def _examine_loss(self, output: Any) -> None:
        """Let the first backward pass of training report a problem if the loss is a sum over samples."""
        loader, metrics = self._session.loader, self._session.metrics
        if loader is not None and loader.training and loader.local_samples > 1:
            report = partial(metrics.report_problem, f"the loss of {self.name}")
            self._memory.examine = loss_reduction.examine(output, loader.local_samples, report)
            self._loss_is_known = self._memory.examine is not None

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Override DDP's method: run the module, in parts if the batch does not fit into memory."""
        if torch.compiler.is_compiling():
            return super()._run_ddp_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() and self.require_backward_grad_sync and self._hook.failure is None:
            self._hook.awaited = True
        run = super()._run_ddp_forward if self.run_context is nullcontext else self._run
        return self._memory.forward(run, inputs, kwargs)

    def _run(self, *inputs: Any, **kwargs: Any) -> Any:
        with self.run_context():
            return super()._run_ddp_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _dry_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the module's output for a batch that does not count, without any communication."""
        # in this mode DDP's _pre_forward only moves the inputs to the device
        with torch.no_grad():
            inputs, kwargs = super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        if not self.static_graph:
            with self.run_context():
                return self._memory.forward(self.module, inputs, kwargs)
        # With a static graph DDP counts the gradients of each parameter, even without synchronisation. So
        # the module runs on detached parameters.
        apart = {name: param.detach().requires_grad_() for name, param in self.module.named_parameters()}
        with self.run_context():
            return torch.func.functional_call(self.module, apart, inputs, kwargs)

    def _compare_inputs(self, inputs: Any) -> None:
        """Send a digest of the inputs to rank 0, which reports a problem if all replicas have the same."""
        if self.process_group is dist.group.WORLD:
            loader = self._session.loader
            counts = loader is None or loader.local_samples > 0
            self._comparison.inputs(self.name, inputs, loader is not None, counts)

    def _forward_begins(self) -> tuple[Batch, bool] | None:
        """Return the arguments that `_watch` needs for this pass; None if it need not be watched."""
        if not torch.is_grad_enabled():
            return None
        batch = self._begin_batch(self._hook.world_size, self._user_no_sync)
        self._window.by_hand |= batch.by_hand
        self._hook.weight = batch.share * batch.weight
        self._hook.instead = None
        synchronised = not (batch.accumulating or self._user_no_sync)
        # Module's __setattr__ is slow
        if synchronised != self._synchronised:
            self._synchronised = synchronised
        split = self._sampler.begin(batch, synchronised)
        # The first pass of a static graph does its all-reduce in a callback of the outermost backward.
        if self.static_graph and not getattr(self, "_static_graph_delay_allreduce_enqueued", True):
            split = False
        watched = split or self._sampler.halves or batch.micro_batches > 1 or batch.weight != 1.0
        return (batch, split) if watched else None

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Override DDP's method, and handle its failure.

        In the second step of a generation it runs a collective, by which the replicas agree on their buckets.
        """
        if not torch.is_grad_enabled() or (self._hook.failure is None and self._hook.lost is None):
            try:
                if self._hook.absorb and not self._has_rebuilt_buckets:
                    _agree_on_buckets(self)
                return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                if not self._hook.absorb:
                    raise
                self._hook.fail(error)
        if self._hook.lost is not None:
            self._hook.fail(self._hook.lost)
        # the gradients of this step will not be used
        self._synchronised = False
        return inputs, kwargs

    def _check_sync_bufs_pre_fwd(self) -> bool:
        """Return whether DDP should broadcast buffers now; overrides DDP's method.

        Buffers are not broadcast in evaluation, in which a replica may have no batch.
        """
        if self._session.dry:
            return False
        broadcast = bool(super()._check_sync_bufs_pre_fwd())  # type: ignore[no-untyped-call]
        self._buffers_wait = broadcast and _evaluating()
        return broadcast and not self._buffers_wait

    def data_loop_begins(self) -> None:
        """Give every replica rank 0's buffers before a loop that is not known to train. A collective."""
        if self.broadcast_buffers and self._hook.world_size > 1:
            # torch's own time limit for collectives
            self.sync_buffers(timedelta(minutes=30))

    def __getstate__(self) -> Any:
        """Refuse to be copied or pickled: a copy would share the optimizer and the process group."""
        raise TypeError(
            "AdaptiveDataParallel cannot be copied or pickled: copy its module, as in "
            "copy.deepcopy(model.module) or AveragedModel(model.module)"
        )

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next pass synchronises gradients; scripts may set it, False means `no_sync`."""
        return self._synchronised and not self._user_no_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        self._user_no_sync, self._synchronised = not wanted, True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return DDP's context for accumulation by hand; accumulation by AdaptiveDataLoader needs none."""
        before, self._user_no_sync = self._user_no_sync, True
        try:
            yield
        finally:
            self._user_no_sync = before

    def _check_loader(self, loader: ElasticLoader) -> None:
        """Raise RuntimeError if a static graph would have to accumulate."""
        if self.static_graph and (loader.accumulation_steps or loader.limits.accumulation):
            raise RuntimeError(
                "static_graph=True cannot be combined with gradient accumulation, in which not every "
                "pass is synchronised: leave it out, or autoscale with gradient_accumulation=False"
            )

    def _watch(
        self, output: Any, batch: Batch, split: bool, inputs: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> Any:
        """Return `output`, extended by hooks that run in backward passes through it.

        Args:
            output: Output of the module.
            batch: The current batch.
            split: Whether gradient noise is measured from parts of the batch (one replica, no accumulation).
            inputs: Positional and named arguments of the forward pass.
        """
        # one replica, no accumulation
        if split or self._sampler.halves:
            again = ForwardPass(self.module, inputs, batch.local, batch.dimension)
            so_far = again.gradients
            key = object()

            def whole() -> None:
                self._sampler.whole(self._window.gradients())

            def arrived(edges: list[Any], gradients: tuple[torch.Tensor | None, ...]) -> None:
                if accumulates(self.module.parameters()):
                    # a further backward pass through this output: DDP does not call its hook
                    if so_far:
                        torch.autograd.Variable._execution_engine.queue_callback(whole)
                    so_far[:] = _added(so_far, gradients)
                    if split:
                        self._sampler.split(key, edges, so_far, batch.local)
                    else:
                        self._sampler.forward_pass(key, again)
                elif torch.is_grad_enabled():
                    self._sampler.can_not_halve("its derivatives are part of the loss")

            watched = watch(output, arrived)
            return output if watched is None else watched
        if batch.accumulating:
            self.refuse_thawed("their gradients would not be averaged over the batches of a step")
        watched = on_backward(output, lambda: self._backward_begins(batch))
        if watched is None:
            raise RuntimeError(
                "the model's output holds no tensor that needs a gradient, in a tensor, tuple, list, dict or "
                "dataclass: accumulation and uneven batches need one"
            )
        return watched

    def _backward_begins(self, batch: Batch) -> None:
        """Prepare for a backward pass in a window of several batches, or of batches of different sizes."""
        task = torch._C._current_graph_task_id()
        if task == self._task or not accumulates(self.module.parameters()):
            return
        self._task = task
        self._hook.reduced = False
        self._hook.instead = self._window.before_backward(batch)
        self._memory.mark()

        def ended() -> None:
            self._hook.instead = None
            first = self._window.after_backward(batch, self._hook.reduced)
            if batch.accumulating and first:
                self.gns.count_micro_batch()
                if self.mp_scaler is None and not self._looked_for_scalers:
                    self._looked_for_scalers = True
                    grad_scaler.guard(self, self.optimizer)
            if batch.accumulating and batch.place == 0 and not self._window.apart:
                self._sampler.first_part(self._window.gradients())
            elif not (batch.accumulating or self._hook.reduced):
                self._sampler.whole(self._window.gradients())

        torch.autograd.Variable._execution_engine.queue_callback(ended)


# For torch.compile(model): the code that runs before and after the module is not compiled. Otherwise torch
# would compile it again for every batch of an accumulation window.


@torch._disable_dynamo  # type: ignore[attr-defined]
def _agree_on_buckets(adp: AdaptiveDataParallel) -> None:
    """Let DDP arrange its buckets by the order in which gradients came, before its forward pass does.

    DDP does it once, with a broadcast without a time limit. If a replica dies meanwhile, gloo may never end
    the broadcast. So a thread waits for it.

    Raises:
        RuntimeError: a replica died, or the broadcast failed.
    """
    hook, once = adp._hook, adp.static_graph or not adp.find_unused_parameters
    if not (once and hook.world_size > 1):
        return
    if not torch.is_grad_enabled():
        return

    reducer, arranged = adp.reducer, []
    try:
        backends.patiently(current_session(), hook.link, lambda: arranged.append(reducer._rebuild_buckets()))
    except RuntimeError:
        # A thread that has not ended may keep a lock of DDP's reducer, for which the backward pass of this
        # step and the destructor of DDP's logger would wait. A loader's worker that is forked now would free
        # the reducer. If the thread has ended, the reducer's buckets are freed with it.
        reducer._remove_autograd_hooks()
        if current_session().transfer_stuck:
            backends.keep_object((reducer, adp.logger))
        # the error may be kept, and its traceback refers to this frame
        del reducer
        raise
    # not in the thread: one that ends late would mark the buckets of a later generation's reducer
    adp._has_rebuilt_buckets = arranged[0]


@torch._disable_dynamo  # type: ignore[attr-defined]
def _uncompiled_begin(adp: AdaptiveDataParallel) -> tuple[Batch, bool] | None:
    return adp._forward_begins()


@torch._disable_dynamo  # type: ignore[attr-defined]
def _uncompiled_watch(
    adp: AdaptiveDataParallel, output: Any, batch: Batch, split: bool, inputs: tuple[Any, dict[str, Any]]
) -> Any:
    return adp._watch(output, batch, split, inputs)


@torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]
def _compiled_forward(adp: AdaptiveDataParallel, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if current_session().dry:
        return adp._dry_forward(inputs, kwargs)
    begun = _uncompiled_begin(adp)
    output = DistributedDataParallel.forward(adp, *inputs, **kwargs)  # type: ignore[no-untyped-call]
    if not adp._synchronised:
        adp._synchronised = True
    if adp._buffers_wait:
        adp._buffers_wait, adp.require_forward_param_sync = False, True
    return output if begun is None else _uncompiled_watch(adp, output, *begun, (inputs, kwargs))


def _current_batch() -> Samples:
    loader = current_session().loader
    if loader is None:
        return Samples()
    inner = script_position().inner.innermost()
    return Samples(
        loader.local_samples,
        loader.sample_dimension,
        loader.training,
        _unbounded(loader),
        None if inner is None else (inner[0], inner[1].samples),
    )


def _unbounded(loader: ElasticLoader) -> int | None:
    """Return the largest local batch that may be chosen; None if the script has bounded it."""
    if not loader.training or loader.local_bsz_bounds is not None:
        return None
    return loader.max_batch_size


def _evaluating() -> bool:
    """Return whether a data loop is running in which no model is trained."""
    loader = current_session().loader
    if loader is None or loader.training:
        return False
    return not (loader.training_loader_undecided and torch.is_grad_enabled())


def _added(
    one: list[torch.Tensor | None], other: tuple[torch.Tensor | None, ...]
) -> list[torch.Tensor | None]:
    """Add the gradients `one` and `other` element by element; None counts as zero."""
    return [
        b if a is None else a if b is None else a + b
        for a, b in zip(one or [None] * len(other), other, strict=True)
    ]
