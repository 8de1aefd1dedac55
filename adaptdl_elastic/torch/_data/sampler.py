"""Samplers that can begin anywhere in a pass, on any number of replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from adaptdl_elastic import _session
from adaptdl_elastic._checks import flag, integer, whole
from adaptdl_elastic.torch._data import partition
from adaptdl_elastic.torch._data.partition import Window


class ElasticSampler(Sampler[int]):
    """This replica's indices of a pass over `dataset`, from any position on.

    The order is a function of the seed and the epoch alone. Replica r of R takes every R-th sample from
    the position on, beginning with the r-th; nothing is padded, so that replicas may get numbers of
    samples that differ by one.

    Args:
        dataset: Anything with a length.
        shuffle: Whether to go through it in a random order that differs between epochs.
        seed: Of that order; None: rank 0's `torch.initial_seed()` must be the same everywhere.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int | None = None) -> None:
        if not hasattr(dataset, "__len__"):
            raise TypeError(f"a data set needs __len__ to be sampled from, {type(dataset).__name__} has none")
        given = None if seed is None else integer(seed)
        if seed is not None and given is None:
            raise TypeError(f"seed={seed!r}: give an integer, or None for torch's")
        self.dataset = dataset
        self.shuffle = flag("shuffle", shuffle)
        self.seed = given
        self.epoch = 0
        self.index = 0
        self._num_replicas: int | None = None  # as the script has set them; None: the job's
        self._rank: int | None = None

    @property
    def num_replicas(self) -> int:
        """How many replicas share the pass: the job's, unless the script has set another number."""
        return _session.current().replicas if self._num_replicas is None else self._num_replicas

    @num_replicas.setter
    def num_replicas(self, replicas: int) -> None:
        self._num_replicas = whole("num_replicas", replicas, 1)

    @property
    def rank(self) -> int:
        """This replica's rank: the job's, unless the script has set another one."""
        return _session.current().rank if self._rank is None else self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._rank = whole("rank", rank, 0)

    def set_epoch(self, epoch: int, index: int = 0) -> None:
        """Go to a position: `index` samples of `epoch` have been taken, on all replicas together.

        An `index` beyond the length of the data set is in a further pass over it, in another order.
        """
        whole_epoch, whole_index = integer(epoch), integer(index)
        if whole_epoch is None or whole_index is None or whole_epoch < 0 or whole_index < 0:
            raise ValueError(f"set_epoch({epoch!r}, {index!r}): both are integers that count from 0")
        self.epoch, self.index = whole_epoch, whole_index

    def order(self) -> torch.Tensor:
        """The order of the present pass, for all replicas: int64 indices, shape (len(dataset),)."""
        size = len(self.dataset)
        seed = torch.initial_seed() if self.seed is None else self.seed
        return partition.order(size, self.shuffle, seed, self.epoch, self.index // size if size else 0)

    def __iter__(self) -> Iterator[int]:
        size = len(self.dataset)
        if size:
            yield from self.order()[self.index % size + self.rank :: self.num_replicas].tolist()

    def __len__(self) -> int:
        size = len(self.dataset)
        return partition.share(size - self.index % size, self.num_replicas, self.rank) if size else 0


class ElasticBatchSampler(Sampler[list[int]]):
    """This replica's batches from a position to the end of its pass.

    It is set before every iterator and then left alone, because a loader with workers runs ahead of what
    has been handed out. `plan` yields what it is going to do.

    Args:
        sampler: Knows the order and the position.
    """

    def __init__(self, sampler: ElasticSampler, drop_last: bool) -> None:
        self.sampler = sampler
        self.drop_last = drop_last
        self.local = 1
        self.accumulation = 0
        self.first_only = False  # yield the first batch of the pass and no more, at least one sample
        self.fill = False  # give a replica that would have nothing a sample that does not count

    def plan(self) -> Iterator[Window]:
        """The windows from the sampler's position to the end of the pass."""
        size = len(self.sampler.dataset)
        return partition.windows(
            self.sampler.index % size if size else 0,
            size,
            self.sampler.num_replicas,
            self.local,
            self.accumulation,
            self.drop_last,
        )

    def __iter__(self) -> Iterator[list[int]]:
        sampler = self.sampler
        size, replicas, rank = len(sampler.dataset), sampler.num_replicas, sampler.rank
        if not size:
            return
        order, position = sampler.order().numpy(), sampler.index % size  # slices faster than a tensor
        if self.first_only:
            yield order[: replicas * self.local][rank::replicas].tolist() or order[:1].tolist()
            return
        for window in self.plan():
            for chunk in window:
                mine = order[position : position + chunk][rank::replicas].tolist()
                if not mine and self.fill:
                    mine = order[position : position + 1].tolist()
                if mine:
                    yield mine
                position += chunk

    def __len__(self) -> int:
        """Batches of a whole pass at the present size."""
        size = len(self.sampler.dataset)
        replicas = self.sampler.num_replicas
        return partition.count_chunks(0, size, replicas, self.local, self.accumulation, self.drop_last)
