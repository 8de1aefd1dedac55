"""Let the Trainer of Hugging Face transformers run while replicas come, go and die.

    from adaptdl_elastic.torch.frameworks.huggingface import Trainer, TrainingArguments

in place of `from transformers import Trainer, TrainingArguments` is the only changed line.

How it works. The Trainer sees a single process that trains with the whole batch: `args.world_size` is 1, and
Accelerate sees no distributed environment. Below the Trainer, `AdaptiveDataParallel` averages the gradients,
and `AdaptiveDataLoader` shares each batch among the replicas. The number of steps, the learning-rate schedule
and `max_steps` are therefore the same for any number of replicas. The Trainer's own loop takes one *window*
of the loader (all batches of one optimizer step) per step. The Trainer's counters and callbacks are states in
the job's checkpoints; a step that did not commit undoes its changes to them.

With `max_batch_size` the batch size is chosen during training. `state.global_step` counts steps at the
initial batch size then: an optimizer step counts as its gain, in whole steps (`_trainer_steps`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import transformers
from transformers.trainer_callback import ExportableState

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint, env
from adaptdl_elastic.torch.epoch import continue_at
from adaptdl_elastic.torch.frameworks._callback_states import FRAMEWORKS, CallbackStates
from adaptdl_elastic.torch.frameworks._single_process import connect, refuse_autoscaling, single_process
from adaptdl_elastic.torch.frameworks._trainer_arguments import refuse_contradictions, refuse_lost_defaults
from adaptdl_elastic.torch.frameworks._trainer_steps import TrainerSteps

__all__ = ["ElasticArgumentsMixin", "ElasticTrainerMixin", "Trainer", "TrainingArguments"]

logger = logging.getLogger(__name__)

# arguments that ElasticArgumentsMixin adds, and their types
_ADDED = {"max_batch_size": "int | None", "local_bsz_bounds": "list[int] | None"}
_OF_THE_PROCESS = ("is_local_process_zero", "is_world_process_zero", "log_history", "stateful_callbacks")


class ElasticArgumentsMixin:
    """Make a class of arguments elastic: `class Arguments(ElasticArgumentsMixin, SFTConfig)`.

    `per_device_train_batch_size` × `gradient_accumulation_steps` is the batch of an optimizer step over all
    replicas. A replica passes at most `per_device_train_batch_size` samples through the model at once.

    The process group is made here, so that it exists when the script builds its model.

    Args:
        max_batch_size: Largest batch of an optimizer step, over all replicas, that may be chosen during
            training; None: the batch stays the initial one.
        local_bsz_bounds: Smallest and largest batch of one replica in a pass; None: what memory allows.

    Raises:
        TypeError: the class has lost a default value of one of its bases, or this one is not the first.
        ValueError: an argument contradicts elastic training; the message says what to do.
    """

    max_batch_size: int | None = None
    local_bsz_bounds: Sequence[int] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Declare this class's arguments in a subclass, which may be made a dataclass."""
        super().__init_subclass__(**kwargs)
        for name, kind in _ADDED.items():
            if name not in cls.__annotations__:
                cls.__annotations__[name] = kind
                setattr(cls, name, None)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse a wrong order of bases."""
        order = cls.__mro__
        if transformers.TrainingArguments in order[: order.index(ElasticArgumentsMixin)]:
            raise TypeError(f"{cls.__name__}: ElasticArgumentsMixin must be the first of its bases")
        return super().__new__(cls)

    def __init__(
        self,
        *args: Any,
        max_batch_size: int | None = None,
        local_bsz_bounds: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.max_batch_size, self.local_bsz_bounds = max_batch_size, local_bsz_bounds
        super().__init__(*args, **kwargs)

    @property
    def initial_batch_size(self) -> int:
        """Samples of an optimizer step over all replicas when the training begins."""
        args: Any = self
        return int(args.per_device_train_batch_size * args.gradient_accumulation_steps)

    def __post_init__(self) -> None:
        refuse_lost_defaults(type(self))
        parent: Any = super()
        with single_process():
            parent.__post_init__()
            device = parent.device
        for name, instead in {
            "fp16": "use bf16",
            "deepspeed": "leave it out",
            "fsdp": "leave it out",
            "auto_find_batch_size": "give the batch size",
        }.items():
            if getattr(self, name, None):
                raise ValueError(f"{name}={getattr(self, name)!r} in an elastic Trainer: {instead}")
        refuse_contradictions(self)
        connect(device.type, getattr(self, "ddp_backend", None))

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments, without those of this class that were not given."""
        parent: Any = super()
        given: dict[str, Any] = parent.to_dict()
        for name in _ADDED:
            if given.get(name) is None:
                given.pop(name, None)
        return given

    @property
    def device(self) -> torch.device:
        """Device of this replica."""
        parent: Any = super()
        device: torch.device = parent.device
        return torch.device("cuda", env.local_rank()) if device.type == "cuda" else device

    @property
    def n_gpu(self) -> int:
        """Devices of this replica: at most one."""
        parent: Any = super()
        return min(int(parent.n_gpu), 1)

    @property
    def process_index(self) -> int:
        """Current rank of this replica."""
        return adl.rank()

    @property
    def local_process_index(self) -> int:
        """Number of this replica on its node. It stays the same as long as the process lives."""
        return env.local_rank()


