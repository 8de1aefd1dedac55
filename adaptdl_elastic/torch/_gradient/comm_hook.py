"""Average gradients in a communication hook, and compute two squared norms of each bucket.

DDP passes each bucket, a flat tensor with the gradients of some parameters. Its norm before the all-reduce is
this replica's, after it the average's. Nothing is copied, and no parameter needs a hook. On steps that are
not sampled the hook only weighs and averages.
"""

# no `from __future__ import annotations`: DDP reads the hook's annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from adaptdl_elastic.torch._gradient.chunked_forward import is_out_of_memory, release_memory
from adaptdl_elastic.torch._gradient.pace import Stopwatch
from adaptdl_elastic.torch._process_group.backends import ARRIVES
from adaptdl_elastic.torch._runtime.step_clock import StepClock

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    from adaptdl_elastic.torch._process_group.backends import Group
else:
    GradBucket = dist.GradBucket

logger = logging.getLogger(__name__)

Future = torch.futures.Future[torch.Tensor]

Divisor = Callable[[slice], torch.Tensor]
"""Returns the divisor of a slice of a flattened gradient."""

Preconditioner = Callable[[torch.Tensor, dict[str, Any]], "Divisor | None"]
"""Returns the divisor of a parameter of this group; None while there is none."""

_CHUNK = {"cpu": 1 << 18}  # elements preconditioned at once, so that they stay in the cache
_DEVICE_CHUNK = 1 << 26  # few kernel launches, but no gradient-sized copy for large models


def squared_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return |tensor|² as a 0-d tensor; 16-bit floats are accumulated in 32 bits."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    kind = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else None
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dtype=kind)
    return norm.square()


class Norms:
    """Compute squared norms by parameter group, of gradients or of preconditioned gradients.

    A preconditioned gradient is divided slice by slice, so that it is never copied as a whole. A parameter
    without a divisor counts as zero and is kept in `lacking`.

    Args:
        groups: returns the optimizer's groups (loading its state makes new ones).
        preconditioner: returns the divisors.
    """

    def __init__(
        self,
        groups: Callable[[], list[dict[str, Any]]],
        preconditioner: Preconditioner | None = None,
    ) -> None:
        self._groups = groups
        self._preconditioner = preconditioner
        self.lacking: list[torch.Tensor] = []  # parameters without a divisor, since this was last emptied
        self._group_of: dict[int, int] = {}
        self._indexed = -1

    def __len__(self) -> int:
        return len(self._groups())

    def _index(self) -> dict[int, int]:
        size = sum(len(group["params"]) for group in self._groups())
        if size != self._indexed:  # after add_param_group, or at the first use
            self._group_of = {
                id(param): index for index, group in enumerate(self._groups()) for param in group["params"]
            }
            self._indexed = size
        return self._group_of

    def squares(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Return Σ |gradient|² by group of (parameter, gradient) pairs, float64, shape [groups]."""
        group_of, groups = self._index(), self._groups()
        sums: list[list[torch.Tensor]] = [[] for _ in groups]
        device = None
        for param, grad in pairs:
            device = grad.device
            group = group_of.get(id(param))
            if group is not None:  # otherwise the optimizer does not train it
                sums[group].extend(self._terms(param, grad, groups[group]))
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return torch.stack([torch.stack(terms).double().sum() if terms else zero for terms in sums])

    def bucket(
        self, flat: torch.Tensor, params: list[torch.Tensor], grads: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return Σ |gradient|² by group for a bucket with the views `grads`; one group takes one pass."""
        if flat.is_sparse:  # a sparse bucket has one parameter, and DDP gives no view of it
            return self.squares([(params[0], flat)])
        if self._preconditioner is not None:
            return self.squares(zip(params, grads, strict=True))
        group_of = self._index()
        groups = [group_of.get(id(param)) for param in params]
        result = torch.zeros(len(self), dtype=torch.float64, device=flat.device)
        offset = first = 0
        for position, group in enumerate(groups):
            offset += params[position].numel()
            if position + 1 == len(groups) or groups[position + 1] != group:
                if group is not None:
                    result[group] += squared_norm(flat[first:offset])
                first = offset
        return result

    @property
    def preconditioned(self) -> bool:
        """Whether gradients are divided before their norms are taken."""
        return self._preconditioner is not None

    def divisible(self, params: Iterable[torch.Tensor]) -> bool:
        """Return whether any of these parameters has a divisor now."""
        group_of, groups, divisor = self._index(), self._groups(), self._preconditioner
        return divisor is None or any(divisor(p, groups[group_of[id(p)]]) is not None for p in params)

    def _terms(
        self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]
    ) -> Iterable[torch.Tensor]:
        if self._preconditioner is None:
            yield squared_norm(grad)
            return
        divisor = self._preconditioner(param, group)
        if divisor is None:
            self.lacking.append(param)
            return
        flat = (grad.to_dense() if grad.is_sparse else grad).reshape(-1)
        chunk = _CHUNK.get(flat.device.type, _DEVICE_CHUNK)
        for start in range(0, flat.numel(), chunk):
            part = slice(start, start + chunk)
            yield squared_norm(flat[part] / divisor(part))


