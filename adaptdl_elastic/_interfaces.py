"""Define the interfaces between the parts of the training library.

`Session` holds one object of each kind. Modules that use a part import its protocol from here. Only
`adaptdl_elastic.torch._bootstrap` imports the classes that implement the protocols.

| protocol | purpose | implemented by |
|---|---|---|
| `SavedState` | a state that is saved and sent to newcomers | `checkpoint.State` |
| `ElasticModel` | a model whose number of replicas changes | `AdaptiveDataParallel`, `AdaptiveFSDP` |
| `ScaledModel` | a model as scaling rules and GradScalers need it | the same |
| `ElasticLoader` | a data loader and its current batch | `torch._data.loader` |
| `Consensus` | act at the same step on all replicas | `torch._runtime.consensus` |
| `Reporter` | step times, statistics, the best batch size | `torch._tuning.reporter` |
| `Survivor` | continue after the death of a replica | `torch._elastic.recovery` |
| `Rescaling` | change the number of replicas in place | `torch._elastic.rescale` |
| `Joining` | let a newcomer join the running replicas | `torch._elastic.join` |

This module does not import torch at run time. `_values` defines what the parts pass on to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar

from adaptdl_elastic._values import BatchSize, Command, Limits, Place, Position
from adaptdl_elastic.protocol.hints import Straggler
from adaptdl_elastic.protocol.messages import ChangePlan, RecoveryPlan

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class ElasticLoader(Protocol):
    """Define a data loader as models and the recovery use it."""

    key: str
    batch_size: int
    size: BatchSize
    """Batch of one replica and accumulation steps of a full window."""
    sample_dimension: int | None
    micro_batch: int
    """Number of the current batch within its window, counted from 0."""

    @property
    def training(self) -> bool:
        """Whether models are trained with this loader."""

    @property
    def index_trained(self) -> int:
        """Samples that the running data loop has taken, without a rest that was left out at its end."""

    @property
    def training_loader_undecided(self) -> bool:
        """Whether no loader has been used for training yet."""

    @property
    def adaptive(self) -> bool:
        """Whether the batch size is chosen during training."""

    @property
    def max_batch_size(self) -> int | None:
        """Largest batch size that autoscaling may choose; None without autoscaling."""

    @property
    def local_bsz_bounds(self) -> tuple[int, int] | None:
        """Smallest and largest batch of one replica, as the script gave them."""

    @property
    def limits(self) -> Limits:
        """Limits of the batch size, with that of the memory if this loader trains."""

    @property
    def current_batch_size(self) -> int:
        """Samples of a full optimizer step, over all replicas."""

    @property
    def accumulation_steps(self) -> int:
        """Batches without an optimizer step in the current window."""

    @property
    def window_samples(self) -> int:
        """Samples of the current optimizer step, over all replicas and all batches of its window."""

    @property
    def local_samples(self) -> int:
        """Samples of the current batch that count for training."""

    @property
    def gradient_weight(self) -> float:
        """Factor by which to multiply the mean gradient of the current batch."""

    @property
    def parts(self) -> float:
        """Number of equal parts to which the parts of the window's gradient are equivalent."""

    def is_optim_step(self) -> bool:
        """Return whether the optimizer steps after the current batch."""

    @property
    def drives(self) -> bool:
        """Whether this loop counts as the training of its epoch."""

    def part_done(self) -> float:
        """Return the part of the running data loop that is done, from 0 to 1; 0 if that is not known."""

    def expected_batches(self) -> int | None:
        """Return how many batches this process gets in the whole running data loop; None: not known."""

    def fit_memory(self) -> None:
        """Choose batches that fit into the new, smaller memory limit; the iterator is made again."""

    def train(self) -> None:
        """Make this the loader that models are trained with."""


class LearntLimit(Protocol):
    """Hold the largest local batch that fits into memory; None before one has not fitted."""

    largest: int | None


