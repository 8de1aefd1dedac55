"""Passwords and certificates that may be replaced in their files while a store is in use.

A credential is used until the server refuses it; then its files are read again. So an administrator may
replace a file before or after the server learns of the new credential.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from adaptdl_elastic.rendezvous.store.store_options import StoreOptionError, StoreOptions

T = TypeVar("T")


class Renewable(Generic[T]):
    """A credential that can be read again from its files. Safe to use from several threads.

    Args:
        read: returns the content of the files; raises StoreOptionError if they cannot be read.
        make: makes the credential from that content; raises StoreOptionError if it cannot be used.
    """

    def __init__(self, read: Callable[[], Any], make: Callable[[Any], T]) -> None:
        self._read, self._make = read, make
        self._lock = threading.Lock()
        self._content = read()
        self.value = make(self._content)
        self.problem = ""
        """Why the present content of the files is not used; "" if it is."""

    def renew(self, refused: T) -> bool:
        """Read the files again; return whether `value` now differs from the one that was refused."""
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
    """Return the password of an etcd user; its value is None if there is none."""
    return Renewable(options.current_password, lambda password: password)


def renewable_tls(options: StoreOptions, secure: bool) -> Renewable[ssl.SSLContext | None]:
    """Return the TLS context made from the certificates; its value is None if no endpoint is `secure`."""
    if not secure:
        return Renewable(lambda: None, lambda _: None)
    return Renewable(options.certificates, lambda _: options.ssl_context())
