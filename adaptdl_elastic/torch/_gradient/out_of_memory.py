"""Survive a batch that does not fit into memory.

The problem. `torch.OutOfMemoryError` is raised inside of the script's own loop, in `model(inputs)` or in
`loss.backward()`. There it cannot be handled without leaving the loop's body, and if it ends the replica, the
next one has the same error.

What is done in the forward pass: the batch is computed in chunks (`chunked_forward`), and nothing is lost.

What is done in the backward pass: the graph cannot be walked a second time, so the step is lost. The replica
without memory gives DDP zeros for the gradients that are missing, and its communication hook sends nan. The
other replicas, which wait for these gradients, find nan in the last bucket. All then ask each other whether
the memory of a replica is exhausted, or the gradients are really nan. If memory is exhausted, the step has
failed on all replicas (`StepOutOfMemory`): the optimizer does not step, and the data loader hands out the
same samples again in smaller batches (`Recovery.repeat_step`). A step without nan costs no question.

If the backward pass is of a data loop inside another one, the whole body of the outer loop is repeated, and
the inner loop gets the smaller batches. The sizes of the batches that the models have got since the last
backward pass tell the two loops apart.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from adaptdl_elastic import _session
from adaptdl_elastic._session import Session
from adaptdl_elastic._values import StepOutOfMemory
from adaptdl_elastic.reducer import PeerLostError
from adaptdl_elastic.torch._gradient.chunked_forward import (
    NotChunkableError,
    count_samples,
    is_out_of_memory,
    release_memory,
    run_in_chunks,
)
from adaptdl_elastic.torch._gradient.comm_hook import HookState
from adaptdl_elastic.torch._gradient.memory_search import MARGIN, largest_fitting, passes_fit
from adaptdl_elastic.torch._tuning.memory_limit import LIMIT, memory_limit

log = logging.getLogger(__name__)

SEARCHED: tuple[str, ...] = ("cuda",)
"""Types of devices on which the largest local batch is searched for."""

_PASSES = 7  # forward passes that are remembered until their backward pass
_STATES = 2  # optimizer states of a parameter (Adam) for which the search leaves room


class OneSampleError(torch.OutOfMemoryError):
    """Raised if not even one sample fits into memory. A restart would not help."""

    ends_job = True
    """Read by the agent's side: the job fails without restarts."""


@dataclass(frozen=True)
class Samples:
    """Describe the batch that the data loader has handed out last.

    Attributes:
        local: Samples on this replica; None: not known.
        dimension: Dimension of tensors that counts samples; None: the first.
        trains: Whether models are trained with the loader.
        goal: Largest local batch that autoscaling might choose for want of a bound; None: there is a bound.
        inner: Loader's key and this replica's samples of a data loop that runs in the loop's body, if any.
    """

    local: int | None = None
    dimension: int | None = None
    trains: bool = False
    goal: int | None = None
    inner: tuple[str, int] | None = None


Culprits = dict[str | None, int]
"""Key of a loader → samples of its batch that has not fitted; None stands for the outermost data loop."""


