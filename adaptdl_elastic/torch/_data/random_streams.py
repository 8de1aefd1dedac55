"""Give each replica its own random numbers from torch, CUDA, NumPy and Python in data loops.

The problem. All replicas start from one seed, so that they build the same model and split the data in the
same way. If they also drew from equal streams during training, they would draw equal dropout masks and equal
noise for different samples.

Two simple ways are wrong. With a different seed per replica from the start, the models and the data splits
would differ. With a different seed once the model is built, a data split that is drawn later, in the epoch
loop, would differ.

What is done. Outside of data loops every replica draws from the script's streams. In a data loop of several
replicas, the streams are seeded at the start of each window with a function of the script's seed, the
position (epoch, data loop, sample index) and the rank. So a step that is repeated, after a death or from a
checkpoint, draws the same numbers again, and no two steps or replicas draw the same numbers. On a single
replica the streams are left alone, and it draws the same numbers as under plain torch. The script's streams
are saved in checkpoints and sent to newcomers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch

from adaptdl_elastic import checkpoint
from adaptdl_elastic._session import Session
from adaptdl_elastic.torch._data.partition import derive_seed

T = TypeVar("T")

# typed as Any: NumPy's stubs lack get_bit_generator and set_bit_generator
_np: Any = np.random
_GOLDEN, _WORD = 0x9E3779B97F4A7C15, 2**64


@dataclass
class Streams:
    """Hold the states of all random streams at one moment."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None
    python: Any
    numpy: Any
    """NumPy's bit generator itself, not a copy; nothing else draws from it while it is kept here."""

    @classmethod
    def present(cls) -> Streams:
        """Return the present streams. NumPy continues to draw from the returned generator."""
        return cls(torch.get_rng_state(), _cuda_state(), random.getstate(), _np.get_bit_generator())

    @classmethod
    def taken(cls, replacement: Any) -> Streams:
        """Return the present streams, and let NumPy draw from `replacement` from now on."""
        found = cls.present()
        _np.set_bit_generator(replacement)
        return found

    def put_back(self) -> None:
        """Draw from these streams from now on."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        random.setstate(self.python)
        _np.set_bit_generator(self.numpy)

    @property
    def seed(self) -> int:
        """Seed with which torch's CPU stream began."""
        generator = torch.Generator()
        generator.set_state(self.cpu)
        return generator.initial_seed()

    def encode(self) -> bytes:
        """Return the states as JSON."""
        version, words, gauss = self.python
        mt = self.numpy.state
        return json.dumps(
            {
                "cpu": self.cpu.numpy().tobytes().hex(),
                "cuda": None if self.cuda is None else self.cuda.numpy().tobytes().hex(),
                "python": [version, list(words), gauss],
                "numpy": [mt["state"]["key"].tolist(), mt["state"]["pos"]] if _is_mt19937(mt) else None,
            }
        ).encode()

    @classmethod
    def decode(cls, saved: Any) -> Streams:
        """Return the streams of which `saved` is the parsed JSON that `encode` made."""
        version, words, gauss = saved["python"]
        numpy: Any = np.random.MT19937()
        if saved["numpy"] is None:
            numpy = _np.get_bit_generator()
        else:
            key, position = saved["numpy"]
            state = {"key": np.array(key, dtype=np.uint32), "pos": position}
            numpy.state = {"bit_generator": "MT19937", "state": state}
        cuda = saved["cuda"]
        return cls(
            _bytes_tensor(saved["cpu"]),
            None if cuda is None or not _cuda_in_use() else _bytes_tensor(cuda),
            (version, tuple(words), gauss),
            numpy,
        )


