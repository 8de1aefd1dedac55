"""Schedulers of scripts, as public repositories have them: without `state_dict`.

`CycleScheduler` is that of rosinality/vq-vae-2-pytorch, shortened; `ScheduledOptim` that of
jadore801120/attention-is-all-you-need-pytorch.
"""

from __future__ import annotations

from typing import Any


class Phase:
    """A part of the cycle, from one value to another."""

    def __init__(self, start: float, end: float, n_iter: int) -> None:
        self.start, self.end, self.n_iter, self.n = start, end, n_iter, 0

    def step(self) -> float:
        self.n += 1
        return self.start + self.n / self.n_iter * (self.end - self.start)


class CycleScheduler:
    """Let an option rise and fall."""

    def __init__(self, optimizer: Any, most: float, n_iter: int, option: str = "lr") -> None:
        self.optimizer, self.option, self.phase = optimizer, option, 0
        first = n_iter // 3
        self.phases = [Phase(most / 25, most, first), Phase(most, most / 1000, n_iter - first)]

    def step(self) -> None:
        phase = self.phases[self.phase]
        for group in self.optimizer.param_groups:
            group[self.option] = phase.step()
        if phase.n == phase.n_iter:
            phase.n, self.phase = 0, 1 - self.phase


class ScheduledOptim:
    """Step the optimizer at a rate that first rises."""

    def __init__(self, optimizer: Any, most: float, n_iter: int) -> None:
        self._optimizer, self.most, self.n_iter, self.n_steps = optimizer, most, n_iter, 0
        self.history = list[float]()

    def step(self) -> None:
        self.n_steps += 1
        self.history.append(self.most * min(self.n_steps / self.n_iter, (self.n_iter / self.n_steps) ** 0.5))
        for group in self._optimizer.param_groups:
            group["lr"] = self.history[-1]
