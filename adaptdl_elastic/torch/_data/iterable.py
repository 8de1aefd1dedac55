"""Share streams (`IterableDataset`s) among the replicas in an elastic loader.

The problem. The samples of a stream have no indices by which the replicas could share them, and their number
is unknown. With several worker processes each worker reads the stream by itself.

What is done. Every replica reads the whole stream and keeps its share. So the stream must be the same on
every replica and in every generation: a function of the epoch. The data set's `set_epoch(epoch)` is called if
it has one. Random numbers that the stream draws from torch, NumPy or Python are seeded from the script's seed
and the epoch. After a change of the number of replicas the stream is read again from its start, and the
samples that were handed out before are skipped. So every sample is handed out exactly once per epoch.

With W workers the stream has W *parts*. A data set that reads the worker id or the number of workers from
torch's `get_worker_info` divides the samples among the workers itself. Of any other data set, part w is every
W-th sample, beginning with sample w. Each chunk comes from one part, and the parts take turns. The position
is the number of samples of each part that have been handed out. So the number of workers must stay the same
during an epoch.

An epoch is one pass, also with autoscaling. `shuffle=True` is refused: the stream itself must shuffle.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, _utils, default_collate, get_worker_info

from adaptdl_elastic import _session
from adaptdl_elastic.torch._data import partition
from adaptdl_elastic.torch._data.batch_comparison import digest
from adaptdl_elastic.torch._data.loader import AdaptiveDataLoaderHelper
from adaptdl_elastic.torch._data.partition import derive_seed, windows
from adaptdl_elastic.torch._data.random_streams import drawn_from, seed_all
from adaptdl_elastic.torch._data.registry import registry
from adaptdl_elastic.torch._runtime.position import script_position

logger = logging.getLogger(__name__)

_END: Any = object()


class Item(NamedTuple):
    """Hold this replica's share of a chunk."""

    size: int
    """Samples of the chunk, over all replicas."""

    samples: Any
    """List of this replica's samples; after `collate`, a batch, or None if this replica has no sample."""

    part: int

    digest: str
    """Digest of the first sample that was read; empty in all but the first chunk."""

    mine: int
    """Samples of this replica that count."""


class Settings(NamedTuple):
    """Describe where an iteration begins and which replica's share it yields."""

    seed: int
    epoch: int
    replicas: int
    rank: int
    local: int
    """Samples of one replica in a full chunk, with autoscaling."""

    step: int
    """Samples of a step without autoscaling; 0 with autoscaling."""

    largest: int
    """Most samples of one replica in a chunk; 0: any number."""

    fill: int
    """1 if a replica without samples of a chunk gets samples that do not count, else 0."""

    in_turn: int
    """1 if chunks that are too small for two samples on each replica go to the replicas in turn, else 0."""

    turn: int
    """Part from which the first chunk comes."""


class _WorkerOfPart:
    """Replace torch's WorkerInfo in a worker whose part differs from its worker id."""

    def __init__(self, info: Any, part: int) -> None:
        self._info, self._part = info, part
        self.asked = False
        """Whether the data set has read the worker id or the number of workers."""

    @property
    def id(self) -> int:
        self.asked = True
        return self._part

    @property
    def num_workers(self) -> int:
        self.asked = True
        return int(self._info.num_workers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._info, name)


