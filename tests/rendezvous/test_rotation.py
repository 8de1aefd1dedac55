"""Passwords and certificates are replaced while a store is in use: the files are read again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import certificates
import pytest
from etcd_binaries import etcd_binary
from guarded_etcd import FIRST_PASSWORD, GuardedEtcd

from adaptdl_elastic.rendezvous.store.base import LeaseLostError, Store, StoreAuthError
from adaptdl_elastic.rendezvous.store.connect import Api, connect

# CPython does not close an SSLSocket whose peer has gone before the handshake began (ssl.SSLSocket._create):
# such a socket has a local address and no remote one
_NEVER_CONNECTED = pytest.mark.filterwarnings(
    r"ignore:Exception ignored in. <ssl.SSLSocket [^>]*laddr=\('[^']*', \d+\)>"
    ":pytest.PytestUnraisableExceptionWarning"
)
pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.timeout(300), _NEVER_CONNECTED]
ROOT = "/adaptdl/v1/default/"
NEXT_PASSWORD = "second-password"
KINDS: list[tuple[Api, str]] = [("v3", "3.5"), ("v2", "3.5")]
SOON = 60.0  # seconds, for what is only waited for when a test fails


def binary_or_skip(version: str) -> Path:
    return etcd_binary(version) or pytest.skip(f"no etcd {version} here")


@pytest.fixture(params=KINDS, ids="-".join)
def kind(request: pytest.FixtureRequest) -> tuple[Api, str]:
    return request.param


@pytest.fixture
def guarded(kind: tuple[Api, str], tmp_path: Path) -> Iterator[GuardedEtcd]:
    with GuardedEtcd(tmp_path, api=kind[0], binary=binary_or_skip(kind[1])) as made:
        yield made


@pytest.fixture
def store(kind: tuple[Api, str], guarded: GuardedEtcd) -> Iterator[Store]:
    with connect(guarded.etcd.endpoint, api=kind[0], options=guarded.options()) as made:
        yield made


@pytest.fixture
def other(kind: tuple[Api, str], guarded: GuardedEtcd) -> Iterator[Store]:
    """An administrator's, which is let in throughout."""
    with connect(guarded.etcd.endpoint, api=kind[0], options=guarded.admin_options()) as made:
        yield made


def test_a_password_whose_file_was_written_first_is_never_refused(kind, guarded, store, collect):
    lease = store.lease(15)  # with users every request of the v2 API is slow
    seen = collect(store.watch(ROOT, store.put(f"{ROOT}a", "1", lease)))
    guarded.write_password(NEXT_PASSWORD)
    store.put(f"{ROOT}a", "2", lease)  # by the password of before
    guarded.change_password(NEXT_PASSWORD)
    for value in ("3", "4"):
        store.put(f"{ROOT}a", value, lease)
    assert [change.value for change in seen.wait(4)] == ["1", "2", "3", "4"]
    assert not lease.lost.wait(lease.ttl + 1)


@pytest.mark.essential
def test_a_password_that_is_refused_is_read_again_from_its_file(guarded, store, other, collect):
    seen = collect(store.watch(ROOT, store.put(f"{ROOT}a", "1")))
    seen.wait(1)
    guarded.change_password(NEXT_PASSWORD)
    for _ in range(2):
        with pytest.raises(StoreAuthError, match="password") as refused:
            store.put(f"{ROOT}a", "2")
    assert str(guarded.password_file) in str(refused.value)
    guarded.restart()  # what waits for changes has to ask again, and is refused, too
    other.put(f"{ROOT}a", "3")
    with pytest.raises(StoreAuthError):
        store.get(f"{ROOT}a")
    assert not seen.ended
    guarded.write_password(NEXT_PASSWORD)
    assert store.put(f"{ROOT}a", "4")
    assert [change.value for change in seen.wait(3)] == ["1", "3", "4"]


@pytest.mark.parametrize("kind", KINDS[:1], indirect=True)  # the v2 API renews nothing without the password
def test_a_password_that_is_refused_for_longer_than_a_lease_ends_no_lease(guarded, store, other):
    lease = store.lease(12)
    store.put(f"{ROOT}node", "1", lease)
    guarded.change_password(NEXT_PASSWORD)
    for _ in range(2):
        with pytest.raises(StoreAuthError):
            store.get(f"{ROOT}node")
        assert not lease.lost.wait(lease.ttl)
    assert lease.remaining() > 0
    assert other.get(f"{ROOT}node").value == "1"
    guarded.write_password(NEXT_PASSWORD)
    store.put(f"{ROOT}node", "2", lease)