class RandomStreams(checkpoint.State):
    """Switch a replica between the script's random streams and its own. There is one object per session."""

    required = False

    def __init__(self, session: Session) -> None:
        super().__init__("adaptdl-random-streams")
        self._session = session
        # this replica's NumPy stream
        self._own = np.random.MT19937(0)
        # the script's streams while this replica draws from its own
        self._scripts: Streams | None = None
        # script's streams of a checkpoint, for the next data loop
        self._restored: Streams | None = None
        # nesting depth of data loops
        self._loops = 0
        # (epoch, data loop, rank) to which `_base` belongs
        self._place: tuple[int, ...] = ()
        # seed from which the seeds of the windows of `_place` are derived
        self._base = 0

    def save(self, fileobj: BinaryIO) -> None:
        """Write the states of the script's streams."""
        fileobj.write((self._scripts or self._restored or Streams.present()).encode())

    def load(self, fileobj: BinaryIO) -> None:
        """Read the states of the script's streams; they take effect when the next data loop begins."""
        self._restored = Streams.decode(json.load(fileobj))

    @property
    def seed(self) -> int:
        """Seed of the script's streams, the same inside and outside of data loops."""
        return torch.initial_seed() if self._scripts is None else self._scripts.seed

    def enter_loop(self) -> None:
        """Begin a data loop, or continue it after a restart."""
        self._loops += 1
        restored, self._restored = self._restored, None
        if restored is not None:
            self._scripts = None
            restored.put_back()

    def leave_loop(self) -> None:
        """End a data loop, and return to the script's streams."""
        self._loops -= 1
        if not self._loops:
            self._return_to_scripts()

    def begin_window(self, epoch: int, loop: int, index: int) -> None:
        """Seed this replica's streams for the window that begins at sample `index`.

        With one replica, or with a model whose `own_random_streams` is False, the script's streams are used
        instead.

        Args:
            epoch: Number of the epoch.
            loop: Number of the data loop within the epoch.
            index: Samples that the loop has handed out before the window.
        """
        session = self._session
        if session.replicas == 1 or not all(model.own_random_streams for model in session.models):
            self._return_to_scripts()
            return
        # without a model nothing is trained, and no separate streams are needed
        if not session.models:
            return
        if self._scripts is None:
            self._scripts, self._place = Streams.taken(self._own), ()
        place = (epoch, loop, session.rank)
        if place != self._place:
            self._place, self._base = place, derive_seed(self._scripts.seed, *place)
        seed_all(_mixed(self._base, index))

    def _return_to_scripts(self) -> None:
        if self._scripts is not None:
            self._scripts.put_back()
            self._scripts = None


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from streams seeded with `seed` inside the block; the streams outside stay unchanged."""
    before = Streams.taken(np.random.MT19937(0))
    seed_all(seed)
    try:
        yield
    finally:
        before.put_back()


def drawn_from(seed: int, items: Iterator[T]) -> Iterator[T]:
    """Yield `items`, computed with streams seeded with `seed`; the streams outside stay unchanged."""
    numpy, own = np.random.MT19937(0), None
    while True:
        before = Streams.taken(numpy)
        try:
            if own is None:
                seed_all(seed)
            else:
                own.put_back()
            item = next(items)
        except StopIteration:
            return
        finally:
            own = Streams.present()
            before.put_back()
        yield item


def seed_all(seed: int) -> None:
    """Seed torch, CUDA (if in use), Python and NumPy with `seed`.

    Unlike torch.manual_seed, this does no work for device types that are not in use.
    """
    torch.default_generator.manual_seed(seed)
    if _cuda_in_use():
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def _mixed(base: int, index: int) -> int:
    """Derive a well-mixed 63-bit seed from `base` and `index` (SplitMix64, Steele et al. 2014)."""
    word = (base + (index + 1) * _GOLDEN) % _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % _WORD
    return (word ^ (word >> 31)) >> 1


def _cuda_state() -> torch.Tensor | None:
    return torch.cuda.get_rng_state() if _cuda_in_use() else None


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _is_mt19937(state: Any) -> bool:
    return bool(state["bit_generator"] == "MT19937")
