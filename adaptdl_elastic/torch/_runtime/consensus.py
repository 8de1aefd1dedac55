"""Doing something on every replica at the same step: stops, checkpoints, changes of size.

The problem. A person presses Ctrl-C in front of one replica, an agent asks for a checkpoint, a timer
runs out: each happens on one replica, at any time, while the others are somewhere in the training loop.
All must act at the same step. Whoever acts one step before the others leaves them waiting for ever in a
gradient all-reduce.

What does not do. A flag that is all-reduced at every step is right, and makes every step pay, evaluation
steps too, which otherwise need no communication at all. "Act at step n + 10" costs nothing, and is wrong
in loops that do not move in lockstep: in an evaluation loop one replica may be hundreds of batches ahead.

What is done. The loop passes *boundaries*: the start of every epoch and of every data loop, and the end
of every optimizer step. Their positions (epoch, data loop, sample index) are the same sequence on every
replica and only grow. To pass one costs a lock and a comparison. When something is to be done:

1. whoever wants it sends a request to rank 0, whose control thread opens a *round*;
2. `prepare`: the control side of every replica (never its training thread, which may be waiting for
   another replica) answers with the last boundary it has passed, and from now on holds the training
   thread at the next one;
3. `decide`: rank 0 takes the latest of the answers, M. Every replica goes on to its first boundary after
   M and acts there. Nobody had passed M's successor when it answered, and nobody has since, so all act
   at the same boundary. Those behind M pass the boundaries up to it, which frees whoever waits for them;
4. `executed`: rank 0 hears that all have acted, and may open the next round.

No deadlock: the answers come from threads that wait for nothing. A replica that waits at a boundary waits
for a message from rank 0, which needs the answers only; if a replica is gone instead, the waiting ends in
`PeerLostError`. Before acting the replicas compare their positions. If a loop was left by `break` on one
replica earlier than on another they differ; those behind then go on until they have caught up.

Signals. Python runs signal handlers between two instructions of the main thread, so never while that is
blocked in a collective with a peer that has stopped. The second Ctrl-C must work right there: it is
counted in a thread that reads the wakeup descriptor, to which the C-level handler writes.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from adaptdl_elastic import checkpoint, env
from adaptdl_elastic._interfaces import Command, Position
from adaptdl_elastic._session import Session
from adaptdl_elastic.protocol.channel import STOPPED
from adaptdl_elastic.protocol.messages import (
    ChangePlan,
    Ping,
    Pong,
    RecoveryPlan,
    SaveCheckpoint,
    Saved,
    StepFinished,
    Stop,
    Stopping,
    WithdrawPlan,
)
from adaptdl_elastic.reducer import AGREEMENT, CollectiveMismatchError, PeerLostError

log = logging.getLogger(__name__)

INTERRUPTED = 130
"""Exit code after a second Ctrl-C: 128 + SIGINT."""

_KEPT = ("stop", "checkpoint")  # what is still wanted after a replica has died
_OF_ROUNDS = ("want", "ready", "executed")  # control messages for rank 0's control thread
_UNHEARD = 100  # of the control messages that nobody listens to yet, how many are kept
_START: Position = (-1, 0, 0)
_DOUBLE_DELIVERY = 0.3  # seconds: a launcher forwards the Ctrl-C that the terminal has sent us already
_STEP_REPORT_INTERVAL = 1.0
_POLL_INTERVAL = 0.2  # seconds from one look for a better batch size to the next: one attribute is read


class BoundaryConsensus:
    """One replica's side of every agreement; rank 0's also leads."""

    def __init__(
        self,
        session: Session,
        handlers: Mapping[str, Callable[[Command], None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = session
        self.started = False
        self.loops_over = False  # the last epoch loop has ended, the script is on its way to its end
        self.handlers = dict(handlers or {})  # what is done at an agreed boundary, by the command's kind
        self.polls: list[Callable[[], Command | None]] = []
        self._clock = clock
        self._condition = threading.Condition()
        self._position: Position = _START
        self._round: int | None = None  # open: hold the training thread at its next boundary
        self._decision: tuple[Position, list[Command]] | None = None
        self.lost: str | None = None  # why nothing can be agreed with this generation any more
        self._asked: list[Command] = []  # of us, and not done yet: rank 0 may die before it has done it
        self._listeners: dict[str, Callable[[int, int, Any], None]] = {}  # by the kind of control message
        self._unheard: list[tuple[int, Any]] = []  # control messages that nobody listens to yet
        self._events: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._closed = False
        self.between = False  # of two generations: nobody would hear of a round
        self._leader = RoundCoordinator(self)
        self._interrupted_at: float | None = None
        self._reported = float("-inf")
        self._first_step = True
        self._told: float | None = None  # time of the newest step that the agent knows of
        self._wakeup: tuple[socket.socket, socket.socket] | None = None

    # -- starting and ending -----------------------------------------------------------------------

    def start(self) -> None:
        """Take orders from the agent and the terminal. Again does nothing."""
        with self._condition:
            if self.started:
                return
            self.started = True
        session = self.session
        self._thread("adaptdl-control", self._lead)
        self._install_handlers()
        atexit.register(self._at_exit)
        if session.channel is not None:
            session.send(session.hello())
            self._thread("adaptdl-channel", self._read_channel)

    def close(self) -> None:
        """End the threads and give the signals back."""
        self._closed = True
        self._events.put(("close", 0, None))
        self._restore_handlers()

    def _at_exit(self) -> None:
        if os.getpid() != self.session.pid or self._closed:
            return
        self.report_step(force=True)
        with contextlib.suppress(Exception):
            checkpoint.flush(env.checkpoint_interval() or 30.0)
        under_agent = self.session.channel is not None
        if self.session.reducer is not None and hasattr(sys, "last_value"):
            self.session.reducer.abort()  # an error that nobody caught is no end of which others should hear
        self.session.close()
        if under_agent and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # too late to stop what has ended

    def _thread(self, name: str, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=name, daemon=True).start()

    # -- signals -----------------------------------------------------------------------------------

    def _install_handlers(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python allows it nowhere else; an agent's messages still work
        self._previous = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._wakeup = (reader, writer)
        self._previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._thread("adaptdl-signals", self._count_interrupts)

    def _restore_handlers(self) -> None:
        if self._wakeup is None or threading.current_thread() is not threading.main_thread():
            return
        reader, writer = self._wakeup
        if os.getpid() == self.session.pid:
            signal.set_wakeup_fd(self._previous_fd)
            for number, handler in self._previous.items():
                if signal.getsignal(number) == self._on_signal:
                    signal.signal(number, handler)
            with contextlib.suppress(OSError):
                reader.shutdown(socket.SHUT_RDWR)
        reader.close()
        writer.close()
        self._wakeup = None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between two of its instructions: take no lock here."""
        if os.getpid() != self.session.pid:  # a data loader's worker inherited us
            if number == signal.SIGTERM:
                os._exit(STOPPED)
            return
        if self.session.epoch is None:  # nothing is under way that could be saved
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            if self.loops_over and self.session.channel is not None:
                return  # all is done and saved; the agent waits for our exit code
            raise SystemExit(STOPPED)
        if number == signal.SIGINT:
            os.write(2, b"\nstopping at the next step; Ctrl-C again stops at once\n")
        self.request({"kind": "stop", "reason": signal.Signals(number).name})

    def _count_interrupts(self) -> None:
        """In a thread of its own: sees signals even while the main thread is stuck in a collective."""
        assert self._wakeup is not None
        reader, first = self._wakeup[0], None
        while True:
            try:
                data = reader.recv(64)
            except OSError:
                return
            if not data:
                return
            if signal.SIGINT not in data or os.getpid() != self.session.pid:
                continue
            now = self._clock()
            if first is None or self.session.epoch is None:
                first = now
            elif now - first > _DOUBLE_DELIVERY:
                os.write(2, b"\nstopped at once: what came after the last checkpoint is lost\n")
                os._exit(INTERRUPTED)

    # -- messages ----------------------------------------------------------------------------------

    def _read_channel(self) -> None:
        """Read the agent's orders, and end when the agent does: another replica then takes this place."""
        channel = self.session.channel
        assert channel is not None
        session = self.session
        for message in channel.orders():
            match message:
                case Stop(reason):
                    self.request({"kind": "stop", "reason": reason})
                case SaveCheckpoint(number):
                    self.request({"kind": "checkpoint", "request": number})
                case Ping(number):
                    session.send(Pong(number, session.recovery.waiting))
                case RecoveryPlan():
                    session.recovery.on_plan(message)
                case ChangePlan():
                    session.rescaling.on_plan(message)
                case WithdrawPlan(generation):
                    session.rescaling.on_withdrawn(generation)
        if not self._closed and os.getpid() == self.session.pid:
            log.error("the agent of this replica is gone")
            os._exit(STOPPED)

    def request(self, command: Command) -> None:
        """Have `command` done on every replica at the next boundary they can agree on. From any thread."""
        if command["kind"] in _KEPT:
            self._asked.append(command)
        self._events.put(("want", 0, command))

    def on_message(self, sender: int, message: Any) -> None:
        """Take a control message of another replica or of this replica's leader. Must not block."""
        kind, number, body = message
        if kind == "prepare":
            with self._condition:
                self._round, self._decision = number, None
                position = self._position
            self._tell(0, ("ready", number, position))
        elif kind == "decide":
            with self._condition:
                if self._round == number:
                    self._decision = (tuple(body[0]), body[1])
                    self._condition.notify_all()
        elif kind == "saved":
            for command in body:
                with contextlib.suppress(ValueError):
                    self._asked.remove(command)  # in place: another thread may be adding one
        elif kind in _OF_ROUNDS:
            self._events.put((kind, sender, (number, body)))
        else:
            with self._condition:
                listener = self._listeners.get(kind)
                if listener is None:
                    self._unheard = [*self._unheard[-_UNHEARD:], (sender, message)]
            if listener is not None:
                listener(sender, number, body)

    def listen(self, kind: str, listener: Callable[[int, int, Any], None]) -> None:
        """Have `listener(sender, number, body)` called for control messages of a kind, also earlier ones."""
        with self._condition:
            self._listeners[kind] = listener
            earlier = [one for one in self._unheard if one[1][0] == kind]
            self._unheard = [one for one in self._unheard if one[1][0] != kind]
        for sender, (_, number, body) in earlier:
            listener(sender, number, body)

    def on_lost(self, rank: int) -> None:
        """Record that a replica is gone without a goodbye."""
        self.lose(f"rank {rank} is gone")

    def lose(self, reason: str) -> None:
        """Nothing can be agreed with this generation any more. From any thread."""
        with self._condition:
            self.lost = self.lost or reason
            self._condition.notify_all()
        self.session.recovery.on_lost()

    def poll_soon(self) -> None:
        """Have the polls asked, which have just become more: the control thread may wait for events only."""
        self._events.put(("tick", 0, None))

    @property
    def round_open(self) -> bool:
        """Whether rank 0 is about to have something done: the next boundary waits for its decision."""
        return self._round is not None

    def _tell(self, rank: int, message: Any) -> None:
        if rank == self.session.rank:
            self.on_message(rank, message)
        elif self.session.reducer is not None:
            self.session.reducer.send_control(rank, message)

    # -- the control thread ------------------------------------------------------------------------

    def _lead(self) -> None:
        """Carry requests to rank 0; there, lead the rounds and watch the clock."""
        while not self._closed:
            try:
                kind, sender, body = self._events.get(timeout=self._leader.wait())
            except queue.Empty:
                kind, sender, body = "tick", 0, None
            try:
                if kind == "close":
                    return
                if kind == "want" and self.session.rank != 0:
                    self._tell(0, ("want", 0, body))
                elif self.session.rank == 0:
                    if kind == "want" and isinstance(body, tuple):  # came from another replica
                        body = body[1]
                    self._leader.on_event(kind, sender, body)
            except Exception:
                log.exception("control thread")

    # -- the training thread -----------------------------------------------------------------------

    def boundary(self, position: Position, last: bool = False) -> None:
        """Pass a boundary, doing first what was agreed to be done there.

        Args:
            position: Of the boundary.
            last: Whether nothing of the data loop is left. A replica that joined here would find no batch, so
                what brings newcomers is done at the boundary after this one.

        Raises:
            SystemExit: with code 143, when it was agreed to stop.
            PeerLostError: when a replica is gone that would have to agree.
        """
        condition = self._condition
        with condition:
            if self._round is None:
                self._position = position
                return
            while self._decision is None:
                if self.lost is not None:
                    raise PeerLostError(self.lost)
                condition.wait()
            after, commands = self._decision
            if position <= after or (last and any(command.get("newcomers") for command in commands)):
                self._position = position
                return
        if not self._together(position):
            return
        with condition:
            number, self._round, self._decision = self._round, None, None
            self._position = position
        generation = self.session.generation
        self._execute([{**command, "position": position} for command in commands])
        if any(command["kind"] == "checkpoint" for command in commands):
            self.session.recovery.mark()
        if self.session.generation == generation:  # else there is another rank 0's leader to talk to
            self._tell(0, ("executed", number, None))

    def abandon(self) -> None:
        """Drop what was to be agreed with a generation whose connections are closed."""
        with self._condition:
            self.lost = self._round = self._decision = None
            self.between = True

    def renew(self, position: Position, recovered: bool = False) -> None:
        """Begin a new generation at `position`; `recovered`: the old one was broken off."""
        with self._condition:
            self._position, self._first_step = position, True
            self._told = self.session.last_step_time  # `switched` says it: it is no step of the new one
        self._events.put(("renew", 0, recovered))
        for command in self._asked:  # rank 0 may be another one
            self._events.put(("want", 0, command))

    def _together(self, position: Position) -> bool:
        """Whether every replica is at `position`; otherwise those behind have been told to catch up."""
        reducer = self.session.reducer
        if reducer is None or reducer.replicas == 1:
            return True
        positions = reducer.allreduce([position], tag="agreement", stream=AGREEMENT)
        latest = max(tuple(p) for p in positions)
        if min(tuple(p) for p in positions) == latest:
            return True
        if position < latest:
            with self._condition:
                assert self._decision is not None
                self._decision = (_before(latest), self._decision[1])
                self._position = position
            return False
        again = reducer.allreduce([position], tag="agreement", stream=AGREEMENT)
        if any(tuple(p) != position for p in again):
            raise CollectiveMismatchError(
                f"the replicas are at different places of the script: {sorted(map(tuple, again))} "
                f"(epoch, data loop, sample); is a data loop run on some replicas only?"
            )
        return True

    def _execute(self, commands: list[Command]) -> None:
        """Carry out agreed commands: save a checkpoint before a change of replicas.

        A stop comes alone, and its checkpoint serves all other requests for one.
        """
        stop = [c for c in commands if c["kind"] == "stop"]
        saves = [c for c in commands if c["kind"] == "checkpoint"]
        if stop:
            self.save("stop", saves)
            self._stop(stop[0])
        elif saves:
            self.save("request" if any("request" in c for c in saves) else "periodic", saves)
        for command in commands:
            if command["kind"] not in ("stop", "checkpoint"):
                self.handlers[command["kind"]](command)

    def save(self, kind: str, requests: Sequence[Command] = ()) -> None:
        """Save a checkpoint, on every replica between the same steps, and tell the agent."""
        asked = [{key: value for key, value in c.items() if key != "position"} for c in requests]
        numbers = [c["request"] for c in requests if c.get("request") is not None]
        session = self.session

        def done(saved: checkpoint.Saved) -> None:
            session.send(Saved(saved.id, saved.path, saved.step or 0, max(numbers, default=None)))
            session.emit(
                "checkpoint",
                id=saved.id,
                step=saved.step,
                seconds=saved.seconds,
                bytes=saved.bytes,
                kind=saved.kind,
            )
            for rank in range(session.replicas):
                self._tell(rank, ("saved", 0, asked))

        with contextlib.suppress(checkpoint.CheckpointSaveError):  # it has said so
            checkpoint.save_all_states(
                kind=kind, background=kind in ("periodic", "request"), step=session.step, done=done
            )

    def _stop(self, command: Command) -> None:
        session = self.session
        self.report_step(force=True)
        session.send(Stopping())  # a script may turn the exit into another one
        if session.reducer is not None:
            with contextlib.suppress(Exception):  # rank 0 has written; nobody leaves before
                session.reducer.barrier(tag="stop")
        if session.rank == 0:
            path = env.checkpoint_path()
            log.info("stopped (%s); %s", command.get("reason", ""), path or "nothing was saved")
            if session.channel is None:
                said = "nothing was saved: ADAPTDL_CHECKPOINT_PATH says where to"
                print(
                    said if path is None else f"stopped; to go on from {path}, start it again",
                    file=sys.stderr,
                )
        raise SystemExit(STOPPED)

    def report_step(self, force: bool = False) -> None:
        """Tell the agent that we live: at the first step, then at most once a second, and at the end."""
        session = self.session
        if session.channel is None or session.last_step_time is None:
            return
        if session.last_step_time == self._told and not force:
            return
        now = self._clock()
        if not force and not self._first_step and now - self._reported < _STEP_REPORT_INTERVAL:
            return
        self._first_step, self._reported, self._told = False, now, session.last_step_time
        session.send(StepFinished(session.step, session.last_step_time))


