"""The agent's handle of one replica: its channel, and what it has said so far."""

from __future__ import annotations

import logging
import os

from adaptdl_elastic.protocol.channel import Channel
from adaptdl_elastic.protocol.messages import (
    AgentMessage,
    MalformedMessageError,
    ReplicaMessage,
    decode_report,
)

logger = logging.getLogger(__name__)
_CHUNK = 1 << 16
_LONGEST = 1 << 24  # bytes of one message; a script that writes more to the descriptor is not the library


class ReplicaHandle:
    """One process of one generation."""

    def __init__(self, number: int, generation: int, local_rank: int, rank: int, error_file: str) -> None:
        self.number = number  # names it to the fork server
        self.generation = generation
        self.local_rank = local_rank
        self.rank = rank
        self.error_file = error_file
        self.pid: int | None = None
        self.library = False
        self.first_step: float | None = None  # wall clock
        self.switched = False  # it went over to the next generation, which this agent has not adopted yet
        self.early_step: tuple[int, float] | None = None  # its first step there
        self.channel, self.theirs = Channel.pair()
        self._buffer = b""

    def fileno(self) -> int:
        """For selectors: readable when `receive` has something."""
        return self.channel.fileno()

    def receive(self) -> list[ReplicaMessage] | None:
        """Messages that have come; None when the other end is closed."""
        try:
            data = os.read(self.channel.fileno(), _CHUNK)
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
        """False when the replica is gone."""
        return self.channel.send(message)

    def close(self) -> None:
        """Hang up."""
        self.channel.close()
        self.theirs.close()


def _message(line: bytes, rank: int) -> ReplicaMessage | None:
    try:
        return decode_report(line)
    except MalformedMessageError as error:
        logger.warning("replica %d sent what is no message: %s", rank, error)
        return None
