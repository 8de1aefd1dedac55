"""Encode plain data to bytes and decode it, for the library's own messages.

Plain data are numbers, text and bytes; lists, tuples, dicts and sets of plain data; and arrays and tensors of
a fixed list of dtypes. Decoding creates only such values, whatever the bytes are, and runs no code of the
sender. A decoded value has the same type as the original. Instances of subclasses of these types are not
plain data.

An encoded value is one byte for its type, followed by its content. Lengths are checked against the number of
bytes left, so the decoder never allocates more than a small multiple of the size of its input.
"""

from __future__ import annotations

import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_INT, _FLOAT, _SIZE = struct.Struct("!q"), struct.Struct("!d"), struct.Struct("!Q")
_DEPTH = 100  # most levels of nesting
_PARTS = 2  # levels that the type and the shape of an array add to it in the bytes
_ARRAY = re.compile(r"[<>|=][biufcSUMm]\d+(\[\d*[a-zA-Z]+\])?")
_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (int, float, str, bool, complex, list, dict, set, tuple, bytes)
}
_TENSORS = frozenset(
    {"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"}
    | {"float16", "bfloat16", "float32", "float64", "complex64", "complex128"}
)


class NotPlainError(TypeError):
    """Raised if a value cannot be encoded, because it is not plain data."""


class CodecError(ValueError):
    """Raised if bytes to decode were not made by `encode`."""


def encode(value: Any) -> bytes:
    """Return `value` as bytes.

    Raises:
        NotPlainError: a part of `value` is not plain data; the message names its type.
    """
    out = bytearray()
    _encode(value, out, 0)
    return bytes(out)


def decode(data: bytes | bytearray | memoryview) -> Any:
    """Return the value that was encoded as `data`.

    Raises:
        CodecError: `data` was not made by `encode`.
    """
    try:
        reader = _Reader(memoryview(data))
        value = reader.value(0)
    except CodecError:
        raise
    except (ValueError, TypeError, OverflowError, LookupError, MemoryError, struct.error) as error:
        raise CodecError(f"{type(error).__name__}: {error}") from None
    if reader.left:
        raise CodecError(f"{reader.left} bytes too many")
    return value


# -- encoding ----------------------------------------------------------------------------------------


def _encode(value: Any, out: bytearray, depth: int) -> None:
    kind = type(value)
    if depth > _DEPTH:
        raise NotPlainError(f"a {kind.__name__} is nested more than {_DEPTH} deep, or in itself")
    write = _WRITERS.get(kind)
    if write is not None:
        write(value, out, depth)
    elif "numpy" in sys.modules and kind is sys.modules["numpy"].ndarray:
        out += b"a"
        _array(value, out)
    elif "numpy" in sys.modules and _is_number_of_numpy(value):
        out += b"n"
        _array(sys.modules["numpy"].asarray(value), out)
    elif "torch" in sys.modules and kind is sys.modules["torch"].Tensor:
        _tensor(value, out)
    else:
        raise NotPlainError(f"a {kind.__module__}.{kind.__qualname__} is no plain data")


def _sized(tag: bytes, data: bytes | bytearray, out: bytearray) -> None:
    out += tag
    out += _SIZE.pack(len(data))
    out += data


def _int(value: int, out: bytearray, depth: int) -> None:
    if -(1 << 63) <= value < 1 << 63:
        out += b"i"
        out += _INT.pack(value)
    else:
        _sized(b"I", value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True), out)


def _items(tag: bytes) -> Callable[[Any, bytearray, int], None]:
    def write(value: Any, out: bytearray, depth: int) -> None:
        out += tag
        out += _SIZE.pack(len(value))
        for item in value:
            _encode(item, out, depth + 1)

    return write


def _pairs(tag: bytes) -> Callable[[Any, bytearray, int], None]:
    def write(value: Any, out: bytearray, depth: int) -> None:
        out += tag
        out += _SIZE.pack(len(value))
        for key, item in value.items():
            _encode(key, out, depth + 1)
            _encode(item, out, depth + 1)

    return write


