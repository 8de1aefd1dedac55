"""Save one AdaptiveDataParallel in checkpoints, with the batch sizes of its statistics."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, BinaryIO

from adaptdl_elastic import _session, checkpoint
from adaptdl_elastic.protocol.environment import HERE
from adaptdl_elastic.torch._gradient import script_options

logger = logging.getLogger(__name__)


class BatchSizes:
    """Record the initial batch sizes of the loaders that a model was trained with, in all runs."""

    def __init__(self) -> None:
        # of the last loader used; None before the first batch
        self.last: int | None = None
        # loader's key → its initial batch size in this run
        self.current: dict[str, int] = {}
        # the same in the run that wrote the checkpoint
        self.saved: dict[str, int] = {}
        # of the last loader used in that run
        self.saved_last: int | None = None

    def use(self, key: str, initial: int) -> int | None:
        """Record the initial batch size of a loader, and compare it with the one in the checkpoint.

        The statistics in a checkpoint are in units of an initial batch size. If that has changed, the caller
        converts them. The size in the checkpoint is that of the loader with the same key. For the first
        loader of this run, if the checkpoint knows neither its key nor its size, it is the size of the
        loader that was used last before the checkpoint.

        Args:
            key: Key of the loader.
            initial: Its initial batch size.

        Returns:
            The size in the checkpoint, if it differs from `initial`; else None. After one call has returned
            a size, all further calls return None, since the statistics are to be converted only once.
        """
        found = None
        if key not in self.current:
            found = self.saved.get(key)
            if found is None and not self.current and initial not in self.saved.values():
                found = self.saved_last
            if found == initial:
                found = None
            if found is not None:
                # the statistics will be converted: the saved sizes are no longer their units
                self.saved = {}
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
        """Restore the sizes of another replica; older checkpoints have fewer entries."""
        self.saved_last = state_dict.get("batch_size")
        self.current = dict(state_dict.get("batch_sizes", {}))
        self.saved = dict(state_dict.get("saved_batch_sizes", {}))

    def of_checkpoint(self) -> None:
        """Treat the restored sizes as those of an earlier run, since the script may have changed them."""
        self.saved, self.current = {**self.saved, **self.current}, {}


class ModelState(checkpoint.TensorState):
    """Everything of one model that a checkpoint holds.

    Args:
        name: name of the model.
        parts: objects with a state dict, by key; None for what the script does not have.
        sizes: batch sizes of the model.
        collect: reads the pending measurement.
        loaded: called when a state dict has been loaded.
    """

    def __init__(
        self,
        name: str,
        parts: dict[str, Any],
        sizes: BatchSizes,
        collect: Callable[[], None],
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name)
        self._parts = {key: part for key, part in parts.items() if part is not None}
        self._sizes, self._collect, self._loaded = sizes, collect, loaded
        # as the script constructed them, in the first start of the run
        self._options = script_options.options_of(self._parts)

    def sync(self) -> None:
        """Read the pending measurement of all replicas."""
        self._collect()

    def state_dict(self) -> Any:
        """Return one state dict per part; the model's without DDP's prefix."""
        return {
            **{key: part.state_dict() for key, part in self._parts.items()},
            **self._sizes.state_dict(),
            "options": self._options,
        }

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the parts that this script has; ValueError if the checkpoint lacks one."""
        missing = sorted(self._parts.keys() - state_dict.keys())
        if missing:
            raise ValueError(f"it was saved without {', '.join(missing)}")
        for key, part in self._parts.items():
            part.load_state_dict(state_dict[key])
        self._sizes.load_state_dict(state_dict)
        self._options = state_dict.get("options", self._options)
        self._loaded()

    def load(self, fileobj: BinaryIO) -> None:
        """Load from a checkpoint, not from a replica of this run.

        Options that the script sets otherwise than the run's first start are named, and count if
        `ADAPTDL_OPTIONS_FROM` says so.
        """
        state_dict, made = self._read(fileobj), self._options
        # an older checkpoint has none
        saved = state_dict.setdefault("options", {})
        differ, scripts = script_options.differing(saved, made), HERE.options_from == "script"
        if scripts and differ:
            state_dict["options"] = {**saved, **made}
            script_options.put(state_dict, differ)
        self.load_state_dict(state_dict)
        schedule: Any = self._parts.get("lr_scheduler")
        if scripts and differ:
            script_options.follow_schedule(schedule)
        if (named := script_options.named(differ)) and _session.current().rank == 0:
            count = "checkpoint's count; ADAPTDL_OPTIONS_FROM=script makes the script's count"
            line = "the checkpoint of %r was made with other options: %s; the %s"
            logger.warning(line, self.name, named, "script's count from here on" if scripts else count)
        if script_options.over(schedule) and _session.current().rank == 0:
            line = "the schedule of %r (%s) is at its end, step %d: further steps are beyond it"
            logger.warning(line, self.name, type(schedule).__name__, schedule.last_epoch)
        self._sizes.of_checkpoint()
