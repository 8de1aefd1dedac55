"""Which samples go to which replica: pure functions.

A pass over a data set is a permutation of it that depends on the seed, the epoch and the number of the
pass alone. It is consumed from its front by *chunks*, what all replicas together take in one forward and
backward pass. Within a chunk replica r of R takes every R-th sample, beginning with the r-th. One or more
chunks are a *window*: what goes into one optimizer step. A position in the pass is therefore one number,
meaningful for any number of replicas, and a change of size between two windows loses and repeats nothing.

The end of a pass. What is left need not fill a window. Its chunks are then made smaller, as equal as can
be; and if what would be left after the next window is less than one sample per replica, the two windows
are made of equal size instead. So every replica has at least one sample in every chunk unless the whole
rest is smaller than R, which happens only to data sets smaller than R, or when the number of replicas
has just grown at the very end of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

Window = tuple[int, ...]
"""Sizes of the chunks of one optimizer step, in samples over all replicas."""


def plan_window(left: int, replicas: int, local: int, accumulation: int = 0) -> Window:
    """Return the chunks of the next optimizer step when `left` samples of the pass are left.

    Args:
        left: Samples of the pass that nobody has had, at least 1.
        replicas: Number of replicas R.
        local: Local batch b of a full chunk, at least 1.
        accumulation: Accumulation steps A: a full window has A + 1 chunks.

    Returns:
        Chunk sizes, which sum up to at most `left`.
    """
    full = replicas * local * (accumulation + 1)
    rest = left - full
    if rest >= replicas or rest == 0:
        return (replicas * local,) * (accumulation + 1)
    if rest > 0 and left >= 2 * replicas:
        return _split(left - left // 2, replicas, local)
    return _split(left, replicas, local)


def _split(samples: int, replicas: int, local: int) -> Window:
    """Split `samples` into the fewest chunks, as equal as possible, and of at least R if possible."""
    count = min(-(-samples // (replicas * local)), max(1, samples // replicas))
    each, more = divmod(samples, count)
    return (each + 1,) * more + (each,) * (count - more)


def windows(
    start: int, total: int, replicas: int, local: int, accumulation: int = 0, drop_last: bool = False
) -> Iterator[Window]:
    """Yield the windows that take a pass of `total` samples from `start` to its end.

    With `drop_last` windows that would not be full are left out.
    """
    full = replicas * local * (accumulation + 1)
    while start < total:
        if drop_last:
            if total - start < full:
                return
            window: Window = (replicas * local,) * (accumulation + 1)
        else:
            window = plan_window(total - start, replicas, local, accumulation)
        yield window
        start += sum(window)


def share(chunk: int, replicas: int, rank: int) -> int:
    """How many samples of a chunk are `rank`'s."""
    return max(0, -(-(chunk - rank) // replicas))


def count_chunks(
    start: int, total: int, replicas: int, local: int, accumulation: int = 0, drop_last: bool = False
) -> int:
    """How many chunks there are from `start` to the end of a pass."""
    each = accumulation + 1
    full = replicas * local * each
    if drop_last:
        return max(total - start, 0) // full * each
    last = _skip(start, total, full)
    return (last - start) // full * each + sum(map(len, windows(last, total, replicas, local, accumulation)))


def _skip(start: int, total: int, full: int) -> int:
    """Return the start of the last few windows, reached from `start` by full ones."""
    return start + max((total - start) // full - 3, 0) * full


def derive_seed(*parts: int) -> int:
    """Derive a well mixed 63-bit seed from `parts` (numpy's SeedSequence)."""
    sequence = np.random.SeedSequence([part & 0xFFFFFFFFFFFFFFFF for part in parts])
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)


def order(size: int, shuffle: bool, seed: int, epoch: int, number: int = 0) -> torch.Tensor:
    """Return the order of pass `number` of an epoch: int64 indices, shape (size,)."""
    if not shuffle:
        return torch.arange(size)
    generator = torch.Generator()
    generator.manual_seed(derive_seed(seed, epoch, number))
    return torch.randperm(size, generator=generator)
