"""Agents that only keep the protocol with the coordinator: no processes, no training.

`FakeAgent.step` looks at the store once and does what a real agent would do next, so a test decides who
moves when. On a real store `FakeAgent.follow` steps whenever something changes, in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from adaptdl_elastic import sched_hints
from adaptdl_elastic.protocol.messages import Groups
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.held import MOST_ENDS, GenerationEnd, Held, Left, PeerLoss
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    Failure,
    JobSpec,
    JobStatus,
    NodeRecord,
    Outcome,
    Plan,
    Transition,
)
from adaptdl_elastic.rendezvous.store.base import Lease, Store, StoreError, Watch
from adaptdl_elastic.sched_hints import JobHints

GOOD_PERF = (0.1, 0.001, 0.005, 0.0005, 0.003, 0.0003, 1.5)
"""A model that scales well: half a millisecond a sample, cheap synchronisation."""


def spec_of(job: str, **changes: object) -> JobSpec:
    """A job that may have one to many replicas anywhere."""
    fields: dict[str, object] = {"max_nodes": 64, "max_replicas": 64, "rescale_timeout": 20.0}
    return JobSpec(job=job, run=f"{job}-1", **{**fields, **changes})  # type: ignore[arg-type]


def hints_of(job: str, generation: int, replicas: int, **changes: object) -> JobHints:
    """A report of a job that would gain from more replicas."""
    fields: dict[str, object] = {
        "init_batch_size": 128,
        "batch_size": 128,
        "atomic_bsz": 128,
        "max_batch_size": 4096,
        "local_bsz_bounds": (16, 512),
        "max_profiled_replicas": replicas,
        "grad_params": (0.01, 10.0),
        "perf_params": GOOD_PERF,
        "predicted_goodput": 1000.0 * replicas,
        "goodput": 1000.0 * replicas,
        "remaining_samples": 1e7,
    }
    fields.update(changes)
    return JobHints(job=job, generation=generation, nodes=1, replicas=replicas, **fields)  # type: ignore[arg-type]


@dataclass
class FakeAgent:
    """One agent of one job on one node."""

    store: Store
    keys: Keys
    node: str
    job: str
    slots: int = 1
    min_slots: int = 1
    library: bool = True
    serial: int = 0
    clock: Callable[[], float] = lambda: 0.0
    generation: int = -1  # what it has acted on
    running: int | None = None  # the generation whose replicas run here
    waiting: Plan | None = None  # a plan that starts when the others have left
    lease: Lease | None = None
    exit_code: int | None = None
    history: list[tuple[int, int]] = field(default_factory=list)  # (generation, replicas) that ran here
    reports: bool = True
    holds_start: bool = False  # a node that does not get its replicas up
    steps: bool = True  # its replicas get as far as their first step
    inplace: bool = False  # what it reports
    resilient: bool = False  # its replicas live on when others die
    groups: Groups | None = ()  # while one of each lives; None: they have not said so in this generation
    alive: tuple[int, ...] = ()  # slots of the replicas that run
    lost: tuple[int, ...] = ()  # slots of those that died in the generation that runs
    unsaved: str = ""  # why its replicas cannot save
    ends: tuple[GenerationEnd, ...] = ()
    loss: PeerLoss | None = None
    first_step: float | None = None
    started: float = 0.0
    sequence: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _watch: Watch | None = None

    @property
    def survives(self) -> Groups | None:
        return self.groups if self.resilient else None

    @property
    def agent(self) -> str:
        return f"{self.node}-{self.job}-{self.serial}"

    def record(self, **changes: object) -> NodeRecord:
        run = self._spec().run
        record = NodeRecord(
            self.node, self.job, run, self.agent, "127.0.0.1", self.slots, min_slots=self.min_slots
        )
        return replace(record, **changes)  # type: ignore[arg-type]

    def _spec(self) -> JobSpec:
        item = self.store.get(self.keys.job(self.job, "spec"))
        assert item is not None
        return records.decode(JobSpec, item.value)

    def register(self, **changes: object) -> FakeAgent:
        self.lease = self.lease or self.store.lease(60.0)  # nobody here lets it run out
        self.store.put(
            self.keys.node(self.node, self.job), records.encode(self.record(**changes)), self.lease
        )
        return self

    def _get(self, kind: type, *parts: str):  # type: ignore[no-untyped-def, type-arg]
        item = self.store.get(self.keys.job(self.job, *parts))
        try:
            return None if item is None else records.decode(kind, item.value)
        except records.MalformedRecordError:
            return None

    def step(self) -> bool:
        """Do the next thing; whether there was one."""
        if self.exit_code is not None:
            return False
        run = self._spec().run
        status = self._get(JobStatus, "status")
        if status is not None and status.run == run and status.state.ended:
            self._end(Outcome.ABORTED)
            self.leave(status.exit_code or 0)
            return True
        plan: Plan | None = self._get(Plan, "plan")
        if plan is None or plan.claim or plan.run != run:
            return False
        if plan.generation > self.generation:
            self._take(plan)
            return True
        if self.waiting is not None and not self.holds_start and self._all_left(self.waiting):
            self._start(self.waiting)
            return True
        return False

    def _take(self, plan: Plan) -> None:
        if plan.transition is Transition.RECOVER:
            self._recover(plan)
            return
        self._end(Outcome.STOPPED)
        self.generation = plan.generation
        mine = [p for p in plan.placements if p.node == self.node and p.agent == self.agent]
        self.waiting = plan if mine else None
        self.say()

    def _recover(self, plan: Plan) -> None:
        named = plan.slots(self.node) if any(p.agent == self.agent for p in plan.placements) else ()
        dead = tuple(slot for slot in named if slot not in self.alive)
        if not named or self.running is None or not self.resilient:
            self._end(Outcome.STOPPED)
            self.generation = plan.generation
            if named:
                self.add_end(GenerationEnd(plan.generation, Outcome.ABORTED, lost=named))
            self.say()
            return
        alive = tuple(slot for slot in named if slot in self.alive)
        self._end(Outcome.STOPPED)
        self.generation, self.running, self.alive, self.lost = plan.generation, plan.generation, alive, ()
        self.history.append((plan.generation, len(alive)))
        if dead:
            self._die(dead)
        else:
            self._say_running(plan)

    def _all_left(self, plan: Plan) -> bool:
        for one in plan.leaving:
            left: Left | None = self._get(Left, "left", one.node)
            if left is not None and left.has_left(one.generation, one.agent):
                continue
            item = self.store.get(self.keys.node(one.node, self.job))
            if item is not None and records.decode(NodeRecord, item.value).agent == one.agent:
                return False
        return True

    def _start(self, plan: Plan) -> None:
        self.running, self.waiting = plan.generation, None
        replicas = len(plan.ranks(self.node))
        self.history.append((plan.generation, replicas))
        self.alive, self.lost = plan.slots(self.node), ()
        self._say_running(plan)

    def _say_running(self, plan: Plan) -> None:
        self.started, self.loss, self.groups = self.clock(), None, () if self.groups == () else None
        self.first_step = self.started if self.steps else None
        self.say()
        if self.reports and self.library and plan.placements[0].node == self.node:
            self.report(plan, inplace=self.inplace)

    def report(self, plan: Plan, **changes: object) -> None:
        hints = hints_of(self.job, plan.generation, plan.replicas, **changes)
        self.store.put(self.keys.job(self.job, "hints"), sched_hints.encode(hints))

    def _end(self, outcome: Outcome, failure: Failure | None = None) -> None:
        ran, generation = self.running is not None, self.running
        if generation is None and self.waiting is not None:
            generation = self.waiting.generation
        loss, self.running, self.waiting, self.alive, self.lost = self.loss, None, None, (), ()
        self.loss = None
        if generation is not None:
            now = self.clock()
            code = 0 if failure is None else failure.exit_code
            end = GenerationEnd(
                generation, outcome, code, failure, self.unsaved, ran, self.library, self.survives
            )
            lost = loss.lost if loss is not None and loss.generation == generation else ()
            first_step, started = (self.first_step, self.started) if ran else (None, 0.0)
            end = replace(end, lost=lost, first_step=first_step, started=started, last_step=now, time=now)
            self.add_end(end)
            self.say()

    def add_end(self, end: GenerationEnd) -> None:
        self.ends = (*self.ends, end)[-MOST_ENDS:]

    def say(self) -> None:
        """Write what it holds."""
        acted = self.generation - 1 if self.waiting is not None else self.generation
        self.sequence += 1
        held = Held(self.node, self.agent, self.sequence, acted, ends=self.ends)
        if self.running is not None:
            held = replace(
                held,
                generation=self.running,
                library=self.library,
                survives=self.survives,
                first_step=self.first_step,
                loss=self.loss,
                started=self.started,
            )
        self.store.put(self.keys.held(self.job, self.node), records.encode(held))
        self.store.put(self.keys.left(self.job, self.node), records.encode(held.left))

    # -- what befalls it

    def finish(self) -> None:
        """Its replicas exit 0."""
        self._end(Outcome.DONE)

    def fail(
        self,
        message: str = "boom",
        exit_code: int = 1,
        kind: str = "",
        lost_peer: bool = False,
        final: bool = False,
        step: int | None = None,
        worked_batch: int | None = None,
    ) -> None:
        """Let a replica of it fail."""
        failure = Failure(0, exit_code, message, 0.0, kind, lost_peer, final, step, worked_batch)
        self._end(Outcome.FAILED, failure)

    def lose(self, *slots: int) -> None:
        """Replicas of it are killed; the others live on if they can."""
        if not self.resilient:
            self._end(Outcome.FAILED, Failure(0, -9, "SIGKILL"))
            return
        self._die(slots)

    def newcomer_fails(self, *slots: int, exit_code: int = 1, message: str = "boom", **more: Any) -> None:
        """Newcomers raise an error, or are killed, after they have joined; the others live on."""
        self._die(slots, Failure(slots[0], exit_code, message, **more))

    def _die(self, slots: tuple[int, ...], failure: Failure | None = None) -> None:
        assert self.running is not None
        self.alive = tuple(slot for slot in self.alive if slot not in slots)
        self.lost = (*self.lost, *slots)
        failure = failure or Failure(self.lost[0], -9, "SIGKILL")
        self.loss = PeerLoss(self.running, tuple(sorted(self.lost)), failure)
        self.say()
        if not self.alive:
            self._end(Outcome.FAILED, failure)

    def switch(self) -> None:
        """Its replicas begin with the newest plan, though others have not left the generation before."""
        self.step()
        assert self.waiting is not None
        self._start(self.waiting)

    def notice(self) -> None:
        """Its replicas find that somebody elsewhere is gone."""
        assert self.running is not None
        self.loss = PeerLoss(self.running, self.lost, None if self.loss is None else self.loss.failure)
        self.say()

    def leave(self, exit_code: int = 0) -> None:
        """Exit in an orderly way."""
        self.exit_code = exit_code
        if self.lease is not None:
            self.lease.revoke()
        self.stop()

    def vanish(self) -> None:
        """The machine is gone: on the store as if its lease had run out."""
        self.exit_code = -9
        if self.lease is not None:
            self.lease.revoke()
        self.stop()

    # -- on a real store

    def follow(self) -> FakeAgent:
        """Step whenever something changes, in a thread, until `stop`."""
        threading.Thread(target=self._follow, daemon=True, name=f"fake-{self.agent}").start()
        return self

    def _follow(self) -> None:
        while not self._stop.is_set():
            with suppress(StoreError):
                snapshot = self.store.range(self.keys.job(self.job))
                while self.step():
                    pass
                with self.store.watch(self.keys.job(self.job), snapshot.revision + 1) as watch:
                    self._watch = watch
                    if self._stop.is_set():
                        return
                    for _ in watch:
                        while not self._stop.is_set() and self.step():
                            pass
            self._stop.wait(0.05)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._watch is not None:
            self._watch.close()


def submit(store: Store, keys: Keys, spec: JobSpec) -> None:
    """Write a job's specification, as its first agent does."""
    store.put(keys.job(spec.job, "spec"), records.encode(spec))
