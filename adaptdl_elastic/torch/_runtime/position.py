"""Keep the position of a script: its finished epochs and data loops, and the sample index in the current one.

With the position, a script can run again from its first line after a restart. Finished epochs are not
run again. Finished data loops of the current epoch are skipped. The data loop that was running continues at
the sample it had reached. A data loop is identified by its number within its epoch. Data loops outside of
epochs have no such number: they run from their start each time the script reaches them.

Every replica must run the same data loops. At the start of a data loop, each replica tells the others the
number of the loop and its loader, without waiting for them. If the replicas differ, their next collective
raises an error.
"""

from __future__ import annotations

import logging
import math
import time
from copy import copy
from types import CodeType
from typing import Any

from adaptdl_elastic import _session, checkpoint
from adaptdl_elastic._session import Session
from adaptdl_elastic.reducer import LOOPS, PeerFinishedError, PeerLostError
from adaptdl_elastic.torch._runtime.inner_loops import InnerLoops
from adaptdl_elastic.torch._runtime.script_names import ScriptNames

logger = logging.getLogger(__name__)

# in reports of problems
OUTSIDE = "the loop outside of epochs"
BEHIND_ALL = 10**6
"""Data loops outside of epochs have greater numbers than this; those in an epoch have smaller ones."""
UNKNOWN_START = -math.inf
"""`start_progress` of a data loop that continues at the position of another checkpoint than the job's own."""
_LONGEST = 100
"""Windows without an optimizer step after which boundaries no longer wait for one."""
_STREAM_POSITIONS = 4
"""Windows of a stream whose positions are kept: a recovery may go back one or two."""
_SAVED = (
    *("finished", "finished_loops", "index", "size", "shuffled", "start_progress", "seeds", "end_indices"),
    *("first_options", "idle", "samples", "step", "trainer", "trained"),
)
"""Attributes of a position that are saved as they are, but for the values of a loop outside of epochs."""


