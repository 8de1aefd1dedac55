"""What the parts of the training library ask of each other, without knowing each other.

`Session` holds one object of each kind. The modules that use it import these protocols; the classes that
implement them are named by `adaptdl_elastic.torch._bootstrap` only.

| protocol | answers | implemented by |
|---|---|---|
| `SavedState` | what is saved and given to newcomers | `checkpoint.State` |
| `ElasticModel` | a model whose number of replicas changes | `torch.parallel.AdaptiveDataParallel` |
| `ScaledModel` | what a scaling rule and a GradScaler need of it | the same |
| `ElasticLoader` | the batch under way | `torch._data.loader` |
| `Consensus` | acting at the same step on all replicas | `torch._runtime.consensus` |
| `Reporter` | step times, statistics, the best batch size | `torch._tuning.reporter` |
| `Survivor` | going on after a death | `torch._elastic.recovery` |
| `Rescaling` | changing the number of replicas in place | `torch._elastic.rescale` |
| `Joining` | becoming one of the running replicas | `torch._elastic.join` |

Nothing here imports torch at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar

from adaptdl_elastic.protocol.messages import ChangePlan, RecoveryPlan

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

Position = tuple[int, int, int]
"""(epoch, number of the data loop within it, global samples handed out in it)."""

Place = tuple[int, int]
"""(epoch, number of the data loop within it)."""

Command = dict[str, Any]
"""What to do at a boundary: `kind` and what that kind needs. Plain data: it travels between replicas."""


class RetryDataLoop(Exception):
    """A death was survived: the data loop goes on where it looks for what to do next."""


class SavedState(Protocol):
    """A state that is saved in every checkpoint, see `adaptdl_elastic.checkpoint.State`."""

    required: bool
    expires: int | None

    @property
    def name(self) -> str:
        """Its name, unique in the script."""

    def save(self, fileobj: BinaryIO) -> None:
        """Write it to a file."""

    def load(self, fileobj: BinaryIO) -> None:
        """Read what `save` wrote."""

    def sync(self) -> None:
        """Bring what the replicas hold into agreement."""

    def snapshot(self) -> Any:
        """Return a copy that later changes do not reach."""

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot."""

    def write_snapshot(self, snapshot: Any, fileobj: Any) -> None:
        """Write a snapshot so that `load` can read it."""

    def _copy_for_save(self) -> Any: ...

    def _saved(self, snapshot: Any) -> None: ...


class ModelSnapshot(Protocol):
    """What a step may change of one model besides its parameters, as it was when the step began."""

    def why_irreparable(self) -> str | None:
        """Return why the step cannot be put back; None if it can."""

    def put_back(self) -> None:
        """Let everything be as it was. May be done again."""


class ElasticModel(Protocol):
    """A model whose replicas come and go within the process.

    A sharded model or another framework's model takes part in changes of the number of replicas by
    implementing this and appending itself to `Session.models`.
    """

    name: str
    """Also the name of the `checkpoint.State` that holds its parameters and all that belongs to them."""

    own_random_streams: bool
    """Whether replicas that train it draw random numbers of their own in data loops."""

    @property
    def module(self) -> torch.nn.Module:
        """The script's module."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of its parameters."""

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate scheduler that it was given; None: it was given none."""

    # Whether it can take part.

    @property
    def has_own_process_group(self) -> bool:
        """Whether the script gave it a process group other than the default one."""

    @property
    def thawed(self) -> bool:
        """Whether parameters require gradients only since the model was wrapped."""

    def refuse_thawed(self, why: str) -> None:
        """Raise RuntimeError if `thawed`."""

    def why_not_resilient(self) -> str | None:
        """Return why the death of a peer cannot be survived with this model; None if it can."""

    # A step whose gradients could not be synchronised.

    def absorb_failures(self) -> None:
        """From now on, keep the failure of a collective in `failure` instead of raising it."""

    @property
    def failure(self) -> BaseException | None:
        """Why the gradients of the step under way could not be synchronised; None: nothing is wrong."""

    def clear_failure(self) -> None:
        """Forget the failure and the gradients of the step that it spoiled."""

    def give_up(self, reason: str) -> None:
        """Let a backward pass that waits for a lost peer go on. From any thread."""

    @property
    def stuck(self) -> bool:
        """Whether the process group has an operation under way that may never end."""

    def snapshot_step(self, last: ModelSnapshot | None) -> ModelSnapshot:
        """Copy what a step may change; the memory of `last` may be used again."""

    # Accumulation windows.

    @property
    def attempted_steps(self) -> int:
        """Optimizer steps that were taken, or left out because gradients were not finite."""

    @property
    def accumulates_by_hand(self) -> bool:
        """Whether the script accumulates over several windows in `no_sync`."""

    def drop_window(self) -> None:
        """Drop what has been accumulated of a window that will not be stepped."""

    # Another generation.

    def reinit_process_group(self) -> None:
        """Use the present default process group from now on, on the same parameters."""

    def sync_buffers(self, limit: timedelta = ...) -> None:
        """Give every replica rank 0's buffers. A collective."""

    def data_loop_begins(self) -> None:
        """Begin a data loop not known to train: give every replica rank 0's buffers. A collective."""

    # Gradient statistics.

    @property
    def progress(self) -> float:
        """Progress so far, in steps at the initial batch size."""

    def statistics(self) -> dict[str, Any]:
        """Return the gradient statistics, for other replicas."""

    def load_statistics(self, statistics: dict[str, Any]) -> None:
        """Take another replica's `statistics`."""


