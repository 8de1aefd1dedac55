"""The stores of generations, whose children a test plays."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from adaptdl_elastic.agent import launch
from adaptdl_elastic.agent.runtime import fork_server
from adaptdl_elastic.agent.runtime.generation_store import GenerationStore, NoStoreError
from adaptdl_elastic.rendezvous.schema.records import MasterRecord


@pytest.fixture
def server() -> Mock:
    return Mock()


@pytest.fixture
def stores(server: Mock) -> Iterator[GenerationStore]:
    made = GenerationStore("127.0.0.1", None, server)
    yield made
    made.close()


def is_open(record: MasterRecord) -> bool:
    with socket.socket() as client:
        return client.connect_ex((record.host, record.port)) == 0


def test_a_store_that_dies_again_and_again_is_given_up_and_no_other_one(
    stores: GenerationStore, server: Mock
) -> None:
    older, newest = stores.open(0), stores.open(1)
    assert "another one serves it" in stores.exited(-2)
    assert "another one serves it" in stores.exited(-2)
    assert [call.args[0] for call in server.spawn.call_args_list] == [-1, -2, -2, -2]
    with pytest.raises(NoStoreError, match="generation 1 died 3 times in 60 s: replicas cannot meet here"):
        stores.exited(-2)
    assert (is_open(older), is_open(newest)) == (True, False)


def test_deaths_long_ago_are_forgiven(stores: GenerationStore, monkeypatch: pytest.MonkeyPatch) -> None:
    record = stores.open(0)
    now = iter((0.0, 100.0, 200.0, 300.0))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    for _ in range(4):
        assert stores.exited(-1)
    monkeypatch.undo()
    assert is_open(record)


def test_stores_before_a_generation_are_forgotten(stores: GenerationStore, server: Mock) -> None:
    records = [stores.open(generation) for generation in range(3)]
    stores.forget(2)
    assert [is_open(record) for record in records] == [False, False, True]
    assert stores.exited(-1) == "", "no replica needs it"
    stores.served_by(server)
    assert [call.args[0] for call in server.spawn.call_args_list] == [-1, -2, -3, -3]


@pytest.mark.parametrize("value", ["abc", "", "999", "0"])
def test_a_fork_server_that_no_service_has_handed_over_is_ignored_in_one_line(
    value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: Any = object()
    monkeypatch.setattr(fork_server.ForkServer, "start", lambda environment: started)
    monkeypatch.setenv("ADAPTDL_FORK_SERVER", value)
    assert launch.start_fork_server() is started
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"ADAPTDL_FORK_SERVER={value} is ignored: only a node service sets it" in said


def test_a_handed_over_fork_server_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setenv("ADAPTDL_FORK_SERVER", str(ours.detach()))
    with theirs:
        made = launch.start_fork_server()
        assert theirs.recv(1)
        theirs.close()
        made.close()
