"""Who is let in: TLS with a CA and client certificates, users and roles, on every server and API."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import certificates
import pytest
from etcd_binaries import etcd_binary
from etcd_server import EtcdServer, ServerTls
from guarded_etcd import GuardedEtcd

from adaptdl_elastic.rendezvous.store.base import StoreAuthError, StoreError, StoreUnavailableError
from adaptdl_elastic.rendezvous.store.connect import StoreOptions, connect
from adaptdl_elastic.rendezvous.store.store_options import StoreOptionError

pytestmark = pytest.mark.etcd
KINDS = [("v3", "3.5"), ("v2", "3.5"), ("v3", "3.4"), ("v2", "3.4")]


@pytest.fixture(scope="module")
def pems(tmp_path_factory: pytest.TempPathFactory) -> certificates.Certificates:
    return certificates.make(tmp_path_factory.mktemp("pem"))


def binary_or_skip(version: str) -> Path:
    return etcd_binary(version) or pytest.skip(f"no etcd {version} here")


@pytest.mark.parametrize(("api", "version"), [KINDS[0], KINDS[-1]])
def test_tls_with_client_certificates(api, version, pems, monkeypatch, collect):
    # what requests would believe more than what we say
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(pems.other_ca))
    monkeypatch.setenv("SSL_CERT_FILE", str(pems.other_ca))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    tls = ServerTls(pems.server.cert, pems.server.key, client_ca=pems.ca)
    ours = {"ca": pems.ca, "cert": pems.client.cert, "key": pems.client.key}
    with EtcdServer(binary=binary_or_skip(version), v2=api == "v2", tls=tls) as server:
        with connect(server.endpoint, api=api, options=StoreOptions(timeout=60, **ours)) as store:
            lease = store.lease(12)
            revision = store.put("/adaptdl/v1/c/a", "1", lease)
            seen = collect(store.watch("/adaptdl/v1/c/", revision))
            store.put("/adaptdl/v1/c/a", "2")
            assert [change.value for change in seen.wait(2)] == ["1", "2"]
            server.kill()
            server.start()
            store.put("/adaptdl/v1/c/a", "3")
            assert seen.wait(3)[2].value == "3"
        with pytest.raises(StoreAuthError, match=r"TLS with etcd is refused .*CERTIFICATE_VERIFY_FAILED"):
            connect(
                server.endpoint, api=api, options=StoreOptions(timeout=60, **{**ours, "ca": pems.other_ca})
            )
        with pytest.raises(StoreAuthError, match="the client certificate is not accepted"):
            connect(server.endpoint, api=api, options=StoreOptions(timeout=60, ca=pems.ca))
        server.kill()
        with pytest.raises(StoreUnavailableError, match="cannot be reached"):
            connect(server.endpoint, api=api, options=StoreOptions(timeout=1, **ours))
        server.start()
        bare = server.endpoint.removeprefix("https://")
        with pytest.raises(StoreError):  # plain HTTP to a TLS port
            connect(bare, api=api, options=StoreOptions(timeout=1))


@pytest.fixture(params=KINDS, ids="-".join)
def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, GuardedEtcd]]:
    """An API, and an etcd whose user may do everything under one prefix, as security.md sets it up."""
    api, version = request.param
    binary = binary_or_skip(version)
    with GuardedEtcd(tmp_path, api=api, binary=binary, root="/adaptdl/v1/one/") as made:
        yield api, made


def test_users_and_roles(guarded, collect):
    api, server = guarded
    with connect(server.etcd.endpoint, api=api, options=server.options()) as store:
        lease = store.lease(12)
        revision = store.put("/adaptdl/v1/one/a", "1", lease)
        seen = collect(store.watch("/adaptdl/v1/one/", revision))
        assert store.compare_and_swap("/adaptdl/v1/one/a", "2", revision, lease)
        assert len(store.range("/adaptdl/v1/one/").items) == 1
        seen.wait(2)
        server.restart()  # forgets every token
        store.put("/adaptdl/v1/one/a", "3")
        assert seen.wait(3)[2].value == "3"
        assert not lease.lost.wait(5.0)  # it is renewed after four
        for forbidden in (
            lambda: store.put("/adaptdl/v1/two/a", "1"),
            lambda: store.range("/adaptdl/v1/"),
            lambda: next(iter(store.watch("/adaptdl/v1/two/", 1))),
        ):
            with pytest.raises(StoreAuthError, match=r"role needs readwrite|v2 role does not cover"):
                forbidden()


WRONG = [
    ({"password": "wrong-secret"}, "refused the login|password is wrong"),
    ({"user": "nobody", "password": "wrong-secret"}, "refused the login|password is wrong"),
    ({"user": None, "password": None}, "asks for a user|v2 role does not cover"),
]


def test_wrong_credentials_are_found_out_at_once(guarded, tmp_path):
    api, server = guarded
    # etcd's v2 API breaks a connection off that has neither a user nor a certificate with a name
    pair = certificates.issue(tmp_path, "stranger", server.authority, common_name=api == "v2")
    for given, wanted in WRONG:
        options = replace(server.options(), cert=pair.cert, key=pair.key, password_file=None, **given)
        with (
            pytest.raises(StoreAuthError, match=wanted) as caught,
            connect(server.etcd.endpoint, api=api, options=options) as store,
        ):
            store.get("/adaptdl/v1/one/a")
        assert "secret" not in str(caught.value)


def test_options_from_the_environment(tmp_path):
    password = tmp_path / "password"
    password.write_text("s3cret\n")
    options = StoreOptions.from_environment(
        {
            "ADAPTDL_ETCD_USER": "adaptdl",
            "ADAPTDL_ETCD_PASSWORD_FILE": str(password),
            "ADAPTDL_ETCD_TIMEOUT": "2.5",
        },
        user=None,
    )
    assert (options.user, options.password, options.timeout) == ("adaptdl", "s3cret", 2.5)
    assert "s3cret" not in repr(options)
    assert StoreOptions.from_environment({"ADAPTDL_ETCD_TIMEOUT": "2"}, timeout=3.0).timeout == 3.0


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"ADAPTDL_ETCD_TIMEOUT": "soon"}, "'soon', not a number"),
        ({"ADAPTDL_ETCD_TIMEOUT": "-1"}, "must be a finite, positive number of seconds, not -1"),
        ({"ADAPTDL_ETCD_USER": "adaptdl"}, "needs a password"),
        ({"ADAPTDL_ETCD_CERT": "/dev/null"}, "needs its key"),
        ({"ADAPTDL_ETCD_CA": "/nowhere/ca.pem"}, "'/nowhere/ca.pem' cannot be read"),
        ({"ADAPTDL_ETCD_PASSWORD_FILE": "/nowhere/pw"}, "cannot be read"),
        ({"ADAPTDL_ETCD_PASSWORD_FILE": "/dev/null"}, "is empty"),
    ],
)
def test_options_that_can_not_be(environ, wanted):
    with pytest.raises(StoreOptionError, match=wanted):
        StoreOptions.from_environment(environ)


def test_a_file_that_is_no_certificate(tmp_path):
    junk = tmp_path / "ca.pem"
    junk.write_text("junk")
    with pytest.raises(StoreOptionError, match="not usable"):
        connect("127.0.0.1:1", options=StoreOptions(ca=junk))