class ScriptPosition(checkpoint.TensorState):
    """Hold the position of a script and the seeds of its loaders. One per session: `script_position()`."""

    required = False

    def __init__(self, session: Session) -> None:
        super().__init__("adaptdl-loops")
        self._session = session
        self.names = ScriptNames()
        # optimizer steps finished since the job began
        self.step = 0
        # finished epochs
        self.finished = 0
        # finished data loops of the current epoch
        self.finished_loops = 0
        # samples that the current data loop has handed out, over all replicas
        self.index = 0
        # samples of its data set; None: not known
        self.size: int | None = None
        # whether they come in a random order; None: not known
        self.shuffled: bool | None = None
        # statistical progress when the current data loop began
        self.start_progress = 0.0
        # loader's key → seed of its sample order, once settled
        self.seeds: dict[str, int] = {}
        # loader's key → samples of a pass
        self.end_indices: dict[str, int] = {}
        # (samples handed out, next part, samples by part) of a stream at the last windows; by `note_stream`
        self.stream_positions: list[tuple[int, int, list[int]]] = []
        # model → (epoch, options of its optimizer at the job's first step, at the epoch's first step)
        self.first_options: dict[str, tuple[int, str, str]] = {}
        # key of the loader that models are trained with, once known
        self.trainer: str | None = None
        # windows of the running loop since its last optimizer step, with gradients
        self.idle = 0
        # samples of the current epoch in training loops
        self.samples = 0
        # epochs of all loops until the end of the last one that the script has reached
        self.until: int | None = None
        # epoch that is number 0 of that loop
        self.zero = 0
        # name of a count of epochs → epochs that its loops have declared in this process
        self.counts: dict[str, int] = {}
        # code that contains the epoch loop
        self.body: CodeType | None = None
        # epoch loops that this process has reached
        self.epoch_loops = 0
        # number of the first data loop of the current epoch that trained; 0: none has ended
        self.trained = 0
        # data loops of the current epoch that this process has reached
        self.entered = 0
        # inside a data loop
        self.looping = False
        # data loops inside the running one
        self.inner = InnerLoops()
        # (loop, index to continue at) of a loop left by its body
        self.left: tuple[int, int] | None = None
        # last (epoch, data loop) that the others were told
        self.announced: tuple[int, int] = (0, 0)
        self.epoch_began = time.monotonic()
        # last epoch that was begun in this process
        self.begun = -1
        # data loops outside of epochs that this process has reached
        self._outside = 0
        # (index, samples, start_progress, inner), restored after a data loop outside of epochs; else None
        self._kept: tuple[int, int, float, InnerLoops] | None = None

    @property
    def outside(self) -> bool:
        """Whether a data loop outside of epochs is running."""
        return self._kept is not None

    @property
    def outside_loop(self) -> int:
        """Number of the running data loop outside of epochs, counted from 1 in this process; 0: none runs."""
        return 0 if self._kept is None else self._outside

    @property
    def loops_outside(self) -> int:
        """Epoch loops, and data loops outside of epochs, that this process has reached."""
        return self.epoch_loops + self._outside

    @property
    def place(self) -> str:
        """Place of the script for its random streams: behind which loop it is, or in which one."""
        if self._session.epoch is None:
            return f"- {self.loops_outside}"
        return f"{self.finished} {self.entered}"

    @property
    def training_over(self) -> bool:
        """Whether a data loop of the current epoch that trains has ended."""
        return 0 < self.trained <= self.finished_loops

    def state_dict(self) -> dict[str, Any]:
        """Return the position for checkpoints and newcomers."""
        finished_loops, index = self._behind()
        _, samples, start_progress, inner = self._kept or (0, self.samples, self.start_progress, self.inner)
        return {name: copy(getattr(self, name)) for name in _SAVED} | {
            "finished_loops": finished_loops,
            "index": index,
            "samples": samples,
            "start_progress": start_progress,
            "stream_positions": [[index, turn, *counts] for index, turn, counts in self.stream_positions],
            "announced": list(self.announced),
            "inner": inner.state(index),
        }

    def load_state_dict(self, state_dict: Any) -> None:
        """Go to the position in `state_dict`. One of an earlier version may lack some values."""
        for name in _SAVED:
            setattr(self, name, copy(state_dict.get(name, getattr(self, name))))
        saved = state_dict.get("stream_positions", [])
        self.stream_positions = [(index, turn, list(counts)) for index, turn, *counts in saved]
        epoch, loop = state_dict["announced"]
        self.announced = (epoch, loop)
        self.inner.load(state_dict.get("inner", {}))
        self.left = None

    def _behind(self) -> tuple[int, int]:
        """Return the number of finished data loops of the epoch, and the index in the next one."""
        if self.left is None:
            return self.finished_loops, self.index if self._kept is None else self._kept[0]
        # The loop is finished only when the script continues after it: an exception may have left it.
        loop, index = self.left
        return loop - 1, index

    def tell_samples(self, size: int, shuffled: bool) -> None:
        """Record the number of samples of the running data loop's data set, and whether it is shuffled."""
        began = "when this data loop began, and"
        changes = []
        if self.size not in (None, size):
            changes.append(f"the data set had {self.size} samples {began} has {size} now")
        if self.shuffled not in (None, shuffled):
            changes.append(f"shuffle was {self.shuffled} {began} is {shuffled} now")
        if self.index and changes and self._session.rank == 0:
            what = "; ".join(changes)
            logger.warning("%s: in what is left of it samples may come twice or not at all", what)
        self.size, self.shuffled = size, shuffled

    def note_stream(self, index: int, turn: int, counts: list[int]) -> None:
        """Remember how many samples of each part of a stream make up `index`, for the last few windows.

        Args:
            index: Samples handed out, over all replicas.
            turn: Part of the stream that gives the next chunk.
            counts: Samples handed out, by part.
        """
        self.stream_positions = [*self.stream_positions[1 - _STREAM_POSITIONS :], (index, turn, list(counts))]

    # -- epochs ------------------------------------------------------------------------------------

    def begin_epoch(self) -> int:
        """Enter the next unfinished epoch, and return its number."""
        session = self._session
        if self.looping:
            raise RuntimeError(
                "an iterator of a data loader is open where an epoch begins, so the epoch's data loops would "
                "be inside that loop: delete it before, or take its batch by `for batch in loader: break`"
            )
        self.finished_loops, self.index = self._behind()
        self.entered, self.left = 0, None
        self.epoch_began = time.monotonic()
        session.epoch = self.begun = self.finished
        # no replica joins here: it is not yet known which loader's loop comes first
        self._pass(last=True)
        return self.finished

    def end_epoch(self) -> None:
        """Record that the body of the epoch loop has run to its end."""
        session, epoch = self._session, self.finished
        seconds = time.monotonic() - self.epoch_began
        session.emit("epoch", epoch=epoch, seconds=seconds, samples=self.samples)
        self.finished += 1
        self.finished_loops = self.index = self.samples = self.trained = 0
        self.left = None
        # not made in an epoch
        self.seeds = {key: seed for key, seed in self.seeds.items() if key.isdigit()}
        self.end_indices = {key: end for key, end in self.end_indices.items() if key.isdigit()}
        if not session.joining:
            session.consensus.drift.epoch_ends(epoch)
            session.rescaling.epoch_ends(epoch)
        checkpoint.end_epoch(epoch)

    def loop_begins(self) -> None:
        """Give the script the names that loops have assigned before its first loop in this process."""
        begun = self.finished, self.finished_loops, self.index
        self.names.loop_begins(self._session.joining or any(begun))

    # -- data loops --------------------------------------------------------------------------------

    def enter(self, loader: str) -> bool:
        """Enter a data loop over the loader with the key `loader`.

        Returns:
            Whether the loop has to be run: not if it finished before a restart or before this replica joined.

        Raises:
            RuntimeError: another data loop is running.
        """
        if self.looping:
            raise RuntimeError(
                "a data loop over a loader of the script's own, or an AdaptiveBPTTIterator, inside another "
                "data loop: only an AdaptiveDataLoader can be iterated there. Let the outer loop end first"
            )
        self.loop_begins()
        self.looping = True
        if self._session.epoch is None:
            self._outside += 1
            self._kept = self.index, self.samples, self.start_progress, self.inner
            self.index, self.inner = 0, InnerLoops()
            return True
        self.left = None
        self.entered += 1
        if self._session.joining:
            newcomer = self._session.newcomer
            assert newcomer is not None
            if not newcomer.arrive((self.finished, self.entered), loader):
                return False
        elif self.entered <= self.finished_loops:
            return False
        else:
            self._pass()
        if not self.index:
            self.inner.outermost_begins()
        what = f"data loop {self.entered} of epoch {self.finished}, over loader {loader}"
        self.announce((self.finished, self.entered), what)
        return True

    def announce(self, place: tuple[int, int], what: str, wait: bool = False) -> None:
        """Tell the other replicas that this replica has reached `place`, unless they were told before.

        Args:
            place: Epoch and data loop.
            what: Description of the place, for error messages.
            wait: Whether to wait until all others have reached it or one of them has died.

        Raises:
            CollectiveMismatchError: another replica has reached another place instead.
            PeerFinishedError: another replica has ended instead.
        """
        reducer = self._session.reducer
        if place <= self.announced:
            return
        self.announced = place
        if reducer is None:
            return
        try:
            told = reducer.allreduce_async(None, _first, what, LOOPS)
            if wait or told.done():
                told.result()
        except PeerFinishedError:
            raise
        except PeerLostError:
            # the next boundary detects the loss and recovers
            return

    def _pass(self, last: bool = False) -> None:
        """Pass the boundary at the beginning of an epoch or a data loop."""
        safe = self._session.recovery
        safe.between_loops()
        safe.retry_on_peer_loss(lambda: self.boundary(last))

    def leave(self, ended: bool, left: int | None = None, trained: bool = False) -> None:
        """Leave a data loop.

        Args:
            ended: Whether the loop is finished; False if it was skipped, or stopped by an error or a stop.
            left: If the loop's body left it, the index at which it would continue.
            trained: Whether models are trained in the loop.
        """
        self.looping, self.idle = False, 0
        if self._kept is not None:
            self.index, self.samples, self.start_progress, self.inner = self._kept
            self._kept = None
        elif ended:
            self.left = None if left is None else (self.entered, left)
            self.finished_loops = self.entered
            self.index = 0
            if trained and not self.training_over:
                self.trained = self.entered

    def boundary(self, last: bool = False) -> None:
        """Pass the boundary at the current position: after a step, or before a data loop or an epoch.

        What is due at a boundary waits for the next optimizer step while the script adds up gradients of
        several steps of the loader: they are not part of a checkpoint, and a newcomer's counter, which begins
        at 0, would step at other batches. A script that has not stepped for long may never do so.

        Args:
            last: Whether no replica can join here: the running data loop has no batch left, or the epoch has
                just begun.
        """
        if 0 < self.idle <= _LONGEST or any(one.accumulates_by_hand for one in self._session.models):
            return
        if self._kept is None:
            self._session.consensus.boundary((self.finished, self.entered, self.index), last)
        else:
            # a newcomer cannot join in a data loop outside of epochs
            self._session.consensus.boundary((self.begun, BEHIND_ALL + self._outside, self.index), last=True)


def _first(a: None, b: None) -> None:
    return a


def script_position(session: Session | None = None) -> ScriptPosition:
    """Return the position of this process's script; the first call restores it from the checkpoint."""
    session = session or _session.current()
    found = session.position
    if found is None:
        found = session.position = ScriptPosition(session)
        checkpoint.load_state(found)
        checkpoint.load_state(found.names)
    assert isinstance(found, ScriptPosition)
    return found