def test_certificates_that_are_refused_for_longer_than_a_lease_end_it(guarded, store, other, collect):
    lease = store.lease(6)
    seen = collect(other.watch(ROOT, store.put(f"{ROOT}node", "1", lease)))
    guarded.replace_authority()
    with pytest.raises(StoreAuthError):
        store.get(f"{ROOT}node")
    assert [change.kind for change in seen.wait(2)] == ["put", "delete"]
    assert lease.remaining() == 0
    guarded.write_certificates()
    assert lease.lost.wait(SOON)
    with pytest.raises(LeaseLostError):
        store.put(f"{ROOT}node", "2", lease)
    store.put(f"{ROOT}node", "3", store.lease(60))
    assert seen.wait(3)[2].value == "3"


def test_a_password_that_cannot_be_read_or_is_wrong_is_a_refusal_that_names_none(guarded, store):
    """Its file may be empty or gone for a moment."""
    store.put(f"{ROOT}a", "1")
    guarded.change_password("third-password")
    for text, said in (("", "is empty"), (None, "cannot be read"), (NEXT_PASSWORD, "password")):
        if text is None:
            guarded.password_file.unlink()
        else:
            guarded.password_file.write_text(text)
        with pytest.raises(StoreAuthError, match=said) as refused:
            store.get(f"{ROOT}a")
        assert NEXT_PASSWORD not in str(refused.value)
        assert FIRST_PASSWORD not in str(refused.value)
    guarded.write_password("third-password")
    assert store.get(f"{ROOT}a").value == "1"


@pytest.mark.essential
def test_certificates_of_another_authority_are_read_again(guarded, store, collect):
    seen = collect(store.watch(ROOT, store.put(f"{ROOT}a", "1")))
    seen.wait(1)
    guarded.replace_authority()
    for _ in range(2):
        with pytest.raises(StoreAuthError, match="CERTIFICATE_VERIFY_FAILED"):
            store.put(f"{ROOT}a", "2")
    assert not seen.ended
    guarded.write_certificates()
    store.put(f"{ROOT}a", "3")
    assert [change.value for change in seen.wait(2)] == ["1", "3"]


def test_an_authority_is_replaced_as_the_page_says_and_no_client_is_refused(guarded, store, collect):
    seen = collect(store.watch(ROOT, store.put(f"{ROOT}a", "0")))
    old, new = guarded.authority, certificates.authority("next CA")
    guarded.trust(old, new)
    store.put(f"{ROOT}a", "1")
    guarded.reissue(new)
    store.put(f"{ROOT}a", "2")
    guarded.restart()
    store.put(f"{ROOT}a", "3")
    guarded.trust(new)
    store.put(f"{ROOT}a", "4")
    assert [change.value for change in seen.wait(5)] == ["0", "1", "2", "3", "4"]


def test_only_the_clients_certificate_is_refused(guarded, store, collect, tmp_path):
    seen = collect(store.watch(ROOT, store.put(f"{ROOT}a", "1")))
    seen.wait(1)
    old = {name: (guarded.node / name).read_bytes() for name in ("node.pem", "node-key.pem")}
    guarded.replace_authority()
    guarded.write_certificates()
    new = {name: (guarded.node / name).read_bytes() for name in old}
    (guarded.node / "node.pem").write_bytes(old["node.pem"])  # with the key of the other: half replaced
    with pytest.raises(StoreAuthError):
        store.put(f"{ROOT}a", "2")
    (guarded.node / "node-key.pem").write_bytes(old["node-key.pem"])  # whole, and of the CA before
    with pytest.raises(StoreAuthError, match="client certificate"):
        store.put(f"{ROOT}a", "2")
    for name, content in new.items():
        (guarded.node / name).write_bytes(content)
    store.put(f"{ROOT}a", "3")
    assert [change.value for change in seen.wait(2)] == ["1", "3"]


@pytest.mark.parametrize("version", ["3.5", "3.4"])
def test_a_token_that_expires_is_replaced(version, tmp_path, collect):
    arguments = ["--auth-token-ttl=1"]
    with (
        GuardedEtcd(tmp_path, binary=binary_or_skip(version), args=arguments) as guarded,
        connect(guarded.etcd.endpoint, options=guarded.options()) as store,
    ):
        seen = collect(store.watch(ROOT, store.put(f"{ROOT}a", "1")))
        lease = store.lease(12)
        assert not lease.lost.wait(9)  # nothing is asked that a token would be looked at for
        assert store.put(f"{ROOT}a", "2", lease)
        assert [change.value for change in seen.wait(2)] == ["1", "2"]
