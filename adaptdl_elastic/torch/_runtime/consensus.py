"""Act on every replica at the same step: stop, save a checkpoint, change the number of replicas.

The problem. A user presses Ctrl-C, an agent asks for a checkpoint, or a timer expires. Each of these happens
on one replica, at any time, while the other replicas are somewhere in the training loop. All replicas must
act at the same step: a replica that acts one step too early leaves the others waiting forever in a gradient
all-reduce.

Two simple ways fail. A flag that is all-reduced at every step is correct but slows down every step, also
evaluation steps, which otherwise need no communication. "Act at step n + 10" costs nothing but is wrong in
loops that do not run in lockstep: in an evaluation loop one replica may be hundreds of batches ahead.

What is done. The training thread passes *boundaries*: the start of every epoch and of every data loop, and
the end of every optimizer step. Their positions (epoch, data loop, sample index) form the same increasing
sequence on every replica. Passing a boundary costs a lock and a comparison. To act:

1. A replica sends a request to rank 0, whose control thread opens a *round*.
2. `prepare`: every replica answers with the last boundary it has passed, and from then on stops its training
   thread at the next boundary. The answer comes from another thread than the training thread, which may be
   waiting for another replica.
3. `decide`: rank 0 sends the latest of the answers, M, to all. Every replica continues to its first boundary
   after M and acts there. No replica has passed a boundary after M, so all act at the same boundary.
   Replicas before M pass the boundaries up to M, so that no replica waits for them.
4. `executed`: every replica tells rank 0 that it has acted. Then rank 0 may open the next round.

This cannot deadlock. The answers come from threads that wait for nothing. A replica that waits at a boundary
waits for a message from rank 0, and rank 0 needs only the answers. If a replica is lost, the wait ends with
`PeerLostError`. Before acting, the replicas compare their positions. The positions differ if one replica left
a loop by `break` earlier than another; the replicas behind then continue until they have caught up.

The end of the script. Behind the last epoch loop the replicas do not wait for each other: one may have ended
while another one runs a data loop, perhaps alone. From then on nothing is agreed on. The others drop an open
round and run to their ends. The checkpoint of the last epoch's end remains the newest one.

Signals. Python runs a signal handler between two instructions of the main thread, so not while the main
thread is blocked in a collective with a peer that has stopped. The second Ctrl-C must work in that case too.
So it is counted by a thread that reads the wakeup file descriptor, to which the C-level handler writes.
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

import torch

from adaptdl_elastic import checkpoint, env
from adaptdl_elastic._session import Session
from adaptdl_elastic._values import Command, Position
from adaptdl_elastic.protocol import uncaught_error
from adaptdl_elastic.protocol.channel import STOPPED
from adaptdl_elastic.protocol.messages import (
    MOST_FILES,
    ChangePlan,
    CodeLoaded,
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
from adaptdl_elastic.reducer import AGREEMENT, CollectiveMismatchError, PeerFinishedError, PeerLostError
from adaptdl_elastic.torch._runtime.drift import APART, RECORD, DriftWatch
from adaptdl_elastic.torch._runtime.rounds import KEPT, RoundCoordinator

log = logging.getLogger(__name__)

INTERRUPTED = 130
"""Exit code after a second Ctrl-C: 128 + SIGINT."""

_OF_ROUNDS = ("want", "ready", "executed")  # kinds of control messages for rank 0's control thread
_UNHEARD = 100  # most control messages that are kept for a listener that is not registered yet
_START: Position = (-1, 0, 0)  # before every boundary
_DOUBLE_DELIVERY = 0.3  # seconds within which a second SIGINT is the launcher's copy of the same Ctrl-C
_STEP_REPORT_INTERVAL = 1.0  # seconds between two reports of a finished step


class BoundaryConsensus:
    """Carry out commands at the same boundary on all replicas. Rank 0's object also leads the rounds."""

    def __init__(
        self,
        session: Session,
        handlers: Mapping[str, Callable[[Command], None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.session = session
        self.started = False
        self.loops_over = False  # the last epoch loop has ended
        self.handlers = dict(handlers or {})  # kind of a command → function that carries it out
        self.polls: list[Callable[[], Command | None]] = []
        self.clock = clock
        self._condition = threading.Condition()
        self._position: Position = _START
        self._round: int | None = None  # number of the open round, in which the next boundary waits
        self._decision: tuple[Position, list[Command]] | None = None  # act at the first boundary after it
        self.lost: str | None = None  # why this generation can agree on nothing any more
        self._asked: list[
            Command
        ] = []  # requests of this replica, repeated if rank 0 dies before they are done
        self._listeners: dict[str, Callable[[int, int, Any], None]] = {}  # by the kind of control message
        self._unheard: list[tuple[int, Any]] = []  # control messages without a listener so far
        self._events: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._closed = False
        self.saving = False  # the training thread writes a checkpoint
        self._interrupted = False  # Ctrl-C stops this job, and this is rank 0
        self.between = False  # the connections of the old generation are closed, the new ones not yet open
        self.leader = RoundCoordinator(self)
        self.drift = DriftWatch(session, self.tell)
        self.listen(RECORD, self.drift.on_record)
        self.listen(APART, self._on_apart)
        self._reported = float("-inf")
        self._first_step = True
        self._told: float | None = None  # time of the last step that was reported to the agent
        self._wakeup: tuple[socket.socket, socket.socket] | None = None

    # -- starting and ending -----------------------------------------------------------------------

    def start(self) -> None:
        """Begin to handle the agent's messages, SIGINT and SIGTERM. Further calls do nothing."""
        with self._condition:
            if self.started:
                return
            self.started = True
        session = self.session
        self._thread("adaptdl-control", self._lead)
        self._install_handlers()
        atexit.register(self._at_exit)
        if session.channel is not None:
            uncaught_error.count_steps = lambda: session.step
            session.send(session.hello())
            self._thread("adaptdl-channel", self._read_channel)

    def close(self) -> None:
        """End the threads, and restore the previous signal handlers."""
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
        if self.session.reducer is not None and hasattr(sys, "last_value") and not uncaught_error.interrupted:
            self.session.reducer.abort()  # after an uncaught error the others must not see a regular end
        self.session.close()
        if under_agent and threading.current_thread() is threading.main_thread():
            # training has ended; SIGTERM must not change the exit
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            # nor must torch's error when `multiprocessing` ends the workers of a data loader
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def _thread(self, name: str, target: Callable[[], None]) -> None:
        threading.Thread(target=target, name=name, daemon=True).start()

    # -- signals -----------------------------------------------------------------------------------

    def _install_handlers(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python sets signal handlers in the main thread only; the agent's messages still work
        self._previous = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._wakeup = (reader, writer)
        self._previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._thread("adaptdl-signals", lambda: self._count_interrupts(reader))

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
        """Handle SIGINT and SIGTERM. Interrupts the main thread anywhere, so it must take no lock."""
        if os.getpid() != self.session.pid:  # a data loader's worker process inherited this handler
            if number == signal.SIGTERM:
                os._exit(STOPPED)
            return
        if self.session.epoch is None:  # outside of epoch loops there is nothing to save
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            if self.loops_over and self.session.channel is not None:
                return  # all is done and saved; the agent waits for the exit code
            raise SystemExit(STOPPED)
        if number == signal.SIGTERM and self.session.channel is not None:
            # The agent says what ends: it has got the same signal, or sends an order before its own. A stop
            # of all replicas would restart those of other nodes from a checkpoint.
            return
        if number == signal.SIGINT:
            _tell(b"\nstopping at the next step; Ctrl-C again stops at once\n")
        self.request({"kind": "stop", "reason": signal.Signals(number).name})

    def _count_interrupts(self, reader: socket.socket) -> None:
        """End the process at a second Ctrl-C. Runs in its own thread, as the main thread may be blocked."""
        first = None
        while True:
            try:
                data = reader.recv(64)
            except OSError:
                return
            if not data:
                return
            if signal.SIGINT not in data or os.getpid() != self.session.pid:
                continue
            now = self.clock()
            if first is None or self.session.epoch is None:
                first = now
            elif now - first > _DOUBLE_DELIVERY:
                _tell(b"\nstopped at once: what came after the last checkpoint is lost\n")
                os._exit(INTERRUPTED)

    # -- messages ----------------------------------------------------------------------------------

    def _read_channel(self) -> None:
        """Handle the agent's messages. End the process if the agent ends: another replica replaces it."""
        channel = self.session.channel
        assert channel is not None
        session = self.session
        for message in channel.orders():
            match message:
                case Stop(reason, interrupted):
                    self._interrupted, session.stop_asked = interrupted, True
                    self.request({"kind": "stop", "reason": reason})
                    # no boundary comes where the script waits for its checkpoints
                    if getattr(session.checkpoints, "waits", False):
                        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
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
        """Request that every replica carries out `command` at the same boundary. Callable in any thread."""
        if command["kind"] in KEPT:
            self._asked.append(command)
        self._events.put(("want", 0, command))

    def on_message(self, sender: int, message: Any) -> None:
        """Take a control message of any replica, this one included. Must not block."""
        kind, number, body = message
        if kind == "prepare":
            with self._condition:
                if body != self.session.generation:  # rank 0 opened the round just before a replica was lost
                    return
                self._round, self._decision = number, None
                position = self._position
            self.tell(0, ("ready", number, position))
        elif kind == "decide":
            with self._condition:
                if self._round == number:
                    self._decision = (tuple(body[0]), body[1])
                    self._condition.notify_all()
        elif kind == "dismiss":
            with self._condition:
                if self._round == number and self._decision is None:
                    self._round = None
                    self._condition.notify_all()
        elif kind == "saved":
            for command in body:
                with contextlib.suppress(ValueError):
                    self._asked.remove(command)  # in place: another thread may append at the same time
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
        """Call `listener(sender, number, body)` for all control messages of `kind`, also for earlier ones."""
        with self._condition:
            self._listeners[kind] = listener
            earlier = [one for one in self._unheard if one[1][0] == kind]
            self._unheard = [one for one in self._unheard if one[1][0] != kind]
        for sender, (_, number, body) in earlier:
            listener(sender, number, body)

    def on_lost(self, rank: int) -> None:
        """Record that the connection to a replica was lost without a regular end."""
        self.lose(f"rank {rank} is gone")

    def lose(self, reason: str) -> None:
        """Record that this generation can agree on nothing any more. Callable in any thread."""
        with self._condition:
            self.lost = self.lost or reason
            self._condition.notify_all()
        self.session.recovery.on_lost()

    def _on_apart(self, _: int, generation: int, text: Any) -> None:
        """Wake the training thread, which ends with an error: the replicas' models have drifted apart."""
        self.drift.on_apart(generation, str(text))
        with self._condition:
            self._condition.notify_all()

    def on_finished(self, rank: int) -> None:
        """Wake the training thread and rank 0's control thread: a replica has ended regularly."""
        with self._condition:
            self._condition.notify_all()
        self._events.put(("finished", rank, None))

    @property
    def finished(self) -> PeerFinishedError | None:
        """Error of a replica that has ended regularly while this one has not; None if there is none."""
        reducer = self.session.reducer
        return None if reducer is None else reducer.finished

    def poll_soon(self) -> None:
        """Wake the control thread after a poll was added: without polls it waits for events only."""
        self._events.put(("tick", 0, None))

    @property
    def round_open(self) -> bool:
        """Whether a round is open: the next boundary waits for rank 0's decision."""
        return self._round is not None

    def generation_of_round(self) -> int | None:
        """Return the generation in which a round may be opened now; None between two generations."""
        with self._condition:
            return None if self.between else self.session.generation

    def tell(self, rank: int, message: Any) -> None:
        """Send a control message to a replica, this one included."""
        if rank == self.session.rank:
            self.on_message(rank, message)
        elif self.session.reducer is not None:
            self.session.reducer.send_control(rank, message)

    # -- the control thread ------------------------------------------------------------------------

    def _lead(self) -> None:
        """Send requests to rank 0; on rank 0, lead the rounds and save periodic checkpoints."""
        while not self._closed:
            try:
                kind, sender, body = self._events.get(timeout=self.leader.wait())
            except queue.Empty:
                kind, sender, body = "tick", 0, None
            try:
                if kind == "close":
                    return
                if kind == "want" and self.session.rank != 0:
                    self.tell(0, ("want", 0, body))
                elif self.session.rank == 0:
                    if kind == "want" and isinstance(body, tuple):  # came from another replica
                        body = body[1]
                    self.leader.on_event(kind, sender, body)
            except Exception:
                log.exception("control thread")

    # -- the training thread -----------------------------------------------------------------------

    def boundary(self, position: Position, last: bool = False) -> None:
        """Pass a boundary, after carrying out the commands that were agreed on for it.

        Args:
            position: Position of the boundary.
            last: Whether no replica can join here, so that commands which add replicas are carried out at the
                next boundary. A replica that joined after a data loop's last batch would get no batch, and
                one that joined at an epoch's beginning might run another loop first.

        Raises:
            SystemExit: the replicas have agreed to stop (exit code 143).
            KeyboardInterrupt: so they have because of Ctrl-C, and this is rank 0.
            PeerLostError: a replica that would have to agree is gone.
            PeerFinishedError: a replica has ended although this one is in an epoch.
        """
        with self._condition:
            if self._round is None:
                self._position = position
                return
        try:
            self._act(position, last)
        except PeerFinishedError:
            if self.session.epoch is not None:
                raise
            with self._condition:  # behind the epochs: run to the end without the others
                self._round, self._decision, self._position = None, None, position

    def _act(self, position: Position, last: bool) -> None:
        """Pass a boundary while a round is open: wait for its decision, and carry it out if it is due."""
        condition = self._condition
        with condition:
            while self._decision is None and self.round_open:
                self.drift.check()
                if self.lost is not None:
                    raise PeerLostError(self.lost)
                if (finished := self.finished) is not None:
                    raise finished
                condition.wait()
            if self._decision is None:  # the round was dismissed
                self._position = position
                return
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
        if self.session.generation == generation:  # a round ends with its generation: nothing to report then
            self.tell(0, ("executed", number, None))

    def abandon(self) -> None:
        """Drop the open round of a generation whose connections are closed."""
        with self._condition:
            self.lost = self._round = self._decision = None
            self.between = True

    def renew(self, position: Position, recovered: bool = False) -> None:
        """Begin a new generation at `position`; `recovered` if the old one ended with a peer's death."""
        with self._condition:
            self._position, self._first_step = position, True
            self._told = self.session.last_step_time  # the message `Switched` has reported this step
        self._events.put(("renew", 0, recovered))
        for command in self._asked:  # a new rank 0 does not know them
            self._events.put(("want", 0, command))

    def _together(self, position: Position) -> bool:
        """Return whether this replica may act at `position`, because all replicas are there.

        If the replicas are at different positions, those behind get False and must continue to the latest
        position; those at the latest position wait for them.

        Raises:
            CollectiveMismatchError: the replicas do not reach the same position, or their parameters differ.
        """
        reducer = self.session.reducer
        if reducer is None or reducer.replicas == 1:
            return True
        mine = [(position, self.drift.digest())]
        found = reducer.allreduce(mine, tag="agreement", stream=AGREEMENT)
        positions, digests = zip(*found, strict=True)
        latest = max(tuple(p) for p in positions)
        if min(tuple(p) for p in positions) == latest:
            self.drift.compare(digests)
            return True
        if position < latest:
            with self._condition:
                assert self._decision is not None
                self._decision = (_before(latest), self._decision[1])
                self._position = position
            return False
        positions, digests = zip(*reducer.allreduce(mine, tag="agreement", stream=AGREEMENT), strict=True)
        if any(tuple(p) != position for p in positions):
            raise CollectiveMismatchError(
                f"the replicas are at different places of the script: {sorted(map(tuple, positions))} "
                f"(epoch, data loop, sample); is a data loop run on some replicas only?"
            )
        self.drift.compare(digests)
        return True

    # the loop may be in `torch.inference_mode`, whose tensors are of no use to training
    @torch.inference_mode(False)
    def _execute(self, commands: list[Command]) -> None:
        """Carry out agreed commands; a checkpoint comes before a change of the number of replicas.

        A stop saves one checkpoint, which also serves all requests for a checkpoint, and ends this process.
        """
        stop = [c for c in commands if c["kind"] == "stop"]
        saves = [c for c in commands if c["kind"] == "checkpoint"]
        if stop:
            self._stop(stop[0], self.save("stop", saves))
        elif saves:
            self.save("request" if any("request" in c for c in saves) else "periodic", saves)
        for command in commands:
            if command["kind"] not in ("stop", "checkpoint"):
                self.handlers[command["kind"]](command)

    def save(self, kind: str, requests: Sequence[Command] = ()) -> str:
        """Save a checkpoint and tell the agent. All replicas call this between the same two steps.

        Returns:
            Why it could not be saved, on rank 0 and if that is known at once; else "".
        """
        asked = [{key: value for key, value in c.items() if key != "position"} for c in requests]
        numbers = [c["request"] for c in requests if c.get("request") is not None]
        session, taken = self.session, time.time()

        def done(saved: checkpoint.Saved) -> None:
            session.send(Saved(saved.id, saved.path, saved.step or 0, max(numbers, default=None)))
            session.emit(
                "checkpoint",
                id=saved.id,
                step=saved.step,
                seconds=saved.seconds,
                bytes=saved.bytes,
                kind=saved.kind,
                taken=taken,
            )
            for rank in range(session.replicas):
                self.tell(rank, ("saved", 0, asked))

        self.saving = True
        try:
            checkpoint.save_all_states(
                kind=kind, background=kind in ("periodic", "request"), step=session.step, done=done
            )
        except checkpoint.CheckpointSaveError as error:  # save_all_states has logged it
            return str(error)
        finally:
            self.saving = False
        return ""

    def _stop(self, command: Command, unsaved: str) -> None:
        session = self.session
        self.report_step(force=True)
        session.send(Stopping(unsaved))  # the script may catch SystemExit and end with another exit code
        if session.reducer is not None:
            with contextlib.suppress(Exception):  # no replica ends before rank 0 has written the checkpoint
                session.reducer.barrier(tag="stop")
        if session.rank == 0:
            path = env.checkpoint_path()
            log.info("stopped (%s); %s", command.get("reason", ""), unsaved or path or "nothing was saved")
            if session.channel is None:
                then = f"stopped; to go on from {path}, start it again"
                nothing = "nothing was saved: ADAPTDL_CHECKPOINT_PATH says where to"
                _tell(f"{unsaved or (nothing if path is None else then)}\n".encode())
        if self._interrupted:
            uncaught_error.interrupted = True
            show = sys.excepthook  # of an interpreter that the agent has not started
            sys.excepthook = lambda *what: (
                sys.exit(STOPPED) if issubclass(what[0], KeyboardInterrupt) else show(*what)
            )
            raise KeyboardInterrupt
        raise SystemExit(STOPPED)

    def report_step(self, force: bool = False) -> None:
        """Report the last finished step to the agent: the first one, then at most one a second.

        Args:
            force: Whether to report also within a second of the last report.
        """
        session = self.session
        if session.channel is None or session.last_step_time is None:
            return
        if session.last_step_time == self._told:
            return
        now = self.clock()
        if not force and not self._first_step and now - self._reported < _STEP_REPORT_INTERVAL:
            return
        if self._first_step:
            session.send(CodeLoaded(uncaught_error.loaded_files()[:MOST_FILES]))
        self._first_step, self._reported, self._told = False, now, session.last_step_time
        session.send(StepFinished(session.step, session.last_step_time))


def _tell(line: bytes) -> None:
    """Write a line to standard error, if that is possible: the terminal or the reader may be gone."""
    with contextlib.suppress(OSError):
        os.write(2, line)


def _before(position: Position) -> Position:
    """Return the greatest position below `position` in the order of boundaries."""
    epoch, loop, index = position
    return (epoch, loop, index - 1)
