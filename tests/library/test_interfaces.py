"""Which interface has an address, and where groups of gloo listen."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import generations
import psutil
import pytest

from adaptdl_elastic.torch._process_group import interfaces
from adaptdl_elastic.torch._process_group.interfaces import GLOO_VARIABLE, interface_of, listen_on


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "chosen", None)
    monkeypatch.setenv(GLOO_VARIABLE, "")
    monkeypatch.delenv(GLOO_VARIABLE)


def test_every_address_of_this_machine_has_its_interface() -> None:
    for name, found in psutil.net_if_addrs().items():
        for one in found:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                assert interface_of(one.address.partition("%")[0]) == name


def test_all_of_loopback_is_on_its_interface() -> None:
    (name,) = {n for n, found in psutil.net_if_addrs().items() for one in found if one.address == "127.0.0.1"}
    assert interface_of("127.0.0.77") == name
    assert interface_of("localhost") == name
    assert interface_of("::1") in (name, None)


@pytest.mark.parametrize("address", ["192.0.2.77", "2001:db8::77", "no-such-host.invalid", ""])
def test_a_foreign_address_selects_no_interface(address: str) -> None:
    listen_on(address)
    assert GLOO_VARIABLE not in os.environ


def test_the_next_generation_may_listen_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "interface_of", {"10.0.0.1": "eth0", "10.1.0.1": "eth1"}.get)
    listen_on("10.0.0.1")
    assert os.environ[GLOO_VARIABLE] == "eth0"
    listen_on("10.1.0.1")
    assert os.environ[GLOO_VARIABLE] == "eth1"


def test_an_interface_chosen_by_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_VARIABLE, "ib0")
    listen_on("127.0.0.1")
    assert os.environ[GLOO_VARIABLE] == "ib0"


LISTENING = """
import psutil, sys
import adaptdl_elastic.torch as adl
adl.init_process_group("gloo")
from adaptdl_elastic import collective
here = {one.laddr.ip for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"}
print(sorted(here))
collective.broadcast(1)
"""


@pytest.mark.processes
def test_replicas_without_an_agent_listen_only_on_loopback(tmp_path: Path) -> None:
    """The address is given to several replicas, and one replica has none."""
    script = tmp_path / "script.py"
    script.write_text(LISTENING)
    ended = [*generations.run(script, 2, tmp_path), generations.run_alone(script, tmp_path)]
    assert [(one.code, one.output.strip()) for one in ended] == [(0, "['127.0.0.1']")] * 3
