"""Decide which requests the page's server lets in. Pure.

The server listens on loopback, which every user and every web page of this machine can reach. So

* the `Host` header has to name the server, or a page of another site could read it under a name of its own
  that leads to 127.0.0.1 (DNS rebinding);
* a browser is let in by the token in the printed address, and afterwards by a cookie that scripts cannot
  read and that other sites' pages do not send;
* a request that changes something also needs the header that only a script of this very page can send, and
  an `Origin` that is the server's own.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

CSRF_HEADER = "X-Adaptdl-Request"

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every answer."""


@dataclass(frozen=True)
class Guard:
    """The secrets of one server, and the checks of requests by them.

    Attributes:
        port: Port of the server.
        token: Secret in the printed address.
        session: Value of the cookie.
        csrf: Value of `CSRF_HEADER`.
    """

    port: int
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    session: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    csrf: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The values of `Host` under which the server may be asked."""
        return tuple(f"{name}:{self.port}" for name in ("127.0.0.1", "localhost", "[::1]"))

    @property
    def cookie(self) -> str:
        """The header that gives a browser its cookie."""
        return f"{self._cookie_name}={self.session}; Path=/; HttpOnly; SameSite=Strict"

    @property
    def _cookie_name(self) -> str:
        return f"adaptdl-{self.port}"  # a browser sends the cookies of all ports of a host

    def wrong_host(self, host: str | None) -> bool:
        """Return whether a request is for another host than this server."""
        return host not in self.hosts

    def right_token(self, token: str) -> bool:
        """Return whether this is the token of the printed address."""
        return hmac.compare_digest(token.encode(), self.token.encode())

    def has_session(self, cookies: str | None) -> bool:
        """Return whether a request has the cookie."""
        # not by SimpleCookie: it drops all cookies if it rejects that of another program on this host
        for pair in (cookies or "").split(";"):
            name, _, value = pair.strip().partition("=")
            if name == self._cookie_name and hmac.compare_digest(value.encode(), self.session.encode()):
                return True
        return False

    def why_no_change(self, headers: Mapping[str, str]) -> str:
        """Return why a request may not change anything; "" if it may."""
        if headers.get("Origin") not in tuple(f"http://{host}" for host in self.hosts):
            return "it does not come from this page"
        if headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            return "it comes from another site"
        if not hmac.compare_digest(headers.get(CSRF_HEADER, "").encode(), self.csrf.encode()):
            return "it does not have this page's token; load the page again"
        if headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            return "its body is not JSON"
        return ""
