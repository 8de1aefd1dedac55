"""Passwords and certificates that are replaced in their files while a store is in use.

What a store was given at its start is used until the server refuses it; then the files are read again. So it
does not matter whether an administrator replaces a file before or after the server learns of it.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from adaptdl_elastic.rendezvous.store.store_options import StoreOptionError, StoreOptions

T = TypeVar("T")


class Renewable(Generic[T]):
    """One credential. Safe to use from several threads.

    Args:
        read: returns what the files hold; StoreOptionError if they cannot be read.
        make: makes the credential of that; StoreOptionError if it cannot be used.
    """

    def __init__(self, read: Callable[[], Any], make: Callable[[Any], T]) -> None:
        self._read, self._make = read, make
        self._lock = threading.Lock()
        self._content = read()
        self.value = make(self._content)
        self.problem = ""
        """Why the files' present content is not used."""

    def renew(self, refused: T) -> bool:
        """Read the files again; return True if `value` is another one now than the one that was refused."""
        with self._lock:
            if self.value is not refused:
                return True  # another thread has renewed it
            try:
                content = self._read()
                if content != self._content:
                    self.value = self._make(content)
            except StoreOptionError as error:
                self.problem = str(error)
                return False
            self._content, self.problem = content, ""
            return self.value is not refused


def renewable_password(options: StoreOptions) -> Renewable[str | None]:
    """Return the password of an etcd user; None if there is none."""
    return Renewable(options.current_password, lambda password: password)


def renewable_tls(options: StoreOptions, secure: bool) -> Renewable[ssl.SSLContext | None]:
    """Return a TLS context of the certificates; None if no endpoint is `secure`."""
    if not secure:
        return Renewable(lambda: None, lambda _: None)
    return Renewable(options.certificates, lambda _: options.ssl_context())
