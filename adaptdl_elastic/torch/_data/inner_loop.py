"""Hand out the batches of a data loop inside another data loop.

The replicas share the samples as in any data loop, at the loader's initial batch size. Nothing is
synchronised: every replica reads its share without waiting for the others.

A batch that has not fitted into memory makes the batches of its loop smaller, so that the loop has more of
them. If memory divides the batches of the outermost loop, those of a loop beside it are divided into as many.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from adaptdl_elastic import _session
from adaptdl_elastic.torch._data.iterable import Settings, ShardedStream
from adaptdl_elastic.torch._data.loader import AdaptiveDataLoaderHelper
from adaptdl_elastic.torch._data.partition import derive_seed
from adaptdl_elastic.torch._data.sampler import ElasticBatchSampler
from adaptdl_elastic.torch._runtime.inner_loops import InnerLoop, InnerPosition
from adaptdl_elastic.torch._runtime.position import script_position
from adaptdl_elastic.torch._tuning.batch_size import local_batch
from adaptdl_elastic.torch._tuning.memory_limit import memory_limit

logger = logging.getLogger(__name__)

_MANY_STEPS = (
    # optimizer steps of a model in one batch of the outermost loop after which a warning is printed
    20
)

Batches = Callable[[InnerLoop], Iterator[Any]]
"""Function that yields (batch, position behind it, whether it has samples of this replica)."""


def run_inner_loop(
    helper: AdaptiveDataLoaderHelper, parts: int, batches: Batches, early: bool = False
) -> Iterator[Any]:
    """Yield the batches of a data loop inside the running one.

    In a loop that ends in the body in which it began, a replica without samples of a batch gets none. With
    `zip` every replica must get a batch each time: it gets one that another replica has, too.

    Args:
        helper: The loader's helper.
        parts: Number of parts of the loader's stream; 0 for a map-style data set.
        batches: Function that yields the batches from a position on.
        early: Whether the loop's iterator was made before the outermost loop began.

    Raises:
        RuntimeError: the loader adapts its batch size, or its loop is running already.
    """
    session = _session.current()
    if session.loader is helper:
        raise RuntimeError(
            "two data loops over one loader at the same time: make a second AdaptiveDataLoader of its "
            "data set"
        )
    if helper.adaptive:
        raise RuntimeError(
            "a data loop over the loader with autoscale_batch_size inside another data loop: its steps are "
            "those of the job, so let its loop be the outer one; with zip() give it first"
        )
    # the body runs only so that its names exist
    if session.dry:
        helper.sync_local_bsz()
        start = _start(helper, parts)
        yield from (batch for batch, _, _ in islice(batches(InnerLoop(start, start)), 1))
        return
    again = True
    while again:
        inner = script_position().inner
        loop, exhausted = inner.enter(helper.key, _start(helper, parts), early), False
        try:
            yield from _from_position(loop, helper, batches)
            exhausted = True
        finally:
            inner.leave(helper.key, loop, exhausted)
            if not loop.open:
                # the step's time includes this loop
                session.metrics.pause()
        again = loop.outdated


def _start(helper: AdaptiveDataLoaderHelper, parts: int) -> InnerPosition:
    """Return the position of a loop that begins here. Each inner loop gets an order of its own."""
    outer, state = helper.session.loader, script_position()
    seed = 0 if outer is None else state.seeds.get(outer.key, 0)
    where = state.finished, state.entered, max(state.inner.window, 0), state.inner.begun
    return 0, derive_seed(seed, zlib.crc32(helper.key.encode()), *where), 0, *[0] * parts


def _from_position(loop: InnerLoop, helper: AdaptiveDataLoaderHelper, batches: Batches) -> Iterator[Any]:
    """Yield batches from the loop's position on; begin again there if it or the replicas have changed."""
    session, inner, handed_out, spare = _session.current(), script_position().inner, False, None
    window, before, over = inner.window, _steps(), False
    while not over:
        helper.sync_local_bsz()
        known, over = (session.generation, loop.changes, _sizes(helper, loop)), True
        for batch, position, mine in batches(loop):
            loop.position = position
            if not (mine or loop.open or _shared(helper, loop)):
                spare = batch
                continue
            handed_out = True
            yield batch
            if loop.outdated:
                return
            if inner.window != window:
                window, before = inner.window, _steps()
            elif max(map(int.__sub__, _steps(), before), default=0) == _MANY_STEPS:
                logger.warning(
                    "%d optimizer steps in one batch of a data loop: no checkpoint is saved and no replica "
                    "comes or goes before its next batch. If an iterator was left open, delete it; else let "
                    "the loop that trains be the outer one",
                    _MANY_STEPS,
                )
            if known != (session.generation, loop.changes, _sizes(helper, loop)):
                over = False
                break
    if spare is not None and not handed_out:
        logger.warning(
            "a data loop inside another one has fewer samples than replicas: replica %d gets a batch that "
            "another replica has, too",
            session.rank,
        )
        yield spare


