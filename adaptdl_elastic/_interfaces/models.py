"""Define what a model and its state are to the other parts of the training library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

if TYPE_CHECKING:
    import torch


class SavedState(Protocol):
    """Define a state that is saved in every checkpoint, see `adaptdl_elastic.checkpoint.State`."""

    required: bool
    expires: int | None
    part_of_step: bool

    @property
    def name(self) -> str:
        """Name of the state, unique in the script."""

    def save(self, fileobj: BinaryIO) -> None:
        """Write the state to a file."""

    def load(self, fileobj: BinaryIO) -> None:
        """Read what `save` wrote."""

    def sync(self) -> None:
        """Synchronise the state between the replicas. A collective."""

    def collect_for_save(self) -> None:
        """Collect on rank 0 what only other replicas hold, for a checkpoint. A collective."""

    def snapshot(self) -> Any:
        """Return a copy that later changes of the state do not change."""

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot."""

    def write_snapshot(self, snapshot: Any, fileobj: Any) -> None:
        """Write a snapshot so that `load` can read it."""

    def _copy_for_save(self) -> Any: ...

    def _saved(self, snapshot: Any) -> None: ...


class Summed(Protocol):
    """Define the state of an Accumulator, as the session uses it."""

    name: str
    syncs: int
    summed: dict[Any, Any]


class ModelSnapshot(Protocol):
    """Hold a copy, from the start of a step, of what the step may change besides the parameters."""

    def why_irreparable(self) -> str | None:
        """Return why the step cannot be undone; None if it can."""

    def put_back(self) -> None:
        """Restore the state at the start of the step. May be called more than once."""


class ElasticModel(Protocol):
    """Define a model that supports changes of the number of replicas within the process.

    A sharded model or a model of another framework takes part in such changes by implementing this protocol
    and appending itself to `Session.models`.
    """

    name: str
    """Name of the model, and of the `checkpoint.State` that holds its parameters and related state."""

    own_random_streams: bool
    """Whether each replica draws its own random numbers in data loops that train the model."""

    @property
    def module(self) -> torch.nn.Module:
        """The script's module."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of its parameters."""

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate scheduler given with the model, or None."""

    # Support for changes and recoveries.

    @property
    def has_own_process_group(self) -> bool:
        """Whether the script gave the model another process group than torch's default one."""

    @property
    def thawed(self) -> bool:
        """Whether parameters require gradients only since the model was wrapped."""

    def refuse_thawed(self, why: str) -> None:
        """Raise RuntimeError if `thawed`."""

    def why_not_resilient(self) -> str | None:
        """Return why this model does not allow to survive the death of a peer; None if it does."""

    # A step whose gradients could not be synchronised.

    def absorb_failures(self) -> None:
        """Store the failure of a collective in `failure` from now on, instead of raising it."""

    @property
    def failure(self) -> BaseException | None:
        """Why the gradients of the current step could not be synchronised; None if they could."""

    def clear_failure(self) -> None:
        """Forget the failure, and drop the gradients of the step that failed."""

    def giving_up(self, reason: str) -> Callable[[], None]:
        """Return a function, for any thread, that lets a backward pass of this generation stop waiting."""

    @property
    def stuck(self) -> bool:
        """Whether the process group runs an operation that may never end."""

    def snapshot_step(self, last: ModelSnapshot | None) -> ModelSnapshot:
        """Copy what a step may change besides parameters; the memory of `last` may be used again."""

    # Accumulation windows.

    @property
    def attempted_steps(self) -> int:
        """Optimizer steps that were taken, or skipped because gradients were not finite."""

    @property
    def accumulates_by_hand(self) -> bool:
        """Whether the script adds up gradients of several windows, and has not stepped yet.

        Changes, checkpoints and stops wait for the step, since these gradients would be lost.
        """

    def drop_window(self) -> None:
        """Drop the gradients of an accumulation window that will not be stepped."""

    # A new generation.

    def hand_over(self, order: Sequence[int]) -> None:
        """Give parts that other replicas lack to those that stay, before the process group is left.

        A collective of the old generation, called only if replicas leave or their order changes.

        Args:
            order: Old ranks of the replicas that stay, in the order of their new ranks.
        """

    def reinit_process_group(self) -> None:
        """Use torch's current default process group from now on, with the same parameters."""

    def sync_buffers(self, limit: timedelta = ...) -> None:
        """Give every replica rank 0's buffers. A collective."""

    def data_loop_begins(self) -> None:
        """Begin a data loop not known to train: give every replica rank 0's buffers. A collective."""

    # Gradient statistics.

    @property
    def gain(self) -> float:
        """Progress of a step, in steps at the initial batch size."""

    @property
    def progress(self) -> float:
        """Progress so far, in steps at the initial batch size."""

    def statistics(self) -> dict[str, Any]:
        """Return the gradient statistics, to be sent to other replicas."""

    def load_statistics(self, statistics: dict[str, Any]) -> None:
        """Replace the gradient statistics by another replica's `statistics`."""


class GradientStatistics(Protocol):
    """Define the gradient statistics of a model that scaling rules and GradScalers read."""

    steps: int
    skipped: int

    def gain(self, scale: float) -> float:
        """Return how many steps of the initial batch size a step at `scale` is worth."""

    def lr_gain(self, scale: float) -> Any:
        """Return the factor of the learning rate at `scale`, by parameter group."""

    def get_progress(self) -> float:
        """Return the progress so far, in steps at the initial batch size."""


class ScaledModel(Protocol):
    """Define what scaling rules and GradScalers need of their model."""

    @property
    def gns(self) -> Any:
        """The model's `GradientStatistics`."""

    @property
    def scale(self) -> float:
        """Batch size of the current step / initial batch size."""

    @property
    def initial_batch_size(self) -> int | None:
        """Batch size over all replicas that the data loader was made with; None before its first batch."""

    @property
    def stepping(self) -> bool:
        """Whether `optimizer.step()` steps now: not in the middle of an accumulation window."""

    @property
    def window_under_way(self) -> bool:
        """Whether gradients have been accumulated since the last step."""

    def begin_step(self, closure: bool = False) -> bool:
        """Return whether the optimizer is to step now."""

    def end_step(self, factor: Any) -> None:
        """Record that the optimizer has stepped at learning rates multiplied by `factor`."""

    def skipped_step(self) -> None:
        """Record that the optimizer did not step, because gradients were inf or nan."""

    def step_left_out(self) -> None:
        """Record a call of `optimizer.step()` in the middle of a window, which does not step."""

    def begin_zero_grad(self) -> bool:
        """Return whether `zero_grad` is to drop all gradients now."""