@dataclass
class Recording:
    """Hold the squared norms of one synchronised backward pass, still on the device.

    Attributes:
        own: of this replica's gradient, by bucket; once reduced, summed over replicas.
        average: of the mean gradient, by bucket.
        change: |g − g'|², by bucket, where g' is the gradient of the previous step.
        reduced: sum over buckets and replicas.
        work: the all-reduce of that sum.
        whole: of the mean gradient after this pass; None: that of `average`. They differ if `average` is of
            this pass alone, and earlier passes of the step have left gradients.
        cost: what measuring costs on this replica, in plain steps.
        mean_cost: the mean over replicas, a 0-d tensor, once `work` has ended.
    """

    own: list[torch.Tensor] = field(default_factory=list)
    average: list[torch.Tensor] = field(default_factory=list)
    change: list[torch.Tensor] = field(default_factory=list)
    reduced: torch.Tensor | None = None
    work: Any = None
    whole: torch.Tensor | None = None
    cost: float = 0.0
    mean_cost: torch.Tensor | None = None


@dataclass(frozen=True)
class GradientSubstitute:
    """Hold gradients that replace those of a last micro-batch which only fills a gap."""

    gradients: dict[int, torch.Tensor]
    factor: float


@dataclass
class HookState:
    """Hold the input and output of the hook, without a reference to the module, to avoid a cycle."""

    norms: Norms
    group: Any  # process group
    world_size: int
    weight: float = 1.0  # factor of this replica's accumulated gradient before the sum
    instead: GradientSubstitute | None = None  # replaces the gradient of the backward pass, and `weight`
    reduced: bool = False  # the hook was called since this was last reset
    recording: Recording | None = None  # set if this backward pass is sampled
    kept: dict[int, torch.Tensor] | None = None  # buckets of the previous step; None: not needed
    absorb: bool = False  # a failed all-reduce leaves zeros and sets `failure` instead of raising
    failure: BaseException | None = None
    awaited: bool = False  # a forward pass was made whose gradients have not all come to the hook yet
    spoilt: bool = False  # send nan: this replica's gradients of this step are not known
    suspect: bool = False  # nan arrived in the last bucket: a replica's gradients may not be known
    lost: BaseException | None = None  # a replica is gone: sums fail at once from now on
    # all-reduces of this backward pass; only with `absorb`
    under_way: "list[_Reduction]" = field(default_factory=list)
    works: list[Any] = field(default_factory=list)  # all-reduces of norms that may not have ended
    link: "Group | None" = None  # what the library knows of the group, if it is torch's default one
    queued: list[tuple[torch.Tensor, Any]] = field(default_factory=list)  # pending buckets and their works
    clock: StepClock = field(default_factory=StepClock)  # measures what this replica does in a step
    stopwatch: Stopwatch = field(default_factory=Stopwatch)  # measures how long measuring takes
    # called before the last bucket's all-reduce
    synchronises: Callable[[], None] = lambda: None

    @property
    def completion_is_unreliable(self) -> bool:
        """Whether completion must be polled, and a peer's death is not reported.

        True with NCCL, whose futures end when a collective is enqueued, if failures are absorbed (`absorb`).
        """
        return self.absorb and self.link is not None and self.link.completion_is_unreliable

    @property
    def tells_of_memory(self) -> bool:
        """Whether all replicas would find out that one of them has sent nan. The same on all of them.

        The host waits for NCCL's results only in order to survive the death of a peer (`absorb`). Without
        that wait it does not look at them.
        """
        if self.world_size == 1:
            return True
        return self.link is not None and (self.absorb or not self.link.completion_is_unreliable)

    def examine(self, buffer: torch.Tensor) -> None:
        """Set `suspect` if the last number of the arrived bucket is nan; the same on all replicas."""
        if self.tells_of_memory and not buffer.is_sparse and bool(buffer.view(-1)[-1].isnan()):
            self.suspect = True

    def queue(self, tensor: torch.Tensor) -> Any:
        """Begin to sum `tensor` over all replicas."""
        call = partial(dist.all_reduce, tensor, group=self.group, async_op=True)
        return call() if self.link is None else self.link.queue(call)

    def fail(self, error: BaseException) -> None:
        """Record the first failure of a step."""
        if self.failure is None:
            self.failure = error
            logger.info("gradient synchronisation failed: %s", error)  # recovery logs the result

    def give_up(self, error: BaseException) -> None:
        """End a backward pass's wait for other replicas. Callable in any thread."""
        self.lost = error
        for reduction in list(self.under_way):
            reduction.settle(partial(self.fail, error))

    @property
    def stuck(self) -> bool:
        """Whether gloo still works on an operation: it may never end, so the group must not be destroyed."""
        return any(not reduction.real.done() for reduction in self.under_way) or any(
            not work.is_completed() for work in self.works
        )


