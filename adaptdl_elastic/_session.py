"""Hold the state of one replica in one object, the session.

The module-level functions of this library use the `Session` that `current()` returns. The session is made by
the first call that needs it. It starts (sends a hello to the agent, installs signal handlers) when
`adaptdl_elastic.torch.init_process_group` is called or a loop begins. Importing the library does neither.

The parts of a session are typed fields. Each part is made at its first use, by the `Parts` that
`adaptdl_elastic.torch._bootstrap` installs. This module knows the parts only by the protocols in
`_interfaces`, and does not import torch.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import adaptdl_elastic
from adaptdl_elastic import env
from adaptdl_elastic._interfaces import (
    Capability,
    Closable,
    Consensus,
    ElasticLoader,
    ElasticModel,
    Joining,
    LearntLimit,
    Reporter,
    Rescaling,
    SavedState,
    StepCounter,
    Summed,
    Survivor,
    TorchGroup,
)
from adaptdl_elastic._past_results import Call, PastResults
from adaptdl_elastic._values import ReportedPosition
from adaptdl_elastic.protocol import environment
from adaptdl_elastic.protocol.channel import Channel
from adaptdl_elastic.protocol.messages import Event, Hello, ReplicaMessage
from adaptdl_elastic.reducer import Reducer

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Identity:
    """Identify a replica in one generation."""

    rank: int = 0
    replicas: int = 1
    nodes: int = 1
    generation: int = 0
    job: str = ""

    @classmethod
    def from_environment(cls) -> Identity:
        """Return the identity in the environment variables; ValueError if they contradict each other."""
        return cls(
            rank=env.replica_rank(),
            replicas=env.num_replicas(),
            nodes=env.num_nodes(),
            generation=env.generation(),
            job=env.job_id() or "",
        )


@dataclass(frozen=True)
class Parts:
    """Hold the functions that make a session's parts, each called at the part's first use."""

    consensus: Callable[[Session], Consensus]
    metrics: Callable[[Session], Reporter]
    recovery: Callable[[Session], Survivor]
    rescaling: Callable[[Session], Rescaling]
    may_change: Callable[[Session], tuple[bool, str]]
    """Whether the number of replicas can change in place, and why not."""


class _Part(Generic[T]):
    """Make a part of a session at its first use, by the installed function of its name.

    From then on the part is an attribute of the session, which Python finds without calling this object.
    """

    def __set_name__(self, owner: type[Session], name: str) -> None:
        self._name = name

    def __get__(self, session: Session, owner: type[Session]) -> T:
        with session.lock:
            if not session.has(self._name):
                session.__dict__[self._name] = getattr(_installed(), self._name)(session)
        part: T = session.__dict__[self._name]
        return part


class Session:
    """Hold the state of one replica: its identity, its agent's channel, its states and models."""

    consensus = _Part[Consensus]()
    """The part by which all replicas stop, save checkpoints and change at the same step."""
    metrics = _Part[Reporter]()
    """Profiled step times and gradient statistics, and the goodput model fitted to them."""
    recovery = _Part[Survivor]()
    """The part by which this replica survives the death of another replica."""
    rescaling = _Part[Rescaling]()
    """The part that changes the number of replicas in place."""

    def __init__(self, identity: Identity, channel: Channel | None) -> None:
        self.identity = identity
        self.channel = channel
        # in the order of registration
        self.states: dict[str, SavedState] = {}
        # in the order of their construction
        self.models: list[ElasticModel] = []
        # the library's collectives, once connected
        self.reducer: Reducer | None = None
        # current epoch; None outside of epoch loops
        self.epoch: int | None = None
        # models are trained outside of epoch loops
        self.trains_outside = False
        # wall clock, end of the last finished optimizer step
        self.last_step_time: float | None = None
        self.pid = os.getpid()
        # held while a part is made, so that each is made once
        self.lock = threading.RLock()
        # parts that other modules make at their first use
        self.position: StepCounter | None = None
        # whose data loop is running
        self.loader: ElasticLoader | None = None
        # that models are trained with
        self.training_loader: ElasticLoader | None = None
        self.reported_position = ReportedPosition()
        # progress in the checkpoint, for data loops that begin before the script has made its models
        self.saved_progress = 0.0
        # whether the number of replicas can change without a restart, and if not, the reason
        self.inplace = (False, "")
        # the script's data loaders, and the one whose loop runs (a `LoaderRegistry`)
        self.loaders: object = None
        # the largest batch of a replica that fits into memory; None before it is asked for
        self.memory: LearntLimit | None = None
        self.checkpoints: Closable | None = None
        # the agent has asked for a stop
        self.stop_asked = False
        # epoch → accumulators made so far
        self.accumulators: Counter[int | None] = Counter()
        # the accumulator that was synchronised last
        self.last_summed: Summed | None = None
        # of the script's collectives outside of data loops
        self.past_results = PastResults()
        # schedulers, GradScalers and plain DDP models of the script; None: no search so far
        self.user_objects: list[weakref.ref[Any]] | None = None

        # torch's process group: argument of init_process_group
        self.backend: str | None = None
        self.group: TorchGroup | None = None
        # kept alive for torch, which calls it from C++
        self.group_store: Any = None
        # the current batch does not count: what the loop's body changes is undone after it
        self.dry = False
        # a transfer between replicas is running that may never end
        self.transfer_stuck = False
        self.capability: Capability | None = None
        # a newcomer that has not joined the others yet
        self.joining = False
        self.newcomer: Joining | None = None
        # rank of a peer that was lost before `consensus` was made
        self.lost_early: int | None = None

    @property
    def identity(self) -> Identity:
        """Identity of this replica in the current generation; the session has its fields, too."""
        return self._identity

    @identity.setter
    def identity(self, identity: Identity) -> None:
        # plain attributes, because every training step reads them many times
        self._identity, self.job = identity, identity.job
        self.rank, self.replicas = identity.rank, identity.replicas
        self.nodes, self.generation = identity.nodes, identity.generation

    @property
    def step(self) -> int:
        """Optimizer steps finished since the job began."""
        return 0 if self.position is None else self.position.step

    @property
    def progress(self) -> float:
        """Training so far, in steps at the initial batch size: the largest progress of the models."""
        return max([model.progress for model in self.models], default=self.saved_progress)

    def has(self, part: str) -> bool:
        """Return whether a part has been made."""
        return part in self.__dict__

    @property
    def in_data_loop(self) -> bool:
        """Whether the script is in a data loop."""
        return self.position is not None and self.position.looping

    def past_call(self, what: str) -> Call | None:
        """Count a collective that the script calls; return what identifies it among the past results.

        Args:
            what: Function and line of the script.

        Returns:
            None if its result is not kept: in a data loop, and without an agent, where no replica joins.
        """
        if self.channel is None or self.in_data_loop:
            return None
        loops = 0 if self.position is None else self.position.entered
        return self.past_results.next_call(self.epoch, loops, what)

    def past_result(self, call: Call | None) -> tuple[bool, Any]:
        """Return whether this is a newcomer that knows the others' result of a collective, and the result."""
        if call is None or not self.joining or env.secret() is None:
            return False, None
        return self.past_results.find(call)

    def keep_result(self, call: Call | None, result: Any) -> None:
        """Keep the result of a collective for replicas that join later."""
        if call is not None and not self.joining:
            self.past_results.keep(call, result)

    def report_eligibility(self) -> None:
        """Report to the scheduler whether the number of replicas can currently change in place."""
        self.inplace = _installed().may_change(self)

    @property
    def started(self) -> bool:
        """Whether the agent knows that this script uses the library."""
        return self.has("consensus") and self.consensus.started

    def start(self) -> None:
        """Send a hello to the agent, and begin to handle its messages and the signals SIGINT and SIGTERM.

        Further calls do nothing.
        """
        self.consensus.start()

    def on_control(self, sender: int, message: Any) -> None:
        """Take another replica's control message. Runs in the reducer's thread."""
        if self.has("consensus") or _parts is not None:
            self.consensus.on_message(sender, message)

    def on_lost(self, rank: int) -> None:
        """Record the loss of another replica. Runs in the reducer's thread."""
        if self.has("consensus") or _parts is not None:
            self.consensus.on_lost(rank)
        else:
            # the script has used only collectives so far
            self.lost_early = rank

    def on_finished(self, rank: int) -> None:
        """Record that another replica has ended regularly. Runs in the reducer's thread."""
        if self.has("consensus"):
            self.consensus.on_finished(rank)

    def hello(self) -> Hello:
        """Return the first message to the agent."""
        return Hello(adaptdl_elastic.__version__, self.pid)

    def send(self, message: ReplicaMessage) -> bool:
        """Send a message to the agent, and return whether it was sent; False without an agent."""
        return self.channel is not None and self.channel.send(message)

    def emit(self, event: str, **fields: Any) -> None:
        """Write an event to the job's log: through the agent, else to the file `ADAPTDL_EVENT_LOG`, if set.

        Only rank 0 writes events, except for `failure`, which the replica that failed writes.
        """
        if self.rank != 0 and event != "failure":
            return
        now = time.time()
        if self.send(Event(event, now, fields)):
            return
        path = os.environ.get(environment.EVENT_LOG)
        if path and self.channel is None:
            self._append(Path(path), {"event": event, "time": now, **fields})

    def _append(self, path: Path, record: Mapping[str, Any]) -> None:
        try:
            with self.lock, path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record, allow_nan=False) + "\n")
        except OSError as error:
            log.warning("event log %s: %s", path, error.strerror)

    def close(self) -> None:
        """Close all connections and end all threads. For tests, and for the end of a process."""
        made: list[Closable | None] = [self.__dict__.get("consensus"), self.__dict__.get("metrics")]
        for part in (*made, self.checkpoints):
            if part is not None:
                part.close()
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None
        if self.channel is not None:
            self.channel.close()


_current: Session | None = None
_parts: Parts | None = None
_lock = threading.Lock()


def install(parts: Parts) -> None:
    """Set the functions with which every session of this process makes its parts."""
    global _parts
    _parts = parts


def _installed() -> Parts:
    if _parts is None:
        raise RuntimeError("this needs the training library: import adaptdl_elastic.torch's names first")
    return _parts


def current() -> Session:
    """Return this process's session; the first call makes it from the environment."""
    global _current
    # without the lock, because every training step calls this several times
    if _current is not None:
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