def _sizes(helper: AdaptiveDataLoaderHelper, loop: InnerLoop) -> tuple[int, int | None]:
    """Return the samples of a full window, and the most of one replica in a batch; None: any number.

    A loop beside the outermost one has as many batches in a window as the outermost loop, so that neither
    ends before the other.
    """
    outer, batch = helper.session.loader, helper.batch_size
    if not loop.beside:
        limit = memory_limit().inner.get(helper.key)
        return (batch if limit is None else min(batch, helper.session.replicas * limit)), limit
    if not isinstance(outer, AdaptiveDataLoaderHelper) or outer.adaptive or not outer.training:
        return batch, None
    more, given = outer.size.accumulation_steps, local_batch(batch, helper.session.replicas)
    if not more:
        return batch, None
    divided = -(-given // (more + 1))
    if -(-given // divided) != more + 1:
        # rather too many batches, which do not end the outermost loop
        divided = max(given // (more + 1), 1)
    return batch, divided


def _shared(helper: AdaptiveDataLoaderHelper, loop: InnerLoop) -> bool:
    """Return whether every replica needs a batch each time, because it may train."""
    return loop.beside or helper.fills()


def _steps() -> list[int]:
    return [model.attempted_steps for model in _session.current().models]


def map_batches(
    helper: AdaptiveDataLoaderHelper,
    batches: ElasticBatchSampler,
    drop_last: bool,
    iterate: Callable[[], Iterator[Any]],
) -> Batches:
    """Return the batches of a map-style data set.

    Args:
        helper: The loader's helper.
        batches: The loader's batch sampler.
        drop_last: Whether a last batch that is not full is left out.
        iterate: Function that makes an iterator over the loader.
    """

    def found(loop: InnerLoop) -> Iterator[Any]:
        index, seed, turn = loop.position
        batches.sampler.seed = seed
        batches.sampler.set_epoch(script_position().finished)
        if index >= batches.sampler.size:
            return
        batches.sampler.set_epoch(script_position().finished, index)
        batches.step, batches.largest = _sizes(helper, loop)
        batches.drop_last, batches.fill, batches.in_turn = drop_last, True, not _shared(helper, loop)
        batches.read_by_loader = True
        plan = [*batches.plan()]
        iterator = iterate()
        batches.read_by_loader = False
        for window in plan:
            for chunk, mine in zip(window, batches.mine(window, index), strict=True):
                loop.samples = len(mine)
                index += chunk
                yield next(iterator), (index, seed, turn), loop.samples > 0

    return found


def stream_batches(
    helper: AdaptiveDataLoaderHelper, stream: ShardedStream, iterate: Callable[[], Iterator[Any]]
) -> Batches:
    """Return the batches of a stream. Arguments as for `map_batches`."""

    def found(loop: InnerLoop) -> Iterator[Any]:
        session, (index, seed, turn, *counts) = _session.current(), loop.position
        step, largest = _sizes(helper, loop)
        at = seed, script_position().finished, session.replicas, session.rank
        in_turn = not _shared(helper, loop)
        stream.configure(Settings(*at, 0, step, largest or 0, 1, in_turn, turn), counts)
        for item in iterate():
            index += item.size
            counts[item.part] += item.size
            turn = (item.part + 1) % stream.parts
            loop.samples = item.mine
            yield item.samples, (index, seed, turn, *counts), loop.samples > 0

    return found
