"""Find out which API an etcd speaks, and connect to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from adaptdl_elastic.rendezvous._http import Http, HttpStatusError
from adaptdl_elastic.rendezvous.options import StoreOptionError, StoreOptions, parse_endpoints
from adaptdl_elastic.rendezvous.store import Store, StoreError

__all__ = ["API_NAMES", "Api", "StoreOptionError", "StoreOptions", "connect"]

Api = Literal["auto", "v2", "v3"]
API_NAMES = ("auto", "v2", "v3")  # for --etcd-api


def connect(endpoint: str, *, api: Api = "auto", options: StoreOptions | None = None) -> Store:
    """The store at `host:port[,host:port…]` (`https://…` for TLS); v3 is preferred where both answer.

    Options default to what the environment says (`StoreOptions.from_environment`). Raises
    StoreUnavailableError when nobody answers in time, StoreAuthError when we are refused, and
    StoreOptionError for an endpoint that is none.
    """
    if api not in API_NAMES:
        raise StoreOptionError(f"--etcd-api is {api!r}; it can be {', '.join(API_NAMES)}")
    options = options or StoreOptions.from_environment()
    endpoints = parse_endpoints(endpoint, options.secure)
    found = api if api != "auto" else _detect(endpoints, options)
    if found == "v3":
        from adaptdl_elastic.rendezvous.etcd_v3 import EtcdV3Store

        v3 = EtcdV3Store(endpoints, options)
        _or_close(v3, v3.check)
        return v3
    from adaptdl_elastic.rendezvous.etcd_v2 import EtcdV2Store

    v2 = EtcdV2Store(endpoints, options)
    _or_close(v2, v2.check)
    return v2


def _detect(endpoints: tuple[str, ...], options: StoreOptions) -> Api:
    http = Http(endpoints, options, lambda error: error.status in (502, 503, 504))
    try:
        # 404 is the only answer that a server gives which has no such API; any other is for the driver
        if _answers(http, "/v3/kv/range", {"key": "AA==", "count_only": True}):
            return "v3"
        if _answers(http, "/v2/keys/", None):
            return "v2"
    finally:
        http.close()
    raise StoreError(
        f"{endpoints[0]} answers, but neither etcd's v3 gateway nor its v2 API is there: is it an etcd, "
        f"of version 3.4 or later or with --enable-v2?"
    )


def _answers(http: Http, path: str, body: dict[str, object] | None) -> bool:
    try:
        http.call(path, body)
    except HttpStatusError as error:
        return error.status not in (404, 405, 501)
    return True


def _or_close(store: Store, check: Callable[[], None]) -> None:
    try:
        check()
    except BaseException:
        store.close()
        raise
