"""Wording that agents and coordinator share."""

from __future__ import annotations


def pluralize(number: int, what: str) -> str:
    """Return a number with its noun: `1 slot`, `2 slots`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
