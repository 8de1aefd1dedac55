"""Servers that die, hang, are cut off, lose their data, or never were."""

from __future__ import annotations

import http.server
import itertools
import shutil
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import requests
from cutting_proxy import CuttingProxy
from etcd_binaries import etcd_binary
from etcd_server import EtcdServer, free_ports

from adaptdl_elastic.rendezvous.store import endpoints
from adaptdl_elastic.rendezvous.store.base import (
    CompactedError,
    StoreError,
    StoreRefusedError,
    StoreUnavailableError,
)
from adaptdl_elastic.rendezvous.store.connect import StoreOptions, connect
from adaptdl_elastic.rendezvous.store.connection_error import TryAgainError
from adaptdl_elastic.rendezvous.store.etcd_v2 import EtcdV2Store
from adaptdl_elastic.rendezvous.store.etcd_v3 import EtcdV3Store
from adaptdl_elastic.rendezvous.store.store_options import StoreOptionError, parse_endpoints

pytestmark = [pytest.mark.etcd, pytest.mark.exhaustive]
# what is done to a connection alone leaves a server to other tests
on_each_server = pytest.mark.parametrize(
    "_shared_world", ["v3-3.5", "v2-3.5", "v3-3.4", "v2-3.4"], indirect=True
)


@pytest.fixture
def store(own_world):
    return own_world.client()


@pytest.mark.essential
def test_a_watch_loses_nothing_when_the_server_is_killed(own_world, collect):
    key = own_world.prefix + "a"
    reader, writer = own_world.client(), own_world.client()
    seen = collect(reader.watch(own_world.prefix))
    written = []
    for number in range(60):
        if number % 20 == 10:
            own_world.real.kill()
            own_world.real.start()
        written.append((writer.put(key, str(number)), str(number)))
    changes = seen.wait(len(written))
    revisions = [change.revision for change in changes]
    assert revisions == sorted(set(revisions))
    assert set(written) <= {(change.revision, change.value) for change in changes}


@on_each_server
def test_changes_made_while_a_watch_was_cut_off_arrive_later(world, collect):
    with CuttingProxy(world.real.endpoint) as proxy, world.client(proxy.endpoint) as reader:
        seen = collect(reader.watch(world.prefix))
        writer = world.client()
        writer.put(world.prefix + "a", "0")
        seen.wait(1)
        proxy.cut()
        for number in range(1, 6):
            writer.put(world.prefix + "a", str(number))
        writer.delete(world.prefix + "a")
        proxy.heal()
        changes = seen.wait(7)
    assert [change.value for change in changes] == ["0", "1", "2", "3", "4", "5", None]


def test_a_paused_server_may_lose_a_lease_but_not_silently(own_world, store):
    lease = store.lease(6)
    store.put(own_world.prefix + "mine", "1", lease)
    own_world.real.pause()
    assert not lease.lost.wait(7.0), "lost without the server's word"
    assert lease.remaining() == 0, "nobody can be certain any more"
    own_world.real.resume()
    while not lease.lost.wait(0.05):  # until the server has said what became of it
        found = store.get(own_world.prefix + "mine")
        if lease.remaining() > 0:  # it has survived, and was there when we looked before
            assert found is not None
            return
    again = store.lease(60)
    store.put(own_world.prefix + "mine", "2", again)
    assert store.get(own_world.prefix + "mine").value == "2"


@pytest.mark.essential
@on_each_server
def test_a_partition_costs_the_lease_and_both_sides_learn_it(world, collect):
    with CuttingProxy(world.real.endpoint) as proxy:
        apart, together = world.client(proxy.endpoint, timeout=5.0), world.client()
        seen = collect(together.watch(world.prefix))
        lease = apart.lease(8)
        apart.put(world.prefix + "mine", "1", lease)
        seen.wait(1)
        proxy.freeze()
        assert seen.wait(2)[1].kind == "delete"
        with pytest.raises(StoreUnavailableError, match="no answer in time"):
            apart.get(world.prefix + "mine")
        assert not lease.lost.is_set()
        assert lease.remaining() == 0
        proxy.heal()
        assert lease.lost.wait(60)


