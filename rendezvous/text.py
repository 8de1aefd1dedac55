"""Words that agents and coordinator have in common."""

from __future__ import annotations


def pluralize(number: int, what: str) -> str:
    """`1 slot`, `2 slots`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