class _Reduction:
    """Hold the all-reduce of a bucket, with a future that always ends.

    When a connection ends, gloo forgets a tensor that it was receiving: its future then never ends (seen in
    one of ten deaths with three replicas, gloo of torch 2.13). So DDP gets another future.
    """

    def __init__(self, tensor: torch.Tensor, real: Any) -> None:
        self.real = real
        devices: Any = [tensor.device] if tensor.is_cuda else None
        self.future: Future = torch.futures.Future(devices=devices)
        self._tensor, self._lock, self._settled = tensor, threading.Lock(), False

    def settle(self, failed: Callable[[], None] | None) -> None:
        """End the future: with the result, or after a failure with zeros. Only the first call counts."""
        with self._lock:
            if self._settled:
                return
            self._settled = True
        if failed is not None:
            failed()
            self._tensor.zero_()  # not nan, which would affect gradient clipping and GradScaler
        self.future.set_result(self._tensor)


def _finished(tensor: torch.Tensor) -> Future:
    devices: Any = [tensor.device] if tensor.is_cuda else None
    future: Future = torch.futures.Future(devices=devices)
    future.set_result(tensor)
    return future


def reduce_bucket(state: HookState, bucket: GradBucket) -> Future:
    """Sum a bucket over the replicas: buffer ← Σ_r weight_r · buffer_r. DDP calls this hook."""
    buffer = bucket.buffer()
    state.reduced = True
    if bucket.is_last():
        state.awaited = False
    if state.instead is not None:
        _replace(bucket, state.instead)
    elif state.weight != 1.0:
        buffer.mul_(state.weight)
    recording = state.recording
    if state.under_way and (bucket.index() == 0 or state.failure is not None):
        state.under_way = [one for one in state.under_way if not one.real.done()]
    if state.failure is not None:  # the group is broken: this step will not be used
        return _given_up(state, bucket) if state.completion_is_unreliable else _finished(buffer.zero_())
    if bucket.is_last():
        state.synchronises()
    if recording is None and state.world_size == 1:
        return _finished(buffer)
    if recording is not None:
        params, grads = bucket.parameters(), bucket.gradients()
        with state.stopwatch.running(buffer.device):
            recording.own.append(_or_nan(state, buffer, lambda: state.norms.bucket(buffer, params, grads)))
            if state.kept is not None:
                _compare(state, state.kept, recording, bucket)
    if state.world_size == 1:
        return _finished(buffer)
    if state.spoilt:
        buffer.fill_(math.nan)
    if bucket.is_last():  # before the call below: a slow peer may let it wait
        state.clock.computed(buffer.is_cuda)
    begun = time.monotonic()
    try:
        if state.lost is not None:
            raise RuntimeError(str(state.lost))
        work = state.queue(buffer)
        state.clock.sent(time.monotonic() - begun)
        future = work.get_future()
        if recording is not None and bucket.is_last():
            _reduce_own(state, recording)
    except RuntimeError as error:
        if not state.absorb:
            raise
        state.fail(error)
        return _given_up(state, bucket) if state.completion_is_unreliable else _finished(buffer.zero_())
    if not state.completion_is_unreliable:
        return _finish(state, bucket, recording, future)
    state.queued.append((buffer, work))
    done = _chained(state, bucket, recording, future)
    return _arrived(state, bucket, recording, done) if bucket.is_last() else done


def _arrived(
    state: HookState,
    bucket: GradBucket,
    recording: Recording | None,
    done: Future,
) -> Future:
    """Wait at the last bucket until all buckets have arrived, or a replica is known to be gone.

    The wait comes at the end of the backward pass, so that code that reads gradients before the
    optimizer does (clipping, a GradScaler's search for inf) finds those of the step, or zeros.
    """
    assert state.link is not None
    works = [work for _, work in state.queued]
    if recording is not None:
        works.append(recording.work)
    try:
        state.link.wait(works, ARRIVES)
    except RuntimeError as error:
        state.fail(error)
        return _given_up(state, bucket)
    state.queued.clear()
    state.examine(bucket.buffer())
    return done


def _given_up(state: HookState, bucket: GradBucket) -> Future:
    """Set this bucket to zero, because the step has failed.

    At the last bucket, end all operations that still write into buckets, and set all buckets to zero.
    """
    buffer = bucket.buffer()
    if bucket.is_last():
        assert state.link is not None
        state.link.abort_and_drain()
        for tensor, _ in state.queued:
            tensor.zero_()
        state.queued.clear()
        buffer.zero_()
        state.link.synchronize()
    return _finished(buffer.zero_())