class GradientStatistics(Protocol):
    """What scaling rules and GradScalers read of a model's gradient statistics."""

    steps: int
    skipped: int

    def gain(self, scale: float) -> float:
        """Return how many steps of the initial batch size a step at `scale` is worth."""

    def lr_gain(self, scale: float) -> Any:
        """Return the same by parameter group."""

    def get_progress(self) -> float:
        """Return the progress so far, in steps at the initial batch size."""


class ScaledModel(Protocol):
    """What a scaling rule, and a GradScaler, need of the model that they serve."""

    @property
    def gns(self) -> Any:
        """Its `GradientStatistics`."""

    @property
    def scale(self) -> float:
        """Batch size of the present step over the initial batch size."""

    @property
    def initial_batch_size(self) -> int | None:
        """Global batch size that the data loader was made with; None before its first batch."""

    @property
    def stepping(self) -> bool:
        """Whether `optimizer.step()` steps now: not in the middle of an accumulation window."""

    @property
    def window_under_way(self) -> bool:
        """Whether something has been accumulated that is not stepped yet."""

    def begin_step(self, closure: bool = False) -> bool:
        """Return whether the optimizer is to step now."""

    def end_step(self, factor: Any) -> None:
        """Record that the optimizer has stepped at learning rates multiplied by `factor`."""

    def skipped_step(self) -> None:
        """Gradients were inf or nan, and the optimizer did not step."""

    def step_left_out(self) -> None:
        """`optimizer.step()` has come in the middle of a window."""

    def begin_zero_grad(self) -> bool:
        """Return whether all gradients are to be dropped now."""


class ElasticLoader(Protocol):
    """The data loader whose loop is under way, as models and the recovery see it."""

    key: str
    batch_size: int
    sample_dimension: int | None

    @property
    def training(self) -> bool:
        """Whether models are trained with this loader."""

    @property
    def training_loader_undecided(self) -> bool:
        """Whether no loader has been used for training yet."""

    @property
    def adaptive(self) -> bool:
        """Whether the batch size is chosen while training."""

    @property
    def may_accumulate(self) -> bool:
        """Whether several batches may be accumulated to one step."""

    @property
    def current_local_bsz(self) -> int:
        """Samples of a full batch on this replica."""

    @property
    def accumulation_steps(self) -> int:
        """Batches without an optimizer step in the window under way."""

    @property
    def micro_batch(self) -> int:
        """Place of the batch just handed out among those of its optimizer step."""

    @property
    def window_samples(self) -> int:
        """Samples of the present optimizer step: all replicas, all its batches."""

    @property
    def local_samples(self) -> int:
        """Samples of the batch just handed out that count."""

    @property
    def gradient_weight(self) -> float:
        """What this batch's mean gradient has to be multiplied by."""

    def is_accum_step(self) -> bool:
        """Return whether other batches follow the one at hand before the optimizer steps."""

    def is_optim_step(self) -> bool:
        """Return whether the optimizer steps after the batch at hand."""

    def train(self) -> None:
        """Make this the loader that models are trained with."""