@dataclass
class TrainingArguments(ElasticArgumentsMixin, transformers.TrainingArguments):
    """Hold the arguments of an elastic Trainer: those of transformers, for the whole job.

    The fields are those of `ElasticArgumentsMixin`, so that an HfArgumentParser knows them.
    """

    max_batch_size: int | None = field(
        default=None, metadata={"help": "Largest batch of a step that may be chosen during training."}
    )
    local_bsz_bounds: list[int] | None = field(
        default=None, metadata={"help": "Smallest and largest batch of one replica in a pass."}
    )


class _Counters(checkpoint.TensorState):
    """Keep the Trainer's counters, which every step changes."""

    part_of_step = True
    required = False

    def __init__(self, trainer: ElasticTrainerMixin) -> None:
        super().__init__("huggingface-trainer")
        self.trainer = trainer
        self.saved: dict[str, Any] | None = None
        self.restored = checkpoint.load_state(self)

    def state_dict(self) -> dict[str, Any]:
        return self.trainer.counters()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved = state_dict
        self.trainer.take_counters(state_dict)


class _History(checkpoint.TensorState):
    """Keep the Trainer's log and the states of its callbacks, which change behind `optimizer.step()`."""

    part_of_step = True
    required = False

    def __init__(self, trainer: ElasticTrainerMixin) -> None:
        super().__init__("huggingface-history")
        self.trainer = trainer
        self.saved: dict[str, Any] | None = None
        checkpoint.load_state(self)

    def state_dict(self) -> dict[str, Any]:
        return self.trainer.history()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.saved = state_dict
        self.trainer.take_history(state_dict)


