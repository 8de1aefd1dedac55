"""Divide samples among replicas. Pure functions.

A pass over a data set is a permutation of it. The permutation depends only on the seed, the epoch and the
number of the pass. The pass is consumed from its front in *chunks*: a chunk is the samples that all replicas
together take in one forward and backward pass. Within a chunk, replica r of R takes every R-th sample,
beginning with sample r, so that shares differ by one sample at most. Where a share would be a single sample,
fewer replicas share the chunk, of at least two samples each (`taken`). A *window* is the one or more chunks
of one optimizer step. So the position in a pass is a single number that is valid for any number of replicas.
A change of the number of replicas between two windows neither loses nor repeats a sample.

There are two rules for the sizes of windows:

* Without autoscaling, a window is the batch that the script has written, on any number of replicas, and the
  last window is the rest (`steps`). It has one chunk, unless memory divides it (`chunks`).
* With autoscaling, a full window has equal local batches on all replicas (`windows`). At the end of a pass,
  the samples left may not fill a window. The chunks of the last window are then made smaller, as equal as
  possible. If fewer than R samples would be left after the next window, the samples left are divided into two
  windows of equal size instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

Window = tuple[int, ...]
"""Sizes of the chunks of one optimizer step, in samples over all replicas."""


def taken(
    chunk: int, replicas: int, rank: int, largest: int | None = None, start: int | None = None
) -> range:
    """Return the samples of a chunk that belong to replica `rank`, counted from the chunk's first.

    Args:
        chunk: Samples of the chunk.
        replicas: Number of replicas.
        rank: Replica.
        largest: Most samples that a replica may have. It may make single samples necessary. None: any number.
        start: Position of the chunk, if replicas without samples need no batch. Chunks that are too small
            for two samples on each replica then go to the replicas in turn.
    """
    if start is not None and chunk < 2 * replicas:
        return range((rank - start) % replicas, chunk, replicas)
    sharing = min(replicas, max(chunk // 2, 1 if largest is None else -(-chunk // largest)))
    return range(rank if rank < sharing else chunk, chunk, sharing)


def shares(
    window: Window, replicas: int, rank: int, largest: int | None = None, start: int | None = None
) -> list[range]:
    """Return which samples of each chunk of a window belong to replica `rank`. Arguments as for `taken`."""
    found = []
    for chunk in window:
        found.append(taken(chunk, replicas, rank, largest, start))
        start = None if start is None else start + chunk
    return found


def fill(largest: int | None) -> int:
    """Return how many samples a replica without a share repeats: two, for a model with BatchNorm."""
    return min(2, largest or 2)


def steps(start: int, total: int, batch: int, drop_last: bool) -> Iterator[int]:
    """Yield the samples of each step of the rest of a pass: `batch`, and at last those that are left."""
    for position in range(start, total, batch):
        if not drop_last or position + batch <= total:
            yield min(batch, total - position)


def step_windows(steps: Iterable[int], replicas: int, largest: int | None) -> Iterator[Window]:
    """Yield the chunks of each step, from the samples of each step."""
    for samples in steps:
        yield chunks(samples, replicas, largest)


def chunks(samples: int, replicas: int, largest: int | None) -> Window:
    """Return a step's chunks: one, or as many as needed for `largest` samples of one replica in each."""
    return _divide(samples, 1 if largest is None else -(-samples // (replicas * largest)))


def count_step_chunks(
    start: int, total: int, replicas: int, batch: int, largest: int | None, drop_last: bool
) -> int:
    """Return the number of chunks of all `steps`."""
    full, rest = divmod(max(total - start, 0), batch)
    last = len(chunks(rest, replicas, largest)) if rest and not drop_last else 0
    return full * len(chunks(batch, replicas, largest)) + last


def plan_window(left: int, replicas: int, local: int, accumulation: int = 0) -> Window:
    """Return the chunks of the next window with autoscaling when `left` samples of the pass are left.

    Args:
        left: Samples of the pass that no replica has taken yet, at least 1.
        replicas: Number of replicas R.
        local: Samples of one replica in a full chunk, at least 1.
        accumulation: Accumulation steps A; a full window has A + 1 chunks.

    Returns:
        Chunk sizes, which sum up to at most `left`.
    """
    full = replicas * local * (accumulation + 1)
    rest = left - full
    if rest >= replicas or rest == 0:
        return split(full, replicas, local)
    if rest > 0 and left >= 2 * replicas:
        return split(left - left // 2, replicas, local)
    return split(left, replicas, local)


def split(samples: int, replicas: int, local: int) -> Window:
    """Split `samples` into the fewest chunks, as equal as possible, of at least R samples if possible."""
    return _divide(samples, min(-(-samples // (replicas * local)), max(1, samples // replicas)))


def _divide(samples: int, count: int) -> Window:
    """Divide `samples` into `count` chunks that differ by one sample at most."""
    each, more = divmod(samples, count)
    return (each + 1,) * more + (each,) * (count - more)


def windows(
    start: int,
    total: int,
    replicas: int,
    local: int,
    accumulation: int = 0,
    drop_last: bool = False,
) -> Iterator[Window]:
    """Yield the windows of the rest of a pass with autoscaling.

    Args:
        start: Position at which the first window begins.
        total: Samples of the whole pass.
        replicas: Number of replicas.
        local: Samples of one replica in a full chunk.
        accumulation: Accumulation steps A; a full window has A + 1 chunks.
        drop_last: Whether to leave out a last window that would not be full.
    """
    full = replicas * local * (accumulation + 1)
    while start < total:
        if drop_last:
            if total - start < full:
                return
            window = split(full, replicas, local)
        else:
            window = plan_window(total - start, replicas, local, accumulation)
        yield window
        start += sum(window)


def count_chunks(
    start: int,
    total: int,
    replicas: int,
    local: int,
    accumulation: int = 0,
    drop_last: bool = False,
) -> int:
    """Return the number of chunks from `start` to the end of a pass; arguments as for `windows`."""
    each = accumulation + 1
    full = replicas * local * each
    if drop_last:
        return max(total - start, 0) // full * each
    last = _skip(start, total, full)
    rest = windows(last, total, replicas, local, accumulation)
    return (last - start) // full * each + sum(map(len, rest))


def _skip(start: int, total: int, full: int) -> int:
    """Return the position after all full windows from `start` on, except the last three."""
    return start + max((total - start) // full - 3, 0) * full


def derive_seed(*parts: int) -> int:
    """Derive a well-mixed 63-bit seed from `parts` by NumPy's SeedSequence."""
    sequence = np.random.SeedSequence([part & 0xFFFFFFFFFFFFFFFF for part in parts])
    return int(sequence.generate_state(1, np.uint64)[0]) >> 1


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
