"""Divide samples among replicas. Pure functions.

A pass over a data set is a permutation of it. The permutation depends only on the seed, the epoch and the
number of the pass. The pass is consumed from its front in *chunks*: a chunk is the samples that all replicas
together take in one forward and backward pass. Within a chunk, replica r of R takes every R-th sample,
beginning with sample r. A *window* is the one or more chunks of one optimizer step. So the position in a pass
is a single number that is valid for any number of replicas. A change of the number of replicas between two
windows neither loses nor repeats a sample.

At the end of a pass, the samples left may not fill a window. The chunks of the last window are then made
smaller, as equal as possible. If fewer than R samples would be left after the next window, the samples left
are divided into two windows of equal size instead. So every replica has at least one sample in every chunk,
unless fewer than R samples are left. That happens only if the data set is smaller than R, or if the number of
replicas has grown at the very end of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

Window = tuple[int, ...]
"""Sizes of the chunks of one optimizer step, in samples over all replicas."""


def plan_window(
    left: int, replicas: int, local: int, accumulation: int = 0, step: int | None = None
) -> Window:
    """Return the chunks of the next optimizer step when `left` samples of the pass are left.

    Args:
        left: Samples of the pass that no replica has taken yet, at least 1.
        replicas: Number of replicas R.
        local: Samples of one replica in a full chunk, at least 1.
        accumulation: Accumulation steps A; a full window has A + 1 chunks.
        step: Samples of a full window; None: R · `local` · (A + 1), which is the most.

    Returns:
        Chunk sizes, which sum up to at most `left`.
    """
    full = _full(replicas, local, accumulation, step)
    rest = left - full
    if rest >= replicas or rest == 0:
        return split(full, replicas, local)
    if rest > 0 and left >= 2 * replicas:
        return split(left - left // 2, replicas, local)
    return split(left, replicas, local)


def _full(replicas: int, local: int, accumulation: int, step: int | None) -> int:
    """Return the samples of a full window."""
    return replicas * local * (accumulation + 1) if step is None else step


def split(samples: int, replicas: int, local: int) -> Window:
    """Split `samples` into the fewest chunks, as equal as possible, of at least R samples if possible."""
    count = min(-(-samples // (replicas * local)), max(1, samples // replicas))
    each, more = divmod(samples, count)
    return (each + 1,) * more + (each,) * (count - more)


def windows(
    start: int,
    total: int,
    replicas: int,
    local: int,
    accumulation: int = 0,
    drop_last: bool = False,
    step: int | None = None,
) -> Iterator[Window]:
    """Yield the windows of the rest of a pass.

    Args:
        start: Position at which the first window begins.
        total: Samples of the whole pass.
        replicas: Number of replicas.
        local: Samples of one replica in a full chunk.
        accumulation: Accumulation steps A; a full window has A + 1 chunks.
        drop_last: Whether to leave out a last window that would not be full.
        step: Samples of a full window, see `plan_window`.
    """
    full = _full(replicas, local, accumulation, step)
    while start < total:
        if drop_last:
            if total - start < full:
                return
            window = split(full, replicas, local)
        else:
            window = plan_window(total - start, replicas, local, accumulation, step)
        yield window
        start += sum(window)


def share(chunk: int, replicas: int, rank: int) -> int:
    """Return how many samples of a chunk of `chunk` samples belong to replica `rank`."""
    return max(0, -(-(chunk - rank) // replicas))


def count_chunks(
    start: int,
    total: int,
    replicas: int,
    local: int,
    accumulation: int = 0,
    drop_last: bool = False,
    step: int | None = None,
) -> int:
    """Return the number of chunks from `start` to the end of a pass; arguments as for `windows`."""
    each = accumulation + 1
    full = _full(replicas, local, accumulation, step)
    if drop_last:
        return max(total - start, 0) // full * each
    last = _skip(start, total, full)
    rest = windows(last, total, replicas, local, accumulation, step=step)
    return (last - start) // full * each + sum(map(len, rest))


def _skip(start: int, total: int, full: int) -> int:
    """Return the position after all full windows from `start` on, except the last three."""
    return start + max((total - start) // full - 3, 0) * full


def derive_seed(*parts: int) -> int:
    """Derive a well-mixed 63-bit seed from `parts` by NumPy's SeedSequence."""
    sequence = np.random.SeedSequence([part & 0xFFFFFFFFFFFFFFFF for part in parts])
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)


def order(size: int, shuffle: bool, seed: int, epoch: int, number: int = 0) -> torch.Tensor:
    """Return the sample order of one pass.

    Args:
        size: Number of samples.
        shuffle: Whether the order is random; otherwise it is 0, 1, 2, …
        seed: Seed of the random order.
        epoch: Epoch of the pass.
        number: Number of the pass within the epoch.

    Returns:
        int64 indices, shape (size,).
    """
    if not shuffle:
        return torch.arange(size)
    generator = torch.Generator()
    generator.manual_seed(derive_seed(seed, epoch, number))
    return torch.randperm(size, generator=generator)
