"""Weigh the batches of a window by their items, such as the tokens that a loss is the mean of.

The gradient of a loss per token over the whole batch is the mean of the replicas' gradients, weighted by
their tokens. The number of tokens of all replicas must be known before the first backward pass of the window.
So each replica reads its batches of the window ahead, and one small collective per step adds up the numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from adaptdl_elastic import _session, collective
from adaptdl_elastic._interfaces import ElasticLoader


class WindowItems:
    """Hold the share of each batch in the items of the current window."""

    def __init__(self) -> None:
        self.count: Callable[[Any], Any] | None = None
        """Function that returns the items of a batch, or None if it has none. None: samples are counted."""
        self.shares: list[float] = []
        """Share of each batch of this replica in all items of the window; empty: samples are counted."""

    def counted(self, batches: Iterator[Any], mine: tuple[int, ...], loader: ElasticLoader) -> Iterator[Any]:
        """Return this replica's batches of a window. A collective if items are counted.

        Args:
            batches: The batches, one for each chunk of the window.
            mine: Samples of each batch that count.
            loader: Their loader.

        Raises:
            RetryDataLoop: a peer died and the job has recovered.
        """
        self.shares = []
        if self.count is None:
            return batches
        read = list(batches)
        found = [self.count(batch) if samples else 0 for batch, samples in zip(read, mine, strict=True)]
        own = [float(n if items is None else items) for items, n in zip(found, mine, strict=True)]
        add = partial(collective.combine, sum(own), operator.add, "items of a step")
        total = _session.current().recovery.restart_loop_on_peer_loss(add, loader)
        self.shares = [items / total if total else 0.0 for items in own]
        return iter(read)
