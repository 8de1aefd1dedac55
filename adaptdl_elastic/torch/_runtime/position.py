"""Where a script is: which epochs and data loops are behind it, and how far it is in the present one.

This is what lets a script be run again from its top after a restart: epochs that have ended are not
offered again, data loops of the present epoch that have ended are skipped, and the loop that was under
way goes on at the sample it had reached. A data loop is known by its number within its epoch. Data loops
outside of epochs have no place in that: they run whenever the script comes to them, from their start.

Every replica must come to the same data loops. Each tells the others which one it has come to, and over
which loader; nobody waits for that, but where they differ all that follows is an error.
"""

from __future__ import annotations

import logging
import time
from types import CodeType
from typing import Any

from adaptdl_elastic import _session, checkpoint
from adaptdl_elastic._session import Session
from adaptdl_elastic.reducer import LOOPS, PeerFinishedError, PeerLostError

logger = logging.getLogger(__name__)

_BEHIND_ALL = 10**6  # data loops: an epoch has fewer
_STREAM_POSITIONS = 4  # windows of a stream that are remembered: a death may undo one or two


class ScriptPosition(checkpoint.TensorState):
    """The position of a script, and the seeds of its loaders. One a session; see `script_position()`."""

    required = False

    def __init__(self, session: Session) -> None:
        super().__init__("adaptdl-loops")
        self._session = session
        self.step = 0  # optimizer steps finished since the job began
        self.finished = 0  # epochs
        self.finished_loops = 0  # of the present epoch
        self.index = 0  # samples that the present data loop has handed out, on all replicas together
        self.size: int | None = None  # samples of its data set; None: not known
        self.shuffled: bool | None = None  # whether they come in a random order; None: not known
        self.start_progress = 0.0  # statistical progress when the present data loop began
        self.seeds: dict[str, int] = {}  # of the loaders' orders, by their keys, once settled
        self.end_indices: dict[str, int] = {}  # samples of a pass of each loader, by their keys
        self.stream_positions: list[tuple[int, int, list[int]]] = []  # see note_stream
        self.trainer: str | None = None  # key of the loader that models are trained with, once known
        self.samples = 0  # of the present epoch, in training loops
        self.until: int | None = None  # remaining_epochs_until's argument
        self.body: CodeType | None = None  # what has the epoch loop in it
        self.epoch_loops = 0  # of the script that this process has come to
        self.entered = 0  # data loops of the present epoch that this process has come to
        self.looping = False  # inside a data loop
        self.left: tuple[int, int] | None = None  # data loop that its body left, and where it would go on
        self.announced: tuple[int, int] = (0, 0)  # the last (epoch, data loop) that others were told of
        self.epoch_began = time.monotonic()
        self._begun = -1  # the last epoch that was begun in this process
        self._outside = 0  # data loops outside of epochs that this process has come to
        self._kept: tuple[int, int, float] | None = (
            None  # what such a loop does not change; None: there is none
        )

    @property
    def outside(self) -> bool:
        """Whether a data loop outside of epochs is under way."""
        return self._kept is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that outlives a generation."""
        finished_loops, index = self._behind()
        _, samples, start_progress = self._kept or (0, self.samples, self.start_progress)
        return {
            "finished": self.finished,
            "finished_loops": finished_loops,
            "index": index,
            "size": self.size,
            "shuffled": self.shuffled,
            "start_progress": start_progress,
            "seeds": dict(self.seeds),
            "end_indices": dict(self.end_indices),
            "stream_positions": [[index, turn, *counts] for index, turn, counts in self.stream_positions],
            "samples": samples,
            "step": self.step,
            "trainer": self.trainer,
            "announced": list(self.announced),
        }

    def load_state_dict(self, state_dict: Any) -> None:
        """Be where `state_dict` says."""
        self.finished = state_dict["finished"]
        self.finished_loops = state_dict["finished_loops"]
        self.index = state_dict["index"]
        self.size, self.shuffled = state_dict.get("size"), state_dict.get("shuffled")
        self.start_progress = state_dict["start_progress"]
        if not isinstance(state_dict["seeds"], dict):
            raise ValueError("it was saved by an older version, which numbered data loaders in another way")
        self.seeds = dict(state_dict["seeds"])
        self.end_indices = dict(state_dict.get("end_indices", {}))
        saved = state_dict.get("stream_positions", [])
        self.stream_positions = [(index, turn, list(counts)) for index, turn, *counts in saved]
        self.samples = state_dict["samples"]
        self.step = state_dict["step"]
        self.trainer = state_dict["trainer"]
        epoch, loop = state_dict["announced"]
        self.announced = (epoch, loop)
        self.left = None

    def _behind(self) -> tuple[int, int]:
        """Return the number of finished data loops of the epoch, and the index in the next one."""
        if self.left is None:
            return self.finished_loops, self.index if self._kept is None else self._kept[0]
        loop, index = self.left  # it is over once the script goes on behind it: an exception may have left it
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
        """Remember what a stream's `index` consists of, beside those of the windows before.

        Args:
            index: Samples handed out, over all replicas.
            turn: The part of the stream whose turn it is.
            counts: Samples of each part that were handed out.
        """
        self.stream_positions = [*self.stream_positions[1 - _STREAM_POSITIONS :], (index, turn, list(counts))]

    # -- epochs ------------------------------------------------------------------------------------

    def begin_epoch(self) -> int:
        """Enter the next unfinished epoch."""
        session = self._session
        self.finished_loops, self.index = self._behind()
        self.entered, self.left = 0, None
        self.epoch_began = time.monotonic()
        session.epoch = self._begun = self.finished
        self._pass()
        return self.finished

    def end_epoch(self) -> None:
        """Record that the body of the epoch loop has run to its end."""
        session, epoch = self._session, self.finished
        seconds = time.monotonic() - self.epoch_began
        session.emit("epoch", epoch=epoch, seconds=seconds, samples=self.samples)
        self.finished += 1
        self.finished_loops = self.index = self.samples = 0
        self.left = None
        self.seeds = {key: seed for key, seed in self.seeds.items() if key.isdigit()}  # not made in an epoch
        self.end_indices = {key: end for key, end in self.end_indices.items() if key.isdigit()}
        if not session.joining:
            session.rescaling.epoch_ends(epoch)
        checkpoint.end_epoch(epoch)

    # -- data loops --------------------------------------------------------------------------------

    def enter(self, loader: str) -> bool:
        """Come to a data loop over the loader with that key; whether it has to be run.

        It has not if it had ended before a restart.
        """
        if self.looping:
            raise RuntimeError(
                "a data loop inside another one: only one can be under way at a time, because only one "
                "position can be restored after a restart. Let the outer loop end first (to evaluate during "
                "training, do it between epochs, or make the epochs shorter)"
            )
        self.looping = True
        if self._session.epoch is None:
            self._outside += 1
            self._kept = self.index, self.samples, self.start_progress
            self.index = 0
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
        what = f"data loop {self.entered} of epoch {self.finished}, over loader {loader}"
        self.announce((self.finished, self.entered), what)
        return True

    def announce(self, place: tuple[int, int], what: str, wait: bool = False) -> None:
        """Tell the others that this replica has come to `place`, unless they were told.

        Args:
            place: The epoch and the data loop.
            what: Description of the place, for error messages.
            wait: Whether to wait until all others have come there or one of them has died.

        Raises:
            CollectiveMismatchError: another one has come to another place.
            PeerFinishedError: another one has ended instead.
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
        except PeerLostError:  # the next boundary finds it, and deals with it
            return

    def _pass(self) -> None:
        """Pass the beginning of an epoch or a data loop."""
        safe = self._session.recovery
        safe.between_loops()
        safe.retry_on_peer_loss(self.boundary)

    def leave(self, ended: bool, left: int | None = None) -> None:
        """Leave a data loop; it `ended` unless it was skipped, or broken off by an error or a stop.

        left: where it would go on, if its body left it.
        """
        self.looping = False
        if self._kept is not None:
            self.index, self.samples, self.start_progress = self._kept
            self._kept = None
        elif ended:
            self.left = None if left is None else (self.entered, left)
            self.finished_loops = self.entered
            self.index = 0

    def boundary(self, last: bool = False) -> None:
        """Pass the present position: between steps or evaluated batches, data loops and epochs.

        Args:
            last: Whether nothing of the data loop under way is left.
        """
        if self.outside:  # nobody can join in it
            place, last = (self._begun, _BEHIND_ALL + self._outside), True
        else:
            place = (self.finished, self.entered)
        self._session.consensus.boundary((*place, self.index), last)


def _first(a: None, b: None) -> None:
    return a


def script_position() -> ScriptPosition:
    """Return the position of this process's script; the first call restores it from the checkpoint."""
    session = _session.current()
    found = session.position
    if found is None:
        found = session.position = ScriptPosition(session)
        checkpoint.load_state(found)
    assert isinstance(found, ScriptPosition)
    return found
