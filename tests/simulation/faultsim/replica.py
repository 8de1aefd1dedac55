"""A replica: a small model of what the training library does under an agent.

It keeps the protocol of `adaptdl_elastic/protocol/messages.py`, and does at each point what the library does
(`torch/_runtime/consensus.py`, `torch/_elastic/rescale.py` and `recovery.py`): it says hello, trains in steps
that all replicas of a generation take together, agrees on boundaries for stops, checkpoints and changes in
place, joins, leaves, and goes on after deaths. Its state is a step number and the name of that state
(`chain`), so that checks can tell two histories of one job apart.

Not modelled: several data loops and epochs, evaluation, accumulation windows, scripts whose replicas come
apart, torch itself, NCCL's self-test, and what a process does between two of its steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from adaptdl_elastic.protocol import messages
from adaptdl_elastic.protocol.channel import CAN_NOT_JOIN, STOPPED
from adaptdl_elastic.protocol.uncaught_error import RECORD, UncaughtError
from faultsim import threads
from faultsim.control import Control
from faultsim.kernel import EPOCH, Dead, Process
from faultsim.mesh import Mesh, NotFormed, PeerLost
from faultsim.node import Machine, MeetingPoint, Wire

if TYPE_CHECKING:
    from faultsim.rescale import Rescaler
    from faultsim.world import World

PATIENCE_SECONDS = 20.0  # that those who have begun to switch wait for each other
CONNECT_SECONDS = 20.0  # that a replica tries to reach the store of a generation
RECOVERIES = 10  # in a row that do not come about
STEP_REPORT_SECONDS = 1.0
HINTS_SECONDS = 2.0
SIGTERM = 15
LOST_PEER = "PeerLostError"  # the kind of an error that only tells of the loss of others
EPOCH_STEPS = 10


@dataclass(frozen=True)
class Defect:
    """Where the replicas of a script fail: on a node, or at all larger sizes than some that work."""

    node: str = ""
    above: int = 0  # replicas; 0: sizes do not matter
    at: str = "start"  # "start": of a process; "step": after its third step; "end": of an epoch
    final: bool = False
    once: bool = False

    def strikes(self, replica: Replica, at: str) -> bool:
        """Return whether a replica fails here."""
        here = self.node == replica.machine.name or 0 < self.above < replica.size
        return here and at == self.at and not (self.once and replica.world.truth.job(replica.job).broken)


@dataclass(frozen=True)
class Script:
    """What a job runs."""

    steps: int = 60
    step_seconds: float = 0.5
    start_seconds: float = 1.0  # imports, models, data
    tail_seconds: float = 0.5  # behind the last epoch
    save_seconds: float = 0.3
    library: bool = True
    inplace: bool = True
    resilient: bool = True
    stop_exit_code: int = STOPPED  # what the script makes of being stopped
    defect: Defect | None = None


class Exit(Exception):
    """As SystemExit."""

    def __init__(self, code: int, why: str = "") -> None:
        super().__init__(why)
        self.code = code


class Replica(Process):
    """One process of a generation."""

    def __init__(
        self, machine: Machine, agent: Process, environ: Mapping[str, str], wire: Wire, script: Script
    ) -> None:
        self.job, self.slot = environ["ADAPTDL_JOB_ID"], int(environ["LOCAL_RANK"])
        self.rank, self.size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        self.generation = int(environ["ADAPTDL_GENERATION"])
        self.device = environ["CUDA_VISIBLE_DEVICES"].split(",")[self.slot]
        name = f"{machine.name}:{self.job}.{self.slot}#{next(machine.world.kernel.numbers)}"
        super().__init__(machine.world.kernel, name, machine.clock_offset, machine.wall_offset)
        self.world: World = machine.world
        self.machine, self.agent, self.wire, self.script = machine, agent, wire, script
        self.environ = dict(environ)
        self.joining = environ.get("ADAPTDL_JOIN") == "1"
        self.mesh: Mesh | None = None
        self.mesh_rank = self.rank
        self.lost = ""  # why nothing can be done together in the present generation any more
        self.step, self.chain = 0, ""  # what is committed here
        self.saved_before: str | None = None  # newest checkpoint when it has loaded one, or saved its first
        self.over = self.hello_said = self.ends = self.finished = False
        self.at_wake: list[Callable[[], None]] = []  # signals that wait for SIGCONT
        self.armed = self.hangs = False
        self.last_step_time: float | None = None
        self._reported = float("-inf")
        self._first_step = True
        self._steps = 0  # that this process has taken
        self._passed = False  # the boundary before the step to come
        self._unread: threads.SimpleQueue[messages.AgentMessage] = threads.SimpleQueue()
        self.inbox: threads.SimpleQueue[tuple[Mesh, Callable[[Replica], None]]] = threads.SimpleQueue()
        self._plans: list[messages.RecoveryPlan] = []  # to go on without the dead
        self.bell = threads.Condition()
        self._writing = threads.RLock()
        self.control = Control(self)
        self.rescaler: Rescaler = self.world.rescaler(self)
        wire.replica_hears = self._hears
        self.at_end += [self._gone]
        machine.processes.append(self)
        self.spawn(self._main, "main")
        self.spawn(self._listen, "control")

    @property
    def takes_steps(self) -> bool:
        """Whether its agent has heard of a step of the present generation, and another one follows."""
        return self.script.library and not self._first_step and not self.over and not self.joining

    @property
    def formed(self) -> Mesh:
        """The connections of the present generation; PeerLost when they have been given up."""
        if self.mesh is None:
            raise PeerLost("its connections were given up")
        return self.mesh

    def go_on(self) -> None:
        """As SIGCONT; signals that have come meanwhile are delivered."""
        super().go_on()
        at_wake, self.at_wake = self.at_wake, []
        for call in at_wake:
            call()

    # -- waiting

    def ring(self) -> None:
        """Something has changed that a thread of this replica may wait for."""
        self.bell.notify_all()

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until `predicate()`, which is asked whenever the bell rings; False: `timeout` has passed."""
        with self.bell:
            return self.bell.wait_for(predicate, timeout)

    def draw(self, seconds: float) -> float:
        """A time around `seconds`."""
        return seconds * (0.5 + self.kernel.random.random())

    # -- the channel

    def send(self, message: messages.ReplicaMessage) -> None:
        """To the agent."""
        self.kernel.running()
        self.kernel.note(f"{self.name} says {message}")
        self.wire.up(message)

    def _hears(self, message: messages.AgentMessage) -> None:
        if self.alive:
            self._unread.put(message)

    def _listen(self) -> None:
        """The control thread: what other replicas of the generation say, in order."""
        while True:
            mesh, call = self.inbox.get()
            if mesh is self.mesh:
                call(self)

    def _read_channel(self) -> None:
        while True:
            self._obey(self._unread.get())

    def _obey(self, message: messages.AgentMessage) -> None:
        match message:
            case messages.Stop(reason):
                self.control.request({"kind": "stop", "reason": reason})
            case messages.SaveCheckpoint(request):
                self.control.request({"kind": "checkpoint", "request": request})
            case messages.Ping(number):
                self.send(messages.Pong(number, False))
            case messages.RecoveryPlan():
                self._on_recovery_plan(message)
            case messages.ChangePlan():
                self.rescaler.on_plan(message)
            case messages.WithdrawPlan(generation):
                self.rescaler.on_withdrawal(generation)

    def _hello(self) -> None:
        self.hello_said = True
        self.send(messages.Hello("1", 1))
        self.spawn(self._read_channel, "channel")

    def signal(self, number: int) -> None:
        """What a signal does to it."""
        if not self.alive or (number == SIGTERM and self.ends):
            return
        if number == SIGTERM and self.stopped:
            self.at_wake.append(lambda: self.signal(number))
        elif number == SIGTERM and self.hello_said:
            if not self.over:
                self.spawn(lambda: self.control.request({"kind": "stop", "reason": "SIGTERM"}), "signal")
        elif number == SIGTERM and not self.script.library:
            self.kernel.kill(self, self.script.stop_exit_code, "(SIGTERM)")
        else:
            self.kernel.kill(self, -number, "(a signal)")

    def _gone(self) -> None:
        self.wire.replica_alive = False
        self.wire.up(None)
        if self.mesh is not None and self.machine.up:
            self.mesh.broken_off(self)
        self.world.truth.replica_ended(self)

    def fail(self, kind: str, why: str, final: bool = False) -> None:
        """End with an error of the script of that kind, or because others are gone (`LOST_PEER`)."""
        lost_peer = kind == LOST_PEER
        error = UncaughtError(kind, why, EPOCH + self.kernel.now + self.wall_offset, lost_peer, final)
        folder = self.environ["TORCHELASTIC_ERROR_FILE"].rpartition("/")[0]
        self.machine.files[f"{folder}/{RECORD}"] = json.dumps(asdict(error)).encode()
        self.kernel.kill(self, 1, why)
        if self.kernel.current is not None and self.kernel.current.process is self:
            raise Dead

    # -- the script

    def _main(self) -> None:
        self.world.truth.replica_started(self)
        try:
            self._script()
        except Exit as error:
            self.kernel.exit(error.code, str(error))
        except (PeerLost, NotFormed) as error:
            self.fail(LOST_PEER, f"({error})")
        self.ends = True  # SIGTERM has no effect any more
        if not self._unread.any(lambda message: isinstance(message, messages.Stop)):
            self.send(messages.Finished())
        self.kernel.sleep(0.01 * self.kernel.random.random())
        self.kernel.exit(0)

    def _fail_at(self, at: str) -> None:
        """Fail if the script's defect is here."""
        defect = self.script.defect
        if defect is not None and defect.strikes(self, at):
            self.world.truth.broke(self, defect)
            self.fail("NameError at train.py:1", f"(a defect at the {at})", defect.final)

    def _script(self) -> None:
        self.kernel.sleep(self.draw(self.script.start_seconds))
        self._fail_at("start")
        if not self.script.library:
            self._plain()
            return
        if self.joining:
            self._hello()
            self.rescaler.join()
        else:
            self._hello()
            self._meet_first()
        while True:
            try:
                self._train()
                break
            except PeerLost as error:
                self.recover(str(error))
        self._end()

    def _plain(self) -> None:
        """A script without the library: it begins at its own checkpoint, and is told by signals."""
        for _ in range(self.script.steps):
            self.kernel.sleep(self.draw(self.script.step_seconds))
            self.world.truth.plain_step(self)
        self.world.truth.plain_end(self)

    def _meet_first(self) -> None:
        """The start of a generation of new processes."""
        point = self.connect(self.environ["MASTER_ADDR"], int(self.environ["MASTER_PORT"]))
        mesh = point.meshes.setdefault("start", Mesh(self.kernel, self.size, point.generation))
        mesh.enter(self, self.rank, None, lambda: False)
        found: tuple[int, str] | None = None
        if self.rank == 0:
            found = self.world.truth.load(self, self.environ["ADAPTDL_CHECKPOINT_ID"])
        self.saved_before = self.world.truth.saved(self.job)
        loaded = mesh.gather("load", found)[0]
        if loaded is None:
            raise Exit(1, "(the recorded checkpoint is not there)")
        self.kernel.sleep(self.draw(0.1))
        self.step, self.chain = loaded
        self.enter_generation()

    def connect(self, host: str, port: int) -> MeetingPoint:
        """The store where a generation meets; Exit when it can not be reached."""
        until = self.kernel.now + CONNECT_SECONDS
        while True:
            self.kernel.sleep(self.draw(0.002))
            point = self.world.points.get((host, port))
            if point is not None and point.answers and self._reaches(point):
                return point
            if self.kernel.now >= until:
                raise NotFormed(f"no store at {host}:{port}")
            self.kernel.sleep(0.5)

    def _reaches(self, point: MeetingPoint) -> bool:
        return self.world.network.connects(self.machine.name, point.machine.name)

    def reads(self, point: MeetingPoint, key: str) -> bool:
        """Whether a key is there, as far as this replica can see."""
        return self._reaches(point) and key in point.values

    def writes(self, point: MeetingPoint, key: str, value: object) -> None:
        """Write a key as soon as that can be."""
        put = partial(point.values.__setitem__, key, value)
        self.world.network.deliver(self.machine.name, point.machine.name, put)

    def enter_generation(self, passed: bool = False, recovered: bool = False) -> None:
        """What is done whenever a generation has begun: from here on deaths are survived, if they can be."""
        self._first_step, self._passed = True, passed
        self.armed = self.script.resilient and self.environ.get("ADAPTDL_RESCALE") != "restart"
        if self.armed:
            self.send(messages.Resilient(self.generation))
        self.spawn(lambda: self._report_hints(self.generation), "hints")
        self.control.renew(self.step if passed else self.step - 1, recovered)

    def _train(self) -> None:
        script = self.script
        while self.step < script.steps:
            self.wait_for(lambda: not self.hangs, None)
            if not self._passed:  # else this generation began at it
                self.control.boundary(self.step)
            self._passed = False
            self.kernel.sleep(self.draw(script.step_seconds))
            values = self.formed.gather(("step", self.step + 1), (self.step, self.chain))
            self.world.truth.commit(self, self.formed, values)
            self.last_step_time = threads.Time.time()
            self.report_step()
            self._steps += 1
            if self._steps == 3:
                self._fail_at("step")
            if self.step % EPOCH_STEPS == 0:
                self._fail_at("end")
        self.formed.gather("end", None)

    def report_step(self, force: bool = False) -> None:
        """Tell the agent of a step: the first of a generation, then one a second, and the last."""
        due = self._first_step or self.kernel.now - self._reported >= STEP_REPORT_SECONDS
        if self.last_step_time is not None and (force or due):
            self._first_step, self._reported = False, self.kernel.now
            self.send(messages.StepFinished(self.step, self.last_step_time))

    def _end(self) -> None:
        """Behind the last epoch: nobody waits for anybody."""
        self.over = True
        for call in self.world.on_script_end:
            call()
        if self.mesh is not None:
            self.mesh.leave(self)
        self.report_step(force=True)
        self.send(messages.EpochsFinished(True))
        self.kernel.sleep(self.draw(self.script.tail_seconds))
        self.world.truth.finished(self)

    def _report_hints(self, generation: int) -> None:
        while self.alive and self.rank == 0 and self.generation == generation and not self.over:
            hints = {
                "job": self.job, "generation": generation, "nodes": 1, "replicas": self.size,
                "init_batch_size": 32, "batch_size": 32, "atomic_bsz": 32, "max_profiled_replicas": self.size,
                "inplace": self.script.inplace, "inplace_reason": "" if self.script.inplace else "its habits",
                "step": self.step,
            }  # fmt: skip
            self.send(messages.Hints(hints))
            self.kernel.sleep(HINTS_SECONDS)

    def save(self, kind: str) -> bool:
        """Write a checkpoint: rank 0 does, one after the other, and tells its agent; False: it may not."""
        step, chain = self.step, self.chain
        with self._writing:
            self.kernel.sleep(self.draw(self.script.save_seconds))
            number = self.world.truth.save(self, step, chain)
            if number:
                self.send(messages.Saved(number, "/checkpoints", step))
        return bool(number)

    # -- deaths

    def on_lost(self, mesh: Mesh, why: str) -> None:
        """A connection of this replica has broken."""
        if self.alive and mesh is self.mesh and not self.over:
            self.lose(why)

    def lose(self, why: str) -> None:
        """Nothing can be done together in this generation any more."""
        self.lost = self.lost or why
        self.ring()

    def _on_recovery_plan(self, message: messages.RecoveryPlan) -> None:
        self._plans.append(message)
        if message.generation > self.generation and self.mesh is not None and not self.over:
            self.lose("the agents say that a replica is gone")
        self.ring()

    def newer(self) -> bool:
        """Whether there is a plan of a later generation without somebody who has died."""
        return any(plan.generation > self.generation for plan in self._plans)

    def recover(self, reason: str, again: bool = False) -> None:
        """Become a generation without the dead; Exit or PeerLost when that can not be."""
        if not (self.armed or again):
            raise PeerLost(reason)
        for _ in range(RECOVERIES):
            self._hang_up(reason)
            self.wait_for(self.newer, None)
            plan = max(self._plans, key=lambda one: one.generation)
            self._plans.clear()
            try:
                self._meet_again(plan)
            except (NotFormed, PeerLost) as error:
                reason = str(error)
            else:
                return
        raise PeerLost(f"{reason}; the survivors have tried {RECOVERIES} times")

    def _hang_up(self, reason: str) -> None:
        if self.mesh is not None:
            mesh, self.mesh = self.mesh, None
            mesh.broken_off(self)
        self.control.abandon()
        self.send(messages.PeerLost(self.generation, reason))

    def _meet_again(self, plan: messages.RecoveryPlan) -> None:
        if plan.rank is None:
            self.send(messages.Switched(plan.generation, self.last_step_time))
            self.kernel.exit(0, "(leaves)")
        self.become(plan, plan.rank)
        point = self.connect(plan.master_addr, plan.master_port)
        self.form(point, None, self.newer)
        standing = self.formed.gather("standing", (self.step, self.chain))
        self.step, self.chain = self.world.truth.agree(self, standing)
        self.formed.gather("recovered", None)
        self.finish_switch(recovered=True)

    def become(self, plan: messages.Plan, rank: int) -> None:
        """Be `rank` of another generation."""
        self.control.abandon()
        self.environ.update(plan.environ)
        self.rank, self.size, self.generation = rank, plan.replicas, plan.generation
        self.armed = False

    def form(self, point: MeetingPoint, patience: float | None, cancelled: Callable[[], bool]) -> None:
        """Connect with all of this generation."""
        key = ("go", self.generation)
        mesh = point.meshes.setdefault(key, Mesh(self.kernel, self.size, self.generation))
        mesh.enter(self, self.rank, patience, cancelled)

    def finish_switch(self, recovered: bool = False) -> None:
        """What everybody in a new generation does last."""
        self.formed.gather("switched", None)
        self.send(messages.Switched(self.generation, self.last_step_time))
        self.enter_generation(passed=True, recovered=recovered)


__all__ = ["CAN_NOT_JOIN", "STOPPED", "Exit", "Replica", "Script"]
