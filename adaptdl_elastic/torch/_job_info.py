"""What a script may ask and tell at any time."""

from __future__ import annotations

import math
import numbers
from typing import Any

from adaptdl_elastic import _session

_TAKEN = ("event", "time", "type")


def world_size() -> int:
    """How many replicas train together now. Ask again instead of keeping the answer: it changes."""
    return _session.current().replicas


def rank() -> int:
    """Return this replica's present rank, from 0 to `world_size() - 1`. Do not keep it: it changes."""
    return _session.current().rank


def report(**metrics: Any) -> None:
    """Put numbers of the script's own into the job's event log, as one event `metrics`.

    Call it on every replica or on rank 0, whose values are taken: `report(accuracy=0.97, loss=0.1)`.
    Without an event log nothing happens.

    Raises:
        TypeError: a value is neither a number nor a string.
        ValueError: a name that is one of an event's own: event, time, type.
    """
    session = _session.current()
    fields: dict[str, Any] = {}
    for name, value in metrics.items():
        if name in _TAKEN:
            raise ValueError(f"report({name}=…): every event has a field of that name already; use another")
        if hasattr(value, "item") and getattr(value, "shape", None) in ((), (1,)):
            value = value.item()
        if not isinstance(value, (numbers.Real, str)) and value is not None:
            raise TypeError(f"report({name}=…): a number or a string is needed, got {_described(value)}")
        if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
            value = float(value)
        if isinstance(value, float) and not math.isfinite(value):
            value = repr(value)  # JSON has no such numbers
        fields[name] = value
    if not session.dry:
        session.emit("metrics", **{"epoch": session.epoch, **fields})


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
