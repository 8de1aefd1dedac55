"""When a password is tried, and when its file is read again: against a server that is a function."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from adaptdl_elastic.rendezvous.store.base import StoreAuthError
from adaptdl_elastic.rendezvous.store.credentials import Renewable
from adaptdl_elastic.rendezvous.store.http import HttpStatusError
from adaptdl_elastic.rendezvous.store.login import SAME_PASSWORD_AFTER, Login
from adaptdl_elastic.rendezvous.store.store_options import StoreOptionError, StoreOptions


@dataclass
class Server:
    """Knows one password, and counts what it is asked."""

    file: Path
    password: str = "first"
    tried: list[str] = field(default_factory=list)
    now: float = 0.0

    def login(self) -> Login:
        self.file.write_text("first\n")
        options = StoreOptions(user="adaptdl", password_file=self.file)
        return Login(options, self.authenticate, clock=lambda: self.now)

    def authenticate(self, user: str, password: str) -> str:
        self.tried.append(password)
        if password != self.password:
            raise HttpStatusError(400, "etcdserver: authentication failed, invalid user ID or password", 3)
        return f"token {len(self.tried)}"


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path / "password")


def test_a_refused_password_is_tried_again_after_a_while_only(server: Server) -> None:
    login = server.login()
    server.password = "second"
    for _ in range(5):
        with pytest.raises(StoreAuthError, match="refused the login"):
            login.headers()
    assert server.tried == ["first"]
    server.now += SAME_PASSWORD_AFTER
    with pytest.raises(StoreAuthError):
        login.headers()
    assert server.tried == ["first", "first"]
    server.password = "first"  # the server's was the wrong one
    server.now += SAME_PASSWORD_AFTER
    assert login.headers() == {"Authorization": "token 3"}


def test_a_password_that_is_new_in_the_file_is_tried_at_once(server: Server) -> None:
    login = server.login()
    server.password = "second"
    with pytest.raises(StoreAuthError):
        login.headers()
    server.file.write_text("a wrong one\n")
    with pytest.raises(StoreAuthError):
        login.headers()
    server.file.write_text("second\n")
    assert login.headers() == {"Authorization": "token 3"}
    assert server.tried == ["first", "a wrong one", "second"]


def test_the_file_is_not_read_while_the_password_of_before_is_accepted(server: Server) -> None:
    login = server.login()
    server.file.write_text("second\n")
    login.forget(login.headers())
    assert login.headers() == {"Authorization": "token 2"}
    assert server.tried == ["first", "first"]


def test_a_token_is_dropped_only_by_the_request_that_had_it(server: Server) -> None:
    login = server.login()
    old = login.headers()
    login.forget(old)
    new = login.headers()
    login.forget(old)  # another request that was under way with the old token
    assert login.headers() == new
    assert server.tried == ["first", "first"]


def test_an_error_other_than_a_refused_password_is_passed_on(server: Server) -> None:
    def authenticate(user: str, password: str) -> str:
        raise HttpStatusError(400, "authentication is not enabled", 9)

    options = StoreOptions(user="adaptdl", password="first")
    with pytest.raises(HttpStatusError, match="not enabled"):
        Login(options, authenticate).headers()


def test_without_a_user_there_is_nothing_to_say(server: Server) -> None:
    assert Login(StoreOptions(), server.authenticate).headers() == {}
    assert server.tried == []


def test_threads_that_are_refused_together_renew_a_credential_once() -> None:
    made: list[object] = []

    def make(content: object) -> object:
        made.append(content)
        return object()

    contents = iter(("old", *["new"] * 8))
    credential = Renewable(lambda: next(contents), make)
    refused = credential.value
    barrier = threading.Barrier(4)
    answers: list[bool] = []

    def renew() -> None:
        barrier.wait(100)
        answers.append(credential.renew(refused))

    threads = [threading.Thread(target=renew) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert answers == [True] * 4
    assert made == ["old", "new"]
    assert not credential.renew(credential.value)


def test_files_that_cannot_be_used_leave_a_credential_as_it_is() -> None:
    content = ["a pair", "half of a pair", "another pair"]

    def make(text: str) -> str:
        if text.startswith("half"):
            raise StoreOptionError("the key does not fit the certificate")
        return f"made of {text}"

    credential = Renewable(lambda: content[0], make)
    del content[0]
    assert not credential.renew(credential.value)
    assert (credential.value, credential.problem) == (
        "made of a pair",
        "the key does not fit the certificate",
    )
    del content[0]
    assert credential.renew(credential.value)
    assert (credential.value, credential.problem) == ("made of another pair", "")
