"""Connect an agent and one of its replicas.

The connection is a socket pair: the agent keeps one end, the replica inherits the other, whose descriptor
number is in `ADAPTDL_AGENT_FD`. The messages are those of `messages`, one per line. No port is opened,
and only a child process of the agent can hold the other end. When the agent is gone the replica reads
end-of-file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from adaptdl_elastic.protocol import environment
from adaptdl_elastic.protocol.messages import (
    AgentMessage,
    Finished,
    MalformedMessageError,
    Message,
    ReplicaMessage,
    Stop,
    decode_order,
    decode_report,
    encode,
)

STOPPED = 143
"""Exit code of a replica that was stopped and can be resumed: 128 + SIGTERM."""

CAN_NOT_JOIN = 76
"""Exit code of a newcomer that cannot join the running replicas. Nothing is lost by it."""

_PEEK_BYTES = 1 << 16
_STOP_FIELD = f'"type":"{Stop.kind}"'.encode()

log = logging.getLogger(__name__)
T = TypeVar("T")


class Channel:
    """Hold one end of the connection. Any thread may send, but only one thread may receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """Return the agent's end, and the socket that its replica inherits."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Channel | None:
        """Return the replica's end; None if no agent started this process."""
        number = environ.get(environment.AGENT_FD)
        if not number:
            return None
        try:
            sock = socket.socket(fileno=int(number))
        except (OSError, ValueError):  # a grandchild inherited the variable, but not the descriptor
            return None
        sock.set_inheritable(False)  # programs that the script starts are no replicas
        return cls(sock)

    def send(self, message: Message) -> bool:
        """Send one message; return False if the other end is gone."""
        data = encode(message)
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError:
            return False
        return True

    def read_now(self, size: int) -> bytes:
        """Return at most `size` bytes that have arrived; BlockingIOError if there are none."""
        return self._socket.recv(size, socket.MSG_DONTWAIT)

    def orders(self) -> Iterator[AgentMessage]:
        """Yield the agent's messages until the agent is gone. For a replica."""
        return self._received(decode_order)

    def reports(self) -> Iterator[ReplicaMessage]:
        """Yield the replica's messages until the replica is gone. For an agent without an event loop."""
        return self._received(decode_report)

    def _received(self, decode: Callable[[bytes], T]) -> Iterator[T]:
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    try:
                        yield decode(line)
                    except MalformedMessageError as error:
                        log.warning("ignored on the channel: %s", error)
        except (OSError, ValueError):  # closed at this end
            return

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the connection. Readers at both ends then read end-of-file."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def say_finished(environ: Mapping[str, str] = os.environ) -> None:
    """Tell the agent that the script ended by itself, unless the agent has asked it to stop.

    Call this when SIGTERM has no effect any more. The agent sends `Stop` before SIGTERM, so if there is no
    such message yet, the signal cannot have ended the script. A script that uses the library has read the
    message already; it sends `Stopping` when it obeys.
    """
    try:
        with socket.socket(fileno=os.dup(int(environ[environment.AGENT_FD]))) as sock:
            try:
                asked = _STOP_FIELD in sock.recv(_PEEK_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                asked = False
            if not asked:
                sock.sendall(encode(Finished()), socket.MSG_DONTWAIT)
    except (KeyError, ValueError, OSError):  # no agent, or the script has closed the descriptor
        return
