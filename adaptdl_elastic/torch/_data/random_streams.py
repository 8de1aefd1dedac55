"""Random numbers of each replica: those that a script draws from torch, CUDA, NumPy and Python.

The problem. Replicas begin from one seed, so that they build the same model and split the data alike.
Drawing from the same streams while they train, they would draw equal dropout masks and equal noise for
different samples: the noise of a step would be one replica's and not that of all of them.

What does not do. Another seed for each replica from the start: the models and the data splits would
differ. Another seed once the model is built: a split of the data that is drawn later, in the epoch loop,
would differ.

What is done. Outside of data loops every replica draws from the script's own streams. In a data loop of
several replicas each window of samples begins by seeding the streams with a function of the script's
seed, the position (epoch, data loop, sample index) and the rank. So a step that is done again, after a
death or from a checkpoint, draws what it drew before, and no two steps or replicas draw the same. On one
replica the streams are left alone: it draws what plain torch would draw. The script's own streams are
part of checkpoints and given to newcomers.
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

_np: Any = np.random  # its stub does not export the functions that put another generator in place
_GOLDEN, _WORD = 0x9E3779B97F4A7C15, 2**64


@dataclass
class Streams:
    """The states of all streams at one moment."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None
    python: Any
    numpy: Any
    """The generator itself, which nothing else draws from meanwhile."""

    @classmethod
    def present(cls) -> Streams:
        """Return what is drawn from now; NumPy's goes on being drawn from."""
        return cls(torch.get_rng_state(), _cuda_state(), random.getstate(), _np.get_bit_generator())

    @classmethod
    def taken(cls, replacement: Any) -> Streams:
        """Take the present streams aside. NumPy draws from `replacement` from now on."""
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
        """The seed that torch's stream began from."""
        generator = torch.Generator()
        generator.set_state(self.cpu)
        return generator.initial_seed()

    def encode(self) -> bytes:
        """Return it as JSON."""
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
        """Invert `encode`, from the parsed JSON."""
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
    """Which streams a replica draws from. One a session."""

    required = False

    def __init__(self, session: Session) -> None:
        super().__init__("adaptdl-random-streams")
        self._session = session
        self._own = np.random.MT19937(0)  # this replica's NumPy stream
        self._scripts: Streams | None = None  # the script's, while this replica draws from streams of its own
        self._restored: Streams | None = None  # where the script's go on, once a data loop begins
        self._loops = 0  # data loops under way, one inside another
        self._place: tuple[int, ...] = ()
        self._base = 0  # of this replica's seeds in the data loop under way

    def save(self, fileobj: BinaryIO) -> None:
        """Write the script's own streams."""
        now = self._scripts or self._restored
        if now is None:
            now = Streams.present()
        fileobj.write(now.encode())

    def load(self, fileobj: BinaryIO) -> None:
        """Keep what is to be put back when a data loop begins."""
        self._restored = Streams.decode(json.load(fileobj))

    @property
    def seed(self) -> int:
        """The script's seed, the same inside and outside of data loops."""
        return torch.initial_seed() if self._scripts is None else self._scripts.seed

    def enter_loop(self) -> None:
        """Begin a data loop, or continue it after a restart."""
        self._loops += 1
        restored, self._restored = self._restored, None
        if restored is not None:
            self._scripts = None
            restored.put_back()

    def leave_loop(self) -> None:
        """End the data loop, whether it is over or was left."""
        self._loops -= 1
        if not self._loops:
            self._return_to_scripts()

    def begin_window(self, epoch: int, loop: int, index: int) -> None:
        """Seed this replica's streams for the samples from `index` on, which are fetched next."""
        session = self._session
        if session.replicas == 1 or not all(model.own_random_streams for model in session.models):
            self._return_to_scripts()
            return
        if not session.models:  # what is no training needs none
            return
        if self._scripts is None:
            seed = torch.initial_seed()
            self._scripts, self._place = Streams.taken(self._own), ()
        else:
            seed = -1
        place = (epoch, loop, session.rank)
        if place != self._place:
            seed = self._scripts.seed if seed < 0 else seed
            self._place, self._base = place, derive_seed(seed, *place)
        seed_all(_mixed(self._base, index))

    def _return_to_scripts(self) -> None:
        if self._scripts is not None:
            self._scripts.put_back()
            self._scripts = None


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside of it everything is drawn from streams of that seed; outside nothing has been drawn."""
    before = Streams.taken(np.random.MT19937(0))
    seed_all(seed)
    try:
        yield
    finally:
        before.put_back()


def drawn_from(seed: int, items: Iterator[T]) -> Iterator[T]:
    """Iterate over `items`, which draw from streams of that seed; outside nothing has been drawn."""
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
    """As torch.manual_seed and its like do it, without what they do for devices that are not in use."""
    torch.default_generator.manual_seed(seed)
    if _cuda_in_use():
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def _mixed(base: int, index: int) -> int:
    """Derive a well mixed 63-bit seed from both (SplitMix64, Steele et al. 2014)."""
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