def _or_nan(state: HookState, buffer: torch.Tensor, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the norms that `compute` returns, or nan if there is no memory for them.

    A step need not be measured, but the other replicas wait for its all-reduces.
    """
    found = _if_it_fits(compute)
    if found is not None:
        return found
    return torch.full((len(state.norms),), math.nan, dtype=torch.float64, device=buffer.device)


def _if_it_fits(compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Return the result of `compute`; None if there is no memory for it."""
    try:
        return compute()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        logger.info("no memory is left to measure this step's gradient: %s", str(error).partition("\n")[0])
    release_memory()
    return None


def _compare(
    state: HookState, kept: dict[int, torch.Tensor], recording: Recording, bucket: GradBucket
) -> None:
    """Keep a bucket, or replace the kept one by their difference, so that there are never two copies."""
    buffer = bucket.buffer()
    before = kept.pop(bucket.index(), None)
    if before is None or before.shape != buffer.shape:  # DDP rebuilds its buckets once
        copy = _if_it_fits(buffer.clone)
        if copy is not None:
            kept[bucket.index()] = copy
        return
    change = before.sub_(buffer)
    start = buffer.storage_offset()
    views = [
        change.as_strided(grad.size(), grad.stride(), grad.storage_offset() - start)
        for grad in bucket.gradients()
    ]
    params = bucket.parameters()
    recording.change.append(_or_nan(state, buffer, lambda: state.norms.bucket(change, params, views)))


def _replace(bucket: GradBucket, instead: GradientSubstitute) -> None:
    buffer = bucket.buffer()
    buffer.zero_()
    views = [buffer] if buffer.is_sparse else bucket.gradients()
    for param, view in zip(bucket.parameters(), views, strict=True):
        gradient = instead.gradients.get(id(param))
        if gradient is not None:
            view.copy_(gradient * instead.factor)


def _reduce_own(state: HookState, recording: Recording) -> None:
    """Start to sum the small vector of own norms; the step does not wait for it."""
    own = _or_nan(state, recording.own[0], lambda: torch.stack(recording.own).sum(0))
    sums = torch.cat([own, torch.full_like(own[:1], recording.cost / state.world_size)])
    recording.reduced, recording.mean_cost = sums[:-1], sums[-1]
    recording.work = state.queue(sums)
    if state.absorb:
        state.works = [work for work in state.works if not work.is_completed()]
        state.works.append(recording.work)


def _measure(state: HookState, bucket: GradBucket, recording: Recording | None) -> Callable[[], None]:
    """Return the function that measures a bucket when it has arrived."""
    if recording is None:
        return lambda: None
    buffer: torch.Tensor = bucket.buffer()  # reduced in place
    # allocated on this stream, because memory of a callback's stream must not be read on others later
    row = torch.empty(len(state.norms), dtype=torch.float64, device=buffer.device)
    recording.average.append(row)
    params, grads = bucket.parameters(), bucket.gradients()

    def measure() -> None:
        with state.stopwatch.running(buffer.device):
            row.copy_(_or_nan(state, buffer, lambda: state.norms.bucket(buffer, params, grads)))

    return measure


def _chained(state: HookState, bucket: GradBucket, recording: Recording | None, future: Any) -> Future:
    """Return a future that ends, or fails, with the all-reduce."""
    buffer, measure, last = bucket.buffer(), _measure(state, bucket, recording), bucket.is_last()
    examines = last and state.tells_of_memory and not state.completion_is_unreliable

    def finish(done: Any) -> torch.Tensor:
        done.value()  # raises the all-reduce's error; torch's fake backend has no value
        measure()
        if examines:
            state.examine(buffer)
        if last:
            state.clock.arrived()
        return buffer

    chained: Future = future.then(finish)
    return chained


def _finish(state: HookState, bucket: GradBucket, recording: Recording | None, future: Any) -> Future:
    if not state.absorb:
        return _chained(state, bucket, recording, future)
    measure, reduction = _measure(state, bucket, recording), _Reduction(bucket.buffer(), future)
    state.under_way.append(reduction)
    buffer, last = bucket.buffer(), bucket.is_last()

    def arrived(done: Any) -> None:
        try:
            done.value()
            measure()
            if last:
                state.examine(buffer)
        except Exception as error:
            reduction.settle(partial(state.fail, error))
        else:
            if last:
                state.clock.arrived()
            reduction.settle(None)

    future.add_done_callback(arrived)
    if state.lost is not None:  # set while the all-reduce was started
        reduction.settle(partial(state.fail, state.lost))
    return reduction.future
