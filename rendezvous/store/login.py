"""Log an etcd user in with the v3 API: exchange the password for a token, again when the token expires."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from adaptdl_elastic.rendezvous.store.base import StoreAuthError
from adaptdl_elastic.rendezvous.store.credentials import renewable_password
from adaptdl_elastic.rendezvous.store.http import HttpStatusError
from adaptdl_elastic.rendezvous.store.store_options import StoreOptions

SAME_PASSWORD_AFTER = 1.0
"""Seconds until a refused password is tried again. etcd computes a slow hash for each attempt."""


class Login:
    """The login of one user; keeps the token. Safe to use from several threads.

    Args:
        options: user, password and password file.
        authenticate: asks the server for a token, given user and password; raises HttpStatusError.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        options: StoreOptions,
        authenticate: Callable[[str, str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options, self._authenticate, self._clock = options, authenticate, clock
        self._password = renewable_password(options)
        self._lock = threading.Lock()
        self._token: str | None = None
        self._refusal = ""
        self._not_before = float("-inf")  # by `clock`: when a refused password may be tried again

    def headers(self) -> dict[str, str]:
        """Return the headers of a request; log in first if there is no token.

        Raises:
            StoreAuthError: the password is refused, and so is the one in the password file now.
        """
        if self._options.user is None:
            return {}
        with self._lock:
            if self._token is None:
                self._token = self._log_in(self._options.user)
            return {"Authorization": self._token}

    def cached_headers(self) -> dict[str, str]:
        """Return the headers of a request without logging in: with the token, if there is one."""
        with self._lock:
            return {} if self._token is None else {"Authorization": self._token}

    def forget(self, headers: dict[str, str]) -> None:
        """Drop the token in these headers because the server refuses it."""
        with self._lock:
            if self._token == headers.get("Authorization"):
                self._token = None

    def _log_in(self, user: str) -> str:
        password = self._password.value
        if self._clock() < self._not_before and not self._password.renew(password):
            raise self._refused()
        while True:
            password = self._password.value
            try:
                return self._authenticate(user, password or "")
            except HttpStatusError as error:
                if "authentication failed" not in error.message:
                    raise
                self._refusal = error.message
            if not self._password.renew(password):
                self._not_before = self._clock() + SAME_PASSWORD_AFTER
                raise self._refused()

    def _refused(self) -> StoreAuthError:
        file, problem = self._options.password_file, self._password.problem
        where = f" in {file}, which is read again" if file is not None else ""
        return StoreAuthError(
            f"etcd refused the login ({self._refusal}): {self._options.hint_if_refused}{where}"
            + (f"; {problem}" if problem else "")
        )
