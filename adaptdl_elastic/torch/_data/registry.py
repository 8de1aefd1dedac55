"""The data loaders of a session: which are known, by what name, and which one is at work."""

from __future__ import annotations

from collections import Counter

from adaptdl_elastic import _frames, _session, checkpoint
from adaptdl_elastic._interfaces import ElasticLoader
from adaptdl_elastic.torch._data.batch_comparison import BatchComparison
from adaptdl_elastic.torch._data.random_streams import RandomStreams
from adaptdl_elastic.torch._runtime.position import script_position


class LoaderRegistry:
    """The loaders of a session."""

    def __init__(self) -> None:
        self._outside = 0  # made outside of epoch loops
        self._inside: tuple[int | None, Counter[str]] = (None, Counter())  # epoch; made in it, by place
        self.current: ElasticLoader | None = None  # whose loop is under way
        self.training: ElasticLoader | None = None  # the one that models are trained with
        self.unrepeatable = 0  # loaders that cannot hand out the samples of a step again
        self._streams: RandomStreams | None = None
        self._comparison: BatchComparison | None = None

    @property
    def streams(self) -> RandomStreams:
        """What this replica draws random numbers from, restored from the checkpoint by the first call."""
        if self._streams is None:
            self._streams = RandomStreams(_session.current())
            checkpoint.load_state(self._streams)
        return self._streams

    @property
    def comparison(self) -> BatchComparison:
        """What compares the samples of all replicas."""
        if self._comparison is None:
            self._comparison = BatchComparison(_session.current())
        return self._comparison

    def key(self) -> str:
        """Of a new loader: what it is known by on other replicas, and when the script runs again.

        Outside of epoch loops they are counted. Inside, what counts is where in the script one is made: it
        may be made in every epoch, or only in the first one of each process, which for a replica that joins
        is not the first of the others. Only what is made in the same place in one epoch is counted there.
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
