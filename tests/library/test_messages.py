"""Messages between an agent and its replicas, in both directions."""

from __future__ import annotations

import json
import socket
import typing
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptdl_elastic.protocol import messages as m
from adaptdl_elastic.protocol.channel import Channel, say_finished

RANKS = st.integers(0, 1000)
SCALARS = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | st.text()
PLAIN = st.dictionaries(st.text(), SCALARS | st.lists(SCALARS.filter(lambda v: v not in (float("inf"),))))
FINITE = PLAIN.filter(lambda values: "Infinity" not in json.dumps(values))
BY_FIELD: dict[str, st.SearchStrategy[Any]] = {
    "reason": st.text(),
    "interrupted": st.booleans(),
    "why_not": st.text(),
    "groups": st.lists(st.lists(RANKS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    "request": st.integers(0, 10**9),
    "generation": st.integers(0, 10**6),
    "replicas": st.integers(1, 1000),
    "nodes": st.integers(1, 1000),
    "ranks": st.lists(st.none() | RANKS).map(tuple),
    "newcomers": st.lists(RANKS).map(tuple),
    "master_addr": st.text(),
    "master_port": st.integers(0, 65535),
    "environ": st.dictionaries(st.text(), st.text()),
    "rank": st.none() | RANKS,
    "id": st.integers(0, 10**9),
    "version": st.text(),
    "pid": st.integers(0, 10**7),
    "event": st.text(),
    "time": st.floats(0, 1e10),
    "fields": FINITE,
    "step": st.integers(0, 10**9),
    "finished": st.booleans(),
    "waiting": st.booleans(),
    "last_step": st.none() | st.floats(0, 1e10),
    "hints": FINITE,
    "path": st.text(),
    "files": st.lists(st.text(), max_size=5).map(tuple),
    "unsaved": st.text(),
}
ORDERS: tuple[Any, ...] = typing.get_args(m.AgentMessage)
REPORTS: tuple[Any, ...] = typing.get_args(m.ReplicaMessage)


def made(kind: Any) -> st.SearchStrategy[Any]:
    given_fields = {one.name: BY_FIELD[one.name] for one in fields(kind)}
    if kind is m.Saved:
        given_fields["id"] = st.text()
    return st.builds(kind, **given_fields)


@given(st.sampled_from(ORDERS).flatmap(made))
def test_an_agents_message_comes_back(message: Any) -> None:
    line = m.encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert m.decode_order(line) == message


@given(st.sampled_from(REPORTS).flatmap(made))
def test_a_replicas_message_comes_back(message: Any) -> None:
    assert m.decode_report(m.encode(message)) == message


@pytest.mark.parametrize("kind", [*ORDERS, *REPORTS])
def test_every_type_is_of_one_direction(kind: Any) -> None:
    assert sum(one.kind == kind.kind for one in (*ORDERS, *REPORTS)) == 1
    decode = m.decode_report if kind in ORDERS else m.decode_order
    with pytest.raises(m.MalformedMessageError, match=f"unknown type {kind.kind!r}"):
        decode(json.dumps({"v": 1, "type": kind.kind}))


@given(st.text() | st.binary())
def test_any_line_is_a_message_or_malformed(line: str | bytes) -> None:
    for decode in (m.decode_order, m.decode_report):
        with pytest.raises(m.MalformedMessageError):
            decode(line)


VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5
)


@given(
    st.sampled_from([*ORDERS, *REPORTS]),
    st.dictionaries(st.sampled_from(sorted(BY_FIELD)) | st.text(), VALUES, max_size=8),
)
def test_any_fields_are_a_message_or_malformed(kind: Any, values: dict[str, Any]) -> None:
    decode = m.order_from_dict if kind in ORDERS else m.report_from_dict
    try:
        found = decode({**values, "v": 1, "type": kind.kind})
    except m.MalformedMessageError:
        return
    assert isinstance(found, kind)


@pytest.mark.parametrize(
    "line",
    [
        "", "null", "[]", "{", "{}", "3", "\x00", '{"type":"ping","id":1}', '{"v":1}',
        '{"v":0,"type":"ping","id":1}',
        '{"v":true,"type":"ping","id":1}', '{"v":1,"type":"ping"}', '{"v":1,"type":"ping","id":-1}',
        '{"v":1,"type":"ping","id":1.5}', '{"v":1,"type":["ping"],"id":1}', "[" * 5000, "é", "1" * 5000,
    ],
)  # fmt: skip
def test_garbage_is_refused(line: str) -> None:
    with pytest.raises(m.MalformedMessageError):
        m.decode_order(line)


@pytest.mark.parametrize(
    "groups",
    [[[]], [[-1]], [[0.5]], [0], "01", [["x"]], [[0]] * (m.MOST_GROUPS + 1), [[0] * (m.MOST_GROUPS + 1)]],
)
def test_groups_of_no_ranks_are_refused(groups: Any) -> None:
    said = {"v": 1, "type": "resilient", "generation": 1}
    assert m.report_from_dict({**said, "groups": [[0, 1], [2]]}) == m.Resilient(1, groups=((0, 1), (2,)))
    assert m.report_from_dict(said) == m.Resilient(1), "an older replica names none"
    with pytest.raises(m.MalformedMessageError):
        m.report_from_dict({**said, "groups": groups})


def test_a_later_version_is_refused_with_both_named() -> None:
    with pytest.raises(m.MalformedMessageError, match="version 2, this one reads up to 1"):
        m.decode_order('{"v":2,"type":"ping","id":1}')


def test_fields_of_a_later_minor_version_are_ignored() -> None:
    assert m.decode_order('{"v":1,"type":"ping","id":1,"colour":"red"}') == m.Ping(1)


def test_a_number_that_json_does_not_have_is_refused_where_it_is_sent() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        m.encode(m.Event("metrics", 0.0, {"loss": float("nan")}))


def test_the_channel_passes_over_what_is_no_message(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = Channel.pair()
    with theirs:
        theirs.sendall(b'{"v":1,"type":"pong"}\nno message\n' + m.encode(m.Finished()))
    assert list(ours.reports()) == [m.Finished()]
    ours.close()
    assert len(caplog.records) == 2


@pytest.mark.parametrize("stopped", [False, True])
def test_a_script_says_that_it_has_finished_unless_it_was_asked_to_stop(stopped: bool) -> None:
    ours, theirs = Channel.pair()
    if stopped:
        ours.send(m.Stop("why"))
    with theirs:
        say_finished({"ADAPTDL_AGENT_FD": str(theirs.fileno())})
    assert list(ours.reports()) == ([] if stopped else [m.Finished()])
    ours.close()


def test_sending_to_an_end_that_is_gone_says_so() -> None:
    left, right = socket.socketpair()
    right.close()
    channel = Channel(left)
    assert not channel.send(m.Ping(1))
    channel.close()
