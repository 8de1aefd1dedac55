"""Who is let in by the server of the page, asked over HTTP as a browser and as a stranger would."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from page_world import HOSTILE, PageWorld, small_world

from adaptdl_elastic.autoscaler.web.access import CSRF_HEADER, Guard
from adaptdl_elastic.autoscaler.web.http_server import WebServer
from adaptdl_elastic.rendezvous.schema.records import JobRequest, decode
from adaptdl_elastic.rendezvous.services.connections import MOST_UNKNOWN

PATIENCE_SECONDS = 100.0


@pytest.fixture
def world() -> PageWorld:
    return small_world()


@pytest.fixture
def server(world: PageWorld) -> Iterator[WebServer]:
    with world.served() as server:
        server.served.feed.wait(0, PATIENCE_SECONDS)
        yield server


def ask(server: WebServer, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """Return status, headers and decoded body of an answer; `Host` is the server's own unless given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.guard.port, timeout=PATIENCE_SECONDS)
    connection.putrequest(method, path, skip_host=True)
    sent = b"" if body is None else json.dumps(body).encode()
    given = {"Host": f"127.0.0.1:{server.guard.port}", "Content-Length": str(len(sent)), **headers}
    for name, value in given.items():
        connection.putheader(name.replace("_", "-"), value)
    connection.endheaders(sent)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    kind = answer.headers.get_content_type()
    return answer.status, answer.headers, json.loads(text) if kind == "application/json" else text


def let_in(server: WebServer) -> dict[str, str]:
    """Return the header of a browser that has opened the printed address."""
    _, headers, _ = ask(server, "GET", server.url.partition(str(server.guard.port))[2])
    return {"Cookie": headers["Set-Cookie"].partition(";")[0]}


def as_page(server: WebServer) -> dict[str, str]:
    """Return the headers that the page's own script sends."""
    cookie = let_in(server)
    _, _, session = ask(server, "GET", "/api/session", **cookie)
    origin = f"http://127.0.0.1:{server.guard.port}"
    return {
        **cookie,
        "Origin": origin,
        "Content-Type": "application/json",
        CSRF_HEADER: session["request"],
    }


def request_of(world: PageWorld) -> JobRequest:
    found = world.store.get(world.keys.job("speech", "request"))
    assert found is not None
    return decode(JobRequest, found.value)


def test_a_browser_is_let_in_by_the_printed_address_and_then_by_its_cookie(server: WebServer) -> None:
    status, headers, _ = ask(server, "GET", server.url.partition(str(server.guard.port))[2])
    assert (status, headers["Location"]) == (303, "/")
    assert "HttpOnly" in headers["Set-Cookie"]
    assert "SameSite=Strict" in headers["Set-Cookie"]
    assert server.guard.token not in headers["Set-Cookie"]
    status, headers, text = ask(server, "GET", "/", **let_in(server))
    assert status == 200
    assert "<main" in text
    assert "default-src 'none'; script-src 'self';" in headers["Content-Security-Policy"]
    status, _, shown = ask(server, "GET", "/api/overview", **let_in(server))
    assert status == 200
    assert shown["jobs"]["speech"]["replicas"] == 12


@pytest.mark.parametrize("cookie", ["", "adaptdl=x", "{name}=wrong", "{name}=", ";;=;{name}"])
def test_without_token_or_cookie_nothing_is_shown(server: WebServer, cookie: str) -> None:
    sent = {"Cookie": cookie.format(name=f"adaptdl-{server.guard.port}")} if cookie else {}
    for path in ("/", "/?token=wrong", "/api/overview", "/api/stream", "/api/jobs/speech"):
        status, headers, body = ask(server, "GET", path, **sent)
        assert status == 401
        assert "speech" not in str(body)
        assert "Set-Cookie" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example"]
)
def test_a_page_of_another_site_cannot_read_under_a_name_of_its_own(server: WebServer, host: str) -> None:
    cookie = let_in(server)
    for path in ("/", "/api/overview", "/static/app.js", f"/?token={server.guard.token}"):
        status, headers, body = ask(server, "GET", path, Host=host.format(port=server.guard.port), **cookie)
        assert status == 421
        assert "speech" not in str(body)
        assert "Set-Cookie" not in headers


@pytest.mark.exhaustive
def test_idle_connections_of_another_user_do_not_lock_the_owner_out(server: WebServer) -> None:
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", server.guard.port)
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(MOST_UNKNOWN + 70)]
        cookie = let_in(server)
        assert ask(server, "GET", "/api/overview", **cookie)[0] == 200
        # those that had to give way
        for one in idle[:70]:
            one.settimeout(PATIENCE_SECONDS)
            with contextlib.suppress(ConnectionResetError):
                assert one.recv(1) == b""


def test_the_page_scales_and_stops_a_job(server: WebServer, world: PageWorld) -> None:
    headers = as_page(server)
    status, _, said = ask(server, "POST", "/api/jobs/speech/scale", {"replicas": 4}, **headers)
    assert (status, said) == (200, {"done": "speech: 4 asked for"})
    assert request_of(world).replicas == 4
    status, _, said = ask(server, "POST", "/api/jobs/speech/scale", {"replicas": 400}, **headers)
    assert (status, said["error"]) == (409, "speech was started for 1 to 16 replicas, not 400")
    status, _, _ = ask(server, "POST", "/api/jobs/speech/scale", {"replicas": None}, **headers)
    assert (status, request_of(world).replicas) == (200, None)
    status, _, said = ask(server, "POST", "/api/jobs/speech/stop", {}, **headers)
    assert (status, said) == (200, {"done": "speech is stopping"})
    assert request_of(world).stop
    for action in ("cancel", "resume"):
        status, _, said = ask(server, "POST", f"/api/jobs/speech/{action}", {}, **headers)
        assert status == 409
        assert said["error"].startswith("speech was not submitted")


