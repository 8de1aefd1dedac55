"""Run a data loop that has no loader: each batch is a number, the same on all replicas."""

from __future__ import annotations

from collections.abc import Iterator

from adaptdl_elastic._interfaces import RetryDataLoop
from adaptdl_elastic.torch._data.loader import AdaptiveDataLoaderHelper


class StepLoopHelper(AdaptiveDataLoaderHelper):
    """Count steps instead of samples: a step of all replicas advances the position by 1."""

    @property
    def equal_shares(self) -> bool:
        """Always true: each replica has a batch of its own."""
        return True

    @property
    def window_length(self) -> int:
        """By how much the current step advances `current_index`."""
        return 1

    @property
    def window_samples(self) -> int:
        """Always 1, so that learning rates are not scaled with the number of replicas."""
        return 1

    def expected_batches(self) -> int | None:
        """Return how many steps this process will have got from the running loop at its end."""
        left = self.end_index - self.current_index - 1
        return super().expected_batches() if self._skipped else self._handed_out + left


def run_steps(helper: AdaptiveDataLoaderHelper, count: int, over: bool = False) -> Iterator[int]:
    """Yield the numbers of the steps that are left of `count`.

    Args:
        helper: The loop's helper.
        count: Steps of the whole loop.
        over: Whether the loop was an epoch by itself that finished before a restart.
    """
    with helper.context(over):
        if helper.skipdone():
            with helper.dry_batch():
                yield 0
            return
        helper.end_index = count
        while True:
            try:
                while helper.current_index < count:
                    helper.resolve_batch_size()
                    helper.begin_batch()
                    yield helper.current_index
                    helper.current_index += 1
                    helper.end_batch(boundary=False)
                    helper.pass_boundary(last=helper.current_index >= count)
            except RetryDataLoop:
                continue
            if not helper.handed_out:
                with helper.dry_batch():
                    yield 0
            if helper.ended():
                return
