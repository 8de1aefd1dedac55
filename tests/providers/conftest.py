from __future__ import annotations

from collections.abc import Iterator

import pytest
from moto_process import Moto, running_moto


@pytest.fixture(scope="session")
def moto_server() -> Iterator[Moto]:
    with running_moto() as server:
        yield server


@pytest.fixture
def moto(moto_server: Moto, monkeypatch: pytest.MonkeyPatch) -> Moto:
    """A server with nothing in it, which every client of this test talks to."""
    moto_server.reset()
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in moto_server.environment.items():
        monkeypatch.setenv(name, value)
    return moto_server
