"""The smallest state there is, and checkpoints of such."""

from __future__ import annotations

from typing import Any, BinaryIO

from adaptdl_elastic import checkpoint
from adaptdl_elastic.checkpoint.manager import Saved
from adaptdl_elastic.storage import Manifest, Storage, new_id


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


def write(storage: Storage, states: dict[str, bytes], generation: int = 0) -> str:
    """Write a checkpoint of these states into a storage, and return its id."""
    writing = storage.begin(new_id(storage.ids(), generation))
    for name, content in states.items():
        with writing.state(name) as file:
            file.write(content)
    writing.commit(Manifest(id=writing.id, states=writing.entries))
    return writing.id
