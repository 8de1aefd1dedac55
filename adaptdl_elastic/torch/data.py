"""Load data with a batch size and a position that survive any change of the number of replicas.

    loader = AdaptiveDataLoader(dataset, batch_size=64, shuffle=True, drop_last=True)
    loader.autoscale_batch_size(1024, local_bsz_bounds=(16, 128), gradient_accumulation=True)
    for epoch in remaining_epochs_until(30):
        for inputs, targets in loader:
            ...

Rules:

- A data loop inside another one belongs to the outer loop's body. It runs from its start, unless it was open
  when the job was interrupted, as the second loader of a `zip`: then it continues.
- A data loop outside of epochs runs from its start each time the script reaches it.
- `batch_size` is the total over all replicas.
- Without autoscaling, every sample of the data set is handed out exactly once per epoch, also if the number
  of replicas changes meanwhile. With `drop_last`, a rest that does not fill a batch is left out.
- With autoscaling, an epoch ends when training has made the statistical progress of one pass at the initial
  batch size. No sample is repeated before all others have been handed out, and a further pass has another
  order. A stream is read once per epoch.
- The order depends only on the script's seed (`torch.manual_seed`, or that of `generator`), the epoch and the
  number of the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from adaptdl_elastic._checks import flag
from adaptdl_elastic._values import RetryDataLoop
from adaptdl_elastic.torch._bootstrap import current_session
from adaptdl_elastic.torch._data.batch_comparison import digest
from adaptdl_elastic.torch._data.inner_loop import map_batches, run_inner_loop, stream_batches
from adaptdl_elastic.torch._data.iterable import Settings, iterate_stream, wrap_stream
from adaptdl_elastic.torch._data.loader import AdaptiveDataLoaderHelper
from adaptdl_elastic.torch._data.loader_mixin import AdaptiveDataLoaderMixin
from adaptdl_elastic.torch._data.loaders_of_others import (
    check_order,
    check_samplers,
    loader_arguments,
    refuse_foreign,
)
from adaptdl_elastic.torch._data.partition import derive_seed
from adaptdl_elastic.torch._data.registry import current_dataloader, initial_seed, registry
from adaptdl_elastic.torch._data.sampler import ElasticBatchSampler, ElasticSampler, GivenSampler
from adaptdl_elastic.torch._runtime.position import script_position

__all__ = [
    "AdaptiveDataLoader",
    "AdaptiveDataLoaderHelper",
    "AdaptiveDataLoaderMixin",
    "ElasticSampler",
    "batch_counts",
    "current_dataloader",
    "expected_batches",
    "is_optim_step",
]

T_co = TypeVar("T_co", covariant=True)


def batch_counts() -> bool:
    """Return whether the current batch counts for training.

    A process may get no batch of a loop: the loop finished before a restart or before the process joined, or
    there are fewer samples than replicas. The loop's body then runs once with the loop's first batch, so that
    variables which it assigns exist after the loop. This batch does not count: optimizers, accumulators and
    `report` do nothing, and all other state that the library knows is restored. Check this function before
    the body does something else that must not be done twice, such as writing to a file.
    """
    return not current_session().dry


def is_optim_step() -> bool:
    """Return whether `optimizer.step()` steps after the current batch.

    False in the middle of an accumulation window. True outside of data loops.
    """
    loader = current_dataloader()
    return loader is None or loader.is_optim_step()


def expected_batches() -> int | None:
    """Return how many batches the running data loop will have given to this process when it ends.

    They are those so far and those that are left at the current batch size. The number changes with the batch
    size and the number of replicas. After a restart it begins with the first batch of the new process. Set
    the total of a progress bar to it in the loop's body::

        bar = tqdm(loader)
        for batch in bar:
            bar.total = adl.expected_batches()

    Returns:
        None outside of data loops, in a batch that does not count, and for a stream.
    """
    loader = current_dataloader()
    return None if loader is None else loader.expected_batches()


class AdaptiveDataLoader(DataLoader[T_co], AdaptiveDataLoaderMixin):
    """Share a data set among the replicas like a `torch.utils.data.DataLoader` that is elastic.

    Args:
        dataset: A map-style data set, or an `IterableDataset` that yields the same stream on every replica.
            Every replica reads the whole stream, with all its workers, and keeps its share.
        batch_size: Initial number of samples per optimizer step, over all replicas. The replicas' shares
            differ by one sample at most and are weighted by their size. At most half as many replicas as
            samples have a share. With autoscaling, the shares are equal, rounded up.
        shuffle: Whether to use a random order.
        **kwargs: Arguments of DataLoader. A `sampler` or `batch_sampler` must give the same order on every
            replica; each replica takes its share. A batch of a `batch_sampler` is one optimizer step, shared
            by all replicas.

    Raises:
        ValueError: an argument is not supported by an elastic loader, or arguments contradict each other.
        TypeError: an argument has the wrong type.
    """

    _is_accelerate_prepared = True
    """Mark for the package Accelerate: it does not share the samples of such a loader a second time."""

    def __init__(
        self, dataset: Dataset[T_co], batch_size: int = 1, shuffle: bool | None = False, **kwargs: Any
    ) -> None:
        given = check_samplers(dataset, kwargs.pop("sampler", None), kwargs.pop("batch_sampler", None))
        drop_last = flag("drop_last", kwargs.pop("drop_last", False))
        shuffle = flag("shuffle", shuffle)
        check_order(given, batch_size, shuffle, drop_last)
        generator = kwargs.pop("generator", None)
        if kwargs.get("in_order", True) is not True:
            raise ValueError(
                "in_order=False: the replicas could not tell which samples were used; leave it out"
            )
        if not isinstance(generator, torch.Generator | None):
            raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
        self._seed_generator: torch.Generator | None = generator
        self._stream = isinstance(dataset, IterableDataset)
        refuse_foreign(dataset)
        if given is not None and given.batches:
            sized: Any = dataset
            batch_size = GivenSampler(sized, given.sampler, True).batch_size
        AdaptiveDataLoaderMixin.__init__(self, batch_size)
        self._elastic.drop_last = drop_last
        self._elastic.repeats()
        self._workers_generator = torch.Generator()
        if self._stream:
            self._elastic_batches: Any = None
            wrapped: Any = wrap_stream(dataset, shuffle, drop_last, kwargs)
            super().__init__(
                wrapped,
                batch_size=None,
                collate_fn=wrapped.collate,
                generator=self._workers_generator,
                **kwargs,
            )
            self.__dict__.update(batch_size=self._elastic.batch_size, drop_last=drop_last)
            return
        if not hasattr(dataset, "__len__"):
            raise ValueError(
                f"{type(dataset).__name__} has no length: a map-style data set needs __len__, a stream must "
                f"be a torch.utils.data.IterableDataset"
            )
        sampler = (
            ElasticSampler(dataset, shuffle)
            if given is None
            else GivenSampler(dataset, given.sampler, given.batches)
        )
        self._elastic_batches = ElasticBatchSampler(sampler, drop_last)
        self._settle()
        super().__init__(
            dataset, batch_sampler=self._elastic_batches, generator=self._workers_generator, **kwargs
        )
        # Attributes that a script may read. DataLoader forbids setting them and, with a batch_sampler, gives
        # them other values.
        self.__dict__.update(batch_size=self._elastic.batch_size, drop_last=drop_last, sampler=sampler)

    @classmethod
    def from_loader(cls, loader: DataLoader[T_co], batch_size: int | None = None) -> AdaptiveDataLoader[T_co]:
        """Make an elastic loader from a `DataLoader`, or from torchdata's StatefulDataLoader.

        Args:
            loader: Loader whose data set, order, workers and collate_fn are taken over. It is not iterated.
            batch_size: Initial number of samples per optimizer step, over all replicas; None: the batch size
                of `loader`.

        Raises:
            ValueError: an elastic loader does not support a setting of `loader`.
            TypeError: `loader` is not a DataLoader.
        """
        if isinstance(loader, cls):
            return loader
        return cls(**loader_arguments(loader, batch_size))

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Let the batch size change, within limits. Not for a loader with a `batch_sampler`."""
        if not self._stream and self._elastic_batches.given:
            raise ValueError(
                "autoscale_batch_size with a batch_sampler, whose batches are what they are: give a sampler, "
                "or shuffle=True"
            )
        super().autoscale_batch_size(max_batch_size, local_bsz_bounds, gradient_accumulation)

    def weigh_by(self, count: Callable[[Any], Any]) -> None:
        """Weigh the gradient of each batch by its items instead of its samples.

        For a loss that is the mean over the items of a batch, such as its tokens with a label. The gradient
        of a step is then that of the mean over all items of all replicas. The batches of a step are read
        ahead, and the replicas add up the number of items in each step.

        Args:
            count: Function that returns the number of items of a batch; None: as many as samples.
        """
        self._elastic.items.count = count

    def __len__(self) -> int:
        """Return the number of batches that each replica gets in one pass at the current batch size."""
        if self._stream:
            raise TypeError("a loader of an IterableDataset has no length")
        self._settle()
        return len(self._elastic_batches)

    def _settle(self) -> None:
        """Give the sampler the present sizes of batches."""
        helper, batches = self._elastic, self._elastic_batches
        batches.local, batches.step = helper.current_local_bsz, helper.step_samples
        batches.largest = helper.largest_pass

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._iterate(current_dataloader() is None)

    def _iterate(self, early: bool) -> Iterator[Any]:
        """Yield the batches of a data loop.

        Args:
            early: Whether no data loop was running when this iterator was made.
        """
        helper = self._elastic
        if current_dataloader() is not None:
            yield from self._inside_another(early)
            return
        with helper.context():
            if helper.skipdone():
                yield from self._dry_batch()
                return
            while True:
                try:
                    yield from self._pass()
                except RetryDataLoop:
                    continue
                if not helper.handed_out:
                    yield from self._dry_batch()
                if helper.ended():
                    return

    def _inside_another(self, early: bool) -> Iterator[Any]:
        """Yield the batches of a loop inside the running one."""
        if self._stream:
            stream: Any = self.dataset
            batches = stream_batches(self._elastic, stream, super().__iter__)
            yield from run_inner_loop(self._elastic, stream.parts, batches, early)
            return
        batches = map_batches(self._elastic, self._elastic_batches, bool(self.drop_last), super().__iter__)
        yield from run_inner_loop(self._elastic, 0, batches, early)

    def _dry_batch(self) -> Iterator[Any]:
        """Yield the loop's first batch, which does not count, to a process that gets no other batch."""
        helper, session, state = self._elastic, current_session(), script_position()
        local = helper.current_local_bsz
        if self._stream:
            stream: Any = self.dataset
            seed = state.seeds.get(helper.key, 0)
            sizes = local, helper.step_samples or 0, helper.largest_pass or 0
            settings = Settings(seed, state.finished, session.replicas, session.rank, *sizes, 1, 0, 0)
            stream.configure(settings, [0] * stream.parts)
            with helper.dry_batch():
                for item in super().__iter__():
                    yield item.samples
                    break
            return
        batches = self._elastic_batches
        batches.sampler.seed = state.seeds.get(helper.key, 0)
        batches.sampler.set_epoch(state.finished, 0)
        size = batches.sampler.size
        if not size or (self.drop_last and helper.batch_size > size):
            return
        batches.local = local
        with helper.dry_batch():
            batches.first_only = batches.read_by_loader = True
            try:
                iterator: Iterator[Any] = super().__iter__()
                batch = next(iterator)
            finally:
                batches.first_only = batches.read_by_loader = False
            yield batch

    def _check_drop_last(self, samples: int) -> None:
        """Report a problem if drop_last leaves out all samples."""
        helper, problem = self._elastic, None
        if self.drop_last and samples < helper.batch_size:
            problem = (
                f"batch_size={helper.batch_size} is more than the {samples} samples of the data set, and "
                f"drop_last leaves all of them out: nothing is done in this loop. Give a batch_size of "
                f"{samples} at most, or leave drop_last out"
            )
        current_session().metrics.report_problem(f"the samples of loader {helper.key}", problem)

    def _pass(self) -> Iterator[Any]:
        """Yield all batches that are left of the data loop."""
        seed = initial_seed(self._elastic, self._seed_generator)
        if self._stream:
            stream: Any = self.dataset
            yield from iterate_stream(stream, self._elastic, seed, super().__iter__)
            return
        helper, sampler = self._elastic, self._elastic_batches.sampler
        sampler.seed = seed
        sampler.set_epoch(script_position().finished)
        helper.end_index = sampler.size
        if isinstance(sampler, GivenSampler) and helper.session.replicas > 1:
            place = script_position()
            where = f"{place.finished} {place.entered} {place.index}"
            registry().comparison.same(f"order of loader {helper.key}", where, digest(sampler.order()))
        script_position().tell_samples(helper.end_index, sampler.shuffle)
        self._check_drop_last(helper.end_index)
        over = self._ended()
        while not over:
            known = yield from self._segment()
            over = self._ended() if known is None else known

    def _ended(self) -> bool:
        helper, size = self._elastic, self._elastic.end_index
        if helper.current_index < size:
            return False
        nothing = not size or (self.drop_last and helper.batch_size > size)
        if nothing or not (helper.adaptive and helper.training):
            return True
        return helper.epoch_done()

    def _segment(self) -> Generator[Any, None, bool | None]:
        """Hand out batches of one size, to the end of the pass or until the size changes.

        Returns:
            Whether the loop is over; None: ask, because the replicas have changed.
        """
        helper, batches, size = self._elastic, self._elastic_batches, self._elastic.end_index
        local, settled = helper.resolve_batch_size(), helper.settled
        begun = helper.current_index
        self._settle()
        batches.accumulation = helper.size.accumulation_steps if helper.training else 0
        full = helper.current_batch_size
        # A batch that has grown beyond the data set takes all of it, instead of leaving all of it out.
        grown = helper.adaptive and helper.batch_size <= size < full and begun % size == 0
        batches.drop_last = self.drop_last and not grown
        helper.left_out = (size - begun % size) % full if batches.drop_last else 0
        helper.count_from = batches.count_from
        batches.fill = helper.fills(batches.sampler.shuffle)
        batches.in_turn = not batches.fill
        batches.sampler.set_epoch(script_position().finished, begun)
        self._seed_workers()
        batches.read_by_loader = True
        iterator: Iterator[Any] = super().__iter__()
        batches.read_by_loader = False
        helper.pause()
        plan = batches.plan()
        window = next(plan, None)
        while window is not None:
            mine = tuple(map(len, batches.mine(window, helper.current_index)))
            helper.begin_window(window, mine)
            own = (next(iterator) if samples or batches.fill else None for samples in mine)
            items = helper.items
            read = items.counted(own, mine, helper) if items.count or items.shares else own
            for chunk, samples, batch in zip(window, mine, read, strict=True):
                if samples or batches.fill:
                    helper.begin_batch()
                    yield batch
                helper.current_index += chunk
                # a batch that does not fit is split into chunks that differ by one sample per replica
                even = chunk == local * helper.session.replicas or sum(window) == full
                helper.end_batch(even=even, boundary=False)
            if helper.settled != settled:
                return None
            window, over = next(plan, None), False
            if window is None:
                helper.leave_out_rest((begun // size + 1) * size)
            if window is None or begun >= size:
                over = self._ended()
            helper.pass_boundary(last=over)
            if helper.settled != settled:
                return None
            if over or window is None:
                return over
        # there was no window left from the start
        helper.leave_out_rest((begun // size + 1) * size)
        return None

    def _seed_workers(self) -> None:
        """Seed the workers' random numbers, differently for every replica, epoch and position."""
        session, state = current_session(), script_position()
        seed = initial_seed(self._elastic, self._seed_generator)
        self._workers_generator.manual_seed(
            derive_seed(seed, state.finished, state.entered, state.index, session.rank)
        )
