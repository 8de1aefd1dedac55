"""The agent's handle of one replica: its channel, and what it has reported so far."""

from __future__ import annotations

import logging

from adaptdl_elastic.protocol.channel import Channel
from adaptdl_elastic.protocol.messages import (
    AgentMessage,
    MalformedMessageError,
    ReplicaMessage,
    decode_report,
)

logger = logging.getLogger(__name__)
_CHUNK = 1 << 16
_LONGEST = 1 << 24  # most bytes of one message; more cannot come from the library


class ReplicaHandle:
    """One replica process."""

    def __init__(self, number: int, generation: int, local_rank: int, rank: int, error_file: str) -> None:
        self.number = number  # identifies it at the fork server
        self.generation = generation
        self.local_rank = local_rank
        self.rank = rank
        self.error_file = error_file
        self.pid: int | None = None
        self.library = False
        self.first_step: float | None = None  # wall clock
        self.switched = False  # it has switched to the next generation, which this agent has not adopted yet
        # its first step in that generation: number, wall clock
        self.early_step: tuple[int, float] | None = None
        self.channel, self.theirs = Channel.pair()
        self._buffer = b""

    def fileno(self) -> int:
        """Return the descriptor, for selectors: it is readable when `receive` returns something."""
        return self.channel.fileno()

    def receive(self) -> list[ReplicaMessage] | None:
        """Return the messages that have arrived; None if the other end is closed. Never block."""
        try:
            data = self.channel.read_now(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > _LONGEST:
            logger.warning("replica %d writes something else than messages to its channel", self.rank)
            return None
        return [message for line in lines if (message := _message(line, self.rank)) is not None]

    def send(self, message: AgentMessage) -> bool:
        """Send a message; return False if the replica is gone."""
        return self.channel.send(message)

    def close(self) -> None:
        """Close both ends of the channel."""
        self.channel.close()
        self.theirs.close()


def _message(line: bytes, rank: int) -> ReplicaMessage | None:
    try:
        return decode_report(line)
    except MalformedMessageError as error:
        logger.warning("replica %d sent what is no message: %s", rank, error)
        return None
