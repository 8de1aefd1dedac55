"""Wording that agents and the autoscaler share."""

from __future__ import annotations


def pluralize(number: int, what: str) -> str:
    """Return a number with its noun: `1 slot`, `2 slots`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def duration(seconds: float) -> str:
    """Format seconds for users: `0.31 s`, `42 s`, `3 min 05 s`, `2 h 04 min`."""
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
