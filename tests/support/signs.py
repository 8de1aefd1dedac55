"""What a test's script tells the test through the channel to its agent."""

from __future__ import annotations

from typing import Any

from adaptdl_elastic import _session
from adaptdl_elastic.protocol.messages import Event


def sign(kind: str, **fields: Any) -> None:
    """Send a message of a type of the test's own, which `fake_agent` gives the test."""
    _session.current().send(Event(f"sign: {kind}", 0.0, fields))
