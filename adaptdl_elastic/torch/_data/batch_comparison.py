"""Compare the data that the replicas read, and report a data pipeline that is set up wrongly.

The problem. If every replica reads the whole data set, or if the data are divided among the replicas twice,
training raises no error. But all replicas compute the same gradient, or most samples are never read.

What is done. Each replica computes a digest of the first data that it reads in a generation and sends the
digest to rank 0 as a control message. No replica waits for it. Rank 0 compares the digests: the inputs of a
model in training must differ between replicas; a stream, of which each replica takes its share, must be the
same on all of them. So must the options of an optimizer, such as the learning rate: if they differ, the
replicas' parameters drift apart. The options of the first step after a restart are compared with those of the
past.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from adaptdl_elastic import checkpoint
from adaptdl_elastic._session import Session
from adaptdl_elastic.torch._runtime.position import script_position

KIND = "digest"
"""Kind of the control messages that carry digests."""

COMPARED_INPUTS = 3
"""Forward passes compared per generation; a problem is reported if the inputs of all of them are equal."""

COMPARED_STEPS = 3
"""Optimizer steps at the beginning of a generation whose options are compared; then every 100th is."""

_STEPS_APART = 100
# most numbers of each tensor that enter its digest, spread over the tensor
_NUMBERS = 4096
# most comparisons that may wait for further digests; the oldest is dropped
_PENDING = 64

Key = tuple[int, str, str]
"""Key of a comparison: the generation, the subject (e.g. a model's inputs), and the place or pass."""


def digest(value: Any) -> str | None:
    """Return a string that differs where nested tensors, arrays, numbers and strings do.

    Some of the numbers of tensors and arrays count, and other objects with their types only. None if there is
    a tensor that cannot be compared (sparse, nested, quantized, without data).
    """
    found = hashlib.blake2b(digest_size=16)
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            if leaf.layout is not torch.strided or leaf.is_meta or leaf.is_nested or leaf.is_quantized:
                return None
            numbers = _spread(leaf.detach()).cpu().resolve_conj().resolve_neg()
            found.update(f"{tuple(leaf.shape)}{leaf.dtype}".encode())
            found.update(numbers.contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray):
            found.update(f"{leaf.shape}{leaf.dtype}".encode())
            found.update(_spread(leaf).tobytes() if leaf.dtype != object else b"")
        elif isinstance(leaf, bytes | str | int | float | complex | np.generic):
            found.update(repr(leaf).encode())
        else:
            found.update(type(leaf).__qualname__.encode())
    return found.hexdigest()


def _spread(numbers: Any) -> Any:
    """Return up to `_NUMBERS` numbers of a tensor or array, spread evenly over it; copies no others."""
    if not numbers.ndim:
        return numbers.reshape(1)
    size = math.prod(numbers.shape)
    # odd, so that it does not meet one column of an image only
    step = -(-size // _NUMBERS) | 1
    places = np.unravel_index(np.arange(0, size, step), numbers.shape) if size else None
    if places is None:
        return numbers.reshape(-1)
    if isinstance(numbers, torch.Tensor):
        return numbers[tuple(torch.from_numpy(place) for place in places)]
    return numbers[places]


class BatchComparison:
    """Send this replica's digests to rank 0; on rank 0, compare the digests of all replicas.

    There is one object per session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        # model → (generation, passes compared in it)
        self._passes: dict[str, tuple[int, int]] = {}
        # model → (generation, steps in it)
        self._steps: dict[str, tuple[int, int]] = {}
        # on rank 0: digests received so far, by rank
        self._waiting: dict[Key, dict[int, str]] = {}
        # on rank 0: number of passes with equal inputs
        self._equal: dict[tuple[int, str], int] = {}
        # model → options that its optimizer has got from a checkpoint
        self._restored: dict[str, str] = {}
        session.consensus.listen(KIND, self._take)

    def inputs(self, model: str, inputs: Any, shared: bool, counts: bool) -> None:
        """Compare the inputs of a forward pass of a model in training.

        Args:
            model: Name of the model.
            inputs: Inputs of the forward pass.
            shared: Whether an elastic loader hands out the samples.
            counts: Whether the batch holds samples of this replica, rather than one that only fills a gap.
        """
        generation = self._session.generation
        known, count = self._passes.get(model, (generation, 0))
        count = count if known == generation else 0
        if count >= COMPARED_INPUTS:
            return
        self._passes[model] = (generation, count + 1)
        found = digest(inputs) if counts else None
        mine = f"none on rank {self._session.rank}" if found is None else found
        self._send(f"{'shared' if shared else 'own'} inputs of {model}", str(count), mine)

    def options(self, model: str, optimizer: torch.optim.Optimizer) -> None:
        """Compare the options with which a model's optimizer is about to step, as the script has set them.

        Args:
            model: Name of the model.
            optimizer: Its optimizer.
        """
        self._compare_with_past(model, optimizer)
        generation = self._session.generation
        known, count = self._steps.get(model, (generation, 0))
        count = count if known == generation else 0
        self._steps[model] = (generation, count + 1)
        if count < COMPARED_STEPS or count % _STEPS_APART == 0:
            # both numbers: the session counts no steps in loops without a loader of ours
            step = f"{self._session.step} {count}"
            self._send(f"options of {model}'s optimizer", step, options_text(optimizer))

    def restored(self, model: str, optimizer: torch.optim.Optimizer) -> None:
        """Record the options that a model's optimizer has got from a checkpoint, if there is one."""
        if checkpoint.loaded_id() is not None:
            self._restored[model] = options_text(optimizer)

    def _compare_with_past(self, model: str, optimizer: torch.optim.Optimizer) -> None:
        """Report a problem if the first step after a restart has the options of the epoch's or job's first.

        A counter that the script computes from the number of the epoch begins again in the middle of it.
        """
        position = script_position(self._session)
        first = position.first_options.get(model)
        restored = self._restored.pop(model, None)
        if first is not None and first[0] == position.finished and restored is None:
            return
        now = options_text(optimizer)
        if first is not None and first[0] == position.finished:
            if now != restored and now in first[1:]:
                which = "epoch" if now == first[2] else "job"
                self._session.metrics.report_problem(
                    f"the options of {model}'s optimizer after a restart", _options_of_the_past(model, which)
                )
            return
        position.first_options[model] = (position.finished, now if first is None else first[1], now)

    def same(self, what: str, place: str, found: str | None) -> None:
        """Send the digest of `what` at `place`, which must be equal on all replicas, if there is one."""
        if found is not None:
            self._send(what, place, found)

    def _send(self, what: str, which: str, mine: str) -> None:
        session = self._session
        if session.replicas > 1 and session.reducer is not None:
            session.reducer.send_control(0, (KIND, session.generation, [what, which, mine]))

    def _take(self, sender: int, generation: int, body: Any) -> None:
        """Take a replica's digest. Runs on rank 0, in the thread that receives control messages."""
        what, which, found = body
        session, key = self._session, (generation, what, which)
        if generation != session.generation:
            return
        digests = self._waiting.setdefault(key, {})
        digests[sender] = found
        if len(digests) == session.replicas:
            del self._waiting[key]
            self._compare(generation, what, len(set(digests.values())) == 1)
        while len(self._waiting) > _PENDING:
            del self._waiting[next(iter(self._waiting))]

    def _compare(self, generation: int, what: str, equal: bool) -> None:
        problem = None
        if what.startswith("stream"):
            problem = None if equal else _different_streams(what)
        elif what.startswith("order"):
            problem = None if equal else _different_orders(what)
        elif what.startswith("options"):
            problem = None if equal else _different_options(what)
        elif equal:
            count = self._equal[generation, what] = self._equal.get((generation, what), 0) + 1
            problem = equal_inputs(what) if count >= COMPARED_INPUTS else None
            if problem is None:
                return
        self._session.metrics.report_problem(f"the {what}", problem)


def options_text(optimizer: torch.optim.Optimizer) -> str:
    """Return the numbers among the options of an optimizer's parameter groups, to six digits."""
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]
    numbers = [
        leaf.item() if isinstance(leaf, torch.Tensor) and leaf.numel() == 1 else leaf
        for leaf in pytree.tree_leaves(groups)
    ]
    return " ".join(f"{number:.6g}" for number in numbers if isinstance(number, int | float))


def equal_inputs(what: str) -> str:
    """Return the message for the case that all replicas train on the same inputs."""
    kind, _, model = what.partition(" inputs of ")
    if kind == "own":
        return (
            f"every replica trains {model} on the same batches: a plain DataLoader is read whole by each of "
            f"them. Use adaptdl_elastic.torch.AdaptiveDataLoader (or AdaptiveDataLoader.from_loader), which "
            f"shares the samples among the replicas"
        )
    return (
        f"every replica trains {model} on the same inputs, though the loader hands out different samples: "
        f"look for noise that is drawn with one seed (own_random_streams = False, a torch.Generator of the "
        f"script's own), or for samples that are all equal"
    )


def _different_streams(what: str) -> str:
    return (
        f"the replicas read different samples from the {what}, each of which is then shared among them once "
        f"more: most samples are not used. Let the data set yield the same on every replica: leave out its "
        f"division by rank (RANK, torch.distributed.get_rank, split_dataset_by_node), which the loader "
        f"makes, and let an order that is drawn at random follow from set_epoch(epoch)"
    )


def _different_orders(what: str) -> str:
    return (
        f"the {what}, which its sampler gives, differs between the replicas: samples are handed out twice or "
        f"not at all. Let the sampler draw from its `generator`, from torch's, NumPy's or Python's global "
        f"stream, or by set_epoch(epoch), and not from a generator of another name"
    )


def _options_of_the_past(model: str, which: str) -> str:
    return (
        f"after the restart {model}'s optimizer steps with the options of the {which}'s first step, such as "
        f"its learning rate, and not with those before the restart: a counter of the script, such as "
        f"`updates = epoch * per_epoch`, does not know how much of the epoch is done. Compute the learning "
        f"rate from adl.progress(), keep the counter in an adl.Value, or give the scheduler state_dict() and "
        f"load_state_dict()"
    )


def _different_options(what: str) -> str:
    return (
        f"the {what}, such as its learning rate, differ between the replicas, whose parameters drift apart: "
        f"a newcomer's variables have their first values. Give the scheduler to the model as lr_scheduler, "
        f"compute the learning rate from adl.progress() or the number of adl.steps, or keep what it follows "
        f"from in an adl.Value"
    )
