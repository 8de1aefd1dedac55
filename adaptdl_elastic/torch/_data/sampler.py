"""Define samplers that can start at any position of a pass, on any number of replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from adaptdl_elastic import _session
from adaptdl_elastic._checks import flag, integer, whole
from adaptdl_elastic.torch._data import partition
from adaptdl_elastic.torch._data.partition import Window
from adaptdl_elastic.torch._data.random_streams import seeded

FOREIGN_READER = (
    "another loader reads the samplers of an AdaptiveDataLoader, which share the samples among the replicas "
    "already: if it shares them once more, most are not used, and their position is not kept. Iterate over "
    "the AdaptiveDataLoader itself: do not give it to a framework that makes a loader of its own from it"
)


class ElasticSampler(Sampler[int]):
    """Yield this replica's indices of a pass over `dataset`, from any position on.

    The order depends only on the seed, the epoch and the number of the pass. Replica r of R takes every R-th
    sample from the position on, beginning with sample r. Nothing is padded, so the replicas' numbers of
    samples may differ by one.

    Args:
        dataset: Object with a length.
        shuffle: Whether to use a random order, different in each epoch.
        seed: Seed of the random order; None: `torch.initial_seed()`, which must be the same on all replicas.
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
        # set by the script; None: the job's. The same for _rank.
        self._num_replicas: int | None = None
        self._rank: int | None = None

    @property
    def num_replicas(self) -> int:
        """Number of replicas that share the pass: the job's, unless the script has set another number."""
        return _session.current().replicas if self._num_replicas is None else self._num_replicas

    @num_replicas.setter
    def num_replicas(self, replicas: int) -> None:
        self._num_replicas = whole("num_replicas", replicas, 1)

    @property
    def rank(self) -> int:
        """Rank of this replica: its rank in the job, unless the script has set another one."""
        return _session.current().rank if self._rank is None else self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._rank = whole("rank", rank, 0)

    def set_epoch(self, epoch: int, index: int = 0) -> None:
        """Go to the position after the first `index` samples of `epoch`, counted over all replicas.

        An `index` beyond the length of the data set lies in a further pass, which has another order.
        """
        whole_epoch, whole_index = integer(epoch), integer(index)
        if whole_epoch is None or whole_index is None or whole_epoch < 0 or whole_index < 0:
            raise ValueError(f"set_epoch({epoch!r}, {index!r}): both are integers that count from 0")
        self.epoch, self.index = whole_epoch, whole_index

    @property
    def size(self) -> int:
        """Samples of the current pass, over all replicas."""
        return len(self.dataset)

    def batch_sizes(self) -> list[int] | None:
        """Return the sizes of the batches of the pass; None if the sampler does not fix them."""
        return None

    def order(self) -> torch.Tensor:
        """Return the order of the current pass, for all replicas: int64 indices, shape (size,)."""
        size = self.size
        seed = torch.initial_seed() if self.seed is None else self.seed
        return partition.order(size, self.shuffle, seed, self.epoch, self.index // size if size else 0)

    def __iter__(self) -> Iterator[int]:
        size = self.size
        if size:
            yield from self.order()[self.index % size + self.rank :: self.num_replicas].tolist()

    def __len__(self) -> int:
        size = self.size
        return len(range(self.index % size + self.rank, size, self.num_replicas)) if size else 0


class GivenSampler(ElasticSampler):
    """Yield this replica's indices in the order of the script's own sampler or batch sampler.

    The script's sampler must give the same order on every replica and after a restart. So before each pass
    its `set_epoch` is called, and its `generator` and the global random streams are seeded from the seed,
    the epoch and the number of the pass.

    Args:
        dataset: Data set that the indices refer to.
        sampler: Iterable of indices, or of lists of indices.
        batches: Whether `sampler` yields lists.
    """

    def __init__(self, dataset: Sized, sampler: Iterable[Any], batches: bool) -> None:
        super().__init__(dataset, shuffle=False)
        self.sampler, self.batches = sampler, batches
        # samples of a pass, the same for every pass
        self._size: int | None = None
        # the last drawn pass: ((seed, epoch, number of the pass), indices, sizes of the batches)
        self._drawn: tuple[tuple[int, int, int], torch.Tensor, list[int]] | None = None

    @property
    def size(self) -> int:
        """Samples of a pass, over all replicas."""
        if self._size is None:
            self._size = len(self._pass()[0])
        return self._size

    @property
    def batch_size(self) -> int:
        """Samples per batch: the sampler's `batch_size`, or the largest batch of this pass if it has none."""
        said = integer(getattr(self.sampler, "batch_size", None))
        return max([1, *self._pass()[1]]) if said is None else said

    def batch_sizes(self) -> list[int] | None:
        """Return the sizes of the sampler's batches in the current pass; None if it yields single indices."""
        return self._pass()[1] if self.batches else None

    def order(self) -> torch.Tensor:
        """Return the order of the current pass, for all replicas.

        Raises:
            RuntimeError: the pass does not have the same number of samples as the first one.
        """
        order = self._pass()[0]
        if len(order) != self.size:
            raise RuntimeError(
                f"{type(self.sampler).__name__} gave {self.size} samples in one pass and {len(order)} in "
                f"another: an elastic loader needs passes of one length"
            )
        return order

    def _pass(self) -> tuple[torch.Tensor, list[int]]:
        """Return the indices of the current pass, and the sizes of its batches."""
        seed = torch.initial_seed() if self.seed is None else self.seed
        where = (seed, self.epoch, self.index // self._size if self._size else 0)
        if self._drawn is None or self._drawn[0] != where:
            drawn = self._draw(partition.derive_seed(*where))
            batches = [list(batch) for batch in drawn] if self.batches else [drawn]
            indices = torch.tensor([index for batch in batches for index in batch], dtype=torch.int64)
            self._drawn = where, indices, [len(batch) for batch in batches if batch]
        return self._drawn[1], self._drawn[2]

    def _draw(self, seed: int) -> list[Any]:
        inner = getattr(self.sampler, "sampler", None)
        for one in (self.sampler, inner):
            if callable(getattr(one, "set_epoch", None)):
                one.set_epoch(self.epoch)  # type: ignore[union-attr]
            generator = getattr(one, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
        with seeded(seed):
            return list(self.sampler)


class ElasticBatchSampler(Sampler[list[int]]):
    """Yield this replica's batches, from the sampler's position to the end of the pass.

    The attributes are set before an iterator is made, and not changed while it runs, because a loader with
    workers reads ahead of the batches that it hands out. `plan` yields the windows of the coming iterator.

    Args:
        sampler: Sampler that holds the order and the position.
        drop_last: Whether to leave out a last window that would not be full.
    """

    def __init__(self, sampler: ElasticSampler, drop_last: bool) -> None:
        self.sampler = sampler
        self._share = 1, 0
        self.drop_last = drop_last
        # samples of one replica in a full batch
        self.local = 1
        # batches without an optimizer step in a full window
        self.accumulation = 0
        # samples of a step, on any number of replicas; None: those of equal local batches
        self.step: int | None = None
        # most samples of one replica in a batch; None: any number
        self.largest: int | None = None
        # True while the AdaptiveDataLoader that owns this makes an iterator
        self.read_by_loader = False
        # yield only the first batch of the pass, with at least one sample
        self.first_only = False
        # give a replica without samples of a chunk samples that do not count
        self.fill = False
        # no replica needs a batch: chunks too small for all go to them in turn
        self.in_turn = False

    @property
    def given(self) -> bool:
        """Whether the batches are those of the script's own batch sampler."""
        return isinstance(self.sampler, GivenSampler) and self.sampler.batches

    def plan(self) -> Iterator[Window]:
        """Return the windows from the sampler's position to the end of the pass, before `mine` is called."""
        size = self.sampler.size
        start, given = self.sampler.index % size if size else 0, self.sampler.batch_sizes()
        self._share = self.sampler.num_replicas, self.sampler.rank
        replicas = self._share[0]
        if given is not None:
            sizes = _rest(given, start)
        elif self.step is not None:
            sizes = partition.steps(start, size, self.step, self.drop_last)
        else:
            return partition.windows(start, size, replicas, self.local, self.accumulation, self.drop_last)
        return partition.step_windows(sizes, replicas, self.largest)

    def mine(self, window: Window, index: int) -> list[range]:
        """Return this replica's samples of each chunk of the window at `index`, from the chunk's first."""
        return partition.shares(window, *self._share, self.largest, index if self.in_turn else None)

    def __iter__(self) -> Iterator[list[int]]:
        session = _session.current()
        if not self.read_by_loader and session.replicas > 1:
            session.metrics.report_problem("the samplers of an AdaptiveDataLoader", FOREIGN_READER)
        return self._batches()

    def _batches(self) -> Iterator[list[int]]:
        sampler = self.sampler
        size, replicas, rank, index = sampler.size, sampler.num_replicas, sampler.rank, sampler.index
        if not size:
            return
        # NumPy slices faster than torch
        order, position = sampler.order().numpy(), index % size
        if self.first_only:
            given = sampler.batch_sizes()
            first = order[: given[0] if given else replicas * self.local]
            yield first[rank::replicas].tolist() or first[:1].tolist()
            return
        for window in self.plan():
            shares = partition.shares(window, replicas, rank, self.largest, index if self.in_turn else None)
            for chunk, mine in zip(window, shares, strict=True):
                samples = order[position : position + chunk]
                if mine:
                    yield samples[mine.start : mine.stop : mine.step].tolist()
                elif self.fill:
                    yield samples[: partition.fill(self.largest)].tolist()
                position, index = position + chunk, index + chunk

    def __len__(self) -> int:
        """Return the number of batches of a whole pass at the present batch size."""
        given = self.sampler.batch_sizes()
        return self.count_from(0) if given is None else len(given)

    def count_from(self, start: int) -> int:
        """Return the number of batches from position `start` of a pass to its end."""
        size, given, replicas = self.sampler.size, self.sampler.batch_sizes(), self.sampler.num_replicas
        if given is not None:
            return sum(len(partition.chunks(one, replicas, self.largest)) for one in _rest(given, start))
        if self.step is not None:
            return partition.count_step_chunks(start, size, replicas, self.step, self.largest, self.drop_last)
        return partition.count_chunks(start, size, replicas, self.local, self.accumulation, self.drop_last)


def _rest(sizes: list[int], start: int) -> Iterator[int]:
    """Yield the sizes of the script's batches from sample `start` on; the first may be the rest of one."""
    end = 0
    for size in sizes:
        end += size
        if end > start:
            yield min(size, end - start)
