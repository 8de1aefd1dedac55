"""Give replicas of unequal speed unequal shares of a loader's batches.

The total batch size does not change. Only the number of samples that each replica takes changes, so that
all replicas finish a step together. The set of samples that are used does not change either: the position
in a pass counts the samples of all replicas, so every sample is handed out once, whatever the shares are.

Shares begin equal in every generation. Rank 0 suggests others when the measured speeds call for it
(`_tuning.shares`), and all replicas change at the same boundary between two steps, as for a batch size.
"""

from __future__ import annotations

from functools import lru_cache

from adaptdl_elastic import _session
from adaptdl_elastic._interfaces import Command
from adaptdl_elastic.torch._data import partition
from adaptdl_elastic.torch._tuning.replica_speed import ReplicaSpeed
from adaptdl_elastic.torch._tuning.shares import Shares, allocate

_cached = lru_cache(maxsize=64)(allocate)


class UnequalShares:
    """Hold the shares of one loader.

    Args:
        speed: Measured speeds of the replicas in training.
        key: Key of the loader.
    """

    def __init__(self, speed: ReplicaSpeed, key: str) -> None:
        self._speed, self._key = speed, key
        self._command = f"shares of loader {key}"  # by which all replicas change them
        self.enabled = False  # the script has called share_by_speed()
        self.shares: Shares | None = None  # None: equal
        self._bounds: tuple[int, int | None] = (1, None)

    def counts(self, chunk: int, replicas: int) -> tuple[int, ...]:
        """Return how many samples of a chunk each replica takes."""
        if self.shares is None or len(self.shares) != replicas:
            return tuple(partition.share(chunk, replicas, rank) for rank in range(replicas))
        return _cached(chunk, self.shares, *self._bounds)

    def limit(self, bounds: tuple[int, int] | None, passes: int) -> None:
        """Keep to these bounds from now on. On all replicas at the same boundary.

        Args:
            bounds: Smallest and largest batch of one replica; None: no bounds.
            passes: Batches of one replica in an optimizer step.
        """
        self._bounds = (1, None) if bounds is None else bounds
        if self.enabled:  # the speed is that of the loader that trains
            least, most = self._bounds
            self._speed.bounds = least * passes, None if most is None else most * passes

    def share_equally(self, bounds: tuple[int, int] | None, passes: int) -> None:
        """Share equally from now on, until speeds have been measured; arguments as for `limit`.

        Used when a generation begins, or when the memory has turned out to be smaller.
        """
        self.shares = None
        self.limit(bounds, passes)

    def enable(self, enabled: bool) -> None:
        """Turn unequal shares on or off, from the next change of the replicas on."""
        self.enabled = enabled
        if not enabled:
            return
        consensus = _session.current().consensus
        if self._command not in consensus.handlers:  # the script may make the loader again in every epoch
            consensus.polls.append(self._poll)
            consensus.poll_soon()
        consensus.handlers[self._command] = self._change

    def _poll(self) -> Command | None:
        """Return a command to change the shares, if that pays. Runs in the control thread of rank 0."""
        loaders = _session.current().loaders
        if loaders is None or loaders.training is None or loaders.training.key != self._key:
            return None  # speeds are measured in training
        state, suggestion = self._speed.suggestion
        if suggestion is None or state != self._speed.state or tuple(suggestion) == self.shares:
            return None
        if state[0] != _session.current().generation:  # measured with other replicas
            return None
        return {"kind": self._command, "shares": list(suggestion)}

    def _change(self, command: Command) -> None:
        """Change the shares, as `command` says. Runs on every replica at the same boundary."""
        shares = tuple(command["shares"])
        if shares != self.shares:
            self.shares = shares
            _session.current().metrics.shares_changed()
