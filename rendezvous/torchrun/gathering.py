"""Let the members of one torchrun round meet at a TCPStore on the node of rank 0.

torch's client of a TCPStore has no time limit of its own: its constructor never returns if the port accepts
connections and does not answer, and neither does a read from a server that hangs. It also prints a C++
backtrace for every attempt that fails. So a plain connection first checks that the port is open, and the
client runs in a thread that can be abandoned.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

REACH_SECONDS = 15.0  # for one attempt to reach the node of rank 0
_CONNECT_SECONDS = 10.0  # of REACH_SECONDS, for the plain connection
_FIRST_LOOK, _LONGEST_LOOK = 0.01, 0.2  # seconds between two checks of which members are there


def _proof(member: str, prefix: str) -> str:
    """Return what a member writes into the round's store, which a stranger can read and write.

    A member's id has a random part and is in no TCPStore, so only members can compute it.
    """
    return hmac.new(member.encode(), prefix.encode(), hashlib.sha256).hexdigest()


class Gathering(threading.Thread):
    """A thread in which one member connects to the store of a round and waits for all members.

    Args:
        prefix: prefix of the round's keys.
        rank: rank of this member.
        members: ids of the members in the order of their ranks, known only from the rendezvous' own store.
        address: host and port on which rank 0 listens.
        server: the store itself, on the node of rank 0; None on others.
        timeout: seconds that an operation of the store may take afterwards.
        on_change: called in this thread when it has reached the store, and when it has ended.
    """

    def __init__(
        self,
        prefix: str,
        rank: int,
        members: Sequence[str],
        address: tuple[str, int],
        server: TCPStore | None,
        timeout: float,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__(name=f"gathering {prefix}", daemon=True)
        self._prefix, self._rank = prefix, rank
        self._proofs = [_proof(member, prefix) for member in members]
        self._address, self._server, self._timeout, self._on_change = address, server, timeout, on_change
        self._given_up = False
        self.reached = False  # the store of rank 0 answers
        self.ended = False
        self.store: PrefixStore | None = None  # set when all members are there
        self.problem = f"rank 0's node does not answer at {address[0]}:{address[1]}"
        self.missing: tuple[int, ...] = tuple(range(len(members)))  # ranks that were absent at the last check
        self.forged: tuple[int, ...] = ()  # those of them whose key has a value that they did not write

    def give_up(self) -> None:
        """Let the thread end when it can; a client that hangs in torch ends with its server."""
        self._given_up = True

    def run(self) -> None:
        """Connect and wait for all members."""
        try:
            self._meet()
        except (DistError, OSError) as error:
            host, port = self._address
            why = (str(error).splitlines() or [type(error).__name__])[0]
            self.problem = f"rank 0's node cannot be reached at {host}:{port}: {why}"
        finally:
            self.ended = True
            self._on_change()

    def _meet(self) -> None:
        tcp = self._server or self.connect()
        store = PrefixStore(self._prefix, tcp)
        store.set(f"here/{self._rank}", self._proofs[self._rank])
        self.reached, self.problem = True, ""
        self._on_change()
        look = _FIRST_LOOK
        while not self._given_up:
            found = {rank: self._look(store, rank) for rank in self.missing}
            self.missing = tuple(rank for rank, right in found.items() if not right)
            self.forged = tuple(rank for rank, right in found.items() if right is False)
            if not self.missing:
                tcp.set_timeout(timedelta(seconds=self._timeout))
                self.store = store
                return
            time.sleep(look)
            look = min(2 * look, _LONGEST_LOOK)

    def _look(self, store: PrefixStore, rank: int) -> bool | None:
        """Return whether a member wrote the value of its key; None: the key is not there."""
        key = f"here/{rank}"
        if not store.check([key]):
            return None
        return hmac.compare_digest(store.get(key), self._proofs[rank].encode())

    def connect(self) -> TCPStore:
        """Connect to the TCPStore of the round."""
        host, port = self._address
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_CONNECT_SECONDS))
