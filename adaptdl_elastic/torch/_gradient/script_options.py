"""Compare the options that a script sets (lr, betas, T_max, …) with those of the run's first start.

A checkpoint holds the options of the optimizer and of its scheduler as the script had constructed them:
training changes the learning rate, so what a checkpoint restores does not say what the script had set. A
state dict is one tree here, and an option is its path in it, for example `optimizer/param_groups/0/lr`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

# what is no option, or follows from others
_NOT = ("params", "param_names", "state", "_last_lr")
_PLAIN = (type(None), bool, int, float, str)


def options_of(parts: dict[str, Any]) -> dict[str, Any]:
    """Return the plain values in the state dicts of the optimizer and the scheduler, by their paths.

    Args:
        parts: objects with a state dict by their keys.
    """
    found: dict[str, Any] = {}
    for key in ("optimizer", "lr_scheduler"):
        # a script's own scheduler may fail; then its save says so
        with suppress(Exception):
            found.update(_leaves(parts[key].state_dict(), key))
    return found


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            # a schedule computes `lr` from `initial_lr`
            if key not in _NOT and not (key == "lr" and "initial_lr" in value):
                yield from _leaves(part, f"{path}/{key}")
    elif isinstance(value, torch.Tensor) and value.numel() == 1:
        yield path, value.item()
    elif all(isinstance(one, _PLAIN) for one in (value if isinstance(value, tuple) else [value])):
        yield path, value


def differing(saved: dict[str, Any], made: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (saved, made) by path for the options that are in both and differ."""
    return {path: (saved[path], made[path]) for path in made if saved.get(path, made[path]) != made[path]}


def named(differ: dict[str, tuple[Any, Any]]) -> str:
    """Return words about options that differ, without those that follow from others."""
    words = {
        f"{path.rpartition('/')[2].removeprefix('initial_')} ({new} in the script, {old} in it)": None
        for path, (old, new) in differ.items()
        if "/_" not in path and "/base_lrs/" not in path
    }
    return ", ".join(words)


def put(state_dict: dict[str, Any], differ: dict[str, tuple[Any, Any]]) -> None:
    """Replace options in a checkpoint's state dict; a learning rate keeps its ratio to its first value."""
    for path, (old, new) in differ.items():
        *parents, name = path.split("/")
        holder: Any = state_dict
        with suppress(LookupError, ValueError, TypeError):
            for key in parents:
                holder = holder[int(key) if isinstance(holder, list) else key]
            if name in ("lr", "initial_lr"):
                holder["lr"] = holder["lr"] * (new / old) if old else holder["lr"] + new
            if name != "lr":
                at = int(name) if isinstance(holder, list) else name
                tensor = isinstance(holder[at], torch.Tensor)
                holder[at] = torch.full_like(holder[at], new) if tensor else new


def over(scheduler: Any) -> bool:
    """Return whether a schedule of torch has come to its end, and is not meant to go on."""
    end = getattr(scheduler, "T_max", getattr(scheduler, "total_steps", None))
    return isinstance(end, int) and scheduler.last_epoch >= end


def follow_schedule(scheduler: Any) -> None:
    """Set the learning rates by a schedule's closed form, where torch has one: its options may differ."""
    if closed := getattr(scheduler, "_get_closed_form_lr", None):
        for group, rate in zip(scheduler.optimizer.param_groups, closed(), strict=True):
            group["lr"] = rate
