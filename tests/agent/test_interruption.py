from __future__ import annotations

import logging
import queue
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_imds import FakeImds
from hypothesis import given
from hypothesis import strategies as st

from adaptdl_elastic.agent.machine.interruption import (
    InstanceIdentity,
    MetadataClient,
    Notice,
    NoticeKind,
    Watcher,
    discover,
    look,
    on_ec2,
    parse_instance_action,
    parse_target_state,
    watch,
)
from adaptdl_elastic.protocol.environment import METADATA_DISABLED, METADATA_ENDPOINT

Notices = queue.Queue[Notice]
PATIENT = 60.0  # seconds; as a time-out of what answers


@pytest.fixture
def imds() -> Iterator[FakeImds]:
    fake = FakeImds()
    yield fake
    fake.close()


@pytest.fixture
def told() -> Notices:
    return queue.Queue()


@pytest.fixture
def watcher(imds: FakeImds, told: Notices) -> Watcher:
    """A watcher that looks when it is asked to."""
    return Watcher(MetadataClient(imds.endpoint, PATIENT), told.put)


@pytest.fixture
def ec2_firmware(tmp_path: Path) -> Path:
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    return tmp_path


def test_every_request_carries_a_token_and_one_token_serves_all(imds: FakeImds) -> None:
    client = MetadataClient(imds.endpoint, PATIENT)
    assert client.get("meta-data/instance-id") == "i-0123456789abcdef0"
    assert client.get("meta-data/spot/instance-action") is None
    assert [method for method, _, _ in imds.requests] == ["PUT", "GET", "GET"]
    assert {status for _, _, status in imds.requests} == {200, 404}


def test_an_expired_token_is_replaced(imds: FakeImds) -> None:
    client = MetadataClient(imds.endpoint, PATIENT)
    client.get("meta-data/instance-id")
    imds.expire_tokens()
    assert client.get("meta-data/instance-type") == "g5.xlarge"


def test_a_token_is_renewed_before_it_ends(imds: FakeImds) -> None:
    now = [0.0]
    client = MetadataClient(imds.endpoint, PATIENT, clock=lambda: now[0])
    client.get("meta-data/instance-id")
    now[0] = 20000.0
    client.get("meta-data/instance-id")
    assert sum(method == "PUT" for method, _, _ in imds.requests) == 2


def test_off_ec2_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket, "create_connection", never)
    (tmp_path / "sys_vendor").write_text("QEMU\n")
    assert not on_ec2(tmp_path)
    assert discover({}, firmware=tmp_path) is None
    assert discover({}, firmware=tmp_path / "absent") is None


def test_disabled_by_the_variable_that_boto3_knows(ec2_firmware: Path) -> None:
    assert on_ec2(ec2_firmware)
    assert discover({METADATA_DISABLED: "true"}, firmware=ec2_firmware) is None


def test_named_by_the_environment_without_a_service() -> None:
    found = discover({"ADAPTDL_INSTANCE_ID": "local-1", "ADAPTDL_PREEMPTIBLE": "1", "ADAPTDL_ZONE": "here"})
    assert found == InstanceIdentity("local-1", None, "here", True, None)
    assert watch(found, lambda _: None) is None
    assert watch(None, lambda _: None) is None


def test_a_hanging_service_is_given_up(imds: FakeImds, caplog: pytest.LogCaptureFixture) -> None:
    imds.hang.set()  # until it is closed
    waits: list[float] = []
    assert discover({METADATA_ENDPOINT: imds.endpoint}, timeout=0.2, wait=waits.append) is None
    assert "HttpPutResponseHopLimit to 2, or ADAPTDL_INSTANCE_ID" in caplog.text
    assert caplog.text.count("does not answer") == 1
    assert sum(waits) < 10


def test_an_absent_service_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        assert discover({METADATA_ENDPOINT: endpoint}, 0.5, wait=lambda _: None) is None
    assert "does not answer" in caplog.text


def test_a_service_that_is_not_up_yet_is_waited_for(imds: FakeImds, caplog: pytest.LogCaptureFixture) -> None:
    """Without its instance a node is never told of its end, and the autoscaler takes it for a dud."""
    imds.broken = True
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        imds.broken = len(waits) < 3

    found = discover({METADATA_ENDPOINT: imds.endpoint}, PATIENT, wait=wait)
    assert found is not None
    assert found.instance == imds.values["instance-id"]
    assert len(waits) == 3
    assert caplog.text == ""


@pytest.mark.parametrize("path", ["instance-type", "instance-life-cycle"])
def test_half_an_answer_is_asked_again(imds: FakeImds, path: str) -> None:
    imds.failing[path] = 503
    found = discover({METADATA_ENDPOINT: imds.endpoint}, PATIENT, wait=lambda _: imds.failing.clear())
    assert found == InstanceIdentity(
        imds.values["instance-id"], "g5.xlarge", "eu-central-1a", True, endpoint=imds.endpoint
    )


def test_a_body_beyond_reason_is_a_notice_all_the_same(
    imds: FakeImds, watcher: Watcher, told: Notices
) -> None:
    imds.values["spot/instance-action"] = "[" * 60_000
    watcher.look_once()
    assert told.get_nowait().kind is NoticeKind.SPOT


@pytest.mark.parametrize("address", ["https://169.254.169.254", "169.254.169.254", ""])
def test_a_bad_address_is_named(address: str) -> None:
    with pytest.raises(ValueError, match=METADATA_ENDPOINT):
        MetadataClient(address)


