"""Manage users of etcd through its JSON gateway."""

from __future__ import annotations

import json
import time
from typing import Any

import urllib3

_READY_SECONDS = 60.0  # that a server may need until it has a leader
_REQUEST_SECONDS = 10.0
_LOOK_SECONDS = 0.05


class EtcdError(Exception):
    """etcd does not start, or refuses what it is asked; the message says why."""


class EtcdGateway:
    """etcd's requests about users.

    Args:
        pool: Makes the requests.
        endpoint: URL of etcd.
    """

    def __init__(self, pool: urllib3.PoolManager, endpoint: str) -> None:
        self._pool, self._endpoint = pool, endpoint
        self._headers: dict[str, str] = {}

    def ask(self, path: str, **body: Any) -> tuple[int, str]:
        """Return status and text of the answer."""
        url = f"{self._endpoint}/v3/auth/{path}"
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            try:
                answer = self._pool.request(
                    "POST", url, json=body, headers=self._headers, timeout=_REQUEST_SECONDS
                )
            except urllib3.exceptions.HTTPError as error:
                status, text = 503, str(error)
            else:
                status, text = answer.status, answer.data.decode(errors="replace")
            # a server that has just begun to listen has no leader yet
            if status != 503 or time.monotonic() > deadline:
                return status, text
            time.sleep(_LOOK_SECONDS)

    def must(self, path: str, **body: Any) -> None:
        """Send a request; raise EtcdError unless etcd carries it out now or has done so before."""
        status, said = self.ask(path, **body)
        if status != 200 and "already" not in said:
            raise EtcdError(f"etcd refuses {path}: {said}")

    def log_in(self, user: str, password: str) -> None:
        """Ask as this user from now on; EtcdError if etcd does not let the user in."""
        status, said = self.ask("authenticate", name=user, password=password)
        if status != 200:
            raise EtcdError(f"etcd at {self._endpoint} does not let {user} in: {said.strip()}")
        self._headers = {"Authorization": str(json.loads(said)["token"]), "Content-Type": "application/json"}
