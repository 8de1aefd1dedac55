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
replica the streams are left alone, and it draws the same numbers as under plain torch.

The script's streams are saved in checkpoints and sent to newcomers, as they are and as they were where the
running epoch began, behind each of its data loops, and behind each loop outside of epochs. A process that
passes such a place again puts them back there, so that it draws the sets of its epoch as the others did.
Generators of the script's own are kept in the same way, unless their states differ between replicas, or they
began elsewhere with another state than here, as generators do that are seeded by rank.

Streams are put back at the places where they were kept, and at no later one. So a seed that the script sets
behind a place counts. A process that comes to a place a second time, as after an exception, puts the streams
back only if torch's seed is still the same.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch

from adaptdl_elastic import _frames, checkpoint, collective
from adaptdl_elastic._session import Session
from adaptdl_elastic.reducer import PeerLostError
from adaptdl_elastic.torch._data.partition import derive_seed
from adaptdl_elastic.torch._runtime.position import script_position

T = TypeVar("T")

# typed as Any: NumPy's stubs lack get_bit_generator and set_bit_generator
_np: Any = np.random
_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    torch.Generator: (
        lambda one: _hex(one.get_state()),
        lambda one, state: one.set_state(_bytes_tensor(state)),
    ),
    random.Random: (random.Random.getstate, lambda one, state: one.setstate(_tuple(state))),
    np.random.RandomState: (lambda one: one.get_state(legacy=False), np.random.RandomState.set_state),
    np.random.Generator: (
        lambda one: one.bit_generator.state,
        lambda one, state: setattr(one.bit_generator, "state", state),
    ),
}
"""For each kind of generator: how its state is read, as data that JSON can hold with `_list`, and set."""
_OUTSIDE = "-"
"""First word of a place outside of epochs."""
_MOST, _MOST_PLACES = 100, 20
"""Parts of an object of the script that are searched; places in an epoch, and outside, that are kept."""
_GLOBAL = torch.default_generator, _np.mtrand._rand
"""Generators that are no script's own."""
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
        cuda = torch.cuda.get_rng_state() if _cuda_in_use() else None
        return cls(torch.get_rng_state(), cuda, random.getstate(), _np.get_bit_generator())

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

    def plain(self) -> dict[str, Any]:
        """Return a copy of the states as plain data."""
        mt = self.numpy.state
        return {
            "cpu": _hex(self.cpu),
            "cuda": None if self.cuda is None else _hex(self.cuda),
            "python": self.python,
            "numpy": [mt["state"]["key"].tolist(), mt["state"]["pos"]]
            if mt["bit_generator"] == "MT19937"
            else None,
        }

    @classmethod
    def of(cls, saved: Any) -> Streams:
        """Return the streams whose `plain` states are `saved`."""
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
            _tuple(saved["python"]),
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
        # script's streams of a checkpoint or of the others, for the data loop in which they were saved
        self._restored: dict[str, Any] | None = None
        # place → streams there
        self._kept: dict[str, dict[str, Any]] = {}
        # places that other processes have passed
        self._passed: set[str] = set()
        # generators of the script by name; names of those that differ between replicas
        self._generators: dict[str, Any] = {}
        self._apart: set[str] = set()
        # digest of the state at which a generator was found, here and in the process whose state was loaded
        self._first: dict[str, int] = {}
        self._theirs: dict[str, int] = {}
        # nesting depth of data loops
        self._loops = 0
        # (epoch, data loop, rank) to which `_base` belongs
        self._place: tuple[int, ...] = ()
        # seed from which the seeds of the windows of `_place` are derived
        self._base = 0

    def sync(self) -> None:
        """Find the generators that differ between replicas, e.g. by their seeds. A collective."""
        mine = {(name, json.dumps(state, default=_list)) for name, state in self._own_states().items()}
        with suppress(PeerLostError):  # the next boundary notices the loss
            both = (mine, mine)
            same, some = collective.combine(both, lambda a, b: (a[0] & b[0], a[1] | b[1]), self.name)
            self._apart |= {name for name, _ in some - same}
            for kept in self._kept.values():
                kept["own"] = {name: own for name, own in kept["own"].items() if name not in self._apart}

    def save(self, fileobj: BinaryIO) -> None:
        """Write the script's streams, and those at the places that it has passed."""
        pending = None if self._scripts else self._restored
        now = pending or {**self._now(), "at": script_position(self._session).place}
        kept = {"kept": self._kept, "first": self._theirs | self._first}
        fileobj.write(json.dumps({**now, **kept}, default=_list).encode())

    def load(self, fileobj: BinaryIO) -> None:
        """Read what `save` wrote; the streams take effect at the places where they were kept."""
        self._restored = {"own": {}, **json.load(fileobj)}
        self._kept, self._theirs = self._restored.pop("kept", {}), self._restored.pop("first", {})
        self._passed = {*self._kept}

    def begin_epoch(self, epoch: int) -> None:
        """Reach the beginning of an epoch, and forget the places of others."""
        within = (_OUTSIDE, str(epoch))
        self._kept = {place: one for place, one in self._kept.items() if place.split()[0] in within}
        self.reach(f"{epoch} 0")

    def reach(self, place: str, anew: bool = False) -> None:
        """Keep the streams at a place outside of data loops, or put back those that were kept there.

        Args:
            place: The place.
            anew: Whether what was kept there is out of date.
        """
        kept = None if anew else self._kept.get(place)
        self._find()
        if kept is not None and (place in self._passed or Streams.of(kept).seed == self.seed):
            self._put_back(kept)
            return
        self._kept[place] = self._now()
        outside = place.startswith(_OUTSIDE)
        places = [one for one in self._kept if one.startswith(_OUTSIDE) == outside]
        # in the middle: the first ones say what an epoch begins with, the last ones how it goes on
        for old in places[_MOST_PLACES // 2 : -_MOST_PLACES // 2]:
            del self._kept[old]

    def _find(self) -> None:
        self._generators = _of_script()
        for name in self._generators.keys() - self._first.keys():
            one = self._generators[name]
            state = json.dumps(_methods(one)[0](one), default=_list)
            self._first[name] = zlib.crc32(state.encode())

    def _now(self) -> dict[str, Any]:
        return {**(self._scripts or Streams.present()).plain(), "own": self._own_states()}

    def _own_states(self) -> dict[str, Any]:
        return {
            name: _methods(one)[0](one) for name, one in self._generators.items() if name not in self._apart
        }

    def _put_back(self, found: dict[str, Any]) -> None:
        Streams.of(found).put_back()
        first, theirs = self._first, self._theirs
        self._set_own(
            {name: own for name, own in found["own"].items() if theirs.get(name) in (None, first.get(name))}
        )

    def _set_own(self, states: dict[str, Any]) -> None:
        for name, state in states.items():
            # a variable may be of another kind by now
            with suppress(TypeError, ValueError, KeyError, RuntimeError):
                _methods(self._generators[name])[1](self._generators[name], state)

    @contextmanager
    def own_unchanged(self) -> Iterator[None]:
        """Let the script's generators be behind the block as they were before it."""
        before = self._own_states()
        try:
            yield
        finally:
            self._set_own(before)

    @property
    def seed(self) -> int:
        """Seed of the script's streams, the same inside and outside of data loops."""
        return torch.initial_seed() if self._scripts is None else self._scripts.seed

    def enter_loop(self, place: str) -> None:
        """Begin a data loop, or continue it after a restart.

        Args:
            place: Place behind the loop.
        """
        self._loops += 1
        if place.startswith(_OUTSIDE):
            return
        self._kept.pop(place, None)
        restored, self._restored = self._restored, None
        # one of an earlier version has no place
        if restored is not None and restored.get("at", place) == place:
            self._find()
            self._scripts = None
            self._put_back(restored)

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


def _of_script() -> dict[str, Any]:
    """Return the generators among the script's variables, and among the parts of these, by name."""
    found = dict[str, Any]()
    for name, one in _frames.script_variables():
        for part, inner in ((name, one), *((f"{name}.{key}", inner) for key, inner in _parts(one))):
            # by its type: a proxy may raise where it is asked for its class
            kind = type(inner)
            if issubclass(kind, tuple(_GENERATORS)) and not issubclass(kind, random.SystemRandom):
                found.setdefault(part, inner)
    for part in [part for part, inner in found.items() if any(inner is one for one in _GLOBAL)]:
        del found[part]
    return found


def _parts(one: Any) -> list[tuple[Any, Any]]:
    kind = type(one)
    if issubclass(kind, ModuleType | type):
        return []
    if issubclass(kind, list | tuple):
        return list(islice(enumerate(one), _MOST))
    inner = one if issubclass(kind, dict) else None
    if inner is None:
        with suppress(Exception):  # a class of the script may answer in any way
            inner = vars(one)
    return list(islice(inner.items(), _MOST)) if isinstance(inner, dict) else []


def _methods(one: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], None]]:
    return next(methods for kind, methods in _GENERATORS.items() if isinstance(one, kind))


def _list(array: Any) -> Any:
    return array.tolist()


def _mixed(base: int, index: int) -> int:
    """Derive a well-mixed 63-bit seed from `base` and `index` (SplitMix64, Steele et al. 2014)."""
    word = (base + (index + 1) * _GOLDEN) % _WORD
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % _WORD
    return (word ^ (word >> 31)) >> 1


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _tuple(state: Any) -> Any:
    """Return the state of one of Python's generators, which JSON has made a list."""
    version, words, gauss = state
    return version, tuple(words), gauss


def _hex(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