def test_the_spot_notice_is_told_within_two_looks_and_once(imds: FakeImds) -> None:
    told: Notices = queue.Queue()
    watcher = watch(InstanceIdentity("i-1", endpoint=imds.endpoint), told.put, interval=0.02, timeout=PATIENT)
    assert watcher is not None
    try:
        imds.wait_for("events/recommendations/rebalance")
        assert told.empty()
        end = imds.spot(120)
        notice = told.get(timeout=PATIENT)
        assert notice == Notice(NoticeKind.SPOT, "spot interruption: terminate", end)
        assert notice.drain
        imds.wait_for("events/recommendations/rebalance", 3)
        assert told.empty()
    finally:
        watcher.stop()


def test_rebalance_first_and_the_end_later(imds: FakeImds, watcher: Watcher, told: Notices) -> None:
    imds.rebalance()
    watcher.look_once()
    risk = told.get_nowait()
    assert (risk.kind, risk.drain, risk.deadline) == (NoticeKind.REBALANCE, False, None)
    imds.target("Terminated")
    watcher.look_once()
    leaving = told.get_nowait()
    assert (leaving.kind, leaving.drain) == (NoticeKind.LIFECYCLE, True)
    imds.spot(30)
    watcher.look_once()
    watcher.look_once()
    assert told.get_nowait().kind is NoticeKind.SPOT
    assert told.empty()


def test_an_earlier_deadline_is_told_again_a_later_one_is_not(
    imds: FakeImds, watcher: Watcher, told: Notices
) -> None:
    for seconds in (120, 200, 60):
        imds.spot(seconds)
        watcher.look_once()
    assert told.qsize() == 2


def test_a_service_that_fails_is_said_once_and_asked_again(
    imds: FakeImds, watcher: Watcher, told: Notices, caplog: pytest.LogCaptureFixture
) -> None:
    imds.broken = True
    with caplog.at_level(logging.INFO):
        watcher.look_once()
        watcher.look_once()
        assert caplog.text.count("still trying") == 1
        imds.broken = False
        imds.spot(60)
        watcher.look_once()
    assert told.get_nowait().kind is NoticeKind.SPOT
    assert "answers again" in caplog.text


@pytest.mark.parametrize("status", [401, 403, 500, 503])
def test_one_path_that_is_refused_does_not_silence_the_others(
    imds: FakeImds, watcher: Watcher, told: Notices, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    """Stand-ins of IMDS answer 500 where AWS says 404; the spot notice may be behind such an answer."""
    imds.failing = {"spot/instance-action": status}
    imds.target("Terminated")
    watcher.look_once()
    assert told.get_nowait().kind is NoticeKind.LIFECYCLE
    imds.failing = {"autoscaling/target-lifecycle-state": status}
    imds.spot(60)
    watcher.look_once()
    assert told.get_nowait().kind is NoticeKind.SPOT
    assert caplog.text.count("still trying") == 1


def test_a_service_that_hangs_is_asked_one_thing_at_a_look(imds: FakeImds) -> None:
    client = MetadataClient(imds.endpoint, PATIENT)
    assert look(client, 0.0) == ((), None)
    imds.hang.set()
    client.timeout = 0.1
    before = imds.connections
    notices, failed = look(client, 0.0)
    assert notices == ()
    assert failed is not None
    assert "instance-action" in str(failed)
    imds.hang.clear()
    client.timeout = PATIENT
    client.get("meta-data/instance-id")  # what came before it has been counted before it
    assert imds.connections == before + 2


@pytest.mark.parametrize(
    "state",
    [
        *("InService", "Pending", "Standby", "Warmed:Stopped", "Warmed:Running"),
        *("", "<html>", "\x00\xff", "null", '{"state": "Terminated"}', "terminated"),
    ],
)
def test_other_states_and_garbage_are_no_end(state: str) -> None:
    assert parse_target_state(state) is None


def test_a_raising_listener_does_not_end_the_watch(imds: FakeImds, caplog: pytest.LogCaptureFixture) -> None:
    told: Notices = queue.Queue()

    def listener(notice: Notice) -> None:
        told.put(notice)
        raise RuntimeError("mine")

    watcher = Watcher(MetadataClient(imds.endpoint, PATIENT), listener, interval=0.02).start()
    try:
        imds.spot(120)
        told.get(timeout=PATIENT)
        imds.target("Terminated")
        assert told.get(timeout=PATIENT).kind is NoticeKind.LIFECYCLE
    finally:
        watcher.stop()
    assert "goes on" in caplog.text


def test_stop_ends_a_watch_that_hangs(imds: FakeImds) -> None:
    imds.hang.set()
    watcher = Watcher(MetadataClient(imds.endpoint, timeout=0.2), lambda _: None, interval=600).start()
    assert imds.hanging.wait(PATIENT)
    watcher.stop()
    watcher.thread.join(PATIENT)
    assert not watcher.thread.is_alive()


@given(st.text())
def test_any_body_of_the_action_is_a_notice_with_a_deadline(body: str) -> None:
    notice = parse_instance_action(body, 1000.0)
    assert notice.drain
    assert notice.deadline is not None


def test_the_time_is_utc() -> None:
    body = '{"action": "stop", "time": "1970-01-01T00:10:00Z"}'
    assert parse_instance_action(body, 0.0) == Notice(NoticeKind.SPOT, "spot interruption: stop", 600.0)
