"""Check data sets, samplers and loaders of other libraries, and take over the settings of a DataLoader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

_INSTEAD = (
    "use datasets.load_dataset(..., streaming=True), which reads the same files, or a map-style data set"
)
_FOREIGN = {
    "streaming": f"Mosaic streaming divides samples among ranks and keeps their position itself: {_INSTEAD}",
    "webdataset": f"webdataset divides its shards among nodes and workers by itself: {_INSTEAD}",
}
"""Package → reason why its data sets are refused."""

_READERS = ("num_replicas", "world_size", "num_processes")
"""Attributes that hold the number of processes among which a sampler divides its samples."""
_RANKS = ("rank", "process_index")
"""Attributes that hold the rank for which a sampler gives its part."""

_TAKEN_OVER = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
    "generator", "prefetch_factor", "persistent_workers", "in_order",
)  # fmt: skip


@dataclass(frozen=True)
class Given:
    """Hold a sampler that the script passed to an elastic loader."""

    sampler: Any
    batches: bool
    """Whether the sampler yields lists of indices (a batch sampler)."""


def refuse_foreign(dataset: Any) -> None:
    """Refuse data sets that divide their samples among ranks and cannot start at a given sample.

    Raises:
        ValueError: `dataset` is of a package in `_FOREIGN`.
    """
    for kind in type(dataset).__mro__:
        why = _FOREIGN.get(kind.__module__.partition(".")[0])
        if why is not None:
            raise ValueError(f"{type(dataset).__name__} in an elastic loader: {why}")


def check_samplers(dataset: Any, sampler: Any, batch_sampler: Any) -> Given | None:
    """Check the samplers that the script passed to an elastic loader.

    Args:
        dataset: Data set of the loader.
        sampler: Sampler of single indices, or None.
        batch_sampler: Sampler of lists of indices, or None.

    Returns:
        The sampler; None if the script passed none.

    Raises:
        TypeError: the object is not a sampler.
        ValueError: both samplers are given, the data set is a stream, or the sampler divides by rank.
    """
    if sampler is None and batch_sampler is None:
        return None
    if sampler is not None and batch_sampler is not None:
        raise ValueError("sampler and batch_sampler were given: give one of them")
    name, given = ("sampler", sampler) if batch_sampler is None else ("batch_sampler", batch_sampler)
    if isinstance(dataset, IterableDataset):
        raise ValueError(f"{name} with an IterableDataset, which has an order of its own: leave it out")
    _refuse_divided(name, given)
    if not hasattr(given, "__iter__"):
        raise TypeError(f"{name}={given!r}: give a torch.utils.data.Sampler, or another iterable of indices")
    return Given(given, batch_sampler is not None)


def _refuse_divided(name: str, given: Any) -> None:
    """Refuse a sampler that gives each rank a part, also inside of other samplers.

    Args:
        name: Name of the argument, for the message.
        given: The argument's value.

    Raises:
        ValueError: a sampler has the rank and the number of its readers, which are more than one.
    """
    found, known = [given], {id(given)}
    for one in found:
        why = (
            f"{name}: {type(one).__name__} gives each rank a part, which an elastic loader would share "
            f"among the replicas once more"
        )
        if isinstance(one, DistributedSampler):
            raise ValueError(f"{why}; leave it out, and give shuffle={one.shuffle}")
        values = getattr(one, "__dict__", {})
        public = {key.lstrip("_"): value for key, value in values.items()}
        readers = next((key for key in _READERS if key in public), None)
        rank = next((key for key in _RANKS if key in public), None)
        if readers and rank and public[readers] not in (None, 1):
            raise ValueError(f"{why}; leave it out, or make it for one reader, with {readers}=1, {rank}=0")
        for key, inner in values.items():
            if (isinstance(inner, Sampler) or "sampler" in key) and id(inner) not in known:
                found.append(inner)
                known.add(id(inner))


def check_order(given: Given | None, batch_size: Any, shuffle: bool, drop_last: bool) -> None:
    """Check that no argument contradicts the script's own sampler.

    Args:
        given: The script's sampler; None if there is none.
        batch_size: Batch size that the script passed.
        shuffle: Whether the script asked for a random order.
        drop_last: Whether the script asked to leave out a last batch that is not full.

    Raises:
        ValueError: `shuffle` with a sampler; `batch_size` or `drop_last` with a batch sampler.
    """
    if given is None:
        return
    if shuffle:
        raise ValueError(
            "shuffle=True with a sampler of your own, which decides about the order: leave one out"
        )
    if given.batches and (drop_last or batch_size != 1):
        raise ValueError(
            "batch_size or drop_last with a batch_sampler, which decides about the batches: leave them out"
        )


def loader_arguments(loader: Any, batch_size: int | None) -> dict[str, Any]:
    """Return the arguments for an AdaptiveDataLoader that replaces `loader`.

    Raises:
        TypeError: `loader` is not a DataLoader.
        ValueError: `loader` makes no batches and `batch_size` is None, or both a batch sampler and
            `batch_size` are given.
    """
    if not isinstance(loader, DataLoader):
        raise TypeError(f"from_loader({loader!r}): give a torch.utils.data.DataLoader")
    found = {name: getattr(loader, name) for name in _TAKEN_OVER if hasattr(loader, name)}
    if not found["num_workers"]:
        for name in ("timeout", "prefetch_factor", "multiprocessing_context", "persistent_workers"):
            found.pop(name, None)
    if batch_size is None and loader.batch_size is None and loader.batch_sampler is None:
        raise ValueError("from_loader of a DataLoader with batch_size=None: give from_loader a batch_size")
    found |= {"dataset": loader.dataset, "batch_size": batch_size or loader.batch_size or 1}
    if isinstance(loader.dataset, IterableDataset):
        return found | {"drop_last": bool(loader.drop_last)}
    batches: Any = loader.batch_sampler
    drop_last, sampler = loader.drop_last, loader.sampler
    if batch_size is not None and loader.batch_size is None and type(batches) is BatchSampler:
        # as in the loaders that Accelerate makes
        drop_last, sampler = batches.drop_last, batches.sampler
    elif not isinstance(batches, BatchSampler) or loader.batch_size is None:
        if batch_size is not None and batches is not None:
            raise ValueError(
                "from_loader with a batch_size, of a loader whose batch_sampler decides about it"
            )
        if batches is not None:
            return found | {"batch_sampler": batches, "batch_size": 1}
    found["drop_last"] = bool(drop_last)
    if type(sampler) is SequentialSampler:
        return found
    if type(sampler).__name__ == "RandomSampler" and _draws_each_once(sampler, loader.dataset):
        return found | {"shuffle": True}
    return found | {"sampler": sampler}


def _draws_each_once(sampler: Any, dataset: Any) -> bool:
    """Return whether a RandomSampler of torch or torchdata does the same as shuffle=True."""
    return not sampler.replacement and sampler.num_samples == len(dataset)
