"""Going on without a replica that has died, from the memory of those that live.

The problem. A replica dies in the middle of a step. The others are stuck in its gradients, have done
part of what comes after them, or all of it; none of them knows what the others have.

What does not do. To load the last checkpoint: all since then is lost, and every process starts anew. To
let each survivor finish its step: some have got the sum of the gradients, others never will.

What is done:

1. *The step does not commit* where its gradients did not arrive. The communication hook turns the failed
   all-reduce into zeros (`comm_hook`), the optimizer does nothing, and the loop's body comes to its end as
   always. The next `__next__` of the data loop finds the failure.
2. *Everybody hears of it.* Whoever finds it hangs up on all others (the library's collectives and torch's
   sockets alike), so that nobody goes on waiting for somebody who waits as well, tells its agent, and
   waits for a plan without the dead one (`RecoveryPlan`).
3. *Meet.* The survivors form the new generation. A death meanwhile leads to another plan: from 2 again.
4. *Agree.* What counts is the highest step that any survivor has committed. It can be one more than that
   of others: its last bucket arrived here and not there. Those others get model, optimizer and all that
   belongs to it from one who has it. Everybody else puts back what its abandoned step has changed
   (buffers, random states, learning-rate scheduler, loss scale, sums of accumulators) and hands the same
   samples out again, divided among those who are left. An evaluation loop begins anew where the sums of
   its accumulators were last added up over all replicas, because a part of them died.

The unit is the whole accumulation window. What an accumulator had not synchronised on the dead replica
in a *training* loop is gone, and is said.

A data loop ends on all replicas together: nobody is in the code behind it while another one still has a
step of it, or its part of an evaluation, to do again. There, too, the accumulators are added up, so that
nothing of a finished loop dies with a replica.

What cannot be put back restarts from the checkpoint, by ending the process with an error that says so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from adaptdl_elastic import env
from adaptdl_elastic._interfaces import ElasticLoader, Place, RetryDataLoop
from adaptdl_elastic._session import Session
from adaptdl_elastic.protocol.messages import PeerLost, RecoveryPlan, Resilient
from adaptdl_elastic.reducer import LOOPS, Future, PeerLostError
from adaptdl_elastic.torch._data.accumulator_state import (
    OwnSums,
    Sums,
    add_sums,
    both_sums,
    known_sums,
    put_sums,
    sums_of,
)
from adaptdl_elastic.torch._data.registry import current_dataloader, registry
from adaptdl_elastic.torch._elastic import eligibility, regroup, state_transfer
from adaptdl_elastic.torch._elastic.dry_batch import dry_batch
from adaptdl_elastic.torch._elastic.step_snapshot import StepSnapshot
from adaptdl_elastic.torch._elastic.user_state import tensors_of_script
from adaptdl_elastic.torch._process_group import backends
from adaptdl_elastic.torch._process_group.setup import disconnect_torch
from adaptdl_elastic.torch._process_group.store import FOREVER, generation_store
from adaptdl_elastic.torch._runtime.position import script_position

log = logging.getLogger(__name__)
T = TypeVar("T")

_STEP = 0.3  # seconds that a step may take to notice a death by itself
_ATTEMPTS = 10  # more deaths than that, one during the recovery from another, are a defect
Where = tuple[int, int, bool]
"""A place, and whether that loop is over. Orders replicas by how far they are in the script."""


@dataclass(frozen=True)
class Mark:
    """Where all replicas last agreed on the accumulators' sums, in the data loop under way."""

    place: Place
    index: int  # samples handed out by then
    sums: Sums


@dataclass
class SurvivorReport:
    """What one replica says about itself when the survivors meet."""

    rank: int
    step: int  # committed
    position: Where
    index: int  # samples of committed steps
    training: bool
    partially_restored: bool  # its model is half another one's: a donor died while it was given
    buffers_diverged: bool  # the replicas' buffers differ, though no loop trains
    synced: dict[str, int] = field(default_factory=dict)  # accumulator → how often it was synchronised
    unsynced: tuple[str, ...] = ()  # accumulators with sums of this replica only
    marked: bool = False  # there were some when this data loop began
    mark: int | None = None  # index of its Mark in this place
    seeds: dict[str, int] = field(default_factory=dict)  # of the loaders' orders
    announced: Place = (0, 0)  # the last data loop that all others were told of


