"""Check the arguments that a script passes to data and epoch loops."""

from __future__ import annotations

from typing import Any

from adaptdl_elastic._checks import integer

__all__ = ["check_bounds", "check_writer", "integer"]


def check_writer(writer: Any) -> None:
    """Raise TypeError if `writer` has no method `add_scalar`."""
    if not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(f"writer={writer!r}: give a torch.utils.tensorboard.SummaryWriter")


def check_bounds(
    batch_size: int,
    max_batch_size: Any,
    largest: int | None,
    given: tuple[int | None, int | None] | None,
) -> tuple[int, int] | None:
    """Check the bounds of a batch size, and fill in their defaults.

    Args:
        batch_size: Initial batch size, over all replicas.
        max_batch_size: Largest batch size as the script gave it, for error messages.
        largest: `max_batch_size` as an integer; None if it is none.
        given: Smallest and largest batch of one replica, each or both None for no bound.

    Returns:
        Smallest and largest batch of one replica; None if `given` is None.

    Raises:
        ValueError: the bounds contradict each other.
    """
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
