"""Plain data there and back, and bytes of strangers that do nothing."""

from __future__ import annotations

import math
import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adaptdl_elastic._codec import CodecError, NotPlainError, decode, encode

PLAIN: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    -(2**63) - 1,
    2**63,
    -(2**200),
    0.1,
    -math.inf,
    1 + 2j,
    "",
    "clé \udcff",
    b"",
    b"\x00\xff",
    bytearray(b"x"),
    [],
    [1, [2.0, ["x"]]],
    (),
    (1, (None,)),
    {},
    {"a": 1, (1, 2): [b"x"], None: {}},
    {1},
    {("x", 2)},
    frozenset({(1, 2)}),
    slice(1, None, 2),
    range(3, 9, 2),
    OrderedDict(b=1, a=2),
    Counter("aab"),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {"a": 1}),
    deque([1, 2], 5),
    deque(),
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{type(value).__name__} {value!r:.30}")
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)
    if isinstance(value, (OrderedDict, dict)):
        assert list(found) == list(value)
    if isinstance(value, defaultdict):
        assert found.default_factory is value.default_factory
    if isinstance(value, deque):
        assert found.maxlen == value.maxlen


def test_not_a_number_comes_back() -> None:
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.array(3, "int8"),
        np.zeros((0, 4), "float16"),
        np.arange(6).reshape(2, 3).T,
        np.array(["a", "bcd"]),
        np.array([b"a"]),
        np.array(["2026-01-01"], "M8[D]"),
        np.array([1 + 1j], ">c16"),
        np.array([True]),
    ],
)
def test_an_array_comes_back_and_can_be_written(array: Any) -> None:
    found = decode(encode(array))
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    np.testing.assert_array_equal(found, array)
    found[...] = found


def test_a_number_of_numpys_comes_back() -> None:
    for value in (np.float64(0.5), np.int32(-3), np.bool_(True), np.float32(1.5)):
        found = decode(encode(value))
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_tensor_comes_back(dtype: torch.dtype) -> None:
    for tensor in (
        torch.ones(2, 3, dtype=dtype).t(),
        torch.ones((), dtype=dtype),
        torch.ones(0, 2, dtype=dtype),
    ):
        found = decode(encode(tensor))
        assert found.dtype == dtype
        assert torch.equal(found, tensor)


class Number(int):
    """A subclass of a plain type."""


@pytest.mark.parametrize(
    "value",
    [
        Path("x"),
        Number(1),
        [object()],
        {"a": print},
        np.array([object()]),
        np.zeros(1, [("a", "i4")]),
        torch.nn.Parameter(torch.ones(1)),
        torch.ones(1).to_sparse(),
        defaultdict(lambda: 1),
    ],
)
def test_a_value_that_is_no_plain_data_is_refused(value: Any) -> None:
    with pytest.raises(NotPlainError, match="is no plain data"):
        encode(value)


def test_a_value_that_is_in_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(NotPlainError, match="nested more than 100 deep, or in itself"):
        encode(value)


def nested(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "inner"),
    [
        (1, 0),
        (torch.ones(2), 0),
        (np.ones((2, 2)), 0),
        (np.float64(1), 0),
        (deque([1]), 1),
        (defaultdict(int, {1: 2}), 1),
        ({1: 2}, 1),
        (slice(1, 2), 1),
    ],
)
def test_encoded_values_can_be_decoded_up_to_the_deepest_nesting(value: Any, inner: int) -> None:
    deepest = encode(nested(value, 100 - inner))
    assert encode(decode(deepest)) == deepest
    with pytest.raises(NotPlainError, match="nested more than 100 deep"):
        encode(nested(value, 101 - inner))


def test_nested_deques_and_defaultdicts_can_be_decoded() -> None:
    value: Any = 1
    for level in range(100):
        value = deque([value]) if level % 2 else defaultdict(int, {0: value})
    deepest = encode(value)
    assert encode(decode(deepest)) == deepest
    with pytest.raises(NotPlainError, match="nested more than 100 deep"):
        encode(deque([value]))


def test_bytes_that_are_nested_too_deep_are_refused() -> None:
    one = encode([1])[:-9]
    assert decode(100 * one + encode(1)) == nested(1, 100)
    with pytest.raises(CodecError, match="nested more than 100 deep"):
        decode(103 * one + encode(1))


def test_corrupted_bytes_raise_only_a_codec_error() -> None:
    choose = random.Random(0)
    whole = encode([*PLAIN, np.arange(9.0), torch.ones(3)])
    for _ in range(20_000):
        data = bytearray(whole)
        for _ in range(choose.randint(1, 8)):
            data[choose.randrange(len(data))] = choose.randrange(256)
        cut = data[: choose.randrange(len(data))] if choose.random() < 0.3 else data
        with suppress(CodecError):
            decode(cut)
    for _ in range(20_000):
        with suppress(CodecError):
            decode(choose.randbytes(choose.randrange(64)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"?",
        b"l" + b"\xff" * 8,
        b"b" + (1 << 40).to_bytes(8, "big"),
        b"l\0\0\0\0\0\0\0\1" * 200,
        b"DN" * 10_000,
        b"qN" * 10_000,
        encode(1) + b"x",
        encode({(): 1}).replace(b"t", b"l"),
        pickle.dumps(print),
        encode(np.zeros(3)).replace(b"<f8", b"|O8"),
        encode(torch.ones(1)).replace(b"float32", b"Storage"),
    ],
)
def test_malformed_bytes_are_a_codec_error(data: bytes) -> None:
    with pytest.raises(CodecError):
        decode(data)
