"""Measure the gradient noise of a sharded model, with the estimators of AdaptiveDataParallel.

With several replicas, V needs two numbers of each backward pass: the sum over replicas of the squared norms
of their own gradients, and the squared norm of the sum (`_gradient.measurement.of_replicas`). Each replica
has its own gradient of whole parameters just before torch's reduce-scatter, and its rows of the sum after it.
So the norms are taken there, and one small all-reduce adds them up when the step was taken.

For Adam, gradients are divided by the root of the second moment, of which each replica holds its rows only.
So on steps that are measured the squares of the gradients are added up by a second reduce-scatter, in the
memory of the first one's input, and each replica divides its rows of the sum.

A single replica has no other gradients to compare with. Torch's graph of a sharded model cannot be walked
twice, so the gradients of two successive steps are compared, which `_gradient.estimator` calls a last resort.
Steps for which the script makes several backward passes are not measured there. In an accumulation window the
gradient of the first micro-batch is compared with that of the window.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed

from adaptdl_elastic._interfaces import Reporter
from adaptdl_elastic._session import Session
from adaptdl_elastic.torch._gradient.accumulation import Batch
from adaptdl_elastic.torch._gradient.comm_hook import HookState, Norms, Recording
from adaptdl_elastic.torch._gradient.measurement import Sampler
from adaptdl_elastic.torch._gradient.noise_scale import GradientNoiseScale
from adaptdl_elastic.torch._process_group.backends import Group, patiently, present
from adaptdl_elastic.torch._sharded import fully_shard
from adaptdl_elastic.torch._sharded.fully_shard import Gradients
from adaptdl_elastic.torch._sharded.layout import Layout

logger = logging.getLogger(__name__)


@dataclass
class _Pass:
    """Hold the measurements of one backward pass.

    Attributes:
        recording: Its norms, as the estimators take them.
        passed: Norms of this replica's rows of the sums of this pass, one tensor per group of parameters.
        seen: Parameters that were measured, by id.
    """

    recording: Recording
    passed: list[torch.Tensor] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)


class ShardedNoise:
    """Measure the gradients of one model; a `fully_shard.GradientObserver`.

    Args:
        session: This process's session.
        gns: The model's statistics.
        parameters: Returns the sharded parameters.
        layout: Returns how the replicas share the model.
    """

    def __init__(
        self,
        session: Session,
        gns: GradientNoiseScale,
        parameters: Callable[[], Iterable[torch.Tensor]],
        layout: Callable[[], Layout],
    ) -> None:
        self._session, self._gns, self._parameters, self._layout = session, gns, parameters, layout
        self.renew()

    def renew(self) -> None:
        """Begin to measure in a new generation."""
        session, gns = self._session, self._gns
        optimizer = gns.optimizer
        self._group = present(session)
        self._replicas = torch.distributed.get_world_size()
        norms = Norms(lambda: optimizer.param_groups, gns.preconditioner)
        self._hook = HookState(norms, torch.distributed.group.WORLD, self._replicas)
        self._sampler = Sampler(gns, self._hook, None, again=False)
        self._passes: list[_Pass] = []
        # norms of this replica's rows after all passes so far, by ids of the parameters of a group
        self._whole: dict[tuple[int, ...], torch.Tensor] = {}
        # passes of this step that are not measured
        self._forgotten = 0
        # a pass was measured in a way that cannot be used
        self._doubtful = False
        # the single replica makes several passes for a step, which are not measured
        self._several = False
        self._said = False

    @property
    def by_rows(self) -> bool:
        """Whether squares of gradients must be divided by what each replica holds of its rows only."""
        return self._hook.norms.preconditioned

    @property
    def measuring(self) -> bool:
        """Whether the present backward pass is measured. The same on all replicas."""
        return not self._session.dry and self._hook.recording is not None

    def begin(self, batch: Batch) -> None:
        """Begin a forward pass whose gradients are going to be used."""
        if self._several and batch.micro_batches == 1:
            return
        if self._replicas == 1 and not self._said:
            self._said = True
            logger.info(
                "gradient noise is estimated from successive steps, less well at high learning rates, while "
                "there is one replica"
            )
        if self._replicas > 1 and batch.micro_batches > 1 and batch.parts != self._replicas:
            # each pass would have its own parts
            batch = replace(batch, measurable=False)
        self._sampler.begin(batch, synchronised=True)
        if self._hook.recording is not None:
            self._passes.append(_Pass(self._hook.recording))

    def reducing(self) -> None:
        """Note that a backward pass adds to the gradients."""
        if not self.measuring:
            self._forgotten += 1

    def own(self, gradients: Gradients) -> None:
        """Keep the squares of this replica's gradients before they are added up."""
        self._passes[-1].recording.own.append(self._hook.norms.squares(gradients))

    def summed(self, passed: Gradients, whole: Gradients) -> None:
        """Keep the squares of this replica's rows of the sums."""
        current, norms = self._passes[-1], self._hook.norms
        row = norms.squares(passed)
        current.passed.append(row)
        params = tuple(id(param) for param, _ in passed)
        if not current.seen.isdisjoint(params):
            self._refuse("a backward pass has added up gradients of the same parameters twice")
        if any(other != params and not set(other).isdisjoint(params) for other in self._whole):
            self._refuse("its backward passes have reached different parameters")
        current.seen.update(params)
        self._whole[params] = row if whole is passed else norms.squares(whole)

    def unknown(self) -> None:
        """Record that the gradients cannot be told apart."""
        self._refuse("torch has added up other gradients than those that were expected")

    def _refuse(self, reason: str) -> None:
        """Leave this step out of the statistics."""
        self._doubtful = True
        if not self._said:
            self._said = True
            logger.warning("gradient noise of a step is not measured: %s", reason)

    def ended(self, batch: Batch) -> None:
        """Measure the gradients at the end of a backward pass of a single replica."""
        if not self.measuring or self._replicas > 1:
            return
        norms, current = self._hook.norms, self._passes[-1].recording
        if len(self._passes) != batch.place + 1 or current.own or self._forgotten:
            self._doubtful = True
            self._several = self._several or batch.micro_batches == 1
            self._hook.kept = None
            return
        pairs = [
            (param, fully_shard.local(param.grad)) for param in self._parameters() if param.grad is not None
        ]
        if batch.accumulating:
            if batch.place == 0:
                self._sampler.first_part(
                    (param, part / (batch.share * batch.weight)) for param, part in pairs
                )
            return
        current.own.append(norms.squares(pairs))
        kept = self._hook.kept
        if kept is None:
            return
        before = {id(param): kept.pop(id(param), None) for param, _ in pairs}
        changes = [(param, known - part) for param, part in pairs if (known := before[id(param)]) is not None]
        if len(changes) == len(pairs):
            current.change.append(norms.squares(changes))
            return
        for param, part in pairs:
            kept[id(param)] = part.clone()

    def absorb(self) -> None:
        """Let a measurement be lost with a replica from now on."""
        self._hook.absorb = True

    @property
    def stuck(self) -> bool:
        """Whether a sum over replicas has not ended, and maybe never will."""
        return self._hook.stuck

    def collect(self) -> None:
        """Read the pending measurement, if there is one."""
        self._sampler.collect()

    def close(self, size: float) -> None:
        """Start to collect the measurements of a step that was taken. The same on all replicas."""
        passes = [one for one in self._passes if one.recording.own]
        if self._forgotten or self._doubtful:
            for one in passes:
                one.recording.own.clear()
        elif self._replicas > 1:
            for one in passes:
                self._add_up(one, one is passes[-1])
        self._sampler.close(size)
        self._begin_step()

    def _add_up(self, one: _Pass, last: bool) -> None:
        """Begin to add up the norms of one pass over the replicas."""
        own = torch.stack(one.recording.own).sum(0)
        rows = [own, torch.stack(one.passed).sum(0)]
        if last:
            rows.append(torch.stack([*self._whole.values()]).sum(0))
        sums = torch.stack(rows)
        # every copy of a part counts its rows; gradients of whole parameters are each replica's own
        sums[0 if self.by_rows else 1 :] /= self._layout().copies
        # made on this stream from memory of torch's stream for communication
        if sums.is_cuda:
            for row in (*one.recording.own, *one.passed, *self._whole.values()):
                row.record_stream(torch.cuda.current_stream(row.device))
        add = partial(torch.distributed.all_reduce, sums, async_op=True)
        queued = add() if self._group is None else self._group.queue(add)
        self._hook.works = [*(one for one in self._hook.works if not one.is_completed()), queued]
        work = _Work(self._session, self._group, queued, sums.is_cuda)
        one.recording.reduced, one.recording.average, one.recording.work = sums[0], [sums[1]], work
        if last:
            one.recording.whole = sums[2]

    def drop(self) -> None:
        """Forget the measurements of gradients that were dropped."""
        coming = [one for one in self._passes[-1:] if not one.recording.own]
        self._sampler.drop()
        recording = self._hook.recording
        self._begin_step()
        # a forward pass was made already, and its backward pass comes
        if coming:
            self._passes, self._hook.recording = coming, recording

    def _begin_step(self) -> None:
        self._passes, self._whole = [], {}
        self._forgotten, self._doubtful = 0, False
        self._hook.recording = None

    def report(self, reporter: Reporter, name: str) -> None:
        """Report what is known of the gradients of the model `name` after a step."""
        self._sampler.report(reporter, name)


class _Work:
    """Hold a sum over replicas, with the patience of torch's own collectives.

    It is begun when a step was taken, and replicas may come there at different times.
    """

    def __init__(self, session: Session, group: Group | None, work: Any, on_device: bool) -> None:
        self._session, self._group = session, group
        self._work, self._on_device = work, on_device

    def wait(self, _: timedelta | None = None) -> None:
        """Wait for the sum; on a GPU the device waits. RuntimeError if a replica was lost."""
        if self._on_device or self._work.is_completed():
            self._work.wait()
        else:
            patiently(self._session, self._group, self._work.wait)
