"""Parse `--rdzv-conf key=value,…` of the torchrun plug-in: its own names, and those of torch's backends."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass

# torch's names of options that have another name here
_ALIASES = {
    "last_call_timeout": "last_call",
    "heartbeat_timeout": "store_timeout",
    "ca_cert": "ca",
    "cacert": "ca",
    "ssl_cert": "cert",
    "ssl_cert_key": "key",
}
_READ_BY_HAND = ("join_timeout", "keep_alive_interval", "keep_alive_max_attempt", "is_host", "protocol")
_PUT_IN_BY_TORCH = ("rank", "read_timeout_seconds")
_MAY_BE_ZERO = ("last_call", "last_call_timeout", "grace")
_BOOLEANS = ("1", "true", "t", "yes", "y", "0", "false", "f", "no", "n")  # the spellings that torch accepts
_KEEP_ALIVE_ATTEMPTS = 3.0  # torch's default


@dataclass(frozen=True)
class HandlerOptions:
    """The options of one handler; docs/howto/from-torchrun.md has their table. Times are in seconds."""

    cluster: str = ""
    api: str = "auto"
    timeout: float = 900.0
    last_call: float = 30.0
    close_timeout: float = 30.0
    lease: float = 5.0
    grace: float = 2.0
    leave_timeout: float = 60.0
    read_timeout: float = 60.0
    store_timeout: float | None = None
    port_range: str = ""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    https: bool = False
    unknown: tuple[str, ...] = ()

    @classmethod
    def parse(cls, config: Mapping[str, object]) -> HandlerOptions:
        """Read torch's parameters.

        Raises:
            ValueError: the value of an option is invalid, or one option is given under two names.
        """
        given = {name: value for name, value in config.items() if name not in _PUT_IN_BY_TORCH}
        values: dict[str, object] = {}
        unknown = []
        for name, value in given.items():
            field = _ALIASES.get(name, name)
            if name in _READ_BY_HAND:
                continue
            if field not in OPTION_NAMES:
                unknown.append(name)
                continue
            read = _text(value) if field in _TEXTS else _seconds(name, value)
            if values.setdefault(field, read) != read:
                raise ValueError(f"--rdzv-conf {name}={value}: {field} is the same option, give one of them")
        # torchrun sets `timeout` for every backend, so `join_timeout` overrides it
        if "join_timeout" in given:
            values["timeout"] = _seconds("join_timeout", given["join_timeout"])
        if "lease" not in values and ("keep_alive_interval" in given or "keep_alive_max_attempt" in given):
            interval = _seconds("keep_alive_interval", given.get("keep_alive_interval", cls.lease))
            attempts = given.get("keep_alive_max_attempt", _KEEP_ALIVE_ATTEMPTS)
            values["lease"] = interval * _seconds("keep_alive_max_attempt", attempts)
        if str(given.get("is_host", "0")).lower() not in _BOOLEANS:
            raise ValueError(f"--rdzv-conf is_host={given['is_host']} is neither true nor false")
        if given.get("protocol", "http") not in ("http", "https"):
            raise ValueError(f"--rdzv-conf protocol={given['protocol']} is neither http nor https")
        values["https"] = given.get("protocol") == "https"
        return cls(**values, unknown=tuple(unknown))  # type: ignore[arg-type]

    def warning(self) -> str | None:
        """Return one line about options that have no effect, or None."""
        if not self.unknown:
            return None
        names = sorted({*OPTION_NAMES, *_ALIASES, *_READ_BY_HAND})
        told = []
        for name in self.unknown:
            close = difflib.get_close_matches(name, names, 1)
            told.append(f"{name} (did you mean {close[0]}?)" if close else name)
        return f"--rdzv-conf has no effect with this backend: {', '.join(told)}; it takes {', '.join(names)}"

    def ports(self) -> tuple[int, int] | None:
        """Return the first and the last port to listen on; None: any."""
        if not self.port_range:
            return None
        first, dash, last = self.port_range.partition("-")
        known = first.isdecimal() and (not dash or last.isdecimal())
        if not known or not 1024 <= int(first) <= int(last or first) <= 65535:
            raise ValueError(
                f"--rdzv-conf port_range={self.port_range} is not FIRST-LAST between 1024 and 65535"
            )
        return int(first), int(last or first)


_TEXTS = ("cluster", "api", "port_range", "ca", "cert", "key")
OPTION_NAMES = tuple(name for name in HandlerOptions.__dataclass_fields__ if name not in ("https", "unknown"))


def _text(given: object) -> str:
    return str(given)


def _seconds(name: str, given: object) -> float:
    try:
        value = float(str(given))
    except ValueError:
        value = math.nan
    if 0 < value < math.inf or (value == 0 and name in _MAY_BE_ZERO):
        return value
    raise ValueError(f"--rdzv-conf {name}={given} is not a finite, positive number of seconds")
