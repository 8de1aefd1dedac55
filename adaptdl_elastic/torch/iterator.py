"""Iterate over one long sequence of tokens for truncated back-propagation through time.

The sequence is cut into `batch_size` parallel streams. A batch holds the next `bptt_len` tokens of each
stream. So the hidden state at the end of one batch is the initial hidden state of the next batch::

    for epoch in remaining_epochs_until(5):
        hidden = None
        for text, target in AdaptiveBPTTIterator(tokens, batch_size=20, bptt_len=35):
            if hidden is not None and hidden.size(1) != text.size(1):
                hidden = None  # the number of streams has changed
            ...

If the number of replicas or the batch size changes during an epoch, the unread tokens are cut into streams
again. Each token is still read once, except for fewer than `batch_size` tokens at the end. The new streams
begin at other places of the sequence, so the old hidden states do not fit them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from adaptdl_elastic import checkpoint
from adaptdl_elastic._checks import integer
from adaptdl_elastic.torch._bootstrap import current_session
from adaptdl_elastic.torch._data.loader_mixin import AdaptiveDataLoaderMixin
from adaptdl_elastic.torch._data.partition import taken

__all__ = ["AdaptiveBPTTIterator", "Batch"]

Range = tuple[int, int]
"""Positions from the first, inclusive, to the second, exclusive."""


class Batch(NamedTuple):
    """Hold tokens and, for each, the next token; both of shape (sequence, streams of this replica)."""

    text: torch.Tensor
    target: torch.Tensor


class AdaptiveBPTTIterator(AdaptiveDataLoaderMixin):
    """Iterate over a sequence of tokens in batches of parallel streams.

    Args:
        dataset: Tokens as a one-dimensional tensor of integers, or a sequence of integers.
        batch_size: Initial number of streams over all replicas, shared as by an `AdaptiveDataLoader`.
        bptt_len: Tokens of each stream in a batch; the last batch of an epoch may have fewer.
        **kwargs: `max_batch_size` and `local_bsz_bounds`, as for `autoscale_batch_size`; `device`, to which
            batches are moved.

    Raises:
        ValueError: the tokens are not one sequence of at least two, there are fewer tokens than streams, or
            `bptt_len` < 1.
        TypeError: an argument is unknown.
    """

    def __init__(
        self, dataset: torch.Tensor | Sequence[int], batch_size: int, bptt_len: int, **kwargs: Any
    ) -> None:
        tokens = _tokens(dataset)
        length = integer(bptt_len)
        if length is None or length < 1:
            raise ValueError(
                f"bptt_len={bptt_len!r}: give the number of tokens of a batch's streams, 1 or more"
            )
        max_batch_size = kwargs.pop("max_batch_size", None)
        bounds = kwargs.pop("local_bsz_bounds", None)
        self._device = kwargs.pop("device", None)
        if kwargs:
            raise TypeError(f"unknown arguments: {', '.join(sorted(kwargs))}")
        super().__init__(batch_size)
        self._elastic.sample_dimension = 1  # (time, streams)
        if self._elastic.batch_size > len(tokens) - 1:
            raise ValueError(
                f"batch_size={batch_size!r}: {len(tokens)} tokens make at most {len(tokens) - 1} streams"
            )
        if bounds is not None and max_batch_size is None:
            raise ValueError(f"local_bsz_bounds={bounds!r} without max_batch_size: give that, too")
        self._tokens, self._bptt_len = tokens, length
        self._state = _Layouts(f"adaptdl-bptt-{self._elastic.key}")
        checkpoint.load_state(self._state)
        if max_batch_size is not None:
            self.autoscale_batch_size(max_batch_size, bounds)

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Let the batch size change during training. Gradient accumulation is not supported."""
        if gradient_accumulation:
            raise ValueError("gradient_accumulation with an AdaptiveBPTTIterator: not supported")
        super().autoscale_batch_size(max_batch_size, local_bsz_bounds)

    def __len__(self) -> int:
        """Return the number of batches that each replica gets in one pass at the current batch size."""
        return -(-((len(self._tokens) - 1) // self._elastic.current_batch_size) // self._bptt_len)

    def __iter__(self) -> Iterator[Batch]:
        helper = self._elastic
        with helper.context():
            if helper.skipdone():
                yield from self._dry_batch()
                return
            # counted in sequences of bptt_len tokens, so that a pass has end_index / batch_size steps
            helper.end_index = -(-(len(self._tokens) - 1) // self._bptt_len)
            if helper.current_index == 0:
                self._state.history = []
            while True:
                yield from self._pass()
                helper.current_index += -helper.current_index % helper.end_index
                over = not (helper.adaptive and helper.training) or helper.epoch_done()
                if not over:
                    self._state.history = []
                helper.pass_boundary(last=over)
                if over:
                    break
            if not helper.handed_out:
                yield from self._dry_batch()

    def _dry_batch(self) -> Iterator[Batch]:
        """Yield the first batch, which does not count, to a process that gets no other batch of the loop."""
        helper = self._elastic
        size = len(self._tokens) - 1
        rows = size // helper.full_chunk
        if rows:
            with helper.dry_batch():
                yield self._block(Remaining([(0, size)]), 0, min(rows, self._bptt_len))

    def _pass(self) -> Iterator[Batch]:
        """Yield the batches of one pass over the tokens."""
        helper, history = self._elastic, self._state.history
        while True:
            helper.sync_local_bsz()
            settled, streams = helper.settled, helper.full_chunk
            left = Remaining.after(len(self._tokens) - 1, history, self._bptt_len)
            rows = left.size // streams
            if not rows:
                return
            history.append([streams, 0])
            for row in range(0, rows, self._bptt_len):
                length = min(self._bptt_len, rows - row)
                final = row + length == rows
                with helper.profile(commit=length == self._bptt_len, boundary=not final):
                    yield self._block(left, row, length)
                    helper.current_index += streams
                    history[-1][1] += 1
                if helper.settled != settled:
                    break

    def _block(self, left: Remaining, row: int, length: int) -> Batch:
        streams, local = self._elastic.full_chunk, self._elastic.current_local_bsz
        replicas, largest = self._elastic.session.replicas, self._elastic.largest_pass
        first = sum(len(taken(streams, replicas, rank, largest)) for rank in range(current_session().rank))
        first %= streams  # a replica without a share
        positions = torch.from_numpy(left.block(streams, first, local, row, length))
        text, target = self._tokens[positions], self._tokens[positions + 1]
        return Batch(text.to(self._device), target.to(self._device))


def _tokens(dataset: Any) -> torch.Tensor:
    try:
        tokens = dataset if isinstance(dataset, torch.Tensor) else torch.as_tensor(dataset)
        got = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
    except (TypeError, ValueError, RuntimeError):
        tokens, got = torch.empty(0), f"a {type(dataset).__name__} of something else"
    fine = tokens.dim() == 1 and len(tokens) > 1
    if not fine or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(
            f"a one-dimensional tensor of at least two integer tokens is needed, got {got}; a torchtext "
            f"dataset has to be turned into one first"
        )
    return tokens


class _Layouts(checkpoint.TensorState):
    """Keep the layouts of this pass in order: numbers of streams, and batches read in each layout."""

    required = False

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.expires = current_session().epoch  # a script may make an iterator in every epoch
        self.history: list[list[int]] = []

    def state_dict(self) -> Any:
        return {"history": self.history}

    def load_state_dict(self, state_dict: Any) -> None:
        self.history = [list(layout) for layout in state_dict["history"]]


class Remaining:
    """Hold the positions of a sequence that have not been read, in order."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.ranges = [r for r in ranges if r[0] < r[1]]
        sizes = [stop - start for start, stop in self.ranges]
        self._starts = np.array([start for start, _ in self.ranges], dtype=np.int64)
        self._offsets = np.cumsum([0, *sizes[:-1]] if sizes else [0])
        self.size = sum(sizes)

    @classmethod
    def after(cls, size: int, history: Sequence[Sequence[int]], bptt_len: int) -> Remaining:
        """Return the unread positions of a sequence.

        Args:
            size: Number of positions.
            history: (streams, batches read) of every layout so far.
            bptt_len: Tokens of each stream in a batch.
        """
        left = cls([(0, size)])
        for streams, batches in history:
            left = left._without(streams, batches * bptt_len)
        return left

    def _without(self, streams: int, rows_read: int) -> Remaining:
        rows = self.size // streams
        read = min(rows_read, rows)
        ranges = [r for s in range(streams) for r in self._slice(s * rows + read, (s + 1) * rows)]
        return Remaining([*ranges, *self._slice(streams * rows, self.size)])

    def _slice(self, start: int, stop: int) -> list[Range]:
        """Return the ranges of the unread positions from number `start` to `stop`, exclusive."""
        found, offset = [], 0
        for first, last in self.ranges:
            low, high = max(start - offset, 0), min(stop - offset, last - first)
            if low < high:
                found.append((first + low, first + high))
            offset += last - first
        return found

    def block(self, streams: int, first: int, count: int, row: int, length: int) -> NDArray[np.int64]:
        """Return the positions of one block of tokens.

        Args:
            streams: Streams into which the unread positions are cut.
            first: First stream of the block.
            count: Number of streams in the block.
            row: First row (position within each stream) of the block.
            length: Number of rows in the block.

        Returns:
            Positions in the sequence, shape (length, count).
        """
        rows = self.size // streams
        index = np.arange(first, first + count) * rows + np.arange(row, row + length)[:, None]
        which = np.searchsorted(self._offsets, index, side="right") - 1
        return np.asarray(index - self._offsets[which] + self._starts[which], dtype=np.int64)
