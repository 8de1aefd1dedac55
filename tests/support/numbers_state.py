"""The smallest state there is."""

from __future__ import annotations

from typing import Any, BinaryIO

from adaptdl_elastic import checkpoint
from adaptdl_elastic.checkpoint.manager import Saved


class Number(checkpoint.State):
    def __init__(self, name: str, value: int = 0, load: bool = True) -> None:
        super().__init__(name)
        self.value = value
        self.loaded = checkpoint.load_state(self) if load else False

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(b"%d" % self.value)

    def load(self, fileobj: BinaryIO) -> None:
        self.value = int(fileobj.read())


def save(**options: Any) -> Saved:
    """Save a checkpoint with these options, and return what was saved."""
    saved = checkpoint.save_all_states(**options)
    assert saved is not None
    return saved
