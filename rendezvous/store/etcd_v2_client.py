"""python-etcd's clients for `etcd_v2`: time-outs, translated errors, and credentials that may be replaced."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

import etcd
import urllib3

from adaptdl_elastic._explained import see
from adaptdl_elastic.rendezvous.store.base import StoreAuthError, StoreRefusedError
from adaptdl_elastic.rendezvous.store.connection_error import TryAgainError
from adaptdl_elastic.rendezvous.store.credentials import renewable_password, renewable_tls
from adaptdl_elastic.rendezvous.store.store_options import StoreOptions

T = TypeVar("T")


class Client(etcd.Client):  # type: ignore[misc]
    """python-etcd's client with a time-out per request; its `write` and `delete` have no argument for it."""

    _own = threading.local()

    @property
    def read_timeout(self) -> float:
        """The time-out of this thread's next request, in seconds."""
        return float(getattr(self._own, "seconds", 60.0))

    def within(self, seconds: float) -> Client:
        """Set the time-out of this thread's next request; return the client itself."""
        self._own.seconds = seconds
        return self


@dataclass(frozen=True)
class Access:
    """Clients made with one password and one set of certificates, by endpoint."""

    password: str | None = field(repr=False)
    context: ssl.SSLContext | None
    pool: urllib3.PoolManager
    clients: dict[str, Client]


def translate(request: Callable[[], T], url: str, options: StoreOptions) -> T:
    """Run one request to the endpoint `url`; raise TryAgainError or a StoreError for python-etcd's errors.

    Errors that are answers are raised unchanged: not found, compare failed, exists already, index cleared,
    watch timed out.
    """
    try:
        return request()
    except (
        etcd.EtcdCompareFailed,
        etcd.EtcdAlreadyExist,
        etcd.EtcdKeyNotFound,
        etcd.EtcdEventIndexCleared,
        etcd.EtcdWatchTimedOut,
    ):
        raise
    except etcd.EtcdInsufficientPermissions:
        raise StoreAuthError(
            "etcd refused: the user or password is wrong, or its v2 role does not cover the prefix: check "
            "ADAPTDL_ETCD_USER and its password" + see("etcd refused the login")
        ) from None
    except (etcd.EtcdNotFile, etcd.EtcdNotDir) as error:
        raise StoreRefusedError(
            f"with etcd's v2 API a key cannot be the directory of another: {error}"
        ) from None
    except etcd.EtcdConnectionFailed as error:
        raise TryAgainError.from_error(error.cause or error, url, options) from None
    except etcd.EtcdLeaderElectionInProgress as error:
        raise TryAgainError(str(error)) from None
    except etcd.EtcdException as error:
        status = (error.payload or {}).get("status")
        if status is None or status >= 500:  # not JSON, or an internal error of the server
            raise TryAgainError(str(error)) from None
        raise StoreRefusedError(f"etcd: {error} (HTTP status {status})") from None


class Clients:
    """The clients of all endpoints, with the present password and certificates.

    Safe to use from several threads.
    """

    def __init__(self, urls: tuple[str, ...], options: StoreOptions) -> None:
        self._urls, self._options = urls, options
        self._password = renewable_password(options)
        self._tls = renewable_tls(options, any(url.startswith("https") for url in urls))
        self._lock = threading.Lock()
        self._access = self._new()

    def close(self) -> None:
        """Close the connections."""
        self._access.pool.clear()

    def _new(self) -> Access:
        password, context = self._password.value, self._tls.value
        urls = self._urls
        pool = urllib3.PoolManager(num_pools=len(urls), maxsize=8, retries=False, ssl_context=context)
        return Access(password, context, pool, {url: self.client(url, pool, password) for url in urls})

    def current(self) -> Access:
        """Return clients with the present password and certificates."""
        with self._lock:
            access = self._access
            if access.password is not self._password.value or access.context is not self._tls.value:
                self._access = self._new()  # requests under way keep the old pool
            return self._access

    def ask(self, request: Callable[[], T], access: Access, url: str) -> T:
        """Run one request to the endpoint `url` as `translate` does.

        Raises TryAgainError if a refused credential was replaced.
        """
        try:
            return translate(request, url, self._options)
        except StoreAuthError as error:
            if self._password.renew(access.password):
                raise TryAgainError("the password has changed", sent=False) from None
            file, problem = self._options.password_file, self._password.problem
            where = f"; {file} is read again" if file is not None else ""
            raise StoreAuthError(f"{error}{where}" + (f"; {problem}" if problem else "")) from None
        except TryAgainError as error:
            # a server may close the connection before its refusal of a certificate is read
            if error.sent and self._tls.renew(access.context):
                error.refused = ""
            raise

    def client(self, url: str, pool: urllib3.PoolManager, password: str | None) -> Client:
        """Return a client of one endpoint that uses the connections of `pool`."""
        parts = urlsplit(url)
        client = Client(
            host=f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname,
            port=parts.port,
            protocol=parts.scheme,
            username=self._options.user,
            password=password,
            allow_redirect=False,
            # a reconnect would use the URLs that the members advertise, which may not be reachable
            allow_reconnect=False,
            read_timeout=self._options.timeout,
        )
        client.http = pool  # replaced: one TLS context for all, and no settings from the environment
        return client
