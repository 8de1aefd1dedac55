"""Which secret replicas of torchrun's agents have, and what they say where they can have none in common."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from adaptdl_elastic import _secrets
from adaptdl_elastic._private import RuntimeFileError
from adaptdl_elastic.torch import _startup

REMEDY = "set the same ADAPTDL_SECRET on all nodes (openssl rand -hex 24)"


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTDL_SECRET", "")  # so that what is set here is taken back
    monkeypatch.delenv("ADAPTDL_SECRET")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setattr(_secrets, "machine_secret", lambda: b"of this machine")


def session(**fields: Any) -> Any:
    return SimpleNamespace(**{"job": "a", "rank": 0, "replicas": 2, "nodes": 2, "generation": 0, **fields})


def no_machine_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> bytes:
        raise RuntimeFileError("/run/adaptdl-0 belongs to another user")

    monkeypatch.setattr(_secrets, "machine_secret", refuse)


def find(session: Any) -> bytes | None:
    _startup.find_secret(session)
    return _startup.env.secret()


def test_a_secret_that_is_given_is_used_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ADAPTDL_SECRET", "given")
    no_machine_secret(monkeypatch)
    assert find(session()) == b"given"
    assert caplog.messages == []


@pytest.mark.parametrize("rank", [0, 1])
def test_replicas_of_several_machines_are_told_once_what_to_set(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert find(session(rank=rank))
    said = [f"ADAPTDL_SECRET is not set, so replicas of other machines are refused: {REMEDY}"]
    assert caplog.messages == (said if rank == 0 else [])


@pytest.mark.parametrize("where", [{"nodes": 1}, {"address": "127.0.0.1"}, {"address": "localhost"}])
def test_replicas_of_one_machine_need_no_words(
    where: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MASTER_ADDR", where.pop("address", "10.0.0.1"))
    with caplog.at_level(logging.WARNING):
        assert find(session(**where))
    assert caplog.messages == []


def test_replicas_of_several_machines_refuse_to_start_without_any_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_machine_secret(monkeypatch)
    with pytest.raises(RuntimeError) as error:
        find(session())
    assert str(error.value) == f"replicas of several nodes need a secret: {REMEDY}"


def test_replicas_of_one_machine_without_any_secret_are_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_machine_secret(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert find(session(nodes=1)) is None
    (said,) = caplog.messages
    assert "replicas cannot prove who they are to each other: /run/adaptdl-0 belongs to another user" in said
    assert said.endswith(REMEDY)


def test_replicas_that_are_told_where_rank_0_listens_have_a_secret_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, connected = _startup.dist.HashStore(), SimpleNamespace(replicas=2)
    monkeypatch.setenv("ADAPTDL_MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("ADAPTDL_MASTER_PORT", "1")
    monkeypatch.setattr(_startup.dist, "rendezvous", lambda *_: iter([(store, 0, 2)]))
    monkeypatch.setattr(_startup, "connect_torch", lambda *_: None)
    _startup.meet_launched(session(nodes=1, reducer=connected), "gloo", None)
    assert _startup.env.secret() is not None
