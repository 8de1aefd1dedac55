"""Register the data loaders of a session, and keep the batch size of each.

All replicas change a batch size at the same boundary between two steps. They agree on it at the beginning of
a generation. Later in the generation, rank 0 suggests a better one if the script has called
`autoscale_batch_size`. Which one is better is decided in `_tuning.batch_size`.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from functools import cached_property
from typing import Any

import torch

from adaptdl_elastic import _frames, _session, checkpoint, collective, env
from adaptdl_elastic._checks import flag, integer
from adaptdl_elastic._interfaces import ElasticLoader
from adaptdl_elastic._session import Session
from adaptdl_elastic._values import BatchSize, Command, Limits
from adaptdl_elastic.protocol import uncaught_error
from adaptdl_elastic.torch._data.batch_comparison import BatchComparison
from adaptdl_elastic.torch._data.partition import chunks, fill, taken
from adaptdl_elastic.torch._data.random_streams import RandomStreams
from adaptdl_elastic.torch._runtime.hang_watch import HangWatch
from adaptdl_elastic.torch._runtime.position import OUTSIDE, script_position
from adaptdl_elastic.torch._tuning.batch_size import initial, local_batch, misfit
from adaptdl_elastic.torch._tuning.memory_limit import limited, memory_limit, split
from adaptdl_elastic.torch._tuning.replica_speed import ReplicaSpeed

logger = logging.getLogger(__name__)


class LoaderRegistry:
    """Register the loaders of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        # loaders made outside of epoch loops
        self._outside = 0
        # (epoch, loaders by script line)
        self._inside: tuple[int | None, Counter[str]] = (None, Counter())
        # number of loaders that cannot hand out the samples of a step again
        self.unrepeatable = 0

    @cached_property
    def streams(self) -> RandomStreams:
        """Random streams of this replica; the first access restores them from the checkpoint."""
        streams = RandomStreams(self._session)
        checkpoint.load_state(streams)
        return streams

    @cached_property
    def comparison(self) -> BatchComparison:
        """Comparison of the data that the replicas read."""
        return BatchComparison(self._session)

    @cached_property
    def speed(self) -> ReplicaSpeed:
        """Comparison of the speeds of the replicas."""
        speed = ReplicaSpeed(self._session)
        self._watch = HangWatch(self._session, speed.clock)
        return speed

    def key(self) -> str:
        """Return the key of a new loader, the same on all replicas and in every run of the script.

        Outside of epoch loops the key is a running number. Inside an epoch loop it is the place in the script
        that makes the loader: a script may make a loader in every epoch, or only in the first epoch of each
        process, and the first epoch of a newcomer is a later one than that of the other replicas. Loaders
        made at the same place within one epoch are numbered.
        """
        epoch = self._session.epoch
        if epoch is None:
            self._outside += 1
            return str(self._outside - 1)
        known, made = self._inside
        if known != epoch:
            self._inside = epoch, made = epoch, Counter()
        place = _frames.script_lines(script_position().body)
        made[place] += 1
        return place if made[place] == 1 else f"{place}, number {made[place]}"


def registry(session: Session | None = None) -> LoaderRegistry:
    """Return the loaders of this process's session."""
    session = session or _session.current()
    found = session.loaders
    if found is None:
        found = session.loaders = LoaderRegistry(session)
    assert isinstance(found, LoaderRegistry)
    return found


def current_dataloader() -> ElasticLoader | None:
    """Return the helper of the loader whose loop runs in this process; None outside data loops."""
    return _session.current().loader


