"""Which address of this machine others use, and ports that nobody takes by chance."""

from __future__ import annotations

import socket

import pytest

from adaptdl_elastic.rendezvous.local import addresses
from adaptdl_elastic.rendezvous.local.addresses import NoPortError, address_towards, listen, reserve

HOST = "127.0.0.1"


def test_endpoints_are_asked_in_turn() -> None:
    assert address_towards(("http://a..b:1", "http://127.0.0.1:2")) == "127.0.0.1"
    assert address_towards(("http://[::1]:2", "http://a..b:1")) in ("::1", "127.0.0.1")  # without IPv6
    assert address_towards(("http://a..b:1",)) == "127.0.0.1"


def test_an_endpoint_on_this_machine_says_nothing_of_how_others_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = {"local": ["127.0.0.1"], "lost": [], "far": ["10.0.0.7"], "six": ["fe80::1%eth0"]}
    monkeypatch.setattr(addresses, "local_addresses", lambda url: ways[url])
    assert address_towards(("local", "lost", "far")) == "10.0.0.7"
    assert address_towards(("far", "six")) == "10.0.0.7"
    assert address_towards(("local", "six")) == "fe80::1%eth0"
    assert address_towards(("lost", "local")) == "127.0.0.1"


def test_a_reserved_port_can_be_bound_only_by_its_number() -> None:
    with reserve(HOST, None) as kept:
        port = kept.getsockname()[1]
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((HOST, port))
        with (
            socket.create_server((HOST, port)) as server,  # as rank 0 does
            socket.create_connection((HOST, port)) as client,
        ):
            accepted, _ = server.accept()
            with accepted:
                assert accepted.getpeername() == client.getsockname()


def test_of_a_range_each_gets_its_own() -> None:
    with reserve(HOST, None) as one:
        low = one.getsockname()[1] if one.getsockname()[1] < 65000 else 29500
    taken = []
    try:
        taken = [reserve(HOST, (low, low + 30)) for _ in range(8)]
        ports = {sock.getsockname()[1] for sock in taken}
    finally:
        for sock in taken:
            sock.close()
    assert len(ports) == 8
    assert all(low <= port <= low + 30 for port in ports)


def test_a_range_without_a_free_port_is_named() -> None:
    with listen(HOST, None) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(
            NoPortError, match=f"ports {port} to {port}: Address already in use; see --port-range"
        ):
            reserve(HOST, (port, port))
    with pytest.raises(NoPortError, match=r"192\.0\.2\.1: Cannot assign.*--local-addr"):
        listen("192.0.2.1", None)
