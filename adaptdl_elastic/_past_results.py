"""Keep results of the script's collectives between data loops, for replicas that join later.

The problem. A newcomer runs the script from its first line, and comes to collectives that the running
replicas have passed: a seed that rank 0 broadcasts, a loss that is summed for the log. They cannot take part
again.

What is done. Every running replica keeps the results of small collectives that the script calls outside of
data loops. A newcomer gets them with its preview of the other states (`torch._elastic.rescale`), and a
collective on its way returns the result that the others have got. A collective whose result was not kept ends
the newcomer.

A collective is identified by its epoch, the data loops of the epoch begun before it, its function and line in
the script, and how often it was called there.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from typing_extensions import Buffer, override

LARGEST = 16 * 1024
"""Bytes of the largest result that is kept."""

TOTAL = 256 * 1024
"""Bytes of all results that are kept. Beyond it the oldest ones that were got in epochs are dropped."""

_OUTSIDE = -1  # stands for the epoch, outside of epochs


class Call(NamedTuple):
    """Identify one call of a collective outside of data loops."""

    epoch: int
    """-1 outside of epochs."""
    loops: int
    """Data loops of the epoch begun before it; 0 outside of epochs."""
    what: str
    """Function and line of the script."""
    number: int
    """Number of such calls so far, this one included."""


class PastResults:
    """Hold the results that one replica has got. One object per session."""

    def __init__(self) -> None:
        self._results: dict[Call, bytes] = {}  # in the order of the calls
        self._calls: Counter[tuple[int, int, str]] = Counter()  # without those of past epochs

    def next_call(self, epoch: int | None, loops: int, what: str) -> Call:
        """Count a call, and return what identifies it.

        Args:
            epoch: Current epoch; None: outside of epochs.
            loops: Data loops of the epoch begun before the call.
            what: Function and line of the script.
        """
        epoch, loops = (_OUTSIDE, 0) if epoch is None else (epoch, loops)
        for past in [one for one in self._calls if _OUTSIDE < one[0] < epoch]:
            del self._calls[past]
        self._calls[epoch, loops, what] += 1
        return Call(epoch, loops, what, self._calls[epoch, loops, what])

    def keep(self, call: Call, result: Any) -> None:
        """Keep the result of a call, unless it is too large or cannot be sent to another replica."""
        try:
            pickled = _pickled(result)
        # whatever an object of the script raises: with one replica it need not be picklable
        except Exception:
            return
        self._results[call] = pickled
        excess = sum(map(len, self._results.values())) - TOTAL
        for old in [one for one in self._results if one.epoch != _OUTSIDE] + [call]:
            if excess <= 0:
                return
            excess -= len(self._results.pop(old, b""))

    def find(self, call: Call) -> tuple[bool, Any]:
        """Return whether the result of a call is known, and the result."""
        pickled = self._results.get(call)
        return (False, None) if pickled is None else (True, pickle.loads(pickled))

    def to_plain(self) -> list[tuple[int, int, str, int, bytes]]:
        """Return all results as plain data, for newcomers."""
        return [(*call, pickled) for call, pickled in self._results.items()]

    def take(self, results: Iterable[tuple[int, int, str, int, bytes]]) -> None:
        """Add the results of a running replica, as its `to_plain` has returned them.

        `find` decodes them with pickle, which can run code: they must come from an authenticated replica.
        """
        for epoch, loops, what, number, pickled in results:
            self._results[Call(epoch, loops, what, number)] = pickled


def _pickled(result: Any) -> bytes:
    """Return `result` pickled; ValueError, early, if that is larger than LARGEST."""
    file = _Small()
    pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(result)
    return file.getvalue()


class _Small(io.BytesIO):
    """A file that refuses to become large."""

    @override
    def write(self, data: Buffer, /) -> int:
        if self.tell() + memoryview(data).nbytes > LARGEST:
            raise ValueError("too large")
        return super().write(data)