class LoaderBatchSize(ElasticLoader):
    """Keep the batch size of one loader. `AdaptiveDataLoaderHelper` adds the data loop to it.

    Args:
        batch_size: Initial number of samples per optimizer step, over all replicas.
    """

    def __init__(self, batch_size: int) -> None:
        size = integer(batch_size)
        if size is None or size < 1:
            raise ValueError(
                f"batch_size={batch_size!r}: give the number of samples per step over all replicas, 1 or more"
            )
        self.batch_size = batch_size = size
        self.session = _session.current()
        self.registry = registry()
        self.key = self.registry.key()
        self.registry.unrepeatable += 1
        self._max_batch_size: int | None = None
        self._local_bounds: tuple[int, int] | None = None
        # whether the script allows accumulation
        self._allowed = False
        # step when the batch size was set last, that size, the largest that has worked
        self._sizes = 0, 0, 0
        self.size = self._initial()
        # generation whose batch size has been settled
        self._generation: int | None = None
        # how often the batches have become smaller, or have been repeated, in this process
        self._repeats = 0
        # a model has been trained with this loader in this process
        self.trained = False
        # whether a rest of a pass that fills no batch is left out
        self.drop_last = False

    @property
    def replicas(self) -> int:
        """Number of replicas that share the data."""
        return self.session.replicas

    @property
    def max_batch_size(self) -> int | None:
        """Largest batch size that autoscaling may choose; None without autoscaling."""
        return self._max_batch_size

    @property
    def local_bsz_bounds(self) -> tuple[int, int] | None:
        """Smallest and largest batch of one replica; None if there are no bounds."""
        return self._local_bounds

    @property
    def current_local_bsz(self) -> int:
        """Samples of this replica in a full batch.

        With autoscaling it is the atomic batch size, which is the same on all replicas. Without it, it is the
        share of this replica: 3, 3 and 2 for a batch of 8 on three replicas. A replica without a share gets
        up to two samples of another replica, which do not count. Where memory divides the batch of a step, it
        is the most that a replica has in a pass.
        """
        if self.equal_shares or self.size.accumulation_steps:
            return self.size.atomic_bsz
        mine = taken(self.batch_size, self.session.replicas, self.session.rank, self.largest_pass)
        return len(mine) or min(fill(self.largest_pass), self.batch_size)

    @property
    def equal_shares(self) -> bool:
        """Whether all replicas have equal local batches: where autoscaling chooses the batch size."""
        return self._max_batch_size is not None and not self.limits.exact

    @property
    def full_chunk(self) -> int:
        """Samples of a full batch over all replicas, of a loader whose windows are not planned."""
        equal = self.equal_shares or self.size.accumulation_steps
        return self.session.replicas * self.size.atomic_bsz if equal else self.batch_size

    @property
    def current_batch_size(self) -> int:
        """Samples of a full optimizer step, over all replicas."""
        if not self.equal_shares:
            return self.batch_size
        return (
            self.session.replicas
            * self.size.atomic_bsz
            * (self.size.accumulation_steps + 1 if self.training else 1)
        )

    @property
    def largest_pass(self) -> int | None:
        """Most samples of one replica in a batch, by the bounds, the memory or equal shares of one sample."""
        if self.equal_shares and self.size.atomic_bsz == 1:
            return 1
        bounds = self.limits.bounds
        return None if bounds is None else bounds[1]

    @property
    def step_samples(self) -> int | None:
        """Samples of a step without autoscaling, on any number of replicas; None with autoscaling."""
        return None if self.equal_shares else self.batch_size

    @property
    def adaptive(self) -> bool:
        """Whether the batch size is chosen during training (`autoscale_batch_size` was called)."""
        return self._max_batch_size is not None

    @property
    def training(self) -> bool:
        """Whether models are trained with this loader."""
        return self.session.training_loader is self

    @property
    def training_loader_undecided(self) -> bool:
        """Whether no loader has been used for training yet."""
        return self.session.training_loader is None and script_position().trainer is None

    def train(self) -> None:
        """Make this the loader that models are trained with.

        AdaptiveDataParallel calls this when a module in training mode gets a batch of this loader.

        Raises:
            RuntimeError: another loader, with autoscaling, is the training loader already.
        """
        if self.session.epoch is None:
            self._train_outside()
        known = self.session.training_loader
        if known is self:
            return
        if known is not None and known.adaptive and not self.replaces(known):
            raise RuntimeError(
                "a second loader would be used for training: autoscale_batch_size was called on another one"
            )
        if known is None:
            self._tell_batch_size()
        self.session.training_loader = self
        # if several loaders train in turn, this one will train again
        self.trained = True
        script_position().trainer = self.key
        # made here, not at its first use, which may be in the reporter's thread
        memory_limit(self.session)
        self.session.metrics.batch_size_changed()

    def _tell_batch_size(self) -> None:
        """Print the batch size with which this process begins to train."""
        session, total = self.session, self.current_batch_size
        if session.rank or session.joining or session.dry:
            return
        replicas, used = session.replicas, max(self.batch_size // 2, 1)
        line = f"batch size {total} over {replicas} replica{'s' if replicas > 1 else ''}"
        if used < replicas and not self.equal_shares:
            line += f", of which only {used} can share it: run it on at most {used}, or raise batch_size"
        print(line, file=sys.stderr, flush=True)

    def _train_outside(self) -> None:
        """Report that models are trained outside of epochs, where no position is kept and no replica joins.

        Raises:
            CanNotJoin: this replica is a newcomer, and the others have not come to an epoch yet, either.
        """
        session = self.session
        if session.trains_outside or session.dry or session.channel is None:
            return
        session.trains_outside = True
        line = (
            f"{_frames.script_line()} trains outside of adl.remaining_epochs_until: there the job keeps its "
            f"size, and a restart begins the loop again. Write `for epoch in adl.remaining_epochs_until(N):`"
        )
        if session.newcomer is not None and session.newcomer.before_epochs:
            collective.give_up(line)
        session.metrics.report_problem(OUTSIDE, line)
        session.report_eligibility()

    def fit_memory(self) -> None:
        """Choose batches that fit into the new, smaller memory limit. On all replicas at one boundary."""
        if self.equal_shares:
            self.size = split(self.size, memory_limit(self.session).largest)
        else:
            self.size = self._initial()
        self._repeats += 1
        self.session.metrics.batch_size_changed()

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = False,
    ) -> None:
        """Let the batch size be chosen during training, and make this the training loader.

        Once the job's goodput is known, the scheduler assigns no number of replicas that does not fit these
        limits. The job can still have such a number, for example after the loss of a node. It then logs a
        warning and continues:

        - No batch of a replica is above the upper bound.
        - Nothing is accumulated unless allowed, so the batch size may be below `batch_size`.
        - If the lower bound and `max_batch_size` contradict each other, `max_batch_size` holds.

        Args:
            max_batch_size: Largest batch size over all replicas (the equal shares of it are rounded up).
            local_bsz_bounds: Smallest and largest batch of one replica, as its memory allows; None: no bound.
            gradient_accumulation: Whether gradients of several batches may be accumulated before a step.

        Raises:
            ValueError: the arguments contradict each other, or the initial batch size does not fit them on
                the number of replicas with which the job begins.
            RuntimeError: this method was called on another loader already.
        """
        largest = integer(max_batch_size)
        bounds = _check_bounds(self.batch_size, max_batch_size, largest, local_bsz_bounds)
        gradient_accumulation = flag("gradient_accumulation", gradient_accumulation)
        problem = misfit(
            Limits(self.batch_size, largest, bounds, gradient_accumulation), self.session.replicas
        )
        if problem is not None and _begins():
            raise ValueError(problem)
        known = self.session.training_loader
        self._generation = None
        if known is not None and known is not self and known.adaptive:
            if not self.replaces(known):
                raise RuntimeError(
                    "autoscale_batch_size was called on another loader already; only one trains"
                )
            assert isinstance(known, LoaderBatchSize)
            if known.batch_size == self.batch_size:
                self.size, self._generation = known.size, known._generation
            agreed = self.session.consensus
            agreed.polls[:] = [self._poll if poll == known._poll else poll for poll in agreed.polls]
            agreed.handlers["batch_size"] = self._change
        begins, self._max_batch_size, self._local_bounds = not self.adaptive, largest, bounds
        self._allowed = gradient_accumulation
        if begins and self._generation is None:
            self.size = self._initial()
        self.session.training_loader = self
        self.session.metrics.batch_size_changed()

    def replaces(self, known: ElasticLoader) -> bool:
        """Return whether the script has made this loader to replace `known`, e.g. one loader per epoch."""
        return known.key == self.key and self.session.loader is not known

    def sync_local_bsz(self) -> int:
        """Settle the batch size of this generation on all replicas, and return `current_local_bsz`."""
        session = self.session
        if self._generation != session.generation:
            self._generation = session.generation
            size = self._initial()
            if self.adaptive:
                leads = session.rank == 0 and self.equal_shares
                best = session.metrics.best_batch_size() if leads else None
                chosen = collective.share(None if best is None else tuple(best), "batch size")
                if chosen is not None:
                    size = BatchSize(*chosen)
            # only now, as the reporter's thread takes it for the size in use
            self.size = size
            if self.adaptive:
                problem = misfit(self.limits, self.session.replicas)
                if problem is not None and session.rank == 0:
                    logger.warning(
                        "%s; until there are others, a batch is %d", problem, self.current_batch_size
                    )
                session.consensus.handlers["batch_size"] = self._change
                if self._poll not in session.consensus.polls:
                    session.consensus.polls.append(self._poll)
                    session.consensus.poll_soon()
            if self.training:
                if self.adaptive:
                    self._remember_size()
                session.metrics.batch_size_changed()
        return self.current_local_bsz

    def _initial(self) -> BatchSize:
        """Return the largest batch of a replica and the accumulation steps of the initial batch size."""
        if not self.equal_shares:
            largest = self.largest_pass
            window = chunks(self.batch_size, self.session.replicas, largest)
            return BatchSize(len(taken(window[0], self.session.replicas, 0, largest)), len(window) - 1)
        return initial(self.limits, self.session.replicas)

    @property
    def limits(self) -> Limits:
        """Limits of the batch size, with that of the memory if this loader trains."""
        most = self._max_batch_size
        if most is not None and (told := env.batch_size_limit()) is not None:
            most = max(self.batch_size, min(most, told))
        given = Limits(self.batch_size, most, self._local_bounds, self._allowed)
        return limited(given, memory_limit(self.session).largest) if self.training else given

    def _poll(self) -> Command | None:
        """Return a command to change to a better batch size, if there is one. Runs in the control thread.

        There is none before the script enters this loader's loop in this generation. Until then, a replica
        that joined in another loader's loop could not carry out the command. On entering the loop, all
        replicas agree on the batch size anyway (`sync_local_bsz`).
        """
        session = self.session
        if self._generation != session.generation or not self.equal_shares:
            return None
        better = session.metrics.suggestion()
        if better is None or better == self.size:
            return None
        atomic, accumulation = better
        return {"kind": "batch_size", "atomic": atomic, "accumulation": accumulation}

    def _change(self, command: Command) -> None:
        """Change the batch size to the one in `command`. Runs on every replica at the same boundary."""
        largest = memory_limit(self.session).largest
        if largest is not None and command["atomic"] > largest:
            # it was chosen before the limit was known
            return
        self.size = BatchSize(command["atomic"], command["accumulation"])
        self._remember_size()
        self.session.metrics.batch_size_changed()

    def _remember_size(self) -> None:
        """Remember the new batch size and the largest that has worked, for the record of an error."""
        session = self.session
        least = self.session.replicas * local_batch(self.batch_size, self.session.replicas)
        step, size, worked = self._sizes
        worked = max(worked, least, size if session.step > step else 0)
        step, size = session.step, self.current_batch_size
        self._sizes = step, size, worked
        uncaught_error.worked_batch = lambda: worked if session.step == step and size > worked else None

    def to_tensorboard(self, writer: Any, global_step: int, tag_prefix: str = "") -> None:
        """Write the batch sizes to TensorBoard. Does nothing on ranks other than 0.

        Args:
            writer: A `torch.utils.tensorboard.SummaryWriter`.
            global_step: Step under which the values are written.
            tag_prefix: Prefix of the tags; a `/` is appended if it lacks one.
        """
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"writer={writer!r}: give a torch.utils.tensorboard.SummaryWriter")
        if self.session.rank != 0:
            return
        if tag_prefix and not tag_prefix.endswith("/"):
            tag_prefix += "/"
        values = {
            "Total_Batch_Size": self.current_batch_size,
            "Local_Batch_Size": self.current_local_bsz,
            "Accumulation_Steps": self.size.accumulation_steps,
        }
        for name, value in values.items():
            writer.add_scalar(tag_prefix + name, value, global_step)