class SavedState(Protocol):
    """Define a state that is saved in every checkpoint; scripts inherit from `checkpoint.State`."""

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

    def needed_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return groups of present ranks, of each of which one has to live; (): each has the whole state."""

    def confirm_step(self) -> bool:
        """Keep a step that failed elsewhere and was taken here; return False if it was not."""

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
    def last_gain(self) -> float:
        """Steps at the initial batch size as which the newest step of the optimizer counts."""

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


class ScaledModel(Protocol):
    """Define what scaling rules and GradScalers need of their model."""

    @property
    def gns(self) -> Any:
        """Gradient statistics of the model."""

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


class StepCounter(Protocol):
    """Define the position of the script: its steps, and the loops that it has reached."""

    step: int
    """Optimizer steps finished since the job began."""
    looping: bool
    """Whether a data loop is running."""
    entered: int
    """Data loops of the current epoch that this process has reached."""
    epoch_loops: int
    """Epoch loops that this process has reached."""


class Closable(Protocol):
    """Define a part of a session that must be closed with the session."""

    def close(self) -> None:
        """End the threads of the part."""


class Consensus(Protocol):
    """Carry out commands on every replica at the same step."""

    started: bool
    loops_over: bool
    between: bool
    """Whether the connections of the old generation are closed, and the new ones not yet open."""
    saving: bool
    """Whether the training thread writes a checkpoint."""
    lost: str | None
    """Why this generation can agree on nothing any more; None while no replica is lost."""
    handlers: dict[str, Callable[[Command], None]]
    polls: list[Callable[[], Command | None]]

    @property
    def drift(self) -> Any:
        """The `DriftWatch`, which compares the replicas' optimizer steps and parameters."""

    def start(self) -> None:
        """Begin to handle the agent's messages, SIGINT and SIGTERM. Further calls do nothing."""

    def close(self) -> None:
        """End the threads, and restore the previous signal handlers."""

    def request(self, command: Command) -> None:
        """Request that every replica carries out `command` at the same boundary. Callable in any thread."""

    def boundary(self, position: Position, last: bool = False) -> None:
        """Pass a boundary, after carrying out the commands that were agreed on for it.

        Args:
            position: Position of the boundary.
            last: Whether the data loop has no batch left; no replica joins at such a boundary.
        """

    def on_message(self, sender: int, message: Any) -> None:
        """Take a control message of another replica."""

    def listen(self, kind: str, listener: Callable[[int, int, Any], None]) -> None:
        """Call `listener(sender, number, body)` for all control messages of `kind`."""

    def on_lost(self, rank: int) -> None:
        """Record that the connection to a replica was lost without a regular end."""

    def on_finished(self, rank: int) -> None:
        """Record that a replica has ended regularly: nothing can be agreed on any more."""

    def lose(self, reason: str) -> None:
        """Record that this generation can agree on nothing any more. Callable in any thread."""

    def abandon(self) -> None:
        """Drop the open round of a generation whose connections are closed."""

    def renew(self, position: Position, recovered: bool = False) -> None:
        """Begin a new generation at `position`; `recovered` if the old one ended with a peer's death."""

    def save(self, kind: str, requests: Sequence[Command] = ()) -> str:
        """Save a checkpoint and tell the agent. All replicas call this between the same two steps."""

    def report_step(self, force: bool = False) -> None:
        """Report the last finished step to the agent."""

    def poll_soon(self) -> None:
        """Wake the control thread after a poll was added."""


class Reporter(Protocol):
    """Measure step times and gradient statistics, and choose the batch size by them."""

    def profile_step_start(self, atomic_bsz: int) -> None:
        """Begin a forward pass with `atomic_bsz` samples on this replica."""

    def profile_step_commit(self, accumulation_step: bool = False) -> None:
        """End a forward and backward pass, and record its time."""

    def pause(self) -> None:
        """Exclude the time until the next pass from the measured step times."""

    def update_grad_params(
        self, key: str, sqr: float, var: float, sqr_error: float = 0.0, estimator: str = ""
    ) -> None:
        """Take the gradient statistics of one model, the error of `sqr`, and the estimator's name."""

    def update_gain(self, key: str, gain: float, lr_factor: float) -> None:
        """Take the gain and the learning-rate factor of one model."""

    def batch_size_changed(self) -> None:
        """Begin to measure the batch size of the training loader, if it is another one now."""

    def report_problem(self, about: str, problem: str | None, every_time: bool = False) -> None:
        """Take a description of a problem with a part of the training; None if the problem is solved."""

    def set_node_times(self, atomic_bsz: int, seconds: Mapping[str, float]) -> None:
        """Take how long a pass of `atomic_bsz` samples takes a replica on each node, without waiting."""

    def set_stragglers(self, stragglers: tuple[Straggler, ...]) -> None:
        """Take the replicas that the others wait for."""

    def network_changed(self, age: float, atomic_bsz: int, busy: float) -> None:
        """Forget the step times on these nodes from before the network changed, `age` seconds ago.

        Passes of `atomic_bsz` samples keep a replica busy for `busy` seconds.
        """

    def best_batch_size(self) -> BatchSize | None:
        """Return the best batch size on the replicas of this generation; None without a goodput model."""

    def suggestion(self) -> BatchSize | None:
        """Return a batch size that is worth a change; None if there is none."""

    def hints(self) -> Any:
        """Return the current `sched_hints.JobHints`."""

    def close(self) -> None:
        """End the thread."""


