"""Keep the positions of data loops inside another data loop.

The problem. One position is saved: that of the outermost loop. A script may evaluate in the body of its
training loop, or read two loaders at the same time with `zip`.

What is done. A data loop inside another one belongs to the body of the outermost loop. It has no boundary of
its own: replicas come and go, and checkpoints are saved, between two windows of the outermost loop only. A
loop that begins and ends in one body has no position to save. A loop that is *open* at such a boundary, as
the second loader of a `zip` is, goes on afterwards. Its position is saved with the outermost loop's index.

After a death, the outermost loop goes back to the start of a window. The open loops go back to the positions
that they had there.

An iterator may live longer than one outermost loop. It begins anew with each of them, as it does in a replica
that joins there.
"""

from __future__ import annotations

from dataclasses import dataclass

_WINDOWS = 4  # starts of windows that are remembered, besides the first one in this process

InnerPosition = tuple[int, ...]
"""(samples handed out, seed of the order, next part of a stream, samples of each part of a stream)."""


@dataclass
class InnerLoop:
    """Hold the position of one loop inside another one."""

    begin: InnerPosition
    position: InnerPosition
    changes: int = 0  # how often `position` was put back
    open: bool = False  # a window of the outermost loop has begun since this loop began
    outdated: bool = False  # another outermost loop has begun since
    early: bool = False  # its iterator was made before the outermost loop began, as `zip` does
    samples: int = 0  # samples of this replica in the batch that was handed out last

    @property
    def beside(self) -> bool:
        """Whether the loop is read beside the outermost one, batch by batch, as the second one of a `zip`."""
        return self.open or self.early


class InnerLoops:
    """Keep the loops that run inside the running data loop."""

    def __init__(self) -> None:
        self.begun = 0  # loops begun since the start of the outermost loop's window
        self.window = -1  # index at which the window of the outermost loop began; -1: none yet
        self._exhausted: set[str] = set()  # keys of loaders whose loops beside ended in this window
        self._running: dict[str, InnerLoop] = {}  # loader's key → its running loop
        self._saved: dict[str, InnerPosition] = {}  # loader's key → position at which its next loop begins
        self._starts: dict[int, dict[str, InnerPosition]] = {}  # index of a window → positions at its start

    def enter(self, key: str, fresh: InnerPosition, early: bool = False) -> InnerLoop:
        """Begin a loop, or continue the loop that was open.

        Args:
            key: Key of the loader.
            fresh: Where a loop begins that was not open.
            early: Whether the loop's iterator was made before the outermost loop began.

        Raises:
            RuntimeError: a loop over this loader is running.
        """
        if key in self._running:
            raise RuntimeError(
                "two data loops over one loader at the same time: make a second AdaptiveDataLoader of its "
                "data set"
            )
        self.begun += 1
        self._exhausted.discard(key)
        loop = self._running[key] = InnerLoop(fresh, self._saved.pop(key, fresh), early=early)
        return loop

    def innermost(self) -> tuple[str, InnerLoop] | None:
        """Return the loader's key and the loop that began last, of those that run in the body of another one.

        A loop that is read beside the outermost one is none of these.
        """
        found = ((key, loop) for key, loop in reversed(self._running.items()) if not loop.beside)
        return next(found, None)

    def leave(self, key: str, loop: InnerLoop, exhausted: bool = False) -> None:
        """End a loop.

        Args:
            key: Key of the loader.
            loop: The loop.
            exhausted: Whether it has no batch left.
        """
        if self._running.get(key) is loop:
            del self._running[key]
        if exhausted and loop.beside and not loop.outdated:
            self._exhausted.add(key)

    def exhausted(self) -> list[str]:
        """Return the keys of the loaders beside the outermost one that have no batch for this window.

        Those that have begun again are left out.
        """
        return sorted(self._exhausted)

    def begin_window(self, index: int) -> None:
        """Begin the window of the outermost loop at `index`, perhaps once more."""
        if index <= self.window:
            self._go_back(index)
        else:
            self._starts[index] = self._positions()
            for old in [*self._starts][1:-_WINDOWS]:
                del self._starts[old]
        self.window, self.begun, self._exhausted = index, 0, set()
        for loop in self._running.values():
            loop.open = True

    def _go_back(self, index: int) -> None:
        """Return all loops to their positions when the window at `index` began."""
        if index not in self._starts and any(self._starts.values()):
            raise RuntimeError(
                f"where the loops inside of this one were at sample {index} is not known any more: the job "
                f"has to go on from its checkpoint"
            )
        self._saved = dict(self._starts.get(index, {}))
        for key, loop in self._running.items():
            loop.position = self._saved.pop(key, loop.begin)
            loop.changes += 1

    def _positions(self) -> dict[str, InnerPosition]:
        return {**self._saved, **{key: loop.position for key, loop in self._running.items()}}

    def state(self, index: int) -> dict[str, list[int]]:
        """Return what to save if the outermost loop is to go on at `index`."""
        found = self._starts.get(index) if index <= self.window else None
        return {key: list(at) for key, at in (self._positions() if found is None else found).items()}

    def load(self, state: dict[str, list[int]]) -> None:
        """Continue at the positions in `state`."""
        self.outermost_begins()
        self._saved = {key: tuple(at) for key, at in state.items()}

    def outermost_begins(self) -> None:
        """Forget all positions, because they belong to another outermost loop."""
        for loop in self._running.values():
            loop.outdated = True
        self._running, self._saved, self._starts, self.window, self.begun = {}, {}, {}, -1, 0
        self._exhausted = set()