def _default(value: defaultdict[Any, Any], out: bytearray, depth: int) -> None:
    factory = value.default_factory
    name = "" if factory is None else getattr(factory, "__name__", "")
    if factory is not None and _FACTORIES.get(name) is not factory:
        raise NotPlainError(f"a defaultdict of {factory!r} is no plain data")
    out += b"D"
    _encode(name, out, depth + 1)
    _pairs(b"d")(value, out, depth)


def _deque(value: deque[Any], out: bytearray, depth: int) -> None:
    out += b"q"
    _encode(value.maxlen, out, depth + 1)
    _items(b"l")(value, out, depth)


def _together(tag: bytes, parts: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any, bytearray, int], None]:
    def write(value: Any, out: bytearray, depth: int) -> None:
        out += tag
        for part in parts(value):
            _encode(part, out, depth + 1)

    return write


def _is_number_of_numpy(value: Any) -> bool:
    numpy = sys.modules["numpy"]
    return isinstance(value, numpy.generic) and not isinstance(value, numpy.void)


def _array(value: np.ndarray[Any, Any], out: bytearray) -> None:
    name = value.dtype.str
    if not _ARRAY.fullmatch(name):
        raise NotPlainError(f"an array of {value.dtype} is no plain data")
    _encode(name, out, 0)
    _encode(tuple(value.shape), out, 0)
    _sized(b"", value.tobytes(), out)


def _tensor(value: Any, out: bytearray) -> None:
    torch = sys.modules["torch"]
    name = str(value.dtype).rpartition(".")[2]
    if name not in _TENSORS or value.layout is not torch.strided:
        raise NotPlainError(f"a tensor of {value.dtype}, {value.layout} is no plain data")
    flat = value.detach().cpu().contiguous().reshape(-1).resolve_conj().resolve_neg()
    out += b"A"
    _encode(name, out, 0)
    _encode(tuple(value.shape), out, 0)
    _sized(b"", flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"", out)


def _constant(tag: bytes) -> Callable[[Any, bytearray, int], None]:
    def write(value: Any, out: bytearray, depth: int) -> None:
        out += tag

    return write


_WRITERS: dict[type, Callable[[Any, bytearray, int], None]] = {
    type(None): _constant(b"N"),
    bool: lambda value, out, depth: out.extend(b"T" if value else b"F"),
    int: _int,
    float: lambda value, out, depth: out.extend(b"f" + _FLOAT.pack(value)),
    complex: lambda value, out, depth: out.extend(b"c" + _FLOAT.pack(value.real) + _FLOAT.pack(value.imag)),
    str: lambda value, out, depth: _sized(b"s", value.encode("utf-8", "surrogatepass"), out),
    bytes: lambda value, out, depth: _sized(b"b", value, out),
    bytearray: lambda value, out, depth: _sized(b"y", value, out),
    list: _items(b"l"),
    tuple: _items(b"t"),
    set: _items(b"S"),
    frozenset: _items(b"Z"),
    dict: _pairs(b"d"),
    OrderedDict: _pairs(b"o"),
    Counter: _pairs(b"C"),
    defaultdict: _default,
    deque: _deque,
    slice: _together(b":", lambda value: (value.start, value.stop, value.step)),
    range: _together(b"r", lambda value: (value.start, value.stop, value.step)),
}


# -- decoding ----------------------------------------------------------------------------------------