@pytest.mark.parametrize("own_world", ["v2-3.5", "v2-3.4"], indirect=True)
def test_with_v2_a_key_that_runs_out_early_is_a_lost_lease(own_world, store):
    """As when the server's clock jumps: v2 reckons by the clock on the wall."""
    key = own_world.prefix + "mine"
    lease = store.lease(5)
    store.put(key, "1", lease)
    store.put(own_world.prefix + "too", "1", lease)
    url = f"http://{own_world.real.endpoint}/v2/keys{key}"
    for _ in range(40):  # a refresh by the lease before the key has run out gives it its whole time again
        answer = requests.put(url, {"ttl": 1, "refresh": "true", "prevExist": "true"}, timeout=60)
        assert answer.status_code in (200, 404), answer.text
        if lease.lost.wait(1.5):
            break
    assert lease.lost.is_set()
    assert store.range(own_world.prefix).items == ()


@on_each_server
def test_a_swap_whose_answer_was_lost_is_not_done_twice(world):
    with CuttingProxy(world.real.endpoint) as proxy:
        store, other = world.client(proxy.endpoint), world.client()
        key = world.prefix + "leader"
        first = other.put(key, "nobody")
        proxy.swallow()
        threading.Timer(0.3, proxy.heal).start()  # at any time within the store's own time-out
        assert store.compare_and_swap(key, "me", first) == other.get(key).mod_revision
        assert other.get(key).value == "me"
        proxy.swallow()
        threading.Timer(0.3, proxy.heal).start()
        assert store.compare_and_swap(key, "me again", first) is None


@on_each_server
def test_a_leased_write_whose_answer_was_lost_is_of_the_lease(world):
    # v2 writes a leased key two or three times
    for how, nth in itertools.product(("swap", "put"), (1, 2, 3, 4)):
        with CuttingProxy(world.real.endpoint) as proxy:
            store, other = world.client(proxy.endpoint), world.client()
            key = f"{world.prefix}leader-{how}-{nth}"
            lease = store.lease(60)
            proxy.lose(nth)
            if how == "swap":
                revision = store.compare_and_swap(key, "me", 0, lease)
            else:
                revision = store.put(key, "me", lease)
            assert revision == other.get(key).mod_revision
            lease.renew(5.0)
            assert other.get(key).mod_revision == revision
            lease.revoke()
            assert other.get(key) is None, "it outlived its owner"
            store.close()


@pytest.mark.parametrize(
    ("own_world", "size"),
    [("v3-3.5", 1_800_000), ("v3-3.5", 4_000_000), ("v3-3.4", 1_800_000), ("v2-3.5", 40_000_000)],
    indirect=["own_world"],
)
def test_a_value_that_is_too_large_is_refused_for_good(own_world, store, size):
    with pytest.raises(StoreRefusedError, match="too large"):
        store.put(own_world.prefix + "a", "x" * size)
    assert store.put(own_world.prefix + "a", "x" * 1_000_000)


def test_a_hung_server_costs_no_more_than_the_time_out(own_world):
    """It never answers: who waited for it, or tried again and again, would never come back."""
    store = own_world.client(timeout=0.5)
    own_world.real.pause()
    start = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="no answer in time"):
        store.put(own_world.prefix + "a", "1")
    assert time.monotonic() - start > 0.4


def test_a_server_that_restarts_within_the_time_out_is_not_noticed(own_world):
    store = own_world.client(timeout=60.0)
    own_world.real.kill()
    thread = threading.Thread(target=own_world.real.start)
    thread.start()
    assert store.put(own_world.prefix + "a", "1")
    thread.join()


def test_data_that_were_replaced_are_noticed(own_world, store, collect):
    for number in range(20):
        store.put(own_world.prefix + "a", str(number))
    seen = collect(store.watch(own_world.prefix, store.range(own_world.prefix).revision))
    seen.wait(1)
    own_world.real.kill()
    shutil.rmtree(own_world.real.log.parent / "data")
    own_world.real.start()
    assert isinstance(seen.wait_end(), CompactedError)
    assert store.range(own_world.prefix).items == ()


@pytest.mark.essential
@on_each_server
def test_the_next_endpoint_is_tried(world, collect):
    (nobody,) = free_ports(1)
    real = world.real.endpoint
    with ExitStack() as stack:
        one, two = (stack.enter_context(CuttingProxy(real)) for _ in range(2))
        addresses = f"127.0.0.1:{nobody},{one.endpoint},{two.endpoint}"
        store = stack.enter_context(world.client(addresses, timeout=20.0))
        seen = collect(store.watch(world.prefix))
        store.put(world.prefix + "a", "1")
        seen.wait(1)
        for victim, number in ((one, "2"), (two, "3")):
            other = two if victim is one else one
            other.cut()  # what was held back must not arrive late
            other.heal()
            victim.freeze()  # hangs; the watch on it has to move, too
            store.put(world.prefix + "a", number)
        assert [change.value for change in seen.wait(3)] == ["1", "2", "3"]