class Survivor(Protocol):
    """Continue without a replica that has died."""

    waiting: bool
    """Whether this replica waits for a plan without the dead replica."""

    @property
    def armed(self) -> bool:
        """Whether this replica would survive the death of a peer in the current generation."""

    @property
    def failed(self) -> bool:
        """Whether gradients of the current window are missing."""

    def trouble(self) -> tuple[bool, bool]:
        """Return whether gradients of the window are missing, and whether a lost peer can be survived."""

    def arm(self) -> None:
        """Survive the death of peers from now on, if possible."""

    def begin_window(self, index: int) -> None:
        """Take a snapshot before the first batch of a training window, at sample `index`."""

    def before_step(self, left_out: bool) -> None:
        """Prepare for a call of `optimizer.step()`; `left_out` if the call will not step."""

    def why_not_repeatable(self) -> str | None:
        """Return why the current step could not be repeated on all replicas; None if it could."""

    def repeat_step(self, loader: ElasticLoader) -> bool:
        """Go back to the beginning of the step if it did not fit into memory; return whether it did not."""

    def dry_batch(self) -> AbstractContextManager[None]:
        """Enclose a batch that does not count, and undo what the loop's body changes."""

    def mark(self) -> None:
        """Record this position and the sums of the accumulators as the point to return to."""

    def retry_on_peer_loss(self, call: Callable[[], T], loader: ElasticLoader | None = None) -> T:
        """Return `call()`; after a peer's death, recover and call it again."""

    def restart_loop_on_peer_loss(self, call: Callable[[], T], loader: ElasticLoader) -> T:
        """Return `call()`; after a peer's death, recover and raise RetryDataLoop."""

    def loop_ended(self, loader: ElasticLoader) -> bool:
        """Return whether this loop is over on all replicas; False if a part of it must be repeated."""

    def loop_left(self, loader: ElasticLoader) -> None:
        """Record that this replica has left a loop by `break`."""

    def between_loops(self) -> None:
        """Prepare to enter a data loop or an epoch: recover from a death, and make all buffers equal."""

    def recover_if_peer_lost(self) -> None:
        """Recover if a peer is known to be lost. For use between data loops."""

    def recover(self, reason: str, loader: ElasticLoader | None = None, at_end: bool = False) -> None:
        """Form a generation without the dead replica, and go to the position at which training continues."""

    def newer(self) -> bool:
        """Return whether there is a recovery plan of a generation after the current one."""

    def on_lost(self) -> None:
        """Interrupt torch's collectives after the loss of a peer. Callable in any thread."""

    def on_plan(self, message: RecoveryPlan) -> None:
        """Take the agent's plan of a generation without dead replicas. Runs in the channel's thread."""


class Rescaling(Protocol):
    """Change the number of replicas without restarting the replicas that stay."""

    def handlers(self) -> dict[str, Callable[[Command], None]]:
        """Return the functions that carry out agreed commands, by the kind of the command."""

    def on_plan(self, message: ChangePlan) -> None:
        """Take the agent's plan of a change in place. Runs in the channel's thread."""

    def on_withdrawn(self, generation: int) -> None:
        """Withdraw the plan of that generation, as the agent orders. Runs in the channel's thread."""

    def epoch_ends(self, epoch: int) -> None:
        """Keep the states of `epoch`, which are about to be dropped, if newcomers may need them."""


class Joining(Protocol):
    """Let a newcomer join the running replicas."""

    @property
    def before_epochs(self) -> bool:
        """Whether the running replicas had not come to an epoch when they were last heard of."""

    def arrive(self, place: Place, loader: str) -> bool:
        """Reach a data loop. Return True after joining the others in it, False if it must be skipped."""


class Capability(Protocol):
    """Define the result of the self-test whether process groups can be made again in this process."""

    why: str
    agreed: bool

    @property
    def failed(self) -> bool:
        """Whether this node's self-test is known to have failed."""


class TorchGroup(Protocol):
    """Define torch's default process group, as all backends offer it."""

    completion_is_unreliable: bool

    def abort(self) -> None:
        """Make every operation of the group end. From any thread."""

    @property
    def is_aborted(self) -> bool:
        """Whether the process group has been aborted."""
