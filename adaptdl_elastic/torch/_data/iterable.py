"""Streams: `IterableDataset`s in an elastic loader.

What can be promised of a stream is less than of a data set with a length. Every replica reads the whole
stream and keeps its share, so the stream must be the same on every replica and in every generation (a
function of the epoch: `set_epoch(epoch)` is called if there is one). After a restart what had been
consumed is read again and skipped. In return every sample is handed out exactly once per epoch, as with
any other data set. Refused: shuffling (shuffle in the stream), more than one worker (each would read a
stream of its own), autoscaling (an epoch has no known length).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from adaptdl_elastic import _session
from adaptdl_elastic.torch._data.loader import AdaptiveDataLoaderHelper
from adaptdl_elastic.torch._data.partition import windows
from adaptdl_elastic.torch._runtime.position import script_position

Item = tuple[int, list[Any]]
"""A chunk's size over all replicas, and this replica's samples of it."""


class ShardedStream(IterableDataset[Item]):
    """This replica's share of every chunk of a stream.

    What changes between iterations is in shared memory, because a persistent worker has its own copy of
    everything else.
    """

    def __init__(
        self, dataset: IterableDataset[Any], drop_last: bool, collate: Callable[[list[Any]], Any]
    ) -> None:
        self.dataset = dataset
        self.drop_last = drop_last
        self._collate = collate
        self._settings = torch.zeros(6, dtype=torch.int64)
        self._settings.share_memory_()  # type: ignore[no-untyped-call]

    def configure(self, epoch: int, start: int, replicas: int, rank: int, local: int, fill: bool) -> None:
        """Where the next iteration begins, and whose share it is."""
        self._settings.copy_(torch.tensor([epoch, start, replicas, rank, local, int(fill)]))

    def __iter__(self) -> Iterator[Item]:
        epoch, start, replicas, rank, local, fill = self._settings.tolist()
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        for chunk in _chunks(islice(iter(self.dataset), start, None), replicas, local, self.drop_last):
            yield len(chunk), chunk[rank::replicas] or (chunk[:1] if fill else [])

    def collate(self, item: Item) -> tuple[int, Any]:
        """In a worker, where there is one: the samples as a batch, None where there are none."""
        size, mine = item
        return size, self._collate(mine) if mine else None


def _chunks(stream: Iterator[Any], replicas: int, local: int, drop_last: bool) -> Iterator[list[Any]]:
    """Yield the stream in chunks; reads ahead to make the last ones as `partition` wants them."""
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
        ValueError: for what can not be done with a stream.
    """
    if shuffle:
        raise ValueError("shuffle=True with an IterableDataset: shuffle inside the stream, by its set_epoch")
    if kwargs.get("num_workers", 0) > 1:
        raise ValueError(
            f"num_workers={kwargs['num_workers']} with an IterableDataset: each worker would read a stream "
            f"of its own, and nobody could tell which samples were used; give 0 or 1"
        )
    collate = kwargs.pop("collate_fn", None) or default_collate
    return ShardedStream(dataset, drop_last, collate)


def iterate_stream(
    stream: ShardedStream,
    helper: AdaptiveDataLoaderHelper,
    make_iterator: Callable[[], Iterator[tuple[int, Any]]],
    prepare: Callable[[], None],
) -> Iterator[Any]:
    """Run the data loop over a stream."""
    while True:
        session = _session.current()
        local, settled = helper.resolve_batch_size(), helper.settled
        stream.configure(
            script_position().finished,
            helper.current_index,
            session.replicas,
            session.rank,
            local,
            helper.training,
        )
        prepare()
        iterator = make_iterator()
        item = next(iterator, None)
        while item is not None:
            size, batch = item
            helper.begin_window((size,))
            if batch is not None:
                helper.begin_batch()
                yield batch
            helper.current_index += size
            helper.end_batch(even=size == local * session.replicas, boundary=False)
            if helper.settled != settled:
                break
            item = next(iterator, None)
            helper.pass_boundary(last=item is None)
            if helper.settled != settled:
                break
        else:
            return