class Recovery:
    """A survivor's side. One a session; costs nothing until `arm`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._armed: int | None = None  # generation in which the death of others does not end us
        self._before: StepSnapshot | None = None  # the window under way
        self._mark: Mark | None = None
        self._failed = False  # the window under way, since `recover` began
        self._partially_restored = False
        self._passed = False  # the others have the data loop behind them whose end this replica waits at
        self._buffers_diverged = False  # a training loop was left by `break`: the replicas' buffers differ
        self.waiting = False  # for a plan without the dead
        self._plans: list[RecoveryPlan] = []
        self._told = threading.Condition()

    # -- armed -------------------------------------------------------------------------------------

    @property
    def armed(self) -> bool:
        """Whether a death in the present generation would be survived."""
        return self._armed == self._session.generation

    def arm(self) -> None:
        """From now on the death of another replica does not end this one, if that is possible at all."""
        session = self._session
        if self.armed or self.why_not() is not None:
            return
        self._armed = session.generation
        for model in self._session.models:
            model.absorb_failures()
        self.mark()
        session.send(Resilient(session.generation))

    def why_not(self) -> str | None:
        """Why a death cannot be survived in this generation; None: it can."""
        session = self._session
        if session.joining:
            return "it has not joined the others yet"
        if session.channel is None:
            return "no agent would bring the others together"
        if env.rescale() == "restart":
            return "--rescale=restart"
        possible, reason = eligibility.possible(session)
        if not possible:
            return reason
        if registry().unrepeatable:
            return "only AdaptiveDataLoader can hand out the samples of a step again"
        return next((why for model in session.models if (why := model.why_not_resilient())), None)

    # -- before and after a window -----------------------------------------------------------------

    def begin_window(self, index: int) -> None:
        """Prepare for the first batch of a training window, which is handed out next."""
        if self.armed and self._session.replicas > 1:
            self._before = StepSnapshot(self._session, index, self._before)

    def before_step(self, left_out: bool) -> None:
        """Prepare for an `optimizer.step()` of this window; `left_out`: the call will do nothing."""
        if self._before is not None and self.armed and self._session.replicas > 1:
            self._before.before_step(left_out)

    def dry_batch(self) -> AbstractContextManager[None]:
        """Around a batch that does not count: the loop's body runs, and all that it changes is put back."""
        return dry_batch(self._session)

    @property
    def failed(self) -> bool:
        """Whether the gradients of the window under way could not be synchronised."""
        return any(model.failure is not None for model in self._session.models)

    @property
    def broken(self) -> bool:
        """Whether somebody is known to be gone."""
        return self.armed and (self._session.consensus.lost is not None or self.failed)

    def mark(self) -> None:
        """All replicas have just synchronised their accumulators, or stand at the beginning of a loop."""
        if self.armed:
            state = script_position()
            self._mark = Mark((state.finished, state.entered), state.index, sums_of(self._session))

    def retry_on_peer_loss(self, call: Callable[[], T], helper: ElasticLoader | None = None) -> T:
        """`call()`, again after each death that it meets with."""
        while True:
            try:
                return call()
            except PeerLostError as error:
                self._survive(error, helper)

    def restart_loop_on_peer_loss(self, call: Callable[[], T], helper: ElasticLoader) -> T:
        """`call()`, a collective of a data loop.

        Raises:
            RetryDataLoop: a death was survived instead. What was agreed on arrived here or did not; the other
                replicas may be one collective further, or have been, so all begin at the same one anew.
        """
        try:
            return call()
        except PeerLostError as error:
            self._survive(error, helper)
        raise RetryDataLoop

    def _survive(self, error: PeerLostError, helper: ElasticLoader | None) -> None:
        if not self.armed or script_position().outside:
            raise error
        self.recover(str(error), helper)

    def loop_ended(self, helper: ElasticLoader) -> bool:
        """All replicas have come to the end of this loop; False: a part of it has to be done again."""
        if not self.armed or self._session.replicas == 1 or script_position().outside:
            return True
        self._buffers_diverged = self._buffers_diverged or helper.training
        try:
            sums = self._end({name: own for name, (_, own, _) in sums_of(self._session).items()}).result()
            if sums is not None:  # all have come to the end
                add_sums(self._session, sums)
                self._even_buffers()
        except PeerLostError as error:
            self.recover(str(error), helper, at_end=True)
            return self._passed
        return True

    def loop_left(self, helper: ElasticLoader) -> None:
        """Record that this replica has left a loop by `break`, so that no peer waits at the loop's end."""
        # after a step that failed the next boundary ends this replica: from a generator's end nobody can
        inside = not script_position().outside
        if inside and self.armed and self._session.replicas > 1 and not self.failed:
            self._buffers_diverged = self._buffers_diverged or helper.training
            self._end(None)

    def _end(self, sums: OwnSums | None) -> Future:
        assert self._session.reducer is not None
        tag = f"end of data loop {self._place()}"
        return self._session.reducer.allreduce_async(sums, both_sums, tag, LOOPS, objects=True)

    def between_loops(self) -> None:
        """All replicas are about to enter a data loop or an epoch."""
        self.recover_if_peer_lost()
        if self.armed:
            self.retry_on_peer_loss(self._even_buffers)

    def recover_if_peer_lost(self) -> None:
        """Between data loops: go on without those who are gone."""
        self.mark()
        if self.broken:
            self.recover("a replica is gone")

    def _even_buffers(self) -> None:
        """Rank 0's buffers for all, where training in parts has made them differ."""
        if not self._buffers_diverged:
            return
        assert self._session.reducer is not None
        self._session.reducer.barrier(tag="buffers")  # torch's broadcast has a time limit
        try:
            for model in self._session.models:
                model.sync_buffers()
        except RuntimeError as error:  # gloo may notice a death before we do
            raise PeerLostError(str(error)) from error
        self._buffers_diverged = False

    def _place(self) -> Place:
        state = script_position()
        return state.finished, state.entered

    # -- a death -----------------------------------------------------------------------------------

    def on_lost(self) -> None:
        """Somebody is gone. From any thread: wake the training thread from a collective with the others."""
        if self.armed:
            disconnect_torch(self._session)
            notice = threading.Timer(_STEP, self._notice, (self._session.generation,))
            notice.daemon = True
            notice.start()

    def _notice(self, generation: int) -> None:
        """Stop waiting for gradients in a step that takes long, and tell the agent of the lost peer."""
        if self._session.consensus.loops_over:
            return  # there is no step any more; a collective says so itself if it needs the others
        if self._session.generation == generation and not self.waiting:
            for model in self._session.models:
                model.give_up("a replica is gone")
            self._session.send(PeerLost(generation, "a replica is gone"))

    def on_plan(self, message: RecoveryPlan) -> None:
        """Take the agent's plan of a generation without dead replicas. Runs in the channel's thread."""
        # First: once the training thread has the plan, what is lost is a generation of the past.
        session, generation = self._session, message.generation
        if not self.waiting and generation > session.generation:
            session.consensus.lose("the agents say that a replica is gone")
        with self._told:
            self._plans.append(message)
            self._told.notify_all()
        reducer = session.reducer  # asked for first: if there is no later generation yet, it is of none
        if reducer is not None and generation > session.generation:
            reducer.abort()  # who was stopped, or cut off, keeps its connections, and would be waited for

    def newer(self) -> bool:
        """Whether there is a plan of a generation after the present one, without somebody who has died."""
        with self._told:
            return any(plan.generation > self._session.generation for plan in self._plans)

    def _next_plan(self) -> RecoveryPlan:
        with self._told:
            while True:
                self._plans = [p for p in self._plans if p.generation > self._session.generation]
                self.waiting = not self._plans
                if self._plans:
                    return max(self._plans, key=lambda plan: plan.generation)
                self._told.wait()

    def recover(self, reason: str, helper: ElasticLoader | None = None, at_end: bool = False) -> None:
        """Become a generation without the dead, and stand where training goes on.

        Args:
            reason: How the death was noticed.
            helper: Of the data loop under way; None: whichever is.
            at_end: That loop has handed out all it had.

        Raises:
            PeerLostError: what this replica has done cannot be undone: it must restart; or others have
                come to the end of the script.
            SystemExit: the plan does without this replica.
        """
        reducer = self._session.reducer
        # By its own will: that is no death. Not so before a generation has come about.
        if self.armed and reducer is not None and reducer.finished is not None:
            raise reducer.finished
        began, helper = time.monotonic(), helper or current_dataloader()
        # what an evaluation loop leaves behind is no step
        self._failed = self.failed and (helper is None or helper.training or helper.training_loader_undecided)
        self._passed = False
        self._check(self._failed, helper, reason)
        log.info("going on without a replica: %s", self._session.consensus.lost or reason)
        for _ in range(_ATTEMPTS):
            self._hang_up(reason)
            plan = self._next_plan()
            try:
                self._meet(plan)
                self._agree(helper, at_end)
                self._finish(began)
            except (RuntimeError, OSError) as error:
                if isinstance(error, UnrecoverableStateError):
                    raise
                reason = str(error)
                log.warning("generation %s did not come about: %s", plan.generation, reason)
            else:
                return
        raise PeerLostError(f"{reason}; the survivors have tried {_ATTEMPTS} times to go on together")

    def _check(self, failed: bool, helper: ElasticLoader | None, reason: str) -> None:
        why = None
        if failed and (helper is None or self._before is None):
            why = "the step that it broke is in no data loop of this library"
        elif self._before is not None and (
            failed or any(m.accumulates_by_hand for m in self._session.models)
        ):
            why = self._before.why_irreparable(self._session)
        if why is not None:
            raise PeerLostError(f"{reason}; training restarts from the last checkpoint, because {why}")

    def _hang_up(self, reason: str) -> None:
        session = self._session
        disconnect_torch(session)
        stuck, session.transfer_stuck = session.transfer_stuck, False
        if stuck or any(model.stuck for model in session.models):
            backends.keep()
        if session.reducer is not None:
            session.reducer.abort()
        session.consensus.abandon()
        session.send(PeerLost(session.generation, reason[:200]))

    def _meet(self, plan: RecoveryPlan) -> None:
        session, generation = self._session, plan.generation
        if plan.rank is None:
            regroup.tell_switched(session, generation)
            raise SystemExit(0)
        regroup.become(session, plan, generation, plan.rank)
        store = generation_store(plan.master_addr, plan.master_port, generation)
        # A survivor may be busy outside of all loops, for longer than anybody could guess. Who has died
        # or hangs is found by the agents, whose next plan ends this, as does the coordinator's patience.
        regroup.form(session, store, 0, self.newer, FOREVER)

    def _finish(self, began: float) -> None:
        state = script_position()
        position = (state.finished, state.entered, state.index)
        regroup.finish(self._session, position, began, recovered=True)
        self._before = None

    # -- agreeing ----------------------------------------------------------------------------------

    def _agree(self, helper: ElasticLoader | None, at_end: bool) -> None:
        """Bring every survivor to the same step and the same sample."""
        session = self._session
        assert session.reducer is not None
        mine = self._standing(helper)
        found = session.reducer.allreduce([vars(mine)], tag="standing")
        everybody = [SurvivorReport(**one) for one in found]
        log.info("the survivors stand at %s", everybody)
        top = _newest(everybody)
        if self._failed and mine.step == top:  # before others get it from us
            assert self._before is not None
            self._before.put_back(session)
        behind = [one.rank for one in everybody if one.partially_restored or one.step < top]
        if behind:
            self._heal(mine, top, behind)
        for model in self._session.models:
            statistics = session.reducer.broadcast(
                model.statistics() if session.rank == 0 else None, tag="statistics"
            )
            model.load_statistics(statistics)
            session.metrics.update_progress(model.progress)
        for one in everybody:
            # In another epoch there are other loaders, if the script makes them in every epoch.
            if one.position[0] == mine.position[0]:
                script_position().seeds = {**one.seeds, **script_position().seeds}
            script_position().announced = max(script_position().announced, one.announced)
        self._same_sums(everybody)
        where = max(one.position for one in everybody)
        here = [one for one in everybody if one.position == where]
        train = any(one.training for one in here)
        # Whoever trains, and is not at the loop's end, keeps its own; but some may be before this loop.
        self._buffers_diverged = any(
            one.buffers_diverged and not (train and one.position == where) for one in everybody
        )
        self._even_buffers()
        if train:
            self._same_index(mine, where)
            if _alone(everybody, everybody) and session.rank == 0:
                log.warning("what the dead had added to accumulators in this data loop is lost")
        elif _alone(here, everybody) if where[-1] else any(one.marked for one in here):
            raise UnrecoverableStateError(
                "what the dead had added to accumulators outside of data loops is gone"
            )
        if mine.position == where:
            self._stand(here)
        elif at_end:
            self._passed = True
        elif not mine.position[-1]:
            raise UnrecoverableStateError(
                f"others are at {where} (epoch, data loop), this one is in {mine.position}"
            )
        session.reducer.barrier(tag="recovered")

    def _standing(self, helper: ElasticLoader | None) -> SurvivorReport:
        session, state = self._session, script_position()
        index = state.index
        if self._failed:
            assert self._before is not None
            index = self._before.index
        mark = self._mark if self._mark is not None and self._mark.place == self._place() else None
        return SurvivorReport(
            rank=session.rank,
            step=session.step,
            position=(*self._place(), not state.looping),
            index=index,
            training=helper is not None and helper.training,
            partially_restored=self._partially_restored,
            buffers_diverged=self._buffers_diverged,
            synced={name: count for name, (_, _, count) in known_sums(session).items()},
            unsynced=tuple(name for name, (_, own, _) in sums_of(session).items() if own),
            mark=None if mark is None else mark.index,
            marked=mark is not None and any(own for _, own, _ in mark.sums.values()),
            seeds=dict(state.seeds),
            announced=state.announced,
        )

    def _heal(self, mine: SurvivorReport, top: int, behind: list[int]) -> None:
        """Those behind get the models of those who are not."""
        session = self._session
        names = {model.name for model in session.models} | tensors_of_script(session)
        donors = [rank for rank in range(session.replicas) if rank not in behind]
        if session.rank not in behind:
            state_transfer.give(session, behind, donors, names)
            return
        if mine.step not in (top, top - 1):
            raise UnrecoverableStateError(f"step {mine.step} is more than one behind {top}")
        log.info("step %d arrived elsewhere: taking it from there", top)
        state_transfer.take(session, overwrites=self._will_be_overwritten)
        self._partially_restored = False
        if mine.step < top:
            script_position().step = top
            if self._failed and self._before is not None:  # the window counts after all
                script_position().samples += script_position().index - self._before.index
            mine.index, self._failed = script_position().index, False

    def _will_be_overwritten(self) -> None:
        self._partially_restored = True  # until all has arrived

    def _same_sums(self, everybody: list[SurvivorReport]) -> None:
        """Take the sums of those whose last synchronisation went through where ours did not."""
        session = self._session
        assert session.reducer is not None
        newest = _newest_sums(everybody)
        uneven = {n for one in everybody for n, count in one.synced.items() if count < newest[n]}
        if not uneven:
            return
        own = {n: s for n, s in known_sums(session).items() if n in uneven and s[2] == newest[n]}
        found: Sums = session.reducer.allreduce(own, lambda a, b: {**b, **a}, tag="sums", objects=True)
        for name, (results, _, syncs) in found.items():
            state: Any = session.states.get(name)
            if name not in own and state is not None:
                state.take_total(results, syncs)

    def _same_index(self, mine: SurvivorReport, where: Where) -> None:
        """Make sure that all who train go on from the same sample, now that those behind are healed."""
        assert self._session.reducer is not None
        indices = self._session.reducer.allreduce([(mine.position, mine.index)], tag="index")
        found = {index for at, index in indices if tuple(at) == where}
        if len(found) > 1:
            raise UnrecoverableStateError(f"the replicas stand at different samples: {sorted(found)}")
        if mine.position == where:
            script_position().index = mine.index

    def _stand(self, here: list[SurvivorReport]) -> None:
        """Begin the evaluation loop under way anew, unless nothing of it is lost."""
        if any(one.training for one in here) or here[0].position[-1]:
            return
        marks = {one.mark for one in here}
        if all(one.index == one.mark for one in here):
            return  # nothing of this loop has been done since
        if len(marks) > 1 or None in marks or self._mark is None:
            raise UnrecoverableStateError(
                "an evaluation loop cannot be begun again: its sums are gone with the dead"
            )
        script_position().index = self._mark.index
        put_sums(self._session, self._mark.sums)


class UnrecoverableStateError(RuntimeError):
    """The survivors have nothing in common from which they could go on."""


def _newest_sums(everybody: list[SurvivorReport]) -> dict[str, int]:
    """How often each accumulator was synchronised where that was done last."""
    newest: dict[str, int] = {}
    for one in everybody:
        for name, count in one.synced.items():
            newest[name] = max(count, newest.get(name, 0))
    return newest


def _alone(some: list[SurvivorReport], everybody: list[SurvivorReport]) -> bool:
    """Whether one of `some` has sums of its own that nobody else knows.

    They are known where a synchronisation has ended elsewhere that has not ended here.
    """
    newest = _newest_sums(everybody)
    return any(one.synced[name] == newest[name] for one in some for name in one.unsynced)


def _newest(everybody: list[SurvivorReport]) -> int:
    steps = [one.step for one in everybody if not one.partially_restored]
    if not steps:
        raise UnrecoverableStateError("no survivor has a whole model")
    return max(steps)
