"""`--rdzv-conf` of the torchrun plug-in: its own names, and those that torch's backends take."""

from __future__ import annotations

import logging
import re

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

from adaptdl_elastic.rendezvous import torchrun
from adaptdl_elastic.rendezvous.torchrun.handler_options import HandlerOptions


def parse(text: str) -> HandlerOptions:
    """As torchrun hands `--rdzv-conf` over, with the `timeout` that it puts in by itself."""
    return HandlerOptions.parse({"timeout": 900, **_parse_rendezvous_config(text)})


def test_the_defaults_are_torchs_where_it_has_them():
    found = parse("")
    assert (found.last_call, found.close_timeout, found.read_timeout) == (30.0, 30.0, 60.0)
    assert found.warning() is None


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ("join_timeout=60", "timeout", 60.0),
        ("timeout=60", "timeout", 60.0),
        ("last_call_timeout=7", "last_call", 7.0),
        ("last_call=0", "last_call", 0.0),
        ("last_call=3,last_call_timeout=3", "last_call", 3.0),
        ("close_timeout=8", "close_timeout", 8.0),
        ("keep_alive_interval=4", "lease", 12.0),
        ("keep_alive_interval=4,keep_alive_max_attempt=5", "lease", 20.0),
        ("keep_alive_interval=4,lease=6", "lease", 6.0),
        ("heartbeat_timeout=3", "store_timeout", 3.0),
        ("read_timeout=9", "read_timeout", 9.0),
        ("protocol=https,cacert=x", "https", True),
        ("ca_cert=x", "ca", "x"),
        ("ssl_cert=x", "cert", "x"),
        ("ssl_cert_key=x", "key", "x"),
    ],
)
def test_torchs_names_are_taken(text: str, option: str, value: object):
    found = parse(text)
    assert getattr(found, option) == value
    assert found.warning() is None


@pytest.mark.parametrize("value", ["1", "true", "True", "no", "0"])
def test_is_host_is_taken_for_etcd_is_the_host(value: str):
    assert parse(f"is_host={value}").warning() is None


def test_unknown_options_are_told_in_one_line_and_the_rest_counts(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        handler = torchrun.create_handler(
            RendezvousParameters("adaptdl-etcd", "e:1", "job", 1, 1, last_cal="3", color="red", lease="7")
        )
    assert handler.get_backend() == "adaptdl-etcd"
    (line,) = caplog.messages
    assert line.startswith(
        "--rdzv-conf has no effect with this backend: last_cal (did you mean last_call?), color; it takes "
    )
    for name in ("join_timeout", "last_call_timeout", "lease", "port_range", "is_host"):
        assert name in line


def test_https_is_for_every_endpoint_that_has_no_scheme():
    found = RendezvousParameters("adaptdl-etcd", "a:1,b:2", "job", 1, 1, protocol="https")
    assert torchrun.create_handler(found).urls == ("https://a:1", "https://b:2")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(({"lease": text}, "lease=") for text in ("inf", "nan", "-1", "0")),
        ({"lease": "soon"}, "positive number of seconds"),
        ({"timeout": "inf"}, "timeout"),
        ({"grace": "-0.5"}, "grace"),
        ({"port_range": "9-3"}, "port_range"),
        ({"port_range": "x"}, "FIRST-LAST"),
        ({"is_host": "maybe"}, "neither true nor false"),
        ({"protocol": "gopher"}, "protocol"),
        ({"keep_alive_interval": "often"}, "keep_alive_interval"),
        ({"join_timeout": "-1"}, "join_timeout"),
        ({"last_call": "3", "last_call_timeout": "4"}, "=4: last_call is the same option, give one"),
        ({"run_id": "a/b"}, "--rdzv-id 'a/b' cannot be used"),
        ({"endpoint": "host:0"}, "host:0"),
        ({"endpoint": "ftp://x"}, "not of the form HOST:PORT"),
        ({"cluster": "a/b"}, "a/b"),
        ({"ca": "/nowhere"}, "cannot be read"),
    ],
)
def test_a_setting_that_cannot_be_used_ends_torchrun_with_one_line(given: dict[str, str], said: str):
    usual = {"backend": "adaptdl-etcd", "endpoint": "e:1", "run_id": "job"}
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        torchrun.create_handler(RendezvousParameters(**{**usual, **given}, min_nodes=1, max_nodes=1))
    assert isinstance(caught.value, SystemExit)
    line = str(caught.value.code)
    assert line.startswith("torchrun: error: ")
    assert "\n" not in line
    assert "--rdzv-conf" in line or set(given) <= {"run_id", "endpoint", "cluster", "ca"}, line
