"""A store that everybody can write to, and of which only signed values are believed."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed

from adaptdl_elastic._secrets import derive
from adaptdl_elastic.torch._process_group.signed_store import ForgedValueError, SignedStore, signed

dist: Any = torch.distributed


@pytest.fixture
def bare() -> Any:
    return dist.HashStore()


def test_a_value_comes_back_through_torchs_own_layers(bare: Any) -> None:
    ours = SignedStore(bare, b"k")
    theirs = dist.PrefixStore("p", ours)
    theirs.set("key", b"\x00value")
    assert theirs.get("key") == b"\x00value"
    assert ours.get("p/key") == b"\x00value"
    assert theirs.check(["key"])
    assert not theirs.check(["key", "other"])
    theirs.wait(["key"], timedelta(seconds=1))
    assert theirs.multi_get(["key"]) == [b"\x00value"]
    assert [theirs.add("n", 2), theirs.add("n", 3)] == [2, 5]
    assert theirs.compare_set("c", "", "1") == b"1"
    assert theirs.compare_set("c", "0", "2") == b"1"
    assert theirs.compare_set("c", "1", "2") == b"2"
    assert theirs.get("c") == b"2"
    assert theirs.delete_key("c")
    assert theirs.num_keys() == 2


def test_a_copy_of_torchs_reads_the_same() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours = SignedStore(server, b"k")  # torch does not keep it
    store = dist.PrefixStore("p", ours)
    store.set("key", "value")
    assert store.clone().get("key") == b"value"


FORGED = "not written by one of them.*ADAPTDL_SECRET"


@pytest.mark.parametrize("value", ["", "x", b"\x00" * 32, b"\x00" * 64])
def test_a_value_of_a_stranger_is_an_error(bare: Any, value: Any) -> None:
    ours = SignedStore(bare, b"k")
    bare.set("key", value)
    bare.set("p/key", value)
    with pytest.raises(ForgedValueError, match=FORGED):
        ours.get("key")
    with pytest.raises(RuntimeError, match=FORGED):
        dist.PrefixStore("p", ours).get("key")


def test_a_value_that_was_changed_or_moved_or_is_of_another_generation_is_an_error(bare: Any) -> None:
    store = SignedStore(bare, derive(b"secret", "meeting", "job", 1))
    store.set("here", "value")
    whole = bare.get("here")
    for key, value in (
        ("here", whole[:-1] + b"E"),
        ("there", whole),
        ("her", whole[:32] + b"e" + whole[32:]),
    ):
        bare.set(key, value)
        with pytest.raises(ForgedValueError, match=FORGED):
            store.get(key)
    bare.set("here", whole)
    assert store.get("here") == b"value"
    for words in (("meeting", "job", 2), ("torch", "job", 1), ("meeting", "job2", 1), ("meetingjob", 1)):
        with pytest.raises(ForgedValueError, match=FORGED):
            SignedStore(bare, derive(b"secret", *words)).get("here")


def test_torchs_own_group_forms_over_it() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sums: list[float] = []

    def member(rank: int) -> None:
        client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
        store = SignedStore(client, b"k")
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
        one = torch.ones(1)
        group.allreduce([one]).wait()
        sums.append(one.item())

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert sums == [2.0, 2.0]


def test_without_a_key_it_is_the_store_itself(bare: Any) -> None:
    assert signed(bare, None) is bare
