"""Let loops of Hugging Face Accelerate run while replicas come, go and die.

    from adaptdl_elastic.torch.frameworks.accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, training, validation, scheduler = accelerator.prepare(...)
    for epoch in accelerator.epochs(3):
        for batch in training:
            ...

How it works. Accelerate sees a single process that trains with the whole batch. `prepare` puts the model
into `AdaptiveDataParallel` and the training loader into `AdaptiveDataLoader`. Accelerate's own collectives
(`gather`, `reduce`, `wait_for_everyone`) do nothing then, so a death cannot interrupt one. Only
`check_trigger` asks the other replicas.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import send_to_device
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

import adaptdl_elastic.torch as adl
from adaptdl_elastic import collective, env
from adaptdl_elastic.reducer import PeerLostError
from adaptdl_elastic.torch.frameworks._single_process import connect, refuse_autoscaling, single_process

__all__ = ["Accelerator"]


class _Loader(adl.AdaptiveDataLoader[Any]):
    """Move batches to the replica's device."""

    target: torch.device
    # samples of a batch of the script's own loader, once the batch size of a step is chosen during training
    given: int | None = None
    first: int | None = None

    def autoscale_batch_size(
        self,
        max_batch_size: int,
        local_bsz_bounds: tuple[int | None, int | None] | None = None,
        gradient_accumulation: bool = True,
    ) -> None:
        """Let the batch size of a step be chosen during training.

        The scheduler then steps by the steps at the initial batch size as which an optimizer step counts, and
        `len()` is the number of batches of the script's own loader.

        Args:
            max_batch_size: Largest batch size over all replicas.
            local_bsz_bounds: Smallest and largest batch of one replica; None: what memory allows.
            gradient_accumulation: Whether a step may have several batches.
        """
        super().autoscale_batch_size(max_batch_size, local_bsz_bounds, gradient_accumulation)
        self.given = self.first

    def __len__(self) -> int:
        """Return the number of batches of this replica in a pass; with autoscaling, those given."""
        if self.given is None or isinstance(self.dataset, IterableDataset):
            return super().__len__()
        rounded = math.floor if self.drop_last else math.ceil
        size: int = self._elastic_batches.sampler.size
        return rounded(size / self.given)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield send_to_device(batch, self.target)


class _Scheduler(AcceleratedScheduler):
    """Step a scheduler as often as the optimizer's step counts for, if the batch size is being chosen."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler. At the end of an epoch, and by a metric, it is one step as everywhere."""
        running: Any = adl.current_dataloader()
        paced = running is not None and running.training and running.equal_shares
        paced = paced and self.gradient_state.sync_gradients
        by_metric = isinstance(self.scheduler, ReduceLROnPlateau)
        for _ in range(running.whole_steps() if paced and not by_metric else 1):
            super().step(*args, **kwargs)


