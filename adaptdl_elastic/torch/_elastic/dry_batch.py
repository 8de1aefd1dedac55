"""Run the body of a data loop once with a batch that does not count, and then undo the effects of the body.

The problem. After `for batch in loader: loss = …` a script may use `loss`. The variable does not exist in a
replica that skips this loop, because the loop finished before a restart or before the replica joined. Nor
does it exist in a replica that reaches the loop when all samples have been handed out.

What is done. Such a replica gets the first batch of the loop. The models compute outputs and gradients as
usual, but nothing is synchronised, and optimizers do not step. After the body, everything is restored that it
has changed: parameters, buffers, gradients, schedulers, loss scales, sums of accumulators, random states
and the script's own States. During the batch `adaptdl_elastic.torch.batch_counts()` returns False.

Collectives in the body. If the replicas have restarted together, all of them run this batch, and their
collectives match. A newcomer that has not joined yet runs it alone, and its collectives return at once
(`placeholder`, `collective`). A newcomer that has joined a loop gets batches of the loop, because no newcomer
joins after a loop's last batch (`BoundaryConsensus.boundary`).
"""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from adaptdl_elastic import checkpoint
from adaptdl_elastic._session import Session
from adaptdl_elastic.torch._elastic.step_snapshot import StepSnapshot, copies_of_script
from adaptdl_elastic.torch._runtime.heap import instances_of
from adaptdl_elastic.torch._runtime.position import script_position

log = logging.getLogger(__name__)


@contextmanager
def dry_batch(session: Session) -> Iterator[None]:
    """Enclose the `yield` of a batch that does not count, and undo its effects afterwards."""
    position = script_position()
    log.info(
        "data loop %d of epoch %d has nothing left for this replica: its body runs once, without effect",
        position.entered,
        position.finished,
    )
    before = StepSnapshot(session, position.index, None)
    states, numpys = copies_of_script(session), np.random.get_state()
    optimizers = instances_of(torch.optim.Optimizer)
    parameters = [param for model in session.models for param in model.module.parameters()]
    parameters += [
        param for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]
    ]
    values = [(param, param.detach().clone()) for param in dict.fromkeys(parameters)]
    gradients = [param.grad for param in parameters]
    for param in parameters:
        param.grad = None
    steps = [vars(optimizer).get("step") for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer.step = types.MethodType(_no_step, optimizer)
    session.dry = True
    try:
        yield
    finally:
        session.dry = False
        for optimizer, step in zip(optimizers, steps, strict=True):
            if step is None:
                del optimizer.step
            else:
                optimizer.step = step
        for param, gradient in zip(parameters, gradients, strict=True):
            param.grad = gradient
        with torch.no_grad():
            for param, value in values:  # a body may change them itself, as weight clipping does
                param.copy_(value)
        np.random.set_state(numpys)
        before.put_back(session)
        checkpoint.restore_states(states)


def _no_step(optimizer: Any, closure: Any = None, *_: Any, **__: Any) -> Any:
    """Replace an optimizer's `step`: call the closure, if any, and do not step."""
    optimizer._opt_called = True  # set by torch's `step` too; a scheduler warns if it is missing
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


_no_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # a scheduler warns if it is missing
