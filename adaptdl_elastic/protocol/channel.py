"""The line between an agent and one of its replicas.

A socket pair: the agent keeps one end, the replica inherits the other, whose descriptor number is in
`ADAPTDL_AGENT_FD`. Messages are JSON objects, one per line, each with a `type`. Nothing is listened
on and nothing but an agent's own child can hold the other end. When the agent is gone the replica
reads end-of-file.

agent → replica
    {"type": "stop", "reason": str}           checkpoint at a common step, then exit 143; a replica that has
                                              not said hello gets SIGTERM after it
    {"type": "checkpoint", "request": int}    save now and go on
    {"type": "plan", "generation": int, "replicas": int, "nodes": int,
     "ranks": [int | None, ...], "newcomers": [int, ...],
     "master_addr": str, "master_port": int, "environ": {...}}
                                              a change in place: new rank by old rank (None: leave), who
                                              is new, the store where g+1 meets, this replica's variables
    {"type": "plan", "generation": int, "withdraw": true, "reason": str}
                                              that change is off
    {"type": "plan", "generation": int, "recover": true, "rank": int | None, "replicas": int, "nodes": int,
     "master_addr": str, "master_port": int, "environ": {...}}
                                              go on without those who died, from memory; this replica's own
                                              new rank (None: leave); the newest such plan counts
    {"type": "ping", "id": int}               say that you are not hanging
replica → agent
    {"type": "hello", "version": str, "pid": int}      the script uses the library: stop it by message,
                                                       not by signal
    {"type": "event", "event": str, "time": float, ...fields}
                                              what belongs into the event log: epoch, batch_size,
                                              checkpoint, metrics, first_step, failure, ...
    {"type": "step", "step": int, "time": float}
                                              a finished optimizer step: the first of a generation at once,
                                              then at most one a second, and the last one before the exit
    {"type": "ready", "generation": int}      a newcomer waits where the others are to be joined
    {"type": "resilient", "generation": int}  from now on, in this generation, the death of others does not
                                              end this replica
    {"type": "over", "over": bool}            it has all epochs behind it; false: it begins more
    {"type": "finished"}                      the script came to its end by itself, with exit code 0, before
                                              it was asked to stop; SIGTERM has no effect from now on
    {"type": "stopping"}                      it has saved as it was asked to, and raises SystemExit(143): it
                                              was stopped, whatever exit code the script makes of that
    {"type": "broken", "generation": int, "reason": str}
                                              somebody is gone; it waits for a plan to go on without them
    {"type": "pong", "id": int, "waiting": bool}
                                              answers ping; whether it waits for such a plan
    {"type": "switched", "generation": int, "last_step": float | None}
                                              it is of that generation now (or leaves for it); end of its
                                              last step before
    {"type": "hints", "hints": {...}}         sched_hints.JobHints, from rank 0 only
    {"type": "saved", "checkpoint": {"id","path","step"}, "request": int | None}   rank 0 only
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

FD_VARIABLE = "ADAPTDL_AGENT_FD"

STOPPED = 143
"""Exit code of a replica that was stopped and can be resumed: 128 + SIGTERM."""

CAN_NOT_JOIN = 76
"""Exit code of a newcomer that can not be brought to where the others are. Nothing is lost by it."""

Message = dict[str, Any]

_PEEK_BYTES = 1 << 16


class Channel:
    """One end of the line. Sending is safe from several threads, receiving is for one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """The agent's end, and the socket that its replica inherits."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Channel | None:
        """The replica's end; None where no agent started this process."""
        number = environ.get(FD_VARIABLE)
        if not number:
            return None
        try:
            sock = socket.socket(fileno=int(number))
        except (OSError, ValueError):  # inherited by a grandchild that closed it
            return None
        sock.set_inheritable(False)  # what the script starts is not a replica
        return cls(sock)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send one message; False when nobody is there any more."""
        data = json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError:
            return False
        return True

    def __iter__(self) -> Iterator[Message]:
        """Every message until the other end is gone."""
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    yield json.loads(line)
        except (OSError, ValueError):
            return

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def close(self) -> None:
        """Hang up; a reader on either side sees the end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def say_finished(environ: Mapping[str, str] = os.environ) -> None:
    """Tell the agent that the script came to its end by itself, unless the agent has asked it to stop.

    Call this where SIGTERM has no effect any more. The agent sends `stop` before SIGTERM, so a script that
    finds no such message here cannot have been ended by the signal. A script that uses the library has read
    the message already; it says `stopping` when it obeys.
    """
    try:
        with socket.socket(fileno=os.dup(int(environ[FD_VARIABLE]))) as sock:
            try:
                asked = b'"type":"stop"' in sock.recv(_PEEK_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                asked = False
            if not asked:
                sock.sendall(b'{"type":"finished"}\n', socket.MSG_DONTWAIT)
    except (KeyError, ValueError, OSError):  # no agent, or the script has closed the descriptor
        return
