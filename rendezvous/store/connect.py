"""Connect to a store: find out which API an etcd speaks, or find a standalone job's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import urllib3

from adaptdl_elastic.rendezvous.store.base import Store, StoreError
from adaptdl_elastic.rendezvous.store.http import Http, HttpStatusError
from adaptdl_elastic.rendezvous.store.local_socket import LocalStore, is_local, socket_path
from adaptdl_elastic.rendezvous.store.plan_store import PlanStore
from adaptdl_elastic.rendezvous.store.store_options import StoreOptionError, StoreOptions, parse_endpoints

__all__ = ["API_NAMES", "Api", "StoreOptionError", "StoreOptions", "connect"]

Api = Literal["auto", "v2", "v3"]
API_NAMES = ("auto", "v2", "v3")  # for --etcd-api


def connect(endpoint: str, *, api: Api = "auto", options: StoreOptions | None = None) -> PlanStore:
    """The store at `host:port[,host:port…]` (`https://…` for TLS); v3 is preferred where both answer.

    `unix:/path` is the socket of a standalone job: of the options only the time-out means anything to it.
    Options default to what the environment says (`StoreOptions.from_environment`). Raises
    StoreUnavailableError when nobody answers in time, StoreAuthError when we are refused, and
    StoreOptionError for an endpoint that is none.
    """
    if api not in API_NAMES:
        raise StoreOptionError(f"--etcd-api is {api!r}; it can be {', '.join(API_NAMES)}")
    options = options or StoreOptions.from_environment()
    if is_local(endpoint):
        local = LocalStore(socket_path(endpoint), options.timeout)
        _or_close(local, local.check)
        return PlanStore(local)
    endpoints = parse_endpoints(endpoint, options.secure)
    found = _find_api(endpoints, options, api)
    if found == "v3":
        from adaptdl_elastic.rendezvous.store.etcd_v3 import EtcdV3Store

        v3 = EtcdV3Store(endpoints, options)
        _or_close(v3, v3.check)
        return PlanStore(v3)
    from adaptdl_elastic.rendezvous.store.etcd_v2 import EtcdV2Store

    v2 = EtcdV2Store(endpoints, options)
    _or_close(v2, v2.check)
    return PlanStore(v2)


_PROBES: dict[str, tuple[str, dict[str, object] | None]] = {
    "v3": ("/v3/kv/range", {"key": "AA==", "count_only": True}),
    "v2": ("/v2/keys/", None),
}
_MISSING = {
    "auto": "neither etcd's v3 gateway nor its v2 API is there: is it an etcd, of version 3.4 or later?",
    "v2": "it has no v2 API: start it with --enable-v2 (gone from etcd 3.6 on), or leave --etcd-api away",
    "v3": "it has no v3 gateway: is it an etcd, of version 3.4 or later?",
}


def _find_api(endpoints: tuple[str, ...], options: StoreOptions, wanted: Api) -> str:
    http = Http(endpoints, options, lambda error: error.status in (502, 503, 504))
    try:
        for api, (path, body) in _PROBES.items():
            if wanted in ("auto", api) and _answers(http, path, body, _credentials(options, api)):
                return api
    finally:
        http.close()
    raise StoreError(f"{', '.join(endpoints)} answers, but {_MISSING[wanted]}")


def _credentials(options: StoreOptions, api: str) -> dict[str, str]:
    """Return the headers of a probe."""
    # the v2 API hangs up on a client certificate without a common name that comes without a user
    if api != "v2" or options.user is None:
        return {}
    return urllib3.make_headers(basic_auth=f"{options.user}:{options.current_password()}")


def _answers(http: Http, path: str, body: dict[str, object] | None, headers: dict[str, str]) -> bool:
    # 404 is what a server answers that has no such API; anything else is for the driver to deal with
    try:
        http.call(path, body, headers=headers)
    except HttpStatusError as error:
        return error.status not in (404, 405, 501)
    return True


def _or_close(store: Store, check: Callable[[], None]) -> None:
    try:
        check()
    except BaseException:
        store.close()
        raise
