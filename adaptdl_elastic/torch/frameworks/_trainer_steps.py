"""Count the steps of Hugging Face's Trainer when the batch size is chosen during training.

`state.global_step` counts steps at the initial batch size: an optimizer step counts as its gain, in whole
steps, and the fraction is carried over. So `max_steps`, schedules, intervals and `num_train_epochs` mean what
they mean with the initial batch, whatever the batch is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import GreedyLR
from transformers.trainer_callback import DefaultFlowCallback

import adaptdl_elastic.torch as adl


class TrainerSteps:
    """Advance a Trainer's counters by the steps that its optimizer steps count for.

    Args:
        trainer: The Trainer, whose arguments and callbacks are known.
        counts: Function that returns whether the step under way counts.
    """

    def __init__(self, trainer: Any, counts: Callable[[], bool]) -> None:
        self._trainer, self._counts = trainer, counts
        # loss of the newest optimizer step
        self.loss: Any = None
        # `global_step` before and after it
        self.before = self.now = 0

    def begin(self) -> None:
        """Let logging, evaluation and saving follow `global_step` when the training begins."""
        callbacks = self._trainer.callback_handler.callbacks
        flow = next((i for i, one in enumerate(callbacks) if type(one) is DefaultFlowCallback), None)
        if self.adaptive and flow is not None:
            callbacks[flow] = _Intervals(self)

    @property
    def adaptive(self) -> bool:
        """Whether the batch size is chosen during training."""
        most: int | None = self._trainer.args.max_batch_size
        return most is not None

    def due(self) -> int:
        """Return by how many steps the optimizer step just made is to advance `global_step`."""
        loader: Any = adl.current_dataloader()
        if loader is None or not self._counts():
            return 0
        left: int = self._trainer.state.max_steps - self._trainer.state.global_step
        return min(int(loader.whole_steps()), left)

    def count(self) -> None:
        """Advance `global_step`, which the Trainer has advanced by 1, and weigh the loss by the steps."""
        trainer = self._trainer
        if not self.adaptive:
            return
        trainer.state.global_step -= 1
        self.before = trainer.state.global_step
        self.now = trainer.state.global_step = self.before + self.due()
        if self.loss is not None and self.loss.isfinite():
            # a logged loss is the mean over the steps since the last one
            trainer._tr_loss += (self.now - self.before - 1) * self.loss

    def pace_schedule(self) -> None:
        """Let the Trainer's scheduler, unless evaluations step it, follow `global_step`.

        Its class is replaced by one that is derived from it, so that it stays the object that others know.
        """
        scheduler = self._trainer.lr_scheduler
        kind, due = type(scheduler), self.due
        if issubclass(kind, (ReduceLROnPlateau, GreedyLR)):
            return

        def step(scheduler: Any, *args: Any) -> None:
            for _ in range(due()):
                kind.step(scheduler, *args)

        scheduler.__class__ = type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})


class _Intervals(DefaultFlowCallback):
    """Log, evaluate and save once when `global_step` reaches or passes a multiple of an interval."""

    def __init__(self, steps: TrainerSteps) -> None:
        self._steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        before, now = self._steps.before, self._steps.now
        if before == now:
            return control
        seen = copy.copy(state)
        for name in ("logging_steps", "eval_steps", "save_steps"):
            interval = getattr(state, name)
            if interval and interval > 0:
                # 1 divides `now`, and now + 1 does not
                setattr(seen, name, 1 if now // interval > before // interval else now + 1)
        if args.logging_first_step and before == 0:
            control.should_log = True
        return super().on_step_end(args, seen, control, **kwargs)
