"""Words of the scripts that tests play: `agent_script`, `coordinator_script` and `scaling_script`."""

from __future__ import annotations

from ast import literal_eval
from typing import Any


def literal_or_text(word: str) -> Any:
    """Return the Python value that a word writes, else the word itself."""
    try:
        return literal_eval(word)
    except (ValueError, SyntaxError):
        return word
