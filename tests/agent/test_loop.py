"""Which signals an agent hears."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from adaptdl_elastic.agent.runtime.event_loop import Loop, Signalled

NUMBERS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


@pytest.fixture
def inherited() -> Iterator[dict[int, Any]]:
    """As `nohup` and a shell that starts a program in the background leave them."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    given = {signal.SIGHUP: signal.SIG_IGN, signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_DFL}
    for number, handler in given.items():
        signal.signal(number, handler)
    yield given
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_is_ignored_from_the_start_stays_so(inherited: dict[int, Any]) -> None:
    loop = Loop()
    loop.on_signals(NUMBERS)
    for number in NUMBERS:
        os.kill(os.getpid(), number)
    assert loop.wait(None) == [Signalled(signal.SIGTERM)]
    loop.close()
    assert {number: signal.getsignal(number) for number in NUMBERS} == inherited