class Accelerator(accelerate.Accelerator):
    """Replace Accelerate's Accelerator in a job whose number of replicas changes.

    The batch size of the training loader × `gradient_accumulation_steps` is the batch of a step over all
    replicas. A replica passes at most one batch of the loader's size through the model at once.

    Make it before any other object of Accelerate. Its arguments are those of Accelerate.

    Raises:
        ValueError: an argument contradicts elastic training; the message says what to do.
    """

    def __init__(self, *args: Any, gradient_accumulation_steps: int = 1, **kwargs: Any) -> None:
        refuse_autoscaling(kwargs, "an Accelerator: call prepared_loader.autoscale_batch_size(...)")
        if AcceleratorState._shared_state or PartialState._shared_state:
            AcceleratorState._reset_state(reset_partial_state=True)  # may have seen the launcher
        with single_process():
            super().__init__(*args, **kwargs)
        if self.mixed_precision == "fp16":
            raise ValueError("mixed_precision='fp16' in an elastic job: use 'bf16'")
        if self.gradient_accumulation_steps != 1:
            raise ValueError(
                "a GradientAccumulationPlugin in an elastic job: give gradient_accumulation_steps"
            )
        self._accumulated = gradient_accumulation_steps
        # elastic models that `prepare` has made
        self._elastic_models = 0
        self.flag_tensor: Any = None
        self._trackers_given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        connect(self.device.type)

    # -- the rank of this replica ------------------------------------------------------------------

    @property
    def is_main_process(self) -> bool:
        """Whether this replica writes files and logs."""
        return adl.rank() == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this replica is the first of its node."""
        return env.local_rank() == 0

    @property
    def process_index(self) -> int:
        """Current rank of this replica."""
        return adl.rank()

    @property
    def local_process_index(self) -> int:
        """Number of this replica on its node."""
        return env.local_rank()

    # -- the objects of a loop ---------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare objects as Accelerate does. A call with a model and its optimizer makes both elastic.

        The first loader of such a call is the training loader. Every replica reads all of the other loaders,
        and of those of other calls.

        Raises:
            ValueError: such a call has several models or optimizers, or no loader.
        """
        optimizers = [one for one in args if isinstance(one, torch.optim.Optimizer)]
        models = [one for one in args if isinstance(one, torch.nn.Module)]
        if not (optimizers and models):
            return super().prepare(*args, device_placement=device_placement)
        loaders = [one for one in args if isinstance(one, DataLoader)]
        if len(optimizers) > 1 or len(models) > 1 or not loaders:
            raise ValueError("prepare() in an elastic job: give one model, its optimizer and its loader")
        kept: Any = loaders[0]
        objects = tuple(one for one in args if one is not kept)
        placement = None
        if device_placement is not None:
            placement = [flag for one, flag in zip(args, device_placement, strict=True) if one is not kept]
        found = super().prepare(*objects, device_placement=placement)
        prepared = iter(found if isinstance(found, tuple) else (found,))
        result = [self._training_loader(kept) if one is kept else next(prepared) for one in args]
        scheduler = next((one.scheduler for one in result if isinstance(one, AcceleratedScheduler)), None)
        optimizer = next(one.optimizer for one in result if isinstance(one, AcceleratedOptimizer))
        place = next(index for index, one in enumerate(args) if one is models[0])
        options: dict[str, Any] = (
            {"device_ids": [self.device.index or 0]} if self.device.type == "cuda" else {}
        )
        self._elastic_models += 1
        if self._elastic_models > 1:
            options["name"] = f"adaptdl-dataparallel-{self._elastic_models}"
        result[place] = adl.AdaptiveDataParallel(result[place], optimizer, scheduler, **options)
        return tuple(result)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler as Accelerate does. It follows the progress of the training."""
        found = super().prepare_scheduler(scheduler)
        found.__class__ = _Scheduler
        return found

    def _training_loader(self, loader: Any) -> Any:
        if isinstance(loader, DataLoaderDispatcher):
            raise ValueError("a DataLoaderDispatcher in an elastic job: give prepare() the loader itself")
        if isinstance(loader, adl.AdaptiveDataLoader):
            return loader
        size = None if loader.batch_size is None else loader.batch_size * self._accumulated
        if size is None and self._accumulated > 1:
            raise ValueError(
                "gradient_accumulation_steps with a batch_sampler, whose batches are whole steps"
            )
        found: Any = _Loader.from_loader(loader, size)
        found.target, found.first = self.device, loader.batch_size
        if self._accumulated > 1:
            fixed: Any = adl.AdaptiveDataLoader.autoscale_batch_size
            fixed(found, size, (1, loader.batch_size), gradient_accumulation=True)
        return found

    def epochs(self, until: int) -> Iterator[int]:
        """Iterate over the epochs below `until` that are left, also after a restart.

        The epochs of a model of a later `prepare` are counted from 0, as those of a cross-validation.
        """
        name = f"model {self._elastic_models}" if self._elastic_models > 1 else None
        return adl.remaining_epochs_until(until, name=name)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Enclose a batch. `sync_gradients` says whether the optimizer steps after it."""
        self.sync_gradients = adl.is_optim_step()
        yield

    def check_trigger(self) -> bool:
        """Return whether any replica has called `set_trigger` since this was last true. A collective.

        If a peer dies meanwhile, the answer is False. The trigger stays set until the next check.
        """
        if not adl.batch_counts():
            return False
        mine = self.flag_tensor is not None and bool(self.flag_tensor)
        try:
            found = bool(collective.allreduce(mine, operator.or_))
        except PeerLostError:  # the data loop recovers when its next batch is asked for
            return False
        self.flag_tensor = None
        return found

    # -- actions of rank 0 for all replicas --------------------------------------------------------

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        if self.is_main_process:
            super().print(*args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save an object on rank 0."""
        if self.is_main_process:
            super().save(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save a model on rank 0."""
        if self.is_main_process:
            super().save_model(*args, **kwargs)

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save a checkpoint of Accelerate on rank 0; the job's own checkpoints do not need it."""
        return super().save_state(*args, **kwargs) if self.is_main_process else None

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """Start the trackers on rank 0; on a replica that becomes rank 0 at its first `log`."""
        self._trackers_given = args, kwargs
        if self.is_main_process:
            super().init_trackers(*args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log values on rank 0, unless the batch does not count."""
        if not (self.is_main_process and adl.batch_counts()):
            return
        if self._trackers_given is not None and not self.trackers:
            given, named = self._trackers_given
            super().init_trackers(*given, **named)
        super().log(*args, **kwargs)
