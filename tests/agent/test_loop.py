"""Which signals an agent hears."""

from __future__ import annotations

import os
import signal

from adaptdl_elastic.agent.runtime.event_loop import Loop, Signalled

NUMBERS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def test_a_signal_ignored_at_the_start_stays_ignored() -> None:
    # as `nohup` and a shell that starts a program in the background leave them
    inherited = {signal.SIGHUP: signal.SIG_IGN, signal.SIGINT: signal.SIG_IGN, signal.SIGTERM: signal.SIG_DFL}
    for number, handler in inherited.items():
        signal.signal(number, handler)
    loop = Loop()
    loop.on_signals(NUMBERS)
    for number in NUMBERS:
        os.kill(os.getpid(), number)
    assert loop.wait(None) == [Signalled(signal.SIGTERM)]
    loop.close()
    assert {number: signal.getsignal(number) for number in NUMBERS} == inherited
