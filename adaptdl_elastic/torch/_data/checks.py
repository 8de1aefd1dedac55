"""Checks of what a script gives to data and epoch loops."""

from __future__ import annotations

from typing import Any

from adaptdl_elastic._checks import integer

__all__ = ["check_bounds", "check_writer", "integer"]


def check_writer(writer: Any) -> None:
    """TypeError for what numbers cannot be written to."""
    if not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(f"writer={writer!r}: give a torch.utils.tensorboard.SummaryWriter")


def check_bounds(
    batch_size: int,
    max_batch_size: Any,
    largest: int | None,
    given: tuple[int | None, int | None] | None,
) -> tuple[int, int] | None:
    """Fill in the defaults of the bounds; ValueError if the bounds contradict each other."""
    if largest is None or largest < batch_size:
        raise ValueError(
            f"max_batch_size={max_batch_size!r}: give an integer of at least the batch size, {batch_size}"
        )
    if given is None:
        return None
    try:
        low, high = given
    except (TypeError, ValueError):
        raise ValueError(f"local_bsz_bounds={given!r}: give a pair (smallest, largest)") from None
    low = 1 if low is None else integer(low)
    high = largest if high is None else integer(high)
    if low is None or high is None or not 1 <= low <= high:
        raise ValueError(f"local_bsz_bounds={given!r}: integers 1 <= smallest <= largest are needed")
    if low > batch_size:
        raise ValueError(
            f"local_bsz_bounds={given!r}: the smallest is above the batch size, {batch_size}, which one "
            f"replica starts with"
        )
    return low, min(high, largest)