class Loaders(Protocol):
    """The data loaders of a session."""

    current: Any
    """The `ElasticLoader` whose loop is under way; None outside of data loops."""

    training: Any
    """The `ElasticLoader` that models are trained with; None while that is not known."""

    unrepeatable: int
    """How many loaders cannot hand out the samples of a step again."""


class StepCounter(Protocol):
    """Where the script is; see `adaptdl_elastic.torch._runtime.position`."""

    step: int
    """Optimizer steps finished since the job began."""


class Closable(Protocol):
    """A part of a session that has to be closed with it."""

    def close(self) -> None:
        """End its threads."""


class Consensus(Protocol):
    """Doing something on every replica at the same step."""

    started: bool
    loops_over: bool
    lost: str | None
    """Why nothing can be agreed with this generation any more; None while all are there."""
    handlers: dict[str, Callable[[Command], None]]
    polls: list[Callable[[], Command | None]]

    def start(self) -> None:
        """Take orders from the agent and the terminal. Again does nothing."""

    def close(self) -> None:
        """End the threads and give the signals back."""

    def request(self, command: Command) -> None:
        """Have `command` done on every replica at the next common boundary. From any thread."""

    def boundary(self, position: Position, last: bool = False) -> None:
        """Pass a boundary, doing first what was agreed to be done there; nobody joins at a loop's `last`."""

    def on_message(self, sender: int, message: Any) -> None:
        """Take a control message of another replica."""

    def listen(self, kind: str, listener: Callable[[int, int, Any], None]) -> None:
        """Have `listener(sender, number, body)` called for control messages of a kind."""

    def on_lost(self, rank: int) -> None:
        """Record that a replica is gone without a goodbye."""

    def lose(self, reason: str) -> None:
        """Nothing can be agreed with this generation any more. From any thread."""

    def abandon(self) -> None:
        """Drop what was to be agreed with a generation whose connections are closed."""

    def renew(self, position: Position, recovered: bool = False) -> None:
        """Begin a new generation at `position`; `recovered`: the old one broke off."""

    def save(self, kind: str, requests: Sequence[Command] = ()) -> None:
        """Save a checkpoint, on every replica between the same steps, and tell the agent."""

    def report_step(self, force: bool = False) -> None:
        """Tell the agent of the last finished step."""

    def poll_soon(self) -> None:
        """Have the `polls` asked, which have just become more."""


class ChosenBatchSize(Protocol):
    """A batch size per replica, and how many batches are accumulated before the one that steps."""

    @property
    def atomic_bsz(self) -> int:
        """Samples of a full batch on one replica."""

    @property
    def accumulation_steps(self) -> int:
        """Batches without an optimizer step before each one with it."""


