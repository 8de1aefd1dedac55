"""The one object that owns what a replica knows about itself.

Module-level functions everywhere in this library are a thin facade over the `Session` that `current()`
returns. It is made by the first call that needs it and starts (says hello, installs signal handlers)
when `adaptdl_elastic.torch.init_process_group` is called, or a loop begins; importing does neither.
Nothing here imports torch.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import adaptdl_elastic
from adaptdl_elastic import env
from adaptdl_elastic.channel import Channel

if TYPE_CHECKING:
    from adaptdl_elastic.checkpoint import State
    from adaptdl_elastic.reducer import Reducer
    from adaptdl_elastic.torch._control import Control
    from adaptdl_elastic.torch._metrics import Metrics

EVENT_LOG_VARIABLE = "ADAPTDL_EVENT_LOG"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """Who a replica is in one generation."""

    rank: int = 0
    replicas: int = 1
    nodes: int = 1
    generation: int = 0
    job: str = ""

    @classmethod
    def from_environment(cls) -> Identity:
        """As the environment says now; ValueError where it contradicts itself."""
        return cls(
            rank=env.replica_rank(),
            replicas=env.num_replicas(),
            nodes=env.num_nodes(),
            generation=env.num_restarts(),
            job=env.job_id() or "",
        )


class Session:
    """What one replica knows about itself, its agent, and what belongs into a checkpoint."""

    def __init__(self, identity: Identity, channel: Channel | None) -> None:
        self.identity = identity
        self.channel = channel
        self.states: dict[str, State] = {}  # in the order of registration
        self.scratch: dict[str, Any] = {}  # what one module keeps for itself, by its name
        self.reducer: Reducer | None = None  # the library's collectives, once connected
        self.step = 0  # optimizer steps finished since the job began
        self.epoch: int | None = None  # of the epoch loop that runs
        self.last_step_time: float | None = None  # wall clock, end of the last finished optimizer step
        self.joining = False  # a newcomer that has not yet come to where the others are
        self.pid = os.getpid()
        self._control: Control | None = None
        self._metrics: Metrics | None = None
        self.lock = threading.RLock()  # for making what there is to be one of

    @property
    def rank(self) -> int:
        """This replica's rank in the present generation."""
        return self.identity.rank

    @property
    def replicas(self) -> int:
        """How many replicas the present generation has."""
        return self.identity.replicas

    @property
    def nodes(self) -> int:
        """How many nodes the present generation has."""
        return self.identity.nodes

    @property
    def generation(self) -> int:
        """The present generation, counted from 0."""
        return self.identity.generation

    @property
    def job(self) -> str:
        """The job's name; empty for a script that is alone."""
        return self.identity.job

    @property
    def metrics(self) -> Metrics:
        """Profiled step times and gradient statistics, and the goodput model fitted to them."""
        with self.lock:
            if self._metrics is None:
                from adaptdl_elastic.torch._metrics import Metrics

                self._metrics = Metrics(self)
            return self._metrics

    @property
    def control(self) -> Control:
        """Stops, checkpoints and changes, agreed among all replicas."""
        with self.lock:
            if self._control is None:
                from adaptdl_elastic.torch._control import Control

                self._control = Control(self)
            return self._control

    @property
    def started(self) -> bool:
        """Whether the agent knows that this script uses the library."""
        return self._control is not None and self._control.started

    def start(self) -> None:
        """Say hello to the agent and take its orders, and the terminal's. Again does nothing."""
        self.control.start()

    def on_control(self, sender: int, message: Any) -> None:
        """Another replica's control message arrived (in the reducer's thread)."""
        self.control.on_message(sender, message)

    def on_lost(self, rank: int) -> None:
        """Another replica is gone (in the reducer's thread)."""
        self.control.on_lost(rank)

    def hello(self) -> dict[str, Any]:
        """What an agent is told first."""
        return {"type": "hello", "version": adaptdl_elastic.__version__, "pid": self.pid}

    def send(self, message: Mapping[str, Any]) -> bool:
        """Send a message of `adaptdl_elastic.channel` to the agent; False where none listens."""
        return self.channel is not None and self.channel.send(message)

    def emit(self, event: str, **fields: Any) -> None:
        """Put an event into the job's log: through the agent, else into `ADAPTDL_EVENT_LOG`, else nowhere.

        Rank 0 speaks for all replicas; only a `failure` is told by whom it befell.
        """
        if self.rank != 0 and event != "failure":
            return
        record = {"event": event, "time": time.time(), **fields}
        if self.send({"type": "event", **record}):
            return
        path = os.environ.get(EVENT_LOG_VARIABLE)
        if path and self.channel is None:
            self._append(Path(path), record)

    def _append(self, path: Path, record: Mapping[str, Any]) -> None:
        try:
            with self.lock, path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record, allow_nan=False) + "\n")
        except OSError as error:
            log.warning("event log %s: %s", path, error.strerror)

    def close(self) -> None:
        """Hang up on everybody. For tests, and for the end of a process."""
        if self._control is not None:
            self._control.close()
        if self._metrics is not None:
            self._metrics.close()
        for kept in list(self.scratch.values()):
            if callable(close := getattr(kept, "close", None)):
                close()
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None
        if self.channel is not None:
            self.channel.close()


_current: Session | None = None
_lock = threading.Lock()


def current() -> Session:
    """This process's session, made from the environment by the first call."""
    global _current
    if _current is not None:  # the lock is for making it; every step of training comes here several times
        return _current
    with _lock:
        if _current is None:
            _current = Session(Identity.from_environment(), Channel.from_environment())
        return _current


def reset() -> None:
    """Close the session and forget it, so that the next call of `current` makes a new one. For tests."""
    global _current
    with _lock:
        session, _current = _current, None
    if session is not None:
        session.close()
