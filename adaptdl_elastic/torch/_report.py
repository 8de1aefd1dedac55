"""What a script may ask and tell at any time."""

from __future__ import annotations

import numbers
from typing import Any

from adaptdl_elastic import _session


def world_size() -> int:
    """How many replicas train together now. Ask again instead of keeping the answer: it changes."""
    return _session.current().replicas


def rank() -> int:
    """This replica's rank now, from 0 to `world_size() - 1`. Ask again instead of keeping the answer."""
    return _session.current().rank


def report(**metrics: Any) -> None:
    """Put numbers of the script's own into the job's event log, as one event `metrics`.

    Call it on every replica or on rank 0, whose values are taken: `report(accuracy=0.97, loss=0.1)`.
    Without an event log nothing happens.

    Raises:
        TypeError: a value is neither a number nor a string.
    """
    session = _session.current()
    fields: dict[str, Any] = {}
    for name, value in metrics.items():
        if hasattr(value, "item"):
            value = value.item()
        if not isinstance(value, (numbers.Number, str, bool)) and value is not None:
            raise TypeError(f"report({name}=…): a number or a string is needed, got {type(value).__name__}")
        fields[name] = repr(value) if value != value else value  # NaN is not JSON
    session.emit("metrics", **{"epoch": session.epoch, **fields})
