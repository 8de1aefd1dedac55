"""Let Lightning's Trainer run while replicas come, go and die.

    trainer = L.Trainer(strategy=ElasticStrategy(), ...)

How it works. The Trainer sees a single process that trains with the whole batch. Below it,
`AdaptiveDataParallel` averages the gradients, and `AdaptiveDataLoader` shares each batch among the replicas.
A batch of the Trainer is a whole optimizer step, whatever `accumulate_grad_batches` says; the passes of a
step are made inside `optimizer_step`. The counters of the loops and the states of the callbacks are states in
the job's checkpoints. A step that did not commit is left by an exception, before callbacks see it, and is
done again. An epoch ends when the loader says so, because only then its last step is committed.

With `max_batch_size` the batch size is chosen during training, and the Trainer's counters count steps at the
initial batch size (`_lightning_steps`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loops import _TrainingEpochLoop
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import IterableDataset

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint, collective, env
from adaptdl_elastic.torch.epoch import continue_at
from adaptdl_elastic.torch.frameworks._callback_states import CallbackStates
from adaptdl_elastic.torch.frameworks._lightning_steps import LightningSteps
from adaptdl_elastic.torch.frameworks._single_process import connect, refuse_autoscaling

__all__ = ["ElasticStrategy"]

logger = logging.getLogger(__name__)

_MANY_EPOCHS = 2**31
_END = object()
_trainers = itertools.count()  # numbers of the Trainers of this script, which may have one to test


class _StepFailedError(Exception):
    """Raised if a replica has died, so that the current step has to be done again."""


class _Loader(adl.AdaptiveDataLoader[Any]):
    """Hand out the first batch of each step, through the strategy."""

    strategy: ElasticStrategy

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        data: Any = self.dataset
        rounded = math.floor if self.drop_last else math.ceil
        return rounded(len(data) / (self.batch_size or 1))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self.strategy.first_batches()

    def batches(self) -> Iterator[Any]:
        """Begin a data loop over the batches of this replica."""
        return super().__iter__()


class _Counters(checkpoint.TensorState):
    """Keep the counters of the Trainer's loops."""

    part_of_step = True
    required = False

    def __init__(self, trainer: Any, steps: LightningSteps | None) -> None:
        super().__init__("lightning-loops")
        self._loop, self._steps = trainer.fit_loop, steps
        self.saved: dict[str, Any] | None = None
        self.restored = checkpoint.load_state(self)

    def _parts(self) -> dict[str, Any]:
        steps = self._loop.epoch_loop
        return {
            "epoch": self._loop.epoch_progress,
            "batch": steps.batch_progress,
            "scheduler": steps.scheduler_progress,
            "optimizer": steps.automatic_optimization.optim_progress,
        }

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {name: part.state_dict() for name, part in self._parts().items()}
        steps = self._steps
        return {
            **found,
            "stepped": self._loop.epoch_loop._batches_that_stepped,
            "made": 0 if steps is None else steps.made,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved = state_dict
        for name, part in self._parts().items():
            part.load_state_dict(state_dict[name])
        self._loop.epoch_loop._batches_that_stepped = state_dict["stepped"]
        if self._steps is not None:
            self._steps.made = state_dict.get("made", 0)

    def begin(self, epochs: int) -> None:
        """Set the counters of epochs to `epochs` finished ones."""
        progress = self._loop.epoch_progress
        for tracker in (progress.total, progress.current):
            tracker.ready = tracker.started = tracker.processed = tracker.completed = epochs

    def skipped(self) -> bool:
        """Return whether the others have finished this epoch, which a newcomer therefore passes by.

        The counters, which are those of the others' epoch, are set back to this one: the Trainer counts it.
        """
        progress, epoch = self._loop.epoch_progress, adl.finished_epochs()
        if progress.current.processed <= epoch:
            return False
        self.begin(epoch)
        for tracker in (progress.total, progress.current):
            tracker.ready = tracker.started = epoch + 1
        return True


class _Places(checkpoint.TensorState):
    """Keep what rank 0 chose at the job's start: versions of loggers and folders of checkpoints."""

    required = False

    def __init__(self, trainer: Any) -> None:
        super().__init__(f"lightning-places-{next(_trainers)}")
        # loggers that number their versions find the next free one in their folder
        self._loggers = [one for one in trainer.loggers if hasattr(one, "_version")]
        self._places: dict[str, Any] = {"versions": [one.version for one in self._loggers]}
        checkpoint.load_state(self)
        self._places = collective.broadcast(self._places, tag=self.name)
        for one, version in zip(self._loggers, self._places["versions"], strict=False):
            one._version = version
        self.keep_logs()

    def keep_logs(self) -> None:
        """Rename the file of a CSVLogger that begins to write on this replica and would delete it."""
        for one in self._loggers:
            if adl.rank() == 0 and isinstance(one, CSVLogger) and one._experiment is None:
                file = Path(one.log_dir, "metrics.csv")
                with contextlib.suppress(OSError):  # there is none
                    file.rename(file.with_name(f"metrics-{file.stat().st_mtime_ns}.csv"))

    def set_folders(self, trainer: Any) -> None:
        """Give the checkpoint callbacks, which have chosen their folders, those of the job."""
        callbacks = {one.state_key: one for one in trainer.checkpoint_callbacks if hasattr(one, "dirpath")}
        if "folders" not in self._places:
            folders = {key: str(one.dirpath) for key, one in callbacks.items()}
            self._places["folders"] = collective.broadcast(folders, tag=f"{self.name}-folders")
        for key in callbacks.keys() & self._places["folders"].keys():
            callbacks[key].dirpath = self._places["folders"][key]

    def state_dict(self) -> dict[str, Any]:
        return self._places

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._places = dict(state_dict)


class _ElasticEpochLoop(_TrainingEpochLoop):
    """Run an epoch until the loader has ended, instead of a number of batches."""

    def run(self, data_fetcher: Any) -> None:
        """Run the steps of an epoch. Repeat a step that failed because a replica has died."""
        self.reset()
        strategy = self.trainer.strategy
        assert isinstance(strategy, ElasticStrategy)
        strategy.begin_epoch(self)
        self.on_run_start(data_fetcher)
        ran = ended = False
        while not ended:
            while not (self.done or ended):
                try:
                    self.advance(data_fetcher)
                    ran = True
                    self.on_advance_end(data_fetcher)
                except _StepFailedError:
                    pass
                except StopIteration:
                    ended = True
                finally:
                    self.on_iteration_done()
            ended = ended or strategy.ends(lambda: self.done)
        # whether the validation after the steps was interrupted
        if not ran and not strategy.skipped() and self._num_ready_batches_reached():
            self._batches_that_stepped -= 1
            self.on_advance_end(data_fetcher)

    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Step the scheduler; if the batch size is being chosen, for every step that was made."""
        steps = self.trainer.strategy.steps
        paced = steps is not None and interval == "step" and not update_plateau_schedulers
        for _ in steps.each() if paced else (None,):
            super()._update_learning_rates(interval, update_plateau_schedulers)


@contextlib.contextmanager
def _running_steps(module: Any) -> Iterator[None]:
    """Let `forward` of the module run its training step, which may call the module's own `forward`."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        module.forward = own
        try:
            return module.training_step(*args, **kwargs)
        finally:
            module.forward = forward

    module.forward = forward
    try:
        yield
    finally:
        module.forward = own


class ElasticStrategy(SingleDeviceStrategy):
    """Strategy of Lightning's Trainer for a job whose number of replicas changes.

    The batch size of the training loader × `accumulate_grad_batches` is the batch of a step over all
    replicas. A replica passes at most one batch of the loader's size through the model at once.

    Args:
        max_batch_size: Largest batch of a step, over all replicas, that may be chosen during training; None:
            the batch stays the initial one.
        local_bsz_bounds: Smallest and largest batch of one replica in a pass; None: what memory allows.
        **ddp_kwargs: Arguments of `AdaptiveDataParallel`, e.g. `scaling_rule`, and of
            DistributedDataParallel.

    Raises:
        ValueError: an argument, the Trainer or the module has a setting that is not supported; the message
            names it.
    """

    strategy_name = "elastic"

    def __init__(
        self,
        max_batch_size: int | None = None,
        local_bsz_bounds: tuple[int, int] | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        refuse_autoscaling(ddp_kwargs, "ElasticStrategy: give max_batch_size")
        if max_batch_size is None and local_bsz_bounds is not None:
            raise ValueError("local_bsz_bounds without max_batch_size in ElasticStrategy: give both")
        super().__init__("cuda" if torch.cuda.is_available() else "cpu")
        # of a training step: Lightning's own one serves a single pass of the module, and parts may follow
        self._forward_redirection = lambda model, module, name, *args, **kwargs: model(*args, **kwargs)
        self._most, self._bounds = max_batch_size, local_bsz_bounds
        # the Trainer's steps, if the batch size is chosen during training
        self.steps: LightningSteps | None = None
        self._ddp_kwargs = ddp_kwargs
        self._trainer: Any = None
        self._accumulated = 1
        self._counters: _Counters | None = None
        self._places: _Places | None = None
        self._began = False
        self._epochs: Any = None
        self._loader: Any = None
        self._batches: Any = None  # batches of this replica in the running epoch, once asked for
        self._next: Any = None  # a batch that was fetched to commit the step before it
        self._left = False  # the last epoch was left before its end
        self._told = False  # whether the metrics of `training_step` were looked at
        self._batch: Any = None  # batch that replaces the Trainer's in `training_step`

    # -- who and where -----------------------------------------------------------------------------

    @property
    def global_rank(self) -> int:
        """Current rank of this replica."""
        return adl.rank()

    @global_rank.setter
    def global_rank(self, rank: int) -> None:
        pass  # set by the parent's constructor

    @property
    def local_rank(self) -> int:
        """Number of this replica on its node."""
        return env.local_rank()

    @local_rank.setter
    def local_rank(self, rank: int) -> None:
        pass  # set by the parent's constructor

    @property
    def is_global_zero(self) -> bool:
        """Whether this replica writes files and logs."""
        return adl.rank() == 0

    @property
    def root_device(self) -> torch.device:
        """Device of this replica."""
        if isinstance(self.accelerator, CPUAccelerator) or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", env.local_rank())

    def setup_environment(self) -> None:
        """Connect the replicas."""
        super().setup_environment()
        connect(self.root_device.type)
        rank_zero_only.rank = adl.rank()
        self._places = self._places or _Places(self.lightning_module.trainer)

    # -- model, optimizer, loader ------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Prepare model and optimizer as on a single device."""
        self._trainer = trainer
        if trainer.state.fn == TrainerFn.FITTING:
            if trainer.precision_plugin.precision == "16-mixed":
                raise ValueError("precision='16-mixed' with ElasticStrategy: use 'bf16-mixed'")
            if not trainer.lightning_module.automatic_optimization:
                raise ValueError("manual optimization with ElasticStrategy: use automatic optimization")
            if self._counters is not None:
                raise ValueError("fit() a second time with ElasticStrategy: only one fit() per script")
            if trainer.fast_dev_run:
                self._most = None
            if self._most is not None and trainer.limit_train_batches != 1.0:
                raise ValueError(
                    "limit_train_batches or overfit_batches with max_batch_size, by which an epoch has no "
                    "certain number of batches: give max_steps"
                )
            if self._most is not None and trainer.reload_dataloaders_every_n_epochs:
                raise ValueError(
                    "reload_dataloaders_every_n_epochs with max_batch_size: leave one of them out"
                )
            self._accumulated, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, 1
            trainer.fit_loop.epoch_loop.__class__ = _ElasticEpochLoop
            assert self._places is not None
            self._places.set_folders(trainer)
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and len(self.lr_scheduler_configs) > 1:
            raise ValueError("several learning-rate schedulers with ElasticStrategy: chain them into one")

    def process_dataloader(self, dataloader: Any) -> Any:
        """Make the training loader elastic; validation, test and prediction read all data on each replica."""
        if not self._trainer.training:
            return dataloader
        size = None if dataloader.batch_size is None else dataloader.batch_size * self._accumulated
        loader: Any = _Loader.from_loader(dataloader, size)
        if self._most is not None:
            if size is None:
                raise ValueError("max_batch_size with a batch_sampler, whose batches are whole steps")
            if isinstance(dataloader.dataset, IterableDataset) and self._trainer.max_steps < 0:
                raise ValueError("max_batch_size with a stream, whose epochs end with it: give max_steps")
            loader.autoscale_batch_size(self._most, self._bounds, gradient_accumulation=True)
        elif self._accumulated > 1:
            if size is None:
                raise ValueError(
                    "accumulate_grad_batches with a batch_sampler, whose batches are whole steps"
                )
            loader.autoscale_batch_size(size, (1, dataloader.batch_size), gradient_accumulation=True)
        loader.strategy = self
        self._loader = loader
        return loader

    def on_train_start(self) -> None:
        """Wrap the model, and restore what the job's checkpoint or the other replicas have."""
        trainer, module = self._trainer, self.lightning_module
        self.steps = None if self._most is None else LightningSteps(trainer)
        self._counters = _Counters(trainer, self.steps)
        CallbackStates("lightning-callback-states", trainer.callbacks, module)
        options = dict(self._ddp_kwargs)
        if self.root_device.type == "cuda":
            options["device_ids"] = [self.root_device.index]
        scheduler = self.lr_scheduler_configs[0].scheduler if self.lr_scheduler_configs else None
        self.model = adl.AdaptiveDataParallel(module, self.optimizers[0], scheduler, **options)
        self.model.run_context = partial(_running_steps, module)
        if self._counters.restored:
            self._counters.begin(adl.finished_epochs())

    def on_train_end(self) -> None:
        """End the epochs together with the other replicas, unless the training was stopped before."""
        if self._epochs is None:
            return
        if self._left or adl.finished_epochs() + 1 < self._until():
            self._epochs.close()
        else:
            next(self._epochs, None)

    # -- an epoch ----------------------------------------------------------------------------------

    def _until(self) -> int:
        epochs = self._trainer.max_epochs
        return _MANY_EPOCHS if epochs is None or epochs < 0 else int(epochs)

    def begin_epoch(self, loop: Any) -> None:
        """Begin the next epoch of the job. The first call continues at the position in the checkpoint."""
        assert self._counters is not None
        if not self._began:
            self._began = True
            if self._counters.restored:
                assert self._counters.saved is not None
                loop.batch_progress.load_state_dict(self._counters.saved["batch"])
            elif self._trainer.current_epoch or loop.batch_progress.current.ready:
                size = self._trainer.train_dataloader.batch_size
                continue_at(self._trainer.current_epoch, loop.batch_progress.current.ready * size)
            self._epochs = adl.remaining_epochs_until(self._until())
        next(self._epochs)
        self._batches, self._left = None, False
        if self.steps is not None:
            self.steps.begin_epoch()

    def skipped(self) -> bool:
        """Return whether this is an epoch that the others had finished before this replica joined them."""
        assert self._counters is not None
        return self._counters.skipped()

    def first_batches(self) -> Iterator[Any]:
        """Yield the first batch of every step of an epoch."""
        while True:
            batch = self._fetched()
            if batch is _END:
                return
            self._refresh()
            yield batch

    def _fetched(self) -> Any:
        """Fetch the next batch of this replica that counts; return `_END` if none is left.

        Fetching commits the previous step.
        """
        batch, self._next = self._next, None
        if self._batches is None:
            self._batches = self._loader.batches()
        while batch is None:
            batch = next(self._batches, _END)
            if batch is not _END and not adl.batch_counts():
                batch = None
        return batch

    def _refresh(self) -> None:
        """Update what may have changed in the Trainer since the last step: the rank and the step number."""
        assert self._places is not None
        self._places.keep_logs()
        rank_zero_only.rank = adl.rank()
        loop = self._trainer.fit_loop
        loop._data_fetcher.fetched = loop.epoch_loop.batch_progress.current.ready

    def ends(self, done: Callable[[], bool]) -> bool:
        """Return whether the epoch is over, when all of its steps seem to be done.

        Fetch the next batch first. That commits the last step; if a replica has died, it takes the step
        back, and then the epoch is not over.

        Args:
            done: Function that returns whether the Trainer wants no more steps.
        """
        self._next = self._fetched()
        if self._next is _END:
            self._next = None
            return True
        if not done():
            return False
        self._next, self._left = None, True
        self._batches.close()
        return True

    # -- a step ------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step on the current batch."""
        if self._batch is not None:
            args = (self._batch, *args[1:])
        if self._told:
            return super().training_step(*args, **kwargs)
        before, self._told = self._metric_counts(), True
        result = super().training_step(*args, **kwargs)
        used = [name for name, count in self._metric_counts().items() if count != before.get(name)]
        if used and self.is_global_zero:
            logger.warning(
                "metrics that training_step updates see only rank 0's share of the samples, and begin again "
                "at a restart: %s",
                ", ".join(used),
            )
        return result

    def _metric_counts(self) -> dict[str, int]:
        """Return how often each metric of torchmetrics in the module has been updated."""
        modules = self.lightning_module.named_modules()
        return {name: one.update_count for name, one in modules if hasattr(one, "metric_state")}

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step without AdaptiveDataParallel, whose forward pass needs all replicas."""
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step without AdaptiveDataParallel."""
        with self.precision_plugin.test_step_context():
            return self.lightning_module.test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step without AdaptiveDataParallel."""
        with self.precision_plugin.predict_step_context():
            return self.lightning_module.predict_step(*args, **kwargs)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Run all passes of the step, and then the optimizer.

        Raises:
            _StepFailedError: a replica has died; the step will be done again.
        """
        trained: Any = self.model
        while not adl.is_optim_step():
            closure()
            optimizer.step(**kwargs)  # does nothing in the middle of a window
            self._batch = self._on_device(next(self._batches))
        try:
            result = closure()
        finally:
            self._batch = None
        self.precision_plugin._after_closure(self.lightning_module, optimizer)
        optimizer.step(**kwargs)
        if trained.failure is not None:
            raise _StepFailedError
        if self.steps is not None:
            self.steps.count()
            self._trainer.fit_loop.epoch_loop._batches_that_stepped += self.steps.made - 1
        return result

    def _on_device(self, batch: Any) -> Any:
        batch = self.precision_plugin.convert_input(batch)
        batch = self.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.batch_to_device(batch, dataloader_idx=0)
