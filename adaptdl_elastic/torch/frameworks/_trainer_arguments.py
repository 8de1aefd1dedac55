"""Refuse arguments of Hugging Face's Trainer that contradict each other or have lost their defaults."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any

# arguments that count optimizer steps or the samples of a pass
_COUNTING = ("num_generations", "sync_ref_model", "torch_empty_cache_steps")


def refuse_contradictions(args: Any) -> None:
    """Raise ValueError if arguments of `ElasticArgumentsMixin` contradict each other or others."""
    most, bounds = args.max_batch_size, args.local_bsz_bounds
    if most is None:
        if bounds is not None:
            raise ValueError("local_bsz_bounds without max_batch_size in an elastic Trainer: give both")
        return
    if most < args.initial_batch_size:
        raise ValueError(
            f"max_batch_size={most} is below the initial batch of {args.initial_batch_size} "
            f"(per_device_train_batch_size × gradient_accumulation_steps)"
        )
    if bounds is not None and not (isinstance(bounds, (list, tuple)) and len(bounds) == 2):
        raise ValueError(f"local_bsz_bounds={bounds!r}: give the smallest and the largest batch of a replica")
    for name in _COUNTING:
        if getattr(args, name, None):
            raise ValueError(f"{name} with max_batch_size, by which steps and batches are of many sizes")


def refuse_lost_defaults(kind: type) -> None:
    """Raise TypeError if the dataclass `kind` has not the fields and defaults that its bases declare."""
    declared: dict[str, tuple[type, Field[Any]]] = {}
    for base in reversed(kind.__mro__):
        its = vars(base).get("__dataclass_fields__", {})
        declared |= {name: (base, its[name]) for name in vars(base).get("__annotations__", {}) if name in its}
    found = {one.name: one for one in fields(kind)}
    for name, (base, own) in declared.items():
        mine = found.get(name)
        if mine is None or (mine.default, mine.default_factory) != (own.default, own.default_factory):
            raise TypeError(
                f"{kind.__name__} loses defaults of {base.__name__}, such as that of {name}: write "
                f"class {kind.__name__}(ElasticArgumentsMixin, {base.__name__})"
            )