@pytest.mark.parametrize(
    ("left_out", "put_in"),
    [
        ("Cookie", {}),
        (CSRF_HEADER, {}),
        ("Origin", {}),
        ("", {"Origin": "http://evil.example"}),
        ("", {"Origin": "null"}),
        ("", {CSRF_HEADER: "wrong"}),
        ("", {"Sec-Fetch-Site": "same-site"}),
        ("", {"Content-Type": "text/plain"}),
    ],
)
def test_no_other_page_can_change_anything(
    server: WebServer, world: PageWorld, left_out: str, put_in: dict[str, str]
) -> None:
    headers = {name: value for name, value in as_page(server).items() if name != left_out} | put_in
    status, _, _ = ask(server, "POST", "/api/jobs/speech/stop", {}, **headers)
    assert status in (401, 403)
    assert world.store.get(world.keys.job("speech", "request")) is None


@pytest.mark.parametrize("body", [{}, {"replicas": 0}, {"replicas": "4"}, {"replicas": True}, [], "x"])
def test_a_malformed_request_is_refused(server: WebServer, world: PageWorld, body: Any) -> None:
    status, _, _ = ask(server, "POST", "/api/jobs/speech/scale", body, **as_page(server))
    assert status == 400
    assert world.store.get(world.keys.job("speech", "request")) is None


def test_a_hostile_name_is_sent_as_data_only(server: WebServer) -> None:
    cookie = let_in(server)
    status, headers, shown = ask(server, "GET", "/api/overview", **cookie)
    assert HOSTILE in shown["jobs"]
    assert headers.get_content_type() == "application/json"
    assert headers["X-Content-Type-Options"] == "nosniff"
    _, _, page = ask(server, "GET", "/", **cookie)
    assert HOSTILE not in page
    status, _, _ = ask(server, "GET", "/api/jobs/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E", **cookie)
    assert status == 200


@pytest.mark.parametrize(
    "path", ["/static/../access.py", "/static/%2e%2e%2faccess.py", "/api/jobs/none", "/x"]
)
def test_other_paths_are_not_served(server: WebServer, path: str) -> None:
    status, _, _ = ask(server, "GET", path, **let_in(server))
    assert status == 404


def test_secrets_are_not_shown_by_accident() -> None:
    guard = Guard(9310)
    assert not any(secret in repr(guard) for secret in (guard.token, guard.session, guard.csrf))


def test_the_page_has_no_script_or_style_of_its_own_and_loads_nothing_from_elsewhere(
    server: WebServer,
) -> None:
    cookie = let_in(server)
    _, _, page = ask(server, "GET", "/", **cookie)
    assert "http://" not in page
    assert "https://" not in page
    assert "style=" not in page
    assert "<script>" not in page
    for name in ("app.js", "job.js", "charts.js", "format.js"):
        _, _, script = ask(server, "GET", f"/static/{name}", **cookie)
        assert "innerHTML" not in script
        assert "eval(" not in script


@pytest.mark.parametrize(
    "other", ['prefs={"a": [1]}', "a b=1", "=", 'q="', "x=\u00e4".encode().decode("latin-1")]
)
def test_a_cookie_of_another_program_on_this_host_does_not_lock_the_browser_out(
    server: WebServer, other: str
) -> None:
    own = let_in(server)["Cookie"]
    for cookies in (f"{other}; {own}", f"{own}; {other}"):
        status, _, _ = ask(server, "GET", "/api/overview", Cookie=cookies)
        assert status == 200


def test_a_number_that_json_does_not_have_is_sent_as_null(world: PageWorld) -> None:
    world.event("plan", job="speech", predicted=float("nan"), bounds=[float("inf"), 1.5])
    with world.served() as server:
        server.served.feed.wait(0, PATIENCE_SECONDS)
        status, _, found = ask(server, "GET", "/api/events", **let_in(server))
    assert status == 200
    assert (found[-1]["predicted"], found[-1]["bounds"]) == (None, [None, 1.5])


def test_a_record_that_cannot_be_shown_leaves_the_rows_and_is_named(
    server: WebServer, world: PageWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = server.served.feed

    def next_problem(of: str) -> dict[str, Any]:
        """Return the first overview whose problem is, or is not, empty as that of `of` is."""
        version, shown = feed.current()
        deadline = time.monotonic() + PATIENCE_SECONDS
        while bool(shown["summary"]["problem"]) != bool(of):
            assert time.monotonic() < deadline, "the feed publishes nothing more"
            version, shown = feed.wait(version, 1.0)
        return shown

    def fail(*_: object) -> None:
        raise ValueError("slots is no number")

    next_problem("")
    with monkeypatch.context() as broken:
        broken.setattr("adaptdl_elastic.autoscaler.web.feed.overview", fail)
        shown = next_problem("some")
    assert shown["summary"]["problem"] == "the page cannot show the cluster: slots is no number"
    assert shown["jobs"]["speech"]["replicas"] == 12
    world.job("speech", reason="runs", placements={"node0": 2})
    assert not next_problem("")["summary"]["problem"], "the feed goes on"
