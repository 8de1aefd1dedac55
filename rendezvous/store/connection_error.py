"""Say why an endpoint of etcd gave no answer, and what to do about it."""

from __future__ import annotations

import ssl

import urllib3

from adaptdl_elastic.rendezvous.store.store_options import StoreOptions

NO_ETCD = "answers, but not as an etcd does"
"""The summary of an answer that etcd would not give."""

_RENAME = "write the endpoint with a name that the certificate is for, or have it issued again"
_TRUST = {
    "Hostname mismatch": _RENAME,
    "IP address mismatch": _RENAME,
    "expired": "renew the server's certificate; or is the clock of this machine wrong?",
    "not yet valid": "the clock of this machine or of the one that issued it is wrong: run an NTP client",
}


class TryAgainError(Exception):
    """An endpoint gave no answer; another endpoint, or the same one later, may give one.

    Args:
        problem: what went wrong, for messages.
        sent: the request was sent, so it may have been carried out.
        refused: which certificate was refused (the server's or the client's), so that a retry is useless; ""
            for other problems.
        timed_out: the time of the attempt was over before the endpoint answered.
        remedy: what to do about it.
        summary: the problem as a verb phrase whose subject is the endpoint.
    """

    def __init__(
        self,
        problem: str,
        *,
        sent: bool = True,
        refused: str = "",
        timed_out: bool = False,
        remedy: str = "is this etcd's port for clients (2379)?",
        summary: str = NO_ETCD,
    ) -> None:
        super().__init__(problem)
        self.problem, self.remedy, self.summary = problem, remedy, summary
        self.sent, self.refused, self.timed_out = sent, refused, timed_out

    @classmethod
    def from_error(cls, error: BaseException, url: str, options: StoreOptions) -> TryAgainError:
        """Translate the error of a failed request to the endpoint `url`."""
        if isinstance(error, urllib3.exceptions.SSLError | ssl.SSLError):
            return cls._from_tls(error, url, options)
        text = f"{type(error).__name__}: {error}"
        silent = "does not answer"
        # first the kinds that urllib3 derives from others
        if isinstance(error, urllib3.exceptions.NameResolutionError | urllib3.exceptions.LocationParseError):
            told = "correct the name in --etcd (ADAPTDL_ETCD), or add it to DNS or /etc/hosts"
            return cls(str(error).rpartition(": ")[2], sent=False, summary=silent, remedy=told)
        listens = "is etcd running, does it listen on that address, is a firewall between?"
        if isinstance(error, urllib3.exceptions.NewConnectionError):
            text = "connection refused" if "refused" in str(error) else str(error).rpartition(": ")[2]
            return cls(text, sent=False, summary=silent, remedy=listens)
        if isinstance(error, urllib3.exceptions.ConnectTimeoutError):
            return cls("no connection in time", sent=False, timed_out=True, summary=silent, remedy=listens)
        if isinstance(error, urllib3.exceptions.TimeoutError | TimeoutError):
            told = "see etcd's own log: it hangs, or is no etcd"
            return cls("no answer in time", timed_out=True, summary=silent, remedy=told)
        # the server may close the connection before its answer is read
        if url.startswith("https:") and "reset by peer" in text.lower():
            return cls._from_tls(error, url, options, text)
        return cls(text)

    @classmethod
    def _from_tls(
        cls, error: BaseException, url: str, options: StoreOptions, text: str = ""
    ) -> TryAgainError:
        text = text or f"TLS: {error}"
        if "CERTIFICATE_VERIFY_FAILED" in text:
            given = f"is not the one of {options.ca}: give" if options.ca else "is not known here: give"
            authority = f"the CA that has signed it {given} that one with --etcd-ca (ADAPTDL_ETCD_CA)"
            return cls(
                text,
                refused="the server's certificate is not trusted here",
                summary="shows a certificate that is not trusted",
                remedy=next((remedy for word, remedy in _TRUST.items() if word in text), authority),
            )
        if "alert" in text:
            other = f" other than {options.cert}" if options.cert else ""
            told = "give one that its CA has signed with --etcd-cert and --etcd-key"
            told += " (ADAPTDL_ETCD_CERT, ADAPTDL_ETCD_KEY)"
            refused = "the client certificate is not accepted"
            return cls(text, refused=refused, summary=f"asks for a client certificate{other}", remedy=told)
        plain = url.replace("https:", "http:", 1)
        told = f"write {plain} and leave --etcd-ca and --etcd-cert away, or have etcd listen on https"
        return cls(text, summary="does not speak TLS", remedy=told)
