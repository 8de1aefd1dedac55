"""Manage users of etcd through its JSON gateway."""

from __future__ import annotations

from typing import Any

from adaptdl_elastic.rendezvous.store.base import Closable, StoreError
from adaptdl_elastic.rendezvous.store.http import Http, HttpStatusError, Json
from adaptdl_elastic.rendezvous.store.store_options import StoreOptions

_READY_SECONDS = 60.0  # that a server may need until it has a leader


class EtcdError(Exception):
    """etcd does not start, or refuses what it is asked; the message says why."""


class EtcdGateway(Closable):
    """etcd's requests about users.

    Args:
        endpoint: URL of etcd.
        options: Certificates.
    """

    def __init__(self, endpoint: str, options: StoreOptions) -> None:
        self._endpoint = endpoint
        # a server that has just begun to listen has no leader yet
        self._http = Http((endpoint,), options, lambda error: error.status == 503)
        self._headers: dict[str, str] = {}

    def ask(self, path: str, **body: Any) -> tuple[int, str]:
        """Return 200 and "", or the status and the text of an error."""
        try:
            self._call(path, body)
        except HttpStatusError as error:
            return error.status, error.message
        except StoreError as error:
            return 503, str(error)
        return 200, ""

    def must(self, path: str, **body: Any) -> None:
        """Send a request; raise EtcdError unless etcd carries it out now or has done so before."""
        status, said = self.ask(path, **body)
        if status != 200 and "already" not in said:
            raise EtcdError(f"etcd refuses {path}: {said}")

    def log_in(self, user: str, password: str) -> None:
        """Ask as this user from now on; EtcdError if etcd does not let the user in."""
        try:
            answer = self._call("authenticate", {"name": user, "password": password})
        except (HttpStatusError, StoreError) as error:
            raise EtcdError(f"etcd at {self._endpoint} does not let {user} in: {error}") from None
        self._headers = {"Authorization": str(answer["token"])}

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _call(self, path: str, body: dict[str, Any]) -> Json:
        return self._http.call(f"/v3/auth/{path}", body, headers=self._headers, timeout=_READY_SECONDS)


def etcd_warning(version: tuple[int, ...]) -> str:
    """Return why this version of etcd is not for data that matter; "" if nothing is known against it."""
    text = ".".join(map(str, version))
    if (3, 5) <= version[:2] < (3, 6) and version < (3, 5, 6):
        return f"etcd {text} can lose data when it is killed: 3.5.6 or later does not (--etcd)"
    if version < (3, 4, 22):
        return f"etcd {text} is old: 3.4.22, 3.5.6 or later is wanted (--etcd)"
    return ""