class MemoryGuard:
    """Let one model survive batches that do not fit.

    Args:
        session: This replica's session.
        module: The script's module.
        batch: Function that describes the current batch.
        ddp: The model, whose settings may not allow that a backward pass fails.
        optimizer: The model's optimizer.
    """

    def __init__(
        self,
        session: Session,
        module: torch.nn.Module,
        batch: Callable[[], Samples],
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.session = session
        self.hook: HookState  # of the present generation; set by the model
        self.batch = batch
        # takes the losses of the next backward pass, once
        self.examine: Callable[[Any], None] | None = None
        self._module = module
        self._parameters = list(module.parameters())
        self._optimizer = optimizer
        self._searched = False
        self._context: Callable[[], AbstractContextManager[None]] = lambda: getattr(
            ddp, "run_context", nullcontext
        )()
        self._unfit = _why_unfit(ddp)
        self._views = ddp.gradient_as_bucket_view  # gradients are views, and have their versions in common
        self._largest: dict[bool, int] = {}  # samples of a chunk, with gradients and without
        self._told: tuple[int, int] | None = None  # (generation, limit) that the others were told last
        self._exhausted: Culprits | None = None  # this replica's batches that did not fit in a step
        self._passed: list[int] = []  # samples of the forward passes since the last backward pass
        self._graph_left = False  # the graph of a failed step may still be in memory
        # trained parameters, with their gradients and the gradients' versions before a backward pass
        self._marks: list[tuple[torch.nn.Parameter, torch.Tensor | None, int]] = []
        _install()
        _guards.add(self)

    # -- the forward pass --------------------------------------------------------------------------

    def forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return `call(*args, **kwargs)`, computed in chunks if it does not fit into memory.

        Raises:
            OneSampleError: not even one sample fits.
            torch.OutOfMemoryError: the batch does not fit and cannot be divided.
        """
        differentiates = torch.is_grad_enabled()
        if differentiates and not self._searched:
            self._search(args, kwargs)
        if differentiates and args and isinstance(args[0], torch.Tensor):
            self._passed = [*self._passed[-_PASSES:], *args[0].shape[:1]]
        largest, batch, samples, text = self._largest.get(differentiates), None, None, None
        if largest is not None:
            batch = self.batch()
            samples = count_samples((args, kwargs), batch.local, batch.dimension)
        if largest is None or samples is None or samples <= largest:
            output, text = _tried(call, *args, **kwargs)
            if text is None:
                self._graph_left = False
                return output
            batch = self.batch()
            samples = count_samples((args, kwargs), batch.local, batch.dimension)
            if samples is None:
                raise torch.OutOfMemoryError(f"{text} (and it is not known which inputs are samples)")
            if samples == 1:
                raise _one_sample(text)
            largest = _half(samples)
        assert batch is not None
        while True:
            if text is not None:  # a try has failed
                release_memory()
            output, text = _tried(self._chunks, call, args, kwargs, samples, batch, largest)
            if text is None:
                break
            if largest == 1:
                raise _one_sample(text)
            largest = _half(largest)
        if self._graph_left:  # a part of the memory will be free again in the next step
            self._graph_left = False
        else:
            self._fits(largest, samples, batch, differentiates)
        return output

    def _search(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Search for the largest local batch that fits before the first batch, if there is no bound."""
        self._searched = True
        session, batch = self.session, self.batch()
        known = memory_limit(session).largest is not None
        if self._parameters[0].device.type not in SEARCHED or session.dry or known or batch.goal is None:
            return
        samples = count_samples((args, kwargs), batch.local, batch.dimension)
        if not (batch.trains and self._module.training) or not samples or samples != batch.local:
            return
        trained = sum(p.numel() * p.element_size() for p in self._parameters if p.requires_grad)
        reserve = 0 if self._optimizer.state else _STATES * trained

        def fits(size: int) -> bool:
            with self._context():
                return passes_fit(self._module, args, kwargs, samples, batch.dimension, size, reserve)

        began = time.monotonic()
        try:
            found = largest_fitting(fits, samples, batch.goal)
        except Exception as error:  # the script's own model runs, on batches of other sizes
            log.info("searched for no largest local batch: the model cannot be run on trial (%s)", error)
            return
        log.info("searched for the largest local batch for %.1f s: %s", time.monotonic() - began, found)
        if found:
            what = f"{found} samples fit into the memory of rank {session.rank} (a search at the start)"
            largest = max(1, int(MARGIN * found))
            session.consensus.request({"kind": LIMIT, "largest": largest, "why": what})

    def _chunks(
        self, call: Callable[..., Any], args: Any, kwargs: Any, samples: int, batch: Samples, largest: int
    ) -> Any:
        try:
            return run_in_chunks(call, args, kwargs, samples, batch.dimension, largest)
        except NotChunkableError as error:
            raise BatchTooLargeError(
                f"a batch of {samples} samples does not fit into memory, and {type(self._module).__name__} "
                f"cannot compute it in parts: {error}. Give autoscale_batch_size(..., local_bsz_bounds=(1, "
                f"{_half(samples)}), gradient_accumulation=True), or a smaller batch_size"
            ) from None

    def _fits(self, largest: int, samples: int, batch: Samples, differentiates: bool) -> None:
        """Remember the size of chunks that fit; in training, tell the other replicas."""
        new = self._largest.get(differentiates) != largest
        self._largest[differentiates] = largest
        rank, generation = self.session.rank, self.session.generation
        what = f"a batch of {samples} samples does not fit into the memory of rank {rank}"
        if differentiates and batch.trains and batch.local == samples:
            if self._told != (generation, largest):
                self._told = generation, largest
                self.session.consensus.request({"kind": LIMIT, "largest": largest, "why": what})
        elif new:
            log.warning("%s: it is computed in parts of %d", what, largest)

    # -- the backward pass -------------------------------------------------------------------------

    def mark(self) -> None:
        """Record before a backward pass which gradients exist, if DDP waits for the gradients of the pass."""
        if self.hook.awaited:
            found = [(p, p.grad) for p in self._parameters if p.requires_grad]
            self._marks = [(p, grad, 0 if grad is None else grad._version) for p, grad in found]

    def forget(self) -> None:
        """Forget what `mark` recorded, because it keeps gradients in memory."""
        self._marks = []

    def take_passed(self) -> list[int]:
        """Return the samples of the forward passes since the last call."""
        found, self._passed = self._passed, []
        return found

    def exhausted(self, waits: bool, culprits: Culprits) -> None:
        """Record that a backward pass has exhausted the memory of this replica.

        Args:
            waits: Whether DDP waits for gradients of the pass.
            culprits: This replica's batches that have not fitted.
        """
        self._exhausted, self._graph_left = culprits, True
        if self.hook.world_size == 1:
            self.hook.fail(_failure([culprits]))
        else:
            self.hook.spoilt = True
        if waits:
            # parameters without a gradient of this pass
            missing = [
                param
                for param, grad, version in self._marks
                if param.grad is grad and (grad is None or grad._version == version)
            ]
            if missing:
                _backward(_no_gradient(*missing))
        if self.hook.world_size == 1:
            self.drop_gradients()

    def settle(self) -> StepOutOfMemory | None:
        """Ask the other replicas whether nan in the gradients means that memory was exhausted.

        This is a collective only if nan has arrived. All replicas see the same nan, so all call it or none.

        Returns:
            The failure of the step, if memory was exhausted.
        """
        hook, session = self.hook, self.session
        if not hook.suspect:
            return None
        hook.suspect = False
        assert session.reducer is not None
        try:
            found = session.reducer.allreduce([self._exhausted], tag="memory")
        except PeerLostError as error:
            if not hook.absorb:
                raise
            hook.fail(error)
            self.drop_gradients()
            return None
        culprits = [one for one in found if one is not None]
        return _failure(culprits) if culprits else None

    def fail(self, failure: StepOutOfMemory) -> None:
        """Record `failure` as that of the current step, and drop its gradients."""
        self.hook.fail(failure)
        self.drop_gradients()

    def reset(self) -> None:
        """Forget the failure of a step."""
        self._exhausted = None
        self.hook.spoilt = self.hook.suspect = False

    def drop_gradients(self) -> None:
        """Set all gradients to zero: code that reads them before the optimizer does finds no nan."""
        with torch.no_grad():
            for param in self._parameters:
                if param.grad is not None:
                    param.grad.zero_()
                elif param.requires_grad:
                    param.grad = torch.zeros_like(param)

    def why_not_survivable(self) -> str | None:
        """Return why a backward pass of this model must not fail; None if it may."""
        if self._unfit is not None:
            return self._unfit
        if self._views and any(grad is not None for _, grad, _ in self._marks):
            return "gradient_as_bucket_view=True without zero_grad(set_to_none=True)"
        if not self.hook.tells_of_memory:
            return "the other replicas would not learn of it"
        return None


def _why_unfit(ddp: DistributedDataParallel) -> str | None:
    """Return which setting of DDP does not allow that a backward pass fails; None if none."""
    names = ("static_graph", "find_unused_parameters")
    return next((f"{name}=True" for name in names if getattr(ddp, name)), None)


class BatchTooLargeError(torch.OutOfMemoryError):
    """Raised if a batch does not fit into memory and cannot be divided."""


def _tried(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, str | None]:
    """Return the result of a call, and the first line of its error if memory was exhausted.

    The error itself is not kept, because its traceback refers to tensors.
    """
    try:
        return call(*args, **kwargs), None
    except RuntimeError as error:
        if not is_out_of_memory(error) or isinstance(error, BatchTooLargeError | OneSampleError):
            raise
        return None, next(iter(str(error).splitlines()), "out of memory")


def _half(samples: int) -> int:
    """Return the size to try after `samples`, at least 2, did not fit."""
    return (samples + 1) // 2


def _failure(found: list[Culprits]) -> StepOutOfMemory:
    keys = sorted({key for one in found for key in one}, key=str)
    least = {key: min(one[key] for one in found if key in one) for key in keys}
    sizes = " and ".join(str(size) for size in least.values())
    return StepOutOfMemory(
        f"a batch of {sizes} samples does not fit into the memory of a replica; its step was repeated",
        _half(least[None]) if None in least else None,
        {key: _half(size) for key, size in least.items() if key is not None},
    )


def find_culprits(outer: int, inner: tuple[str, int] | None, passed: list[int]) -> Culprits:
    """Return the batches that have not fitted into memory in a backward pass, each of 2 samples or more.

    Args:
        outer: Samples of the outermost data loop's batch.
        inner: Loader's key and samples of the loop in its body, if one runs.
        passed: Samples of the forward passes that the backward pass may belong to; none if that is not known.
    """
    outermost: Culprits = {None: outer} if outer > 1 else {}
    if inner is None or inner[1] <= 1:
        return outermost
    key, samples = inner
    if samples not in passed:
        return outermost if outer in passed and outermost else {key: samples}
    others = [*passed]
    others.remove(samples)
    return {key: samples, **(outermost if outer in others else {})}


def _one_sample(text: str) -> OneSampleError:
    return OneSampleError(
        f"not even one sample fits into memory ({text}). Use shorter or smaller inputs, a smaller model, "
        f"torch.utils.checkpoint inside of the model, a lower precision (torch.autocast), or devices with "
        f"more memory"
    )


class _NoGradient(torch.autograd.Function):
    """Return a scalar whose gradient with respect to every parameter is zero."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


_no_gradient: Callable[..., torch.Tensor] = _NoGradient.apply  # untyped in torch
_guards: weakref.WeakSet[MemoryGuard] = weakref.WeakSet()
_inside = threading.local()
_backward: Callable[..., None] = torch.autograd.backward


@contextmanager
def unguarded() -> Iterator[None]:
    """Enclose backward passes whose errors are handled by the code around them."""
    before, _inside.now = getattr(_inside, "now", False), True
    try:
        yield
    finally:
        _inside.now = before


def guards() -> list[MemoryGuard]:
    """Return the guards of all models of this process's session."""
    return [guard for guard in list(_guards) if guard.session is _session.current()]


@wraps(_backward)
def _guarded_backward(*args: Any, **kwargs: Any) -> None:
    """Replace `torch.autograd.backward`, which `Tensor.backward` calls."""
    # Within another pass, as reentrant checkpoints are; on a GPU these run in a thread of autograd's.
    if getattr(_inside, "now", False) or torch._C._current_graph_task_id() != -1:
        return _backward(*args, **kwargs)
    found = guards()
    if not found:
        return _backward(*args, **kwargs)
    _inside.now = True
    try:
        _run(found, *args, **kwargs)
    finally:
        _inside.now = False


def _install() -> None:
    torch.autograd.backward = _guarded_backward


def _run(found: list[MemoryGuard], *args: Any, **kwargs: Any) -> None:
    for guard in found:
        guard.mark()
        if guard.examine is not None:
            look, guard.examine = guard.examine, None
            look(args[0] if args else kwargs.get("tensors"))
    waiting = [guard for guard in found if guard.hook.awaited]
    _, text = _tried(_backward, *args, **kwargs)
    if text is not None:
        _survive(found, waiting, text)
    for guard in waiting:
        guard.forget()
    for guard in found:
        guard.take_passed()
    settle(found)


def _survive(found: list[MemoryGuard], waiting: list[MemoryGuard], text: str) -> None:
    """Let the step fail after a backward pass in which memory was exhausted."""
    release_memory()
    session = found[0].session
    if session.dry:
        for guard in found:
            guard.drop_gradients()
        return
    batch, passed = found[0].batch(), [size for guard in found for size in guard.take_passed()]
    if batch.local is None:
        raise torch.OutOfMemoryError(
            f"{text} (outside of an AdaptiveDataLoader's loop: the step cannot be repeated)"
        )
    culprits = find_culprits(batch.local, batch.inner, passed)
    if not culprits:
        raise _one_sample(text)
    samples = max(culprits.values())
    why = "several models wait for the gradients of one pass" if len(waiting) > 1 else None
    why = why or next((why for guard in found if (why := guard.why_not_survivable())), None)
    why = why or session.recovery.why_not_repeatable()
    if why is not None:
        raise BatchTooLargeError(
            f"a batch of {samples} samples does not fit into memory ({text}), and its step cannot be "
            f"repeated in smaller batches: {why}"
        )
    log.info("memory is exhausted in the backward pass of %d samples: %s", samples, text)
    for guard in found:
        guard.exhausted(guard in waiting, culprits)


def settle(found: list[MemoryGuard]) -> None:
    """Let the step fail on all models if a replica's memory was exhausted. A collective after nan."""
    for guard in found:
        failure = guard.settle()
        if failure is not None:
            for each in found:
                each.fail(failure)