class RoundCoordinator:
    """Rank 0's part: opens one round at a time for everything that is wanted by then."""

    def __init__(self, control: BoundaryConsensus) -> None:
        self._control = control
        self._number = 0
        self._wanted: list[Command] = []
        self._running: list[Command] | None = None  # of the open round
        self._ready: dict[int, Position] = {}
        self._executed: set[int] = set()
        self._next_save: float | None = None
        self._next_poll = 0.0

    def wait(self) -> float | None:
        """Seconds until the clock has something to say; None: until somebody else has."""
        control = self._control
        if control.session.rank != 0 or not control.started:
            return None
        now = control._clock()
        if self._next_save is None and env.checkpoint_path():
            interval = env.checkpoint_interval()
            self._next_save = now + interval if interval else float("inf")
        dues = [] if self._next_save is None else [self._next_save]
        if control.polls:
            dues.append(self._next_poll)
        left = min(dues, default=float("inf")) - now
        return None if left == float("inf") else min(max(left, 0.0), 1.0)

    def on_event(self, kind: str, sender: int, body: Any) -> None:
        """One event of the control thread."""
        if kind == "want":
            self._want(body)
        elif kind == "renew":
            self._control.between = False  # here: what was wanted before must not open a round that this ends
            if body:  # what was under way has not been done
                both = (*(self._running or ()), *self._wanted)
                self._wanted = [c for c in both if c["kind"] in _KEPT]
            self._running = None
            self._number += 1  # what is said of that round comes too late
        elif kind == "ready" and body[0] == self._number:
            self._ready[sender] = tuple(body[1])
            self._decide()
        elif kind == "executed" and body[0] == self._number:
            self._executed.add(sender)
            if len(self._executed) == self._control.session.replicas:
                self._running = None
        self._tick()
        if self._running is None and self._wanted and not self._control.between:
            self._open()

    def _want(self, command: Command) -> None:
        same = [c for c in (*self._wanted, *(self._running or ())) if _covers(c, command)]
        if not same:
            self._wanted.append(command)

    def _tick(self) -> None:
        control, now = self._control, self._control._clock()
        if self._next_save is not None and now >= self._next_save:
            self._next_save = now + env.checkpoint_interval()
            self._want({"kind": "checkpoint"})
        if control.polls and now >= self._next_poll:
            self._next_poll = now + _POLL_INTERVAL
            for poll in list(control.polls):
                command = poll()
                if command is not None:
                    self._want(command)

    def _open(self) -> None:
        self._number += 1
        self._running, self._wanted = self._wanted, []
        self._ready, self._executed = {}, set()
        for rank in range(self._control.session.replicas):
            self._control._tell(rank, ("prepare", self._number, None))

    def _decide(self) -> None:
        if len(self._ready) < self._control.session.replicas:
            return
        after = max(self._ready.values())
        for rank in range(self._control.session.replicas):
            self._control._tell(rank, ("decide", self._number, (after, self._running)))


def _covers(known: Command, new: Command) -> bool:
    """Whether doing `known` does `new` as well."""
    if known["kind"] != new["kind"]:
        return False
    return known["kind"] == "stop" or known == new


def _before(position: Position) -> Position:
    """Return the greatest position below `position` in the order of boundaries."""
    epoch, loop, index = position
    return (epoch, loop, index - 1)