@pytest.fixture
def clock(monkeypatch):
    """Give all attempts a clock that only their sleeping puts on."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(endpoints, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return now


@pytest.mark.parametrize("kind", [EtcdV2Store, EtcdV3Store])
def test_an_error_names_the_endpoints_that_refuse(kind, clock):
    first, second = free_ports(2)
    urls = parse_endpoints(f"127.0.0.1:{first},127.0.0.1:{second}")
    with kind(urls, StoreOptions(timeout=2.0)) as store:
        with pytest.raises(StoreUnavailableError) as caught:
            store.get("/a")
        for port in (first, second):
            assert f"127.0.0.1:{port}: connection refused" in str(caught.value)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (lambda seconds: seconds > 0.5, "not JSON"),  # the server is slow, and the deadline near
        (lambda seconds: seconds > 1.0, "no answer in time"),  # it has hung since the first attempt
    ],
)
def test_an_attempt_that_the_deadline_cuts_short_hides_no_reason(clock, answers, reason):
    def attempt(endpoint, seconds):
        if answers(seconds):
            raise TryAgainError("not JSON")
        endpoints.time.sleep(seconds)
        raise TryAgainError.from_error(TimeoutError(), endpoint, StoreOptions())

    with pytest.raises(StoreUnavailableError, match=rf"http://a:1: {reason}\)"):
        endpoints.Endpoints(("http://a:1",), StoreOptions().hint).run(attempt, 1.01)
    assert clock == [1.01]


def test_connect_without_a_server_says_what_to_look_at(clock):
    (port,) = free_ports(1)
    with pytest.raises(StoreUnavailableError, match=r"connection refused.*is --etcd right"):
        connect(f"127.0.0.1:{port}", options=StoreOptions(timeout=0.3))


def test_the_api_is_found_out():
    binary = etcd_binary("3.5") or pytest.skip("no etcd 3.5")
    quick = StoreOptions(timeout=60)
    with EtcdServer(binary=binary) as server:
        with connect(server.endpoint, options=quick) as store:
            assert isinstance(store, EtcdV3Store)
        with pytest.raises(StoreError, match="v2"):
            connect(server.endpoint, api="v2", options=quick)
    with EtcdServer(binary=binary, v2=True, args=["--enable-grpc-gateway=false"]) as server:
        with connect(server.endpoint, options=quick) as store:
            assert isinstance(store, EtcdV2Store)
        with pytest.raises(StoreError, match="v3"):
            connect(server.endpoint, api="v3", options=quick)
    with EtcdServer(binary=binary, v2=True) as server:
        for api, kind in (("v2", EtcdV2Store), ("v3", EtcdV3Store), ("auto", EtcdV3Store)):
            with connect(server.endpoint, api=api, options=quick) as store:
                assert isinstance(store, kind)


class _NotEtcd(http.server.BaseHTTPRequestHandler):
    status, text = 404, b"<html>not here</html>"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.text)))
        self.end_headers()
        self.wfile.write(self.text)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "text", "wanted"),
    [
        (404, b"<html>not here</html>", "is it an etcd"),
        (200, b"<html>hello</html>", "not JSON"),
        (200, b"[1, 2]", "not a JSON object"),
    ],
)
def test_something_else_listens_there(status, text, wanted):
    handler = type("Handler", (_NotEtcd,), {"status": status, "text": text})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(StoreError, match=wanted):
                connect(f"127.0.0.1:{server.server_address[1]}", options=StoreOptions(timeout=3))
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "no etcd endpoint"),
        (" , ", "no etcd endpoint"),
        ("host:port", "Port could not be cast"),
        ("host:99999", "Port out of range"),
        ("ftp://host", "not of the form"),
        ("host:1/v2", "not of the form"),
        ("user:secret@host:1", "no user and password"),
        ("a b:1", "not a host name"),
    ],
)
def test_endpoints_that_are_none(text, wanted):
    with pytest.raises(StoreOptionError, match=wanted) as caught:
        parse_endpoints(text)
    assert "secret" not in str(caught.value)


def test_endpoints():
    assert parse_endpoints("a:1, b,https://c:3/,[::1]:4") == (
        "http://a:1",
        "http://b:2379",
        "https://c:3",
        "http://[::1]:4",
    )
    assert parse_endpoints("a", secure=True) == ("https://a:2379",)
    with pytest.raises(StoreOptionError, match="is not https"):
        parse_endpoints("http://a", secure=True)
