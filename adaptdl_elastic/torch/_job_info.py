"""Tell a script its rank and the number of replicas, and record its metrics. Callable at any time."""

from __future__ import annotations

import math
import numbers
from typing import Any

from adaptdl_elastic import _session

_TAKEN = ("event", "time", "type")


def world_size() -> int:
    """Return the current number of replicas. Do not keep it: it changes."""
    return _session.current().replicas


def rank() -> int:
    """Return this replica's current rank, from 0 to `world_size() - 1`. Do not keep it: it changes."""
    return _session.current().rank


def report(**metrics: Any) -> None:
    """Write values of the script to the job's event log, as one event `metrics`.

    Call it on every replica or only on rank 0; rank 0's values are written. An example:
    `report(accuracy=0.97, loss=0.1)`. Without an event log the call does nothing.

    Raises:
        TypeError: a value is neither a number nor a string.
        ValueError: a name is that of a field of every event: event, time, type.
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
