"""Define the services of a session: consensus, measurements, recovery and changes in place.

Also the types and exceptions that these services pass on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from adaptdl_elastic._interfaces.loaders import BatchSize, ElasticLoader
from adaptdl_elastic.protocol.hints import Straggler
from adaptdl_elastic.protocol.messages import ChangePlan, RecoveryPlan

T = TypeVar("T")

Position = tuple[int, int, int]
"""(epoch, number of the data loop within it, global samples handed out in it)."""

Place = tuple[int, int]
"""(epoch, number of the data loop within it)."""

Command = dict[str, Any]
"""An action at a boundary: the key `kind`, and arguments of that kind. Plain data, sent between replicas."""


class RetryDataLoop(Exception):
    """Raised after a recovery from a death: the data loop must be continued from its new position."""


class StepOutOfMemory(RuntimeError):
    """Raised if the gradients of a step are lost because a replica ran out of memory; on all replicas.

    Args:
        message: What has happened, for users.
        largest: Largest local batch to try from now on in the outermost data loop; None: any.
        inner: The same for data loops inside of it, by the keys of their loaders.
    """

    def __init__(self, message: str, largest: int | None, inner: dict[str, int] | None = None) -> None:
        super().__init__(message)
        self.largest = largest
        self.inner = inner or {}


class StepCounter(Protocol):
    """Define the position of the script; see `adaptdl_elastic.torch._runtime.position`."""

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
        """Forget the step times on several nodes from before the network changed, `age` seconds ago.

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
    """Define torch's default process group; see `adaptdl_elastic.torch._process_group.backends.Group`."""

    completion_is_unreliable: bool

    def abort(self) -> None:
        """Make every operation of the group end. From any thread."""

    @property
    def is_aborted(self) -> bool:
        """Whether the process group has been aborted."""