class _Live(transformers.TrainerCallback):
    """Keep the TrainerState true while the replicas change. It runs before all other callbacks."""

    def __init__(self, trainer: ElasticTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.begin_training()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        became_first = adl.rank() == 0 and not state.is_world_process_zero
        state.is_world_process_zero = adl.rank() == 0
        state.is_local_process_zero = env.local_rank() == 0
        if became_first:
            self._trainer.become_first()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.count_step()


class _Windows:
    """Give the Trainer all windows of an epoch as the "batches of one step", fetched one by one."""

    def __init__(self, trainer: ElasticTrainerMixin) -> None:
        self._trainer = trainer

    def __len__(self) -> int:
        return 1  # batches of a window are not counted here: `training_step` takes all of them

    def __iter__(self) -> Iterator[Any]:
        return self._trainer.windows()


class ElasticTrainerMixin:
    """Make a Trainer elastic: `class MyTrainer(ElasticTrainerMixin, SFTTrainer)`.

    Its arguments must be `TrainingArguments` of this module, or of a class that inherits first from
    `ElasticArgumentsMixin`: `class Arguments(ElasticArgumentsMixin, SFTConfig)`.

    Raises:
        TypeError: the arguments are those of plain transformers.
        ValueError: an argument belongs into the training arguments.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_autoscaling(kwargs, "a Trainer: give it to TrainingArguments")
        with single_process():
            super().__init__(*args, **kwargs)
        trainer = self._trainer()
        if not isinstance(trainer.args, ElasticArgumentsMixin):
            raise TypeError(
                "an elastic Trainer needs its own TrainingArguments: from "
                "adaptdl_elastic.torch.frameworks.huggingface import Trainer, TrainingArguments; for another "
                "class, `class Arguments(ElasticArgumentsMixin, SFTConfig)`"
            )
        self._counters: _Counters | None = None
        self._kept_history: _History | None = None
        self._callback_states: CallbackStates | None = None
        self._elastic_model: adl.AdaptiveDataParallel | None = None
        self._epochs: Iterator[int] | None = None
        self._batches: Any = None
        self._stop_at: int | None = None  # global_step after which a callback has asked to stop
        self._stop_training = False  # not only the epoch
        self._stopped = False  # the training has ended before its last epoch
        self._steps_per_epoch = 1
        self._steps = TrainerSteps(trainer, self._counts)
        trainer.callback_handler.callbacks.insert(0, _Live(self))

    def _trainer(self) -> Any:
        """Return this object as `Any`: mypy does not know the attributes of transformers' Trainer."""
        return self

    # -- the whole training ------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as transformers' Trainer does; a restarted job continues from its own checkpoint.

        `resume_from_checkpoint` is used only if the job has no checkpoint of its own: the job's own is newer.
        """
        if self._counters is not None:
            raise RuntimeError("an elastic Trainer can train() once per script")
        self._counters = _Counters(self)
        self._kept_history = _History(self)
        self._steps.begin()
        resume = None if self._counters.restored else resume_from_checkpoint
        if adl.rank() == 0:
            self._tell_user()
        parent: Any = super()
        return parent.train(resume, *args, **kwargs)

    def _tell_user(self) -> None:
        trainer = self._trainer()
        size, most = trainer.args.initial_batch_size, trainer.args.max_batch_size
        takes = f"takes {size} samples" if most is None else f"counts {size} samples, and takes up to {most}"
        logger.warning(
            "elastic Trainer: a step %s over all replicas; logged losses and token counts "
            "are those of rank 0's share, and every replica evaluates the whole evaluation set",
            takes,
        )
        callbacks = trainer.callback_handler.callbacks
        own = [one for one in callbacks if not type(one).__module__.startswith(FRAMEWORKS)]
        if self._steps.adaptive and (names := ", ".join(type(one).__name__ for one in own)):
            logger.warning(
                "state.global_step may advance by more than 1 in a step: in %s, a test such as "
                "`state.global_step %% 100 == 0` may never be true",
                names,
            )

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Restore the counters; return the number of finished epochs, and 0 steps to skip.

        The Trainer need not skip steps, because the loader continues at its own position.
        """
        parent: Any = super()
        epochs, batches = parent._init_training_state(max_steps, num_update_steps_per_epoch, *args, **kwargs)
        self._steps_per_epoch = num_update_steps_per_epoch
        assert self._counters is not None
        assert self._kept_history is not None
        if self._counters.restored:
            self.take_counters(self._counters.saved or {})
            self.take_history(self._kept_history.saved or {})
        elif epochs or batches:
            continue_at(epochs, batches * self._trainer().args.per_device_train_batch_size)
        return adl.finished_epochs(), 0

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the scheduler for the optimizer itself, not for Accelerate's wrapper."""
        parent: Any = super()
        wrapped = optimizer if optimizer is not None else self._trainer().optimizer
        return parent.create_scheduler(num_training_steps, getattr(wrapped, "optimizer", wrapped))

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Wrap the model and the loader."""
        parent: Any = super()
        model, loader = parent._prepare_for_training(*args, **kwargs)
        trainer = self._trainer()
        options: dict[str, Any] = {
            name: getattr(trainer.args, f"ddp_{name}")
            for name in ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")
            if getattr(trainer.args, f"ddp_{name}", None) is not None
        }
        if trainer.args.device.type == "cuda":
            options["device_ids"] = [trainer.args.device.index]
        wrapped = adl.AdaptiveDataParallel(
            model, trainer.optimizer.optimizer, trainer.lr_scheduler, **options
        )
        trainer.model_wrapped = self._elastic_model = wrapped
        size, largest = trainer.args.initial_batch_size, trainer.args.per_device_train_batch_size
        elastic: Any = adl.AdaptiveDataLoader.from_loader(loader, batch_size=size)
        if self._steps.adaptive:
            if isinstance(elastic.dataset, torch.utils.data.IterableDataset) and trainer.args.max_steps <= 0:
                raise ValueError("max_batch_size with a stream, whose epochs end with it: give max_steps")
            bounds = trainer.args.local_bsz_bounds
            given = None if bounds is None else tuple(bounds)
            elastic.autoscale_batch_size(trainer.args.max_batch_size, given, gradient_accumulation=True)
            self._steps.pace_schedule()
        elif size > largest:
            elastic.autoscale_batch_size(size, (1, largest), gradient_accumulation=True)
        if trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None:
            elastic.weigh_by(self._count_items)
        trainer.callback_handler.train_dataloader = elastic
        return wrapped, elastic

    def begin_training(self) -> None:
        """Restore the counters again, since the Trainer has reset some; begin the loop over epochs."""
        assert self._counters is not None
        if self._counters.restored:
            self.take_counters(self._counters.saved or {})
        self._epochs = adl.remaining_epochs_until(self._trainer().state.num_train_epochs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run the next unfinished epoch of the job."""
        trainer, parent = self._trainer(), super()
        if trainer.state.global_step >= trainer.state.max_steps:  # stopped there before a restart
            trainer.control.should_training_stop = self._stopped = True
            return
        assert self._epochs is not None
        if self._callback_states is None:  # here all callbacks have begun the training
            callbacks = trainer.callback_handler.callbacks
            self._callback_states = CallbackStates("huggingface-callbacks", callbacks, trainer.model)
        next(self._epochs)
        steps, trainer.args.gradient_accumulation_steps = trainer.args.gradient_accumulation_steps, 1
        run: Any = parent
        try:
            run._run_epoch(*args, **kwargs)
        finally:
            trainer.args.gradient_accumulation_steps = steps
            if self._batches is not None:
                self._batches.close()
        # a callback may stop the training by the evaluation at the end of an epoch, too
        last = adl.finished_epochs() + 1 >= trainer.state.num_train_epochs
        self._stopped = self._stopped or (trainer.control.should_training_stop and not last)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """End the epochs together with the other replicas, then as transformers does."""
        epochs: Any = self._epochs
        if self._stopped:
            epochs.close()
        else:
            for epoch in epochs:
                raise RuntimeError(f"the Trainer has left out epoch {epoch}")
        parent: Any = super()
        return parent._finalize_training(*args, **kwargs)

    # -- one step ----------------------------------------------------------------------------------

    def _count_items(self, batch: Any) -> Any:
        """Return the number of items of a batch (`num_items_in_batch`); None if it has none."""
        return self._trainer()._get_num_items_in_batch([batch], self._trainer().args.device)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[Any, None]:
        """Return all windows that are left of the epoch, and no number of items: `training_step` counts."""
        self._batches = epoch_iterator
        return _Windows(self), None

    def windows(self) -> Iterator[Any]:
        """Yield the first batch of each window. Stop only when the previous step has been committed."""
        for batch in self._batches:
            if self._stops(ended=False):
                # the data loop is over when the Trainer ends the epoch
                self._batches.close()
                return
            yield batch
        self._stops(ended=True)

    def _stops(self, ended: bool) -> bool:
        """Return whether a callback has asked to stop after the last step, which is committed now.

        Args:
            ended: Whether the epoch has no step left.
        """
        trainer = self._trainer()
        if self._stop_at is None or trainer.state.global_step < self._stop_at:
            return False
        self._stop_at = None
        if self._stop_training:
            last = adl.finished_epochs() + 1 >= trainer.state.num_train_epochs
            self._stopped = not (ended and last)
            trainer.control.should_training_stop = True
        else:
            trainer.control.should_epoch_stop = True
        return True

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward passes for all batches of the window; return their mean loss.

        The loss of a batch is the mean over its own items. The loader weighs its gradient.
        """
        parent: Any = super()
        loader: Any = adl.current_dataloader()
        loss: Any = 0.0
        total = 0.0
        for batch in chain([inputs], self._batches):
            items = self._count_items(batch)
            found = parent.training_step(model, batch, None if items is None else items.clamp(min=1))
            loss, total = loss + found * loader.gradient_weight, total + loader.gradient_weight
            if adl.is_optim_step():
                break
        mean: torch.Tensor = loss / total if self._counts() and total else torch.zeros_like(loss)
        self._steps.loss = mean
        return mean

    def _counts(self) -> bool:
        """Return whether the current step counts: its gradients have arrived, and its batch counts."""
        assert self._elastic_model is not None
        return adl.batch_counts() and self._elastic_model.failure is None

    def count_step(self) -> None:
        """Set the counters to the step just made, for which the Trainer has counted 1."""
        self._steps.count()
        self._set_epoch_fraction()

    def become_first(self) -> None:
        """Start what only rank 0 has, progress bar and trackers, because this replica has become rank 0."""
        trainer = self._trainer()
        for one in trainer.callback_handler.callbacks:
            tracks = hasattr(one, "_initialized")  # the callbacks of transformers.integrations
            if tracks:
                one._initialized = False
            if tracks or isinstance(one, transformers.ProgressCallback):
                one.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)

    def _set_epoch_fraction(self) -> None:
        """Set `state.epoch` by the samples that all replicas have taken, or by the statistical progress."""
        state = self._trainer().state
        loader: Any = adl.current_dataloader()
        if loader is None:
            return
        if self._steps.adaptive and loader.end_index:
            state.epoch = adl.finished_epochs() + loader.part_done()
            return
        done = loader.current_index // loader.batch_size + 1  # the index lies within the present window
        state.epoch = adl.finished_epochs() + min(done / self._steps_per_epoch, 1.0)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, save and evaluate only after a step that counts; leave their time out of the step times."""
        trainer = self._trainer()
        loader: Any = adl.current_dataloader()
        control = trainer.control
        if loader is not None:
            if control.should_training_stop or control.should_epoch_stop:
                # The loop ends when the next batch is asked for, because only then this step is committed.
                self._stop_at = trainer.state.global_step if self._counts() else None
                self._stop_training = control.should_training_stop
                control.should_training_stop = control.should_epoch_stop = False
            if not self._counts():
                control.should_log = control.should_save = control.should_evaluate = False
                return
            if control.should_save or control.should_evaluate:
                loader.pause()
        parent: Any = super()
        parent._maybe_log_save_evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint of the Trainer on the replica that may write, rank 0."""
        if self._trainer().args.should_save:
            parent: Any = super()
            parent._save_checkpoint(*args, **kwargs)

    # -- the Trainer's state -----------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        """Return the Trainer's counters, as tensors and plain values."""
        trainer = self._trainer()
        state = {name: value for name, value in vars(trainer.state).items() if name not in _OF_THE_PROCESS}
        return {
            "state": {name: one for name, one in state.items() if isinstance(one, int | float | str | None)},
            "loss": getattr(trainer, "_tr_loss", torch.zeros(())),
            "total_loss": float(getattr(trainer, "_total_loss_scalar", 0.0)),
            "logged": int(getattr(trainer, "_globalstep_last_logged", 0)),
            "initial": int(getattr(trainer, "_initial_global_step", 0)),
        }

    def take_counters(self, saved: Mapping[str, Any]) -> None:
        """Set to their values in `saved` the counters that the Trainer has already."""
        trainer = self._trainer()
        if hasattr(trainer, "state"):
            vars(trainer.state).update(saved["state"])
        if hasattr(trainer, "_tr_loss"):
            with torch.no_grad():
                trainer._tr_loss.copy_(saved["loss"])
            trainer._total_loss_scalar = saved["total_loss"]
            trainer._globalstep_last_logged = saved["logged"]
            trainer._initial_global_step = saved["initial"]

    def history(self) -> dict[str, Any]:
        """Return the Trainer's log, and the states of its callbacks."""
        trainer = self._trainer()
        return {
            "log_history": [dict(line) for line in trainer.state.log_history or []],
            "callbacks": [
                [type(one).__name__, one.state()["attributes"]] for one in self._stateful_callbacks()
            ],
        }

    def take_history(self, saved: Mapping[str, Any]) -> None:
        """Set the log and the callbacks to `saved`."""
        trainer = self._trainer()
        trainer.state.log_history = [dict(line) for line in saved["log_history"]]
        for one, (name, attributes) in zip(self._stateful_callbacks(), saved["callbacks"], strict=False):
            if type(one).__name__ == name:
                vars(one).update(attributes)

    def _stateful_callbacks(self) -> list[Any]:
        callbacks = self._trainer().callback_handler.callbacks
        return [one for one in callbacks if isinstance(one, ExportableState)]


class Trainer(ElasticTrainerMixin, transformers.Trainer):
    """Run transformers' Trainer on a changing number of replicas, with `TrainingArguments` of this module."""