def initial_seed(loader: LoaderBatchSize, generator: torch.Generator | None) -> int:
    """Return the seed of a loader's sample order, the same on all replicas.

    The seed is that of rank 0's `generator`, or of `torch.manual_seed` if `generator` is None. It is kept in
    checkpoints, so that a script that sets no seed continues in the same order after a restart.

    Raises:
        RetryDataLoop: a peer died and the job has recovered; the data loop must be continued from its new
            position.
    """
    state = script_position()
    known = state.seeds.get(loader.key)
    if known is None:
        own = generator.initial_seed() if generator is not None else loader.registry.streams.seed
        mine, safe = own & (2**63 - 1), loader.session.recovery
        known = safe.restart_loop_on_peer_loss(lambda: int(collective.share(mine, "seed")), loader)
        state.seeds[loader.key] = known
    return known


def _begins() -> bool:
    """Return whether the run has just begun: no restart, no join and no checkpoint came before."""
    fresh = env.num_restarts() == 0 and not _session.current().joining
    return fresh and checkpoint.loaded_id() is None


def _check_bounds(
    batch_size: int,
    max_batch_size: Any,
    largest: int | None,
    given: tuple[int | None, int | None] | None,
) -> tuple[int, int] | None:
    """Check the bounds of a batch size, and fill in their defaults.

    Args:
        batch_size: Initial batch size, over all replicas.
        max_batch_size: Largest batch size as the script gave it, for error messages.
        largest: `max_batch_size` as an integer; None if it is none.
        given: Smallest and largest batch of one replica, each or both None for no bound.

    Returns:
        Smallest and largest batch of one replica; None if `given` is None.

    Raises:
        ValueError: the bounds contradict each other.
    """
    if largest is None or largest < batch_size:
        raise ValueError(
            f"max_batch_size={max_batch_size!r}: give an integer of at least the batch size, {batch_size}"
        )
    if given is None:
        return None
    try:
        low, high = given
    except (TypeError, ValueError):
        raise ValueError(f"local_bsz_bounds={given!r}: give a pair (smallest, largest)") from None
    low = 1 if low is None else integer(low)
    high = largest if high is None else integer(high)
    if low is None or high is None or not 1 <= low <= high:
        raise ValueError(f"local_bsz_bounds={given!r}: integers 1 <= smallest <= largest are needed")
    if low > batch_size:
        raise ValueError(
            f"local_bsz_bounds={given!r}: the smallest is above the batch size, {batch_size}, which one "
            f"replica starts with"
        )
    return low, min(high, largest)
