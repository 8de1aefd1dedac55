"""Connect to a store: choose the driver that fits the endpoint and the API that the server speaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import urllib3

from adaptdl_elastic.extensions import ExtensionError
from adaptdl_elastic.rendezvous.store.base import Store, StoreError
from adaptdl_elastic.rendezvous.store.http import Http, HttpStatusError
from adaptdl_elastic.rendezvous.store.local_socket import LocalStore, is_local, socket_path
from adaptdl_elastic.rendezvous.store.store_options import (
    STORES,
    StoreOptionError,
    StoreOptions,
    foreign_scheme,
    parse_endpoints,
)

__all__ = ["API_NAMES", "Api", "StoreOptionError", "StoreOptions", "connect"]

Api = Literal["auto", "v2", "v3"]
API_NAMES = ("auto", "v2", "v3")  # values of --etcd-api


def connect(endpoint: str, *, api: Api = "auto", options: StoreOptions | None = None) -> Store:
    """Return the store at `host:port[,host:port…]` or `unix:/path`.

    Args:
        endpoint: `host:port[,host:port…]` of an etcd (`https://…` for TLS), or `unix:/path`, the socket of a
            standalone job, for which only the time-out of the options matters, or `scheme://host:port` of a
            store of another package.
        api: which API to use; "auto" prefers v3 if the server answers on both.
        options: time-out and credentials; None: from the environment (`StoreOptions.from_environment`).

    Raises:
        StoreUnavailableError: no endpoint answers in time.
        StoreAuthError: the credentials are refused.
        StoreOptionError: the endpoint or the API is invalid.
    """
    if api not in API_NAMES:
        raise StoreOptionError(f"--etcd-api is {api!r}; it can be {', '.join(API_NAMES)}")
    options = options or StoreOptions.from_environment()
    if is_local(endpoint):
        local = LocalStore(socket_path(endpoint), options.timeout)
        _or_close(local, local.check)
        return local
    endpoints = parse_endpoints(endpoint, options.secure)
    if scheme := foreign_scheme(endpoint):
        return _of_another_package(scheme, endpoint, options)
    found = _find_api(endpoints, options, api)
    if found == "v3":
        from adaptdl_elastic.rendezvous.store.etcd_v3 import EtcdV3Store

        v3 = EtcdV3Store(endpoints, options)
        _or_close(v3, v3.check)
        return v3
    from adaptdl_elastic.rendezvous.store.etcd_v2 import EtcdV2Store

    v2 = EtcdV2Store(endpoints, options)
    _or_close(v2, v2.check)
    return v2


def _of_another_package(scheme: str, endpoint: str, options: StoreOptions) -> Store:
    try:
        store = STORES.load(scheme)(endpoint, options)
    except ExtensionError as error:
        raise StoreOptionError(str(error)) from None
    if not isinstance(store, Store):
        raise StoreOptionError(f"the store {scheme!r} of {STORES.origin(scheme)} gives {store!r}, no Store")
    return store


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
    # the v2 API closes a connection with a client certificate without a common name unless a user is given
    if api != "v2" or options.user is None:
        return {}
    return urllib3.make_headers(basic_auth=f"{options.user}:{options.current_password()}")


def _answers(http: Http, path: str, body: dict[str, object] | None, headers: dict[str, str]) -> bool:
    # 404 means that the server has no such API; all other errors are left to the driver
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
