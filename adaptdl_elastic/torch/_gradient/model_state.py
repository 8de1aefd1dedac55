"""What a checkpoint holds of one AdaptiveDataParallel, and the batch sizes that its statistics are of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, BinaryIO

from adaptdl_elastic import checkpoint


class BatchSizes:
    """The initial batch sizes of the loaders that a model was trained with, in this run and before."""

    def __init__(self) -> None:
        self.last: int | None = None  # of the loader that was used last; None before the first batch
        self.current: dict[str, int] = {}  # of each loader trained with, by its key, in this run
        self.saved: dict[str, int] = {}  # the same of the run that the checkpoint is of
        self.saved_last: int | None = None  # the last one of those

    def use(self, key: str, initial: int) -> int | None:
        """Take the initial batch size of the loader at hand.

        The checkpoint's is that of the same loader. One that the checkpoint does not know may be the first
        one's successor.

        Returns:
            The checkpoint's, where that is another one: all statistics are in units of it. Only once.
        """
        found = None
        if key not in self.current:
            found = self.saved.get(key)
            if found is None and not self.current and initial not in self.saved.values():
                found = self.saved_last
            if found == initial:
                found = None
            if found is not None:
                self.saved = {}  # of other units from now on
        self.last = self.current[key] = initial
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {
            "batch_size": self.last or self.saved_last,
            "batch_sizes": dict(self.current),
            "saved_batch_sizes": dict(self.saved),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take another replica's; older checkpoints have fewer entries."""
        self.saved_last = state_dict.get("batch_size")
        self.current = dict(state_dict.get("batch_sizes", {}))
        self.saved = dict(state_dict.get("saved_batch_sizes", {}))

    def of_checkpoint(self) -> None:
        """What was loaded is of an earlier run: the script may have other batch sizes now."""
        self.saved, self.current = {**self.saved, **self.current}, {}


class ModelState(checkpoint.TensorState):
    """Everything of one model that a checkpoint holds.

    Args:
        name: The model's.
        parts: Whatever has a state dict, by its key; None for what the script does not have.
        sizes: The model's batch sizes.
        collect: Takes in the measurement that is on its way between the replicas.
        loaded: Called when a state dict has been loaded.
    """

    def __init__(
        self,
        name: str,
        parts: dict[str, Any],
        sizes: BatchSizes,
        collect: Callable[[], None],
        loaded: Callable[[], None],
    ) -> None:
        super().__init__(name)
        self._parts = {key: part for key, part in parts.items() if part is not None}
        self._sizes, self._collect, self._loaded = sizes, collect, loaded

    def sync(self) -> None:
        """Take in what is still on its way between the replicas."""
        self._collect()

    def state_dict(self) -> Any:
        """Return one state dict per part; the model's without DDP's prefix."""
        return {
            **{key: part.state_dict() for key, part in self._parts.items()},
            **self._sizes.state_dict(),
        }

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the parts that this script has; ValueError where the checkpoint lacks one."""
        missing = sorted(self._parts.keys() - state_dict.keys())
        if missing:
            raise ValueError(f"it was saved without {', '.join(missing)}")
        for key, part in self._parts.items():
            part.load_state_dict(state_dict[key])
        self._sizes.load_state_dict(state_dict)
        self._loaded()

    def load(self, fileobj: BinaryIO) -> None:
        """Load from a checkpoint, not from a replica of this run."""
        super().load(fileobj)
        self._sizes.of_checkpoint()
