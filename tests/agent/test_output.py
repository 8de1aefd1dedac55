"""What becomes of the output of replicas when somebody does not take it any more."""

from __future__ import annotations

import io
from typing import Any

import pytest

from adaptdl_elastic.agent.output import _Flow


class Full(io.BytesIO):
    name = "stdout.log"

    def write(self, data: Any) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_and_a_closed_terminal_do_not_stop_each_other(caplog: pytest.LogCaptureFixture) -> None:
    shown: list[bytes] = []
    flow = _Flow(Full(), shown.append)
    flow.feed(b"one\ntw")
    flow.feed(b"o\n")
    assert shown == [b"one", b"two"]
    assert len(caplog.messages) == 1

    def closed(line: bytes) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    file = io.BytesIO()
    file.name = "stdout.log"  # type: ignore[misc]
    flow = _Flow(file, closed)
    flow.feed(b"one\n")
    flow.feed(b"two\n")
    assert file.getvalue() == b"one\ntwo\n"
    flow.end()
    assert len(caplog.messages) == 2