class ShardedStream(IterableDataset[Item]):
    """Yield this replica's share of every chunk of a stream.

    The settings of an iteration are in shared memory: a persistent worker has its own copy of every other
    attribute.

    Args:
        dataset: The stream.
        drop_last: Whether to leave out chunks that are not full, at the end of each part.
        collate: Function that makes a batch of a list of samples.
        workers: Number of worker processes that read the stream; 0 for none.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        drop_last: bool,
        collate: Callable[[list[Any]], Any],
        workers: int,
    ) -> None:
        self.dataset = dataset
        self.drop_last = drop_last
        self.parts = max(workers, 1)
        self._collate = collate
        self._shared = torch.zeros(len(Settings._fields) + self.parts, dtype=torch.int64)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]

    def configure(self, settings: Settings, counts: list[int]) -> None:
        """Let the next iteration begin after the first `counts[w]` samples of each part w."""
        self._shared.copy_(torch.tensor([*settings, *counts]))

    def __iter__(self) -> Iterator[Item]:
        values = self._shared.tolist()
        settings, counts = Settings(*values[: -self.parts]), values[-self.parts :]
        seed, info = derive_seed(settings.seed, settings.epoch), get_worker_info()
        if info is None:
            return drawn_from(seed, self._items(self._whole(settings.epoch), 0, counts[0], settings, True))
        seed_all(seed)
        if self.parts == 1:
            return self._items(self._whole(settings.epoch), 0, counts[0], settings, True)
        part = (info.id + settings.turn) % self.parts
        samples = self._part(info, part, settings.epoch, seed)
        return self._items(samples, part, counts[part], settings, info.id == 0)

    def _whole(self, epoch: int) -> Iterator[Any]:
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        yield from self.dataset

    def _part(self, info: Any, part: int, epoch: int, seed: int) -> Iterator[Any]:
        """Yield the samples of one part. Runs in a worker if there are several."""
        worker: Any = _utils.worker
        worker._worker_info = known = _WorkerOfPart(info, part)
        samples = self._whole(epoch)
        # a generator's body, which may call get_worker_info, runs from here on
        first = next(samples, _END)
        if first is _END:
            return
        if known.asked:
            # the workers read different samples: each may draw its own
            seed_all(derive_seed(seed, part))
        every = chain([first], samples)
        yield from every if known.asked else islice(every, part, None, self.parts)

    def _items(
        self, samples: Iterator[Any], part: int, start: int, settings: Settings, leads: bool
    ) -> Iterator[Item]:
        replicas, largest = settings.replicas, settings.largest or None
        compared, left = leads and replicas > 1, islice(samples, start, None)
        if settings.step:
            sizes = cycle(partition.chunks(settings.step, replicas, largest))
            turn = (part - settings.turn) % self.parts
            chunks = _written(left, islice(sizes, turn, None, self.parts), self.drop_last)
        else:
            chunks = _chunks(left, replicas, settings.local, self.drop_last)
        for chunk in chunks:
            found = (digest(chunk[0]) if compared else None) or ""
            compared = False
            at = start if settings.in_turn else None
            taken = partition.taken(len(chunk), replicas, settings.rank, largest, at)
            mine = [chunk[index] for index in taken]
            if not mine and settings.fill:
                mine = chunk[: partition.fill(largest)]
            start += len(chunk)
            yield Item(len(chunk), mine, part, found, len(taken))

    def collate(self, item: Item) -> Item:
        """Return `item` with its samples as a batch, or None if it has none. Runs in the worker, if any."""
        return item._replace(samples=self._collate(item.samples) if item.samples else None)


def _written(stream: Iterator[Any], sizes: Iterator[int], drop_last: bool) -> Iterator[list[Any]]:
    """Yield the stream in chunks of these sizes."""
    for size in sizes:
        chunk = list(islice(stream, size))
        if not chunk or (drop_last and len(chunk) < size):
            return
        yield chunk


def _chunks(stream: Iterator[Any], replicas: int, local: int, drop_last: bool) -> Iterator[list[Any]]:
    """Yield the stream in chunks of equal local batches.

    Reads `replicas` samples ahead of each chunk, so that `partition.windows` can size the last chunks.
    """
    full, buffer = replicas * local, deque[Any]()
    for sample in stream:
        buffer.append(sample)
        if len(buffer) == full + replicas:
            yield [buffer.popleft() for _ in range(full)]
    for window in windows(0, len(buffer), replicas, local, drop_last=drop_last):
        for size in window:
            yield [buffer.popleft() for _ in range(size)]


def wrap_stream(dataset: Any, shuffle: bool, drop_last: bool, kwargs: dict[str, Any]) -> ShardedStream:
    """Wrap the stream for its loader, and take `collate_fn` out of the loader's arguments.

    Raises:
        ValueError: `shuffle` is true.
    """
    if shuffle:
        raise ValueError("shuffle=True with an IterableDataset: shuffle inside the stream, by its set_epoch")
    collate = kwargs.pop("collate_fn", None) or default_collate
    return ShardedStream(dataset, drop_last, collate, kwargs.get("num_workers", 0))


def iterate_stream(
    stream: ShardedStream,
    helper: AdaptiveDataLoaderHelper,
    seed: int,
    make_iterator: Callable[[], Iterator[Item]],
) -> Iterator[Any]:
    """Yield the batches of a data loop over a stream.

    Args:
        stream: The stream.
        helper: Position and batch size of the loader.
        seed: Seed of the loader.
        make_iterator: Function that makes an iterator over `stream` with its present settings.
    """
    while True:
        session, state = _session.current(), script_position()
        local, settled = helper.resolve_batch_size(), helper.settled
        turn, counts = _position(stream.parts, state.index, state.stream_positions)
        at = seed, state.finished, session.replicas, session.rank
        sizes = local, helper.step_samples or 0, helper.largest_pass or 0
        fills = helper.fills()
        stream.configure(Settings(*at, *sizes, fills, not fills, turn), counts)
        items = iter(make_iterator())
        window = _next_window(items, helper, stream.drop_last)
        while window:
            if window[0].digest:
                where = f"{state.finished} {state.entered} {state.index}"
                registry().comparison.same(f"stream of loader {helper.key}", where, window[0].digest)
            mine = tuple(item.mine for item in window)
            helper.begin_window(tuple(item.size for item in window), mine)
            helper.items.counted((item.samples for item in window), mine, helper)
            for item in window:
                if item.samples is not None:
                    helper.begin_batch()
                    yield item.samples
                counts[item.part] += item.size
                helper.current_index += item.size
                turn = (item.part + 1) % stream.parts
                if item is window[-1]:
                    state.note_stream(helper.current_index, turn, counts)
                full = helper.window_samples == helper.current_batch_size
                even = full or item.size == local * session.replicas
                helper.end_batch(even=even, boundary=False)
            if helper.settled != settled:
                break
            window = _next_window(items, helper, stream.drop_last)
            helper.pass_boundary(last=not window)
            if helper.settled != settled:
                break
        else:
            return


def _next_window(items: Iterator[Item], helper: AdaptiveDataLoaderHelper, drop_last: bool) -> list[Item]:
    """Return the chunks of the next optimizer step; an empty list at the end."""
    full = 1 + (helper.size.accumulation_steps if helper.training else 0)
    window = list(islice(items, full))
    return [] if drop_last and len(window) < full else window


def _position(parts: int, index: int, known: list[tuple[int, int, list[int]]]) -> tuple[int, list[int]]:
    """Return the part of the next chunk, and how many of the first `index` samples each part gave.

    Args:
        parts: Number of parts.
        index: Samples handed out so far, over all replicas.
        known: Remembered positions: (index, next part, samples of each part).
    """
    if parts == 1 or not index:
        return 0, [index] * parts
    for at, turn, counts in reversed(known):
        if at == index and len(counts) == parts:
            return turn, list(counts)
    logger.warning(
        "num_workers was another one when this pass over the stream began, and is %d now: in what is left "
        "of it samples may come twice or not at all",
        parts,
    )
    each, more = divmod(index, parts)
    return 0, [each + (part < more) for part in range(parts)]
