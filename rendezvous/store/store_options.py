"""Endpoints, time-out and credentials of the store."""

from __future__ import annotations

import math
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from adaptdl_elastic.extensions import ExtensionPoint
from adaptdl_elastic.protocol.environment import ETCD
from adaptdl_elastic.rendezvous.store.base import StoreError
from adaptdl_elastic.rendezvous.text import in_url

DEFAULT_PORT = 2379

STORES = ExtensionPoint("store", "adaptdl_elastic.stores")
"""Stores of other packages, by the scheme of their endpoints: functions (endpoint, StoreOptions) → Store."""

_PATHS = "ca", "cert", "key", "password_file"
_TEXTS = "timeout", "user", "password"


def variable(name: str) -> str:
    """Return the environment variable that sets one of `StoreOptions`."""
    return f"{ETCD}_{name.upper()}"


def to_environ(**options: object) -> dict[str, str]:
    """Return the environment variables that set some of `StoreOptions`."""
    return {variable(name): str(value) for name, value in options.items()}


class StoreOptionError(StoreError, ValueError):
    """An endpoint or option is invalid; the message says what to write instead."""


@dataclass(frozen=True)
class StoreOptions:
    """Time-out and credentials.

    Attributes:
        timeout: seconds that one operation may take, all endpoints and retries included.
        ca: PEM file with the authority that signed the server's certificate (default: the system's
            authorities).
        cert: PEM file with the client certificate.
        key: PEM file with its key.
        user: name of an etcd user.
        password: its password; in no repr and in no log.
        password_file: file whose first line is the password; it is read again when etcd refuses the password.
        hint: what an error says where etcd cannot be reached.
        hint_if_refused: what an error says where etcd refuses the user.
    """

    timeout: float = 5.0
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: Path | None = None
    hint: str = "is it running, and is --etcd right?"
    hint_if_refused: str = "check ADAPTDL_ETCD_USER and its password"

    def __post_init__(self) -> None:
        if self.password_file is not None and self.password is None:
            object.__setattr__(self, "password", read_password(self.password_file))
        if not 0 < self.timeout < math.inf:
            raise StoreOptionError(
                f"the store's time-out must be a finite, positive number of seconds, not {self.timeout:g}: "
                f"--etcd-timeout, ADAPTDL_ETCD_TIMEOUT"
            )
        if (self.cert is None) != (self.key is None):
            raise StoreOptionError("a client certificate needs its key and the other way round: give both")
        if (self.user is None) != (self.password is None):
            raise StoreOptionError(
                "an etcd user needs a password and the other way round: ADAPTDL_ETCD_USER with "
                "ADAPTDL_ETCD_PASSWORD_FILE or ADAPTDL_ETCD_PASSWORD"
            )
        for name, path in (("CA", self.ca), ("client certificate", self.cert), ("client key", self.key)):
            if path is not None and not os.access(path, os.R_OK):
                raise StoreOptionError(f"the {name} file {str(path)!r} cannot be read")

    @property
    def secure(self) -> bool:
        """Whether these options require TLS."""
        return self.ca is not None or self.cert is not None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ, **given: object) -> StoreOptions:
        """Return options from `ADAPTDL_ETCD_{TIMEOUT,CA,CERT,KEY,USER,PASSWORD,PASSWORD_FILE}`.

        Passwords have no command-line option, because every user can read the process list.

        Args:
            environ: the environment.
            given: options that override the environment unless they are None.
        """
        values: dict[str, Any] = {
            name: text for name in (*_PATHS, *_TEXTS) if (text := environ.get(variable(name)))
        }
        if "password_file" in values:
            values.pop("password", None)
        values |= {name: value for name, value in given.items() if value is not None}
        values |= {name: Path(values[name]) for name in _PATHS if name in values}
        if "timeout" in values:
            values["timeout"] = _seconds(values["timeout"])
        return cls(**values)

    def current_password(self) -> str | None:
        """Return the first line of the password file now, or `password` if there is no file."""
        return self.password if self.password_file is None else read_password(self.password_file)

    def certificates(self) -> tuple[bytes, ...]:
        """Return the present content of the files of the CA, the client certificate and its key."""
        try:
            return tuple(path.read_bytes() for path in (self.ca, self.cert, self.key) if path is not None)
        except OSError as error:
            raise StoreOptionError(
                f"the certificate file {error.filename!r} cannot be read: {error.strerror}"
            ) from None

    def ssl_context(self) -> ssl.SSLContext:
        """Return the TLS context for https endpoints; REQUESTS_CA_BUNDLE has no effect on it."""
        try:
            context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
            if self.cert is not None and self.key is not None:
                context.load_cert_chain(str(self.cert), str(self.key))
        except (OSError, ssl.SSLError) as error:
            raise StoreOptionError(f"the CA, client certificate or key is not usable: {error}") from None
        return context


def read_password(path: Path) -> str:
    """Return the first line of a password file."""
    try:
        text = path.read_text().partition("\n")[0].rstrip("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreOptionError(f"the password file {str(path)!r} cannot be read: {error}") from None
    if not text:
        raise StoreOptionError(f"the password file {str(path)!r} is empty")
    return text


def foreign_scheme(endpoint: str) -> str:
    """Return the scheme of an endpoint of another package's store; "" for every other endpoint."""
    scheme, sign, _ = endpoint.partition("://")
    return scheme if sign and scheme not in ("http", "https") and scheme in STORES else ""


def parse_endpoints(text: str, secure: bool = False) -> tuple[str, ...]:
    """Return the endpoints in `host:port[,host:port…]` as URLs without a path.

    Each may begin with `http://` or `https://`, or with the scheme of a store of another package. The default
    is https if `secure`, else http; the default port is 2379.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise StoreOptionError("no etcd endpoint was given: write HOST:PORT[,HOST:PORT...]")
    return tuple(_parse_endpoint(part, secure) for part in parts)


def _parse_endpoint(text: str, secure: bool) -> str:
    default = "https" if secure else "http"
    try:
        url = urlsplit(text if "://" in text else f"{default}://{text}")
        host, port = url.hostname, url.port
    except ValueError as error:
        raise StoreOptionError(f"etcd endpoint {text!r}: {error}; write HOST:PORT") from None
    if host and foreign_scheme(text):
        return text
    if url.scheme not in ("http", "https") or not host or url.path not in ("", "/") or url.query:
        raise StoreOptionError(f"etcd endpoint {text!r} is not of the form HOST:PORT or https://HOST:PORT")
    if url.username or url.password:
        raise StoreOptionError("an etcd endpoint takes no user and password: see ADAPTDL_ETCD_USER")
    if not re.fullmatch(r"[\w.\-:%]+", host):
        raise StoreOptionError(f"etcd endpoint {text!r}: {host!r} is not a host name or address")
    if secure and url.scheme == "http":
        raise StoreOptionError(
            f"etcd endpoint {text!r} is not https, but a CA or client certificate was given"
        )
    if port == 0:
        raise StoreOptionError(f"etcd endpoint {text!r}: nobody listens on port 0")
    return f"{url.scheme}://{in_url(host)}:{port or DEFAULT_PORT}"


def _seconds(text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        raise StoreOptionError(f"ADAPTDL_ETCD_TIMEOUT is {text!r}, not a number of seconds") from None
