"""Count the steps of Lightning's Trainer when the batch size is chosen during training.

A step of the Trainer is a step at the initial batch size: an optimizer step counts as its gain, in whole
steps, and the fraction is carried over. So `max_steps`, schedules, intervals and epochs mean what they mean
with the initial batch, whatever the batch is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from lightning.pytorch.callbacks import ProgressBar

import adaptdl_elastic.torch as adl
from adaptdl_elastic.torch.frameworks._callback_states import FRAMEWORKS

logger = logging.getLogger(__name__)


class LightningSteps:
    """Advance the counters of a Trainer by the steps that its optimizer steps count for.

    Args:
        trainer: The Trainer, whose callbacks and schedulers are known.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._loop = trainer, trainer.fit_loop.epoch_loop
        # steps that the newest optimizer step counts for
        self.made = 0
        self._follow(trainer, "log_every_n_steps")
        for one in trainer.loggers:
            self._follow(one, "_flush_logs_every_n_steps")
        own = [one for one in trainer.callbacks if not type(one).__module__.startswith(FRAMEWORKS)]
        for one in trainer.callbacks:
            if one not in own:
                # of ModelCheckpoint and EMAWeightAveraging
                self._follow(one, "_every_n_train_steps")
                self._follow(one, "update_every_n_steps")
            if isinstance(one, ProgressBar):
                one.__class__ = type(type(one).__name__, (_Bar, type(one)), {})
        for one in trainer.strategy.lr_scheduler_configs:
            if one.reduce_on_plateau and one.interval == "step":
                self._follow(one, "frequency")
        if own and adl.rank() == 0:
            logger.warning(
                "global_step and batch_idx may advance by more than 1 in a step: in %s, a test such as "
                "`trainer.global_step %% 100 == 0` may never be true",
                ", ".join(type(one).__name__ for one in own),
            )

    def _follow(self, owner: Any, name: str) -> None:
        given = getattr(owner, name, None)
        if type(given) is int:
            interval = _Interval(given)
            interval.steps = self
            setattr(owner, name, interval)

    def begin_epoch(self) -> None:
        """Let the validations of an epoch follow the steps."""
        self._follow(self._trainer, "val_check_batch")

    def count(self) -> None:
        """Advance the counters, which the Trainer advances by 1, by the steps that the last one counts for.

        The last optimizer step of an epoch completes its steps, and no other one does.
        """
        loop = self._loop
        loader: Any = adl.current_dataloader()
        batches, steps = loop.batch_progress, loop.automatic_optimization.optim_progress.optimizer.step
        left = self._trainer.num_training_batches - (batches.current.ready - 1)
        last = loader.part_done() == 1.0
        self.made = left if last else min(loader.whole_steps(), left - 1)
        if loop.max_steps >= 0:
            self.made = min(self.made, loop.max_steps - loop.global_step)
        for tracker in (batches.total, batches.current, steps.total, steps.current):
            for name in vars(tracker):
                setattr(tracker, name, getattr(tracker, name) + self.made - 1)
        batches.is_last_batch = last

    def each(self) -> Iterator[None]:
        """Set the number of the loop's batch to that of each step that was just made, one after the other."""
        progress = self._loop.batch_progress.current
        now = progress.ready
        for progress.ready in range(now - self.made + 1, now + 1):
            yield
        progress.ready = now


class _Interval(int):
    """A number of steps that "divides" a count if one of its multiples was reached or passed by that step.

    Lightning asks `count % interval == 0` after a step.
    """

    steps: LightningSteps

    def __rmod__(self, count: int) -> int:
        interval = int(self)
        return 0 if count // interval > (count - self.steps.made) // interval else 1


class _Bar(ProgressBar):
    """Show the last step that a batch counts for, instead of the first."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = trainer.fit_loop.epoch_loop.batch_idx
        super().on_train_batch_end(trainer, pl_module, outputs, batch, now)