class _Reader:
    """Read values from `data`, one after the other."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        """Number of bytes that have not been read."""
        return len(self._data) - self._at

    def take(self, size: int) -> memoryview:
        if size > self.left:
            raise CodecError(f"{size} bytes are missing of which there are {self.left}")
        self._at += size
        return self._data[self._at - size : self._at]

    def size(self) -> int:
        found: int = _SIZE.unpack(self.take(_SIZE.size))[0]
        if found > self.left:  # an item has at least one byte
            raise CodecError(f"{found} items in {self.left} bytes")
        return found

    def number(self) -> float:
        found: float = _FLOAT.unpack(self.take(_FLOAT.size))[0]
        return found

    def value(self, depth: int) -> Any:
        if depth > _DEPTH + _PARTS:
            raise CodecError(f"nested more than {_DEPTH} deep")
        tag = bytes(self.take(1))
        read = _READERS.get(tag)
        if read is None:
            raise CodecError(f"there is no type {tag!r}")
        return read(self, depth + 1)

    def items(self, depth: int) -> list[Any]:
        return [self.value(depth) for _ in range(self.size())]

    def pairs(self, depth: int) -> list[tuple[Any, Any]]:
        return [(self.value(depth), self.value(depth)) for _ in range(self.size())]

    def array(self, depth: int) -> np.ndarray[Any, Any]:
        import numpy as np  # an agent decodes none, and need not have it in memory

        name, shape = self.value(depth), self.value(depth)
        data = self.take(self.size())
        if not isinstance(name, str) or not _ARRAY.fullmatch(name):
            raise CodecError("an array of a type that does not travel")
        dtype = np.dtype(name)
        _check_shape(shape, dtype.itemsize, len(data))
        found: np.ndarray[Any, Any] = np.frombuffer(bytearray(data), dtype)
        return np.reshape(found, shape)

    def tensor(self, depth: int) -> Any:
        import torch

        name, shape = self.value(depth), self.value(depth)
        data = self.take(self.size())
        if name not in _TENSORS:
            raise CodecError("a tensor of a type that does not travel")
        dtype: torch.dtype = getattr(torch, name)
        _check_shape(shape, dtype.itemsize, len(data))
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)

    def default(self, depth: int) -> defaultdict[Any, Any]:
        name = self.value(depth)
        self.expect(b"d")
        return defaultdict(_FACTORIES[name] if name else None, self.pairs(depth))

    def deque(self, depth: int) -> deque[Any]:
        most = self.value(depth)
        self.expect(b"l")
        return deque(self.items(depth), most)

    def expect(self, tag: bytes) -> None:
        if self.take(1) != tag:
            raise CodecError(f"there is no {tag!r} where it belongs")

    def scalar(self, depth: int) -> Any:
        return self.array(depth)[()]


def _check_shape(shape: Any, itemsize: int, size: int) -> None:
    if type(shape) is not tuple or any(type(n) is not int or n < 0 for n in shape) or len(shape) > 32:
        raise CodecError("that is no shape")
    if prod(shape) * itemsize != size:
        raise CodecError(f"an array of shape {shape} does not have {size} bytes")


_READERS: dict[bytes, Callable[[_Reader, int], Any]] = {
    b"N": lambda r, depth: None,
    b"T": lambda r, depth: True,
    b"F": lambda r, depth: False,
    b"i": lambda r, depth: _INT.unpack(r.take(_INT.size))[0],
    b"I": lambda r, depth: int.from_bytes(r.take(r.size()), "big", signed=True),
    b"f": lambda r, depth: r.number(),
    b"c": lambda r, depth: complex(r.number(), r.number()),
    b"s": lambda r, depth: str(r.take(r.size()), "utf-8", "surrogatepass"),
    b"b": lambda r, depth: bytes(r.take(r.size())),
    b"y": lambda r, depth: bytearray(r.take(r.size())),
    b"l": lambda r, depth: r.items(depth),
    b"t": lambda r, depth: tuple(r.items(depth)),
    b"S": lambda r, depth: set(r.items(depth)),
    b"Z": lambda r, depth: frozenset(r.items(depth)),
    b"d": lambda r, depth: dict(r.pairs(depth)),
    b"o": lambda r, depth: OrderedDict(r.pairs(depth)),
    b"C": lambda r, depth: Counter(dict(r.pairs(depth))),
    b"D": _Reader.default,
    b"q": _Reader.deque,
    b":": lambda r, depth: slice(r.value(depth), r.value(depth), r.value(depth)),
    b"r": lambda r, depth: range(r.value(depth), r.value(depth), r.value(depth)),
    b"a": _Reader.array,
    b"n": _Reader.scalar,
    b"A": _Reader.tensor,
}
