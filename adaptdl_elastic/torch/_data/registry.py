"""Register the data loaders of a session: their keys, the training loader, and the running data loop."""

from __future__ import annotations

from collections import Counter

from adaptdl_elastic import _frames, _session, checkpoint
from adaptdl_elastic._interfaces import ElasticLoader
from adaptdl_elastic.torch._data.batch_comparison import BatchComparison
from adaptdl_elastic.torch._data.random_streams import RandomStreams
from adaptdl_elastic.torch._runtime.hang_watch import HangWatch
from adaptdl_elastic.torch._runtime.position import script_position
from adaptdl_elastic.torch._tuning.replica_speed import ReplicaSpeed


class LoaderRegistry:
    """Register the loaders of a session."""

    def __init__(self) -> None:
        self._outside = 0  # loaders made outside of epoch loops
        self._inside: tuple[int | None, Counter[str]] = (None, Counter())  # (epoch, loaders by script line)
        self.current: ElasticLoader | None = None  # loader whose data loop is running
        self.training: ElasticLoader | None = None  # loader that models are trained with
        self.unrepeatable = 0  # number of loaders that cannot hand out the samples of a step again
        self._streams: RandomStreams | None = None
        self._comparison: BatchComparison | None = None
        self._speed: ReplicaSpeed | None = None
        self._watch: HangWatch | None = None

    @property
    def streams(self) -> RandomStreams:
        """Random streams of this replica; the first access restores them from the checkpoint."""
        if self._streams is None:
            self._streams = RandomStreams(_session.current())
            checkpoint.load_state(self._streams)
        return self._streams

    @property
    def comparison(self) -> BatchComparison:
        """Comparison of the data that the replicas read."""
        if self._comparison is None:
            self._comparison = BatchComparison(_session.current())
        return self._comparison

    @property
    def speed(self) -> ReplicaSpeed:
        """Comparison of the speeds of the replicas."""
        if self._speed is None:
            self._speed = ReplicaSpeed(_session.current())
            self._watch = HangWatch(_session.current(), self._speed.clock)
        return self._speed

    def key(self) -> str:
        """Return the key of a new loader, the same on all replicas and in every run of the script.

        Outside of epoch loops the key is a running number. Inside an epoch loop it is the place in the script
        that makes the loader: a script may make a loader in every epoch, or only in the first epoch of each
        process, and the first epoch of a newcomer is a later one than that of the other replicas. Loaders
        made at the same place within one epoch are numbered.
        """
        epoch = _session.current().epoch
        if epoch is None:
            self._outside += 1
            return str(self._outside - 1)
        known, made = self._inside
        if known != epoch:
            self._inside = epoch, made = epoch, Counter()
        place = _frames.script_lines(script_position().body)
        made[place] += 1
        return place if made[place] == 1 else f"{place}, number {made[place]}"


def registry() -> LoaderRegistry:
    """Return the loaders of this process's session."""
    session = _session.current()
    found = session.loaders
    if found is None:
        found = session.loaders = LoaderRegistry()
    assert isinstance(found, LoaderRegistry)
    return found


def current_dataloader() -> ElasticLoader | None:
    """Return the helper of the loader whose loop runs in this process; None outside data loops."""
    return registry().current