class Reporter(Protocol):
    """What a job learns about itself while it trains, and the batch size that follows from it."""

    def profile_step_start(self, atomic_bsz: int) -> None:
        """Begin a forward pass with `atomic_bsz` samples on this replica."""

    def profile_step_commit(self, accumulation_step: bool = False) -> None:
        """End the pass."""

    def pause(self) -> None:
        """Leave the time from here to the next pass out of the step times."""

    def update_grad_params(self, key: str, sqr: float, var: float) -> None:
        """Take the gradient statistics of one model."""

    def update_gain(self, key: str, gain: float, lr_factor: float) -> None:
        """Take the gain of one model, and what its learning rate is multiplied by."""

    def update_progress(self, progress: float) -> None:
        """Take the progress so far."""

    def get_progress(self) -> float:
        """Return the progress so far, in steps at the initial batch size."""

    def set_batch_size(
        self,
        init_batch_size: int,
        max_batch_size: int | None = None,
        local_bsz_bounds: tuple[int, int] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Take what the training loader was given."""

    def set_current_batch_size(self, atomic_bsz: int, accumulation_steps: int) -> None:
        """Take the batch size that is in use from now on."""

    def update_position(
        self,
        *,
        step: int,
        epoch: int = 0,
        epochs: int | None = None,
        samples_done: float | None = None,
        samples_total: float | None = None,
        data_size: int = 0,
    ) -> None:
        """Take where the job is."""

    def report_problem(self, about: str, problem: str | None) -> None:
        """Take what is wrong with a part of the training and what to do, or None: nothing is any more."""

    def set_inplace(self, possible: bool, reason: str = "") -> None:
        """Take whether this script can be rescaled without a restart, and why not."""

    def best_batch_size(self) -> ChosenBatchSize | None:
        """Return the best batch size on the replicas of this generation; None without a model."""

    def suggestion(self) -> ChosenBatchSize | None:
        """Return a batch size that is worth changing to; None: there is none."""

    def hints(self) -> Any:
        """Return the `sched_hints.JobHints` of now."""

    def close(self) -> None:
        """End the thread."""


class Survivor(Protocol):
    """Going on without a replica that has died."""

    waiting: bool
    """Whether it waits for a plan without the dead."""

    @property
    def armed(self) -> bool:
        """Whether a death in the present generation would be survived."""

    @property
    def failed(self) -> bool:
        """Whether the gradients of the window under way could not be synchronised."""

    @property
    def broken(self) -> bool:
        """Whether a peer is known to be gone."""

    def arm(self) -> None:
        """From now on the death of a peer does not end this replica, if that is possible at all."""

    def begin_window(self, index: int) -> None:
        """Prepare for the first batch of a training window, which is handed out next."""

    def before_step(self, left_out: bool) -> None:
        """Prepare for an `optimizer.step()` of this window; `left_out`: the call will do nothing."""

    def dry_batch(self) -> AbstractContextManager[None]:
        """Around a batch that does not count: the loop's body runs, and all that it changes is put back."""

    def mark(self) -> None:
        """All replicas have just synchronised their accumulators, or stand at the beginning of a loop."""

    def retry_on_peer_loss(self, call: Callable[[], T], loader: ElasticLoader | None = None) -> T:
        """Return `call()`, called again after each death that it meets with."""

    def restart_loop_on_peer_loss(self, call: Callable[[], T], loader: ElasticLoader) -> T:
        """Return `call()`; RetryDataLoop if a death was survived instead."""

    def loop_ended(self, loader: ElasticLoader) -> bool:
        """Return whether all replicas have come to the end of this loop with nothing to do again."""

    def loop_left(self, loader: ElasticLoader) -> None:
        """Record that this replica has left a loop by `break`."""

    def between_loops(self) -> None:
        """All replicas are about to enter a data loop or an epoch."""

    def recover_if_peer_lost(self) -> None:
        """Between data loops: go on without those who are gone."""

    def recover(self, reason: str, loader: ElasticLoader | None = None, at_end: bool = False) -> None:
        """Become a generation without the dead, and stand where training goes on."""

    def newer(self) -> bool:
        """Return whether there is a plan of a later generation, without a peer that has died."""

    def on_lost(self) -> None:
        """Record that a peer is gone. May be called from any thread."""

    def on_plan(self, message: RecoveryPlan) -> None:
        """Take the agent's plan of a generation without dead replicas. Runs in the channel's thread."""


class Rescaling(Protocol):
    """Changing the number of replicas without restarting those that stay."""

    def handlers(self) -> dict[str, Callable[[Command], None]]:
        """Return what is done at agreed boundaries, by the kind of the command."""

    def on_plan(self, message: ChangePlan) -> None:
        """Take the agent's plan of a change in place. Runs in the channel's thread."""

    def on_withdrawn(self, generation: int) -> None:
        """Withdraw the plan of that generation, as the agent orders. Runs in the channel's thread."""

    def epoch_ends(self, epoch: int) -> None:
        """States of `epoch` are about to be dropped."""


class Joining(Protocol):
    """A newcomer's side of a change in place."""

    def arrive(self, place: Place, loader: str) -> bool:
        """Come to a data loop: join the others in it, or pass it by because they have (False)."""


class Capability(Protocol):
    """Whether groups can be made again in this process, where that has to be tried out first."""

    why: str
    agreed: bool

    @property
    def failed(self) -> bool:
        """Whether this node's self-test is known to have failed."""


class Summed(Protocol):
    """The state of an Accumulator."""

    name: str
    syncs: int
    summed: dict[Any, Any]


class TorchGroup(Protocol):
    """Torch's default group of one generation; see `adaptdl_elastic.torch._process_group.backends.Group`."""

    completion_is_unreliable: bool

    @property
    def is_aborted(self) -> bool:
        """Whether it has been aborted."""
