"""The agent's handle of one replica: its channel, and what it has reported so far."""

from __future__ import annotations

import math
import time

from adaptdl_elastic.protocol.channel import Channel
from adaptdl_elastic.protocol.messages import (
    AgentMessage,
    MalformedMessageError,
    ReplicaMessage,
    StepFinished,
    decode_report,
)
from adaptdl_elastic.rendezvous.text import pluralize

_CHUNK = 1 << 16
_LONGEST = 1 << 24  # most bytes of one message; more cannot come from the library
_NOTICE_SECONDS = 60.0  # from one notice about junk to the next


class ReplicaHandle:
    """One replica process."""

    def __init__(self, number: int, generation: int, local_rank: int, rank: int, error_file: str) -> None:
        self.number = number  # identifies it at the fork server
        self.generation = generation
        self.local_rank = local_rank
        self.rank = rank
        self.error_file = error_file
        self.pid: int | None = None
        self.started = time.time()
        self.library = False
        self.newcomer = False  # it is to join running replicas, and has not yet
        self.first_step: float | None = None  # wall clock
        self.switched = False  # it has switched to the next generation, which this agent has not adopted yet
        # its first step in that generation: number, wall clock
        self.early_step: StepFinished | None = None
        self.channel, self.theirs = Channel.pair()
        self.broken = ""  # why its channel cannot be used any more
        self._buffer = b""
        # lines without a notice yet that are no messages, what is wrong with the last one, and when the last
        # notice was
        self._junk, self._why, self._noticed = 0, "", -math.inf

    def fileno(self) -> int:
        """Return the descriptor, for selectors: it is readable when `receive` returns something."""
        return self.channel.fileno()

    def receive(self) -> list[ReplicaMessage] | None:
        """Return the messages that have arrived; None if the other end is closed or broken. Never block."""
        if self.broken:
            return None
        try:
            data = self.channel.read_now(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0], self._buffer = self._buffer + lines[0], b""
        self._buffer += rest
        if len(self._buffer) > _LONGEST:
            self._junk, self._buffer = self._junk + 1, b""
            self.broken = self._why = f"a message of more than {_LONGEST >> 20} MiB to the agent"
        return [message for line in lines if (message := self._message(line)) is not None]

    def notice(self, now: float) -> str:
        """Return a line about what is no message, at most once a minute until the channel is broken; else "".

        Args:
            now: Monotonic; infinity: tell all that has not been told.
        """
        if not self._junk or (now < self._noticed + _NOTICE_SECONDS and not self.broken):
            return ""
        count, self._junk, self._noticed = pluralize(self._junk, "line"), 0, now
        end = "it is killed" if self.broken else "only the library may write to its channel"
        return (
            f"replica {self.rank} has sent {count} that its agent cannot read, the last: {self._why}; {end}"
        )

    def _message(self, line: bytes) -> ReplicaMessage | None:
        try:
            return decode_report(line)
        except MalformedMessageError as error:
            self._junk, self._why = self._junk + 1, str(error)
            return None

    def send(self, message: AgentMessage) -> bool:
        """Send a message; return False if the replica is gone."""
        return self.channel.send(message)

    def close(self) -> None:
        """Close both ends of the channel."""
        self.channel.close()
        self.theirs.close()
