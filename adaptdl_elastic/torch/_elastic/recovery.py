"""Continue training after a replica has died, from the memory of the survivors.

The problem. A replica dies in the middle of a step. A survivor may be waiting for the gradients of this
step, may have got some of them, or may have finished the step. No survivor knows how far the others are.

Loading the last checkpoint would lose all steps since then and restart every process. Letting each survivor
finish its step is impossible: some will never get the sum of the gradients. What is done:

1. *The step does not commit* on a replica that did not get its gradients. The communication hook replaces the
   result of the failed all-reduce by zeros (`comm_hook`), the optimizer does nothing, and the loop's body
   runs to its end as usual. The next `__next__` of the data loop detects the failure.
2. *Disconnect.* A replica that detects the failure closes its connections to all others (of the library's
   collectives and of torch), so that no replica keeps waiting for another one. It tells its agent and waits
   for a plan without the dead replica (`RecoveryPlan`).
3. *Meet.* The survivors connect as a new generation. If another replica dies meanwhile, there is another
   plan, and they begin again at 2.
4. *Agree.* Training continues after the highest step that any survivor has committed. Others may be one step
   behind: the last bucket of gradients arrived at some replicas only. Those behind get the model, the
   optimizer and the related state from a survivor that has committed the step. If no survivor has committed
   the failed step, all restore what it has changed (buffers, random states, learning-rate scheduler, loss
   scale, sums of accumulators), and its samples are handed out again, divided among the survivors. An
   evaluation loop is repeated from the point at which the sums of its accumulators were last synchronised,
   because the dead replica's part of the sums is lost.

A step here is a whole accumulation window. What the dead replica had added to an accumulator in a *training*
loop since the last synchronisation is lost, and a warning says so.

A data loop ends on all replicas together. So no replica runs the code after the loop while another one still
has to repeat a step or a part of an evaluation. The accumulators are added up at that point, so that no sum
of a finished loop is lost with a replica.

If a state cannot be restored, the process ends with an error, and training restarts from the checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from adaptdl_elastic import env
from adaptdl_elastic._interfaces import ElasticLoader
from adaptdl_elastic._session import Session
from adaptdl_elastic._values import Place, RetryDataLoop, StepOutOfMemory
from adaptdl_elastic.protocol.messages import PeerLost, RecoveryPlan, Resilient
from adaptdl_elastic.reducer import LOOPS, Future, PeerLostError
from adaptdl_elastic.torch._data.accumulator_state import OwnSums, Sums, add_sums, both_sums, known_sums
from adaptdl_elastic.torch._data.registry import current_dataloader, registry
from adaptdl_elastic.torch._elastic import eligibility, regroup, state_transfer
from adaptdl_elastic.torch._elastic.dry_batch import dry_batch
from adaptdl_elastic.torch._elastic.step_snapshot import StepSnapshot, put_sums, sums_of, tensors_of_script
from adaptdl_elastic.torch._elastic.survivors import (
    Mark,
    SurvivorReport,
    UnrecoverableStateError,
    Where,
    knows_sums_alone,
    newest_step,
    newest_sums,
)
from adaptdl_elastic.torch._process_group import backends
from adaptdl_elastic.torch._process_group.setup import disconnect_torch
from adaptdl_elastic.torch._process_group.store import FOREVER, generation_store
from adaptdl_elastic.torch._runtime.position import script_position
from adaptdl_elastic.torch._tuning.memory_limit import memory_limit

log = logging.getLogger(__name__)
T = TypeVar("T")

_STEP = 0.3  # seconds that a running step has to notice a death by itself, before it is interrupted
_ATTEMPTS = 10  # recoveries tried in a row, each interrupted by another death, before giving up


class Recovery:
    """Let this replica survive the death of peers. One object per session; costs nothing until `arm`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._armed: int | None = None  # generation in which this replica survives the death of a peer
        self._before: StepSnapshot | None = None  # snapshot at the start of the current window
        self._mark: Mark | None = None
        self._failed = False  # during `recover`: the current window failed and has not been undone
        self._partially_restored = False  # the donor of its model died during the transfer
        self._passed = False  # the others have passed the end of the data loop at which this replica waits
        self._buffers_diverged = False  # a training loop has run since the replicas' buffers were last equal
        self.waiting = False  # for a plan without the dead replica
        self._plans: list[RecoveryPlan] = []
        self._told = threading.Condition()

    # -- arming ------------------------------------------------------------------------------------

    @property
    def armed(self) -> bool:
        """Whether this replica would survive the death of a peer in the current generation."""
        return self._armed == self._session.generation

    def arm(self) -> None:
        """Survive the death of peers from now on; if `why_not` gives a reason against it, tell the agent."""
        session = self._session
        if self.armed or session.joining:
            return
        if (why := self.why_not()) is not None:
            session.send(Resilient(session.generation, why))
            return
        self._armed = session.generation
        for model in self._session.models:
            model.absorb_failures()
        self.mark()
        groups = tuple(group for model in session.models for group in model.needed_groups())
        session.send(Resilient(session.generation, groups=groups))
        if session.consensus.lost is not None:  # before this replica was armed, so that `on_lost` did nothing
            self.on_lost()

    def why_not(self) -> str | None:
        """Return why this replica cannot survive a peer's death in this generation; None if it can."""
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
        """Take a snapshot before the first batch of a training window, at sample `index`."""
        if self._session.models:
            self._before = StepSnapshot(self._session, index, self._before)

    def before_step(self, left_out: bool) -> None:
        """Prepare for a call of `optimizer.step()`; `left_out` if the call will not step."""
        if self._before is not None:
            self._before.states.before_step(left_out)

    def why_not_repeatable(self) -> str | None:
        """Return why the current step could not be repeated on all replicas; None if it could."""
        helper = current_dataloader()
        if helper is None or not (helper.training or helper.training_loader_undecided):
            return "it is in no data loop of this library that trains"
        if registry().unrepeatable:
            return "only AdaptiveDataLoader can hand out the samples of a step again"
        if self._before is None:
            return "nothing is known of its beginning"
        return self._before.why_irreparable(self._session)

    def repeat_step(self, helper: ElasticLoader) -> bool:
        """Go back to the beginning of the current step if it did not fit into memory.

        Returns:
            Whether it did not fit.

        All replicas get the same `StepOutOfMemory`, so all go back without a message. If a peer has died as
        well, `recover` goes back instead.

        Raises:
            RuntimeError: the step cannot be undone.
        """
        failure = next((m.failure for m in self._session.models if m.failure is not None), None)
        if not isinstance(failure, StepOutOfMemory):
            return False
        memory_limit(self._session).learn(failure)
        if self.armed and self._session.consensus.lost is not None and not script_position().outside:
            return False
        why = self.why_not_repeatable()
        if why is not None or self._before is None:
            raise RuntimeError(f"{failure}, and the step cannot be repeated: {why}") from failure
        self._before.put_back(self._session)
        for model in self._session.models:
            model.clear_failure()
        script_position().index = self._before.index
        helper.fit_memory()
        return True

    def _give_up_step(self, helper: ElasticLoader) -> None:
        """Forget a step that did not fit into memory, in a loop that its body has left."""
        for model in self._session.models:
            if isinstance(model.failure, StepOutOfMemory):
                memory_limit(self._session).learn(model.failure)
                model.clear_failure()
                helper.fit_memory()

    def dry_batch(self) -> AbstractContextManager[None]:
        """Enclose a batch that does not count, and undo what the loop's body changes."""
        return dry_batch(self._session)

    @property
    def failed(self) -> bool:
        """Whether the gradients of the current window could not be synchronised."""
        return any(model.failure is not None for model in self._session.models)

    def trouble(self) -> tuple[bool, bool]:
        """Return whether gradients of the current window are missing, and whether a peer is known to be lost.

        The second is true only if this replica can survive the loss.
        """
        failed = self.failed
        return failed, self.armed and (failed or self._session.consensus.lost is not None)

    def mark(self) -> None:
        """Record this position and the sums of the accumulators as the point to return to.

        Called when all replicas have just synchronised their accumulators, or are at the start of a loop.
        """
        if self.armed:
            state = script_position()
            self._mark = Mark((state.finished, state.entered), state.index, sums_of(self._session))

    def retry_on_peer_loss(self, call: Callable[[], T], helper: ElasticLoader | None = None) -> T:
        """Return `call()`; after a peer's death, recover and call it again."""
        while True:
            try:
                return call()
            except PeerLostError as error:
                self._survive(error, helper)

    def restart_loop_on_peer_loss(self, call: Callable[[], T], helper: ElasticLoader) -> T:
        """Return `call()`, a collective of a data loop.

        Raises:
            RetryDataLoop: a peer died and the survivors have recovered. Some of them may have finished this
                collective and others not, so all continue the data loop from the same point.
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
        """Wait until all replicas have come to the end of this loop, and add up their accumulators.

        Returns:
            False if a replica died and a part of the loop must be repeated; True otherwise.
        """
        if not self.armed or self._session.replicas == 1 or script_position().outside:
            return True
        self._buffers_diverged = self._buffers_diverged or helper.training
        try:
            sums = self._end({name: own for name, (_, own, _) in sums_of(self._session).items()}).result()
            if sums is not None:  # no replica has left the loop by `break`
                add_sums(self._session, sums)
                self._even_buffers()
        except PeerLostError as error:
            self.recover(str(error), helper, at_end=True)
            return self._passed
        return True

    def loop_left(self, helper: ElasticLoader) -> None:
        """Record that this replica has left a loop by `break`, so that no peer waits at the loop's end."""
        self._give_up_step(helper)
        # no recovery while the loader's generator is closed: after a failed step the next boundary raises
        inside = not script_position().outside
        if inside and self.armed and self._session.replicas > 1 and not self.failed:
            self._buffers_diverged = self._buffers_diverged or helper.training
            self._end(None)

    def _end(self, sums: OwnSums | None) -> Future:
        assert self._session.reducer is not None
        tag = f"end of data loop {self._place()}"
        return self._session.reducer.allreduce_async(sums, both_sums, tag, LOOPS, objects=True)

    def between_loops(self) -> None:
        """Prepare to enter a data loop or an epoch: recover from a death, and make all buffers equal."""
        self.recover_if_peer_lost()
        if self.armed:
            self.retry_on_peer_loss(self._even_buffers)

    def recover_if_peer_lost(self) -> None:
        """Recover if a peer is known to be lost. For use between data loops."""
        self.mark()
        if self.trouble()[1]:
            self.recover("a replica is gone")

    def _even_buffers(self) -> None:
        """Give all replicas rank 0's buffers if training has made them differ. A collective."""
        if not self._buffers_diverged:
            return
        assert self._session.reducer is not None
        self._session.reducer.barrier(tag="buffers")  # wait here: torch's broadcast has a time limit
        try:
            for model in self._session.models:
                model.sync_buffers()
        except RuntimeError as error:  # gloo may notice a death before the reducer does
            raise PeerLostError(str(error)) from error
        self._buffers_diverged = False

    def _place(self) -> Place:
        state = script_position()
        return state.finished, state.entered

    # -- a death -----------------------------------------------------------------------------------

    def on_lost(self) -> None:
        """Interrupt torch's collectives after the loss of a peer. Callable in any thread."""
        if self.armed:
            disconnect_torch(self._session)
            notice = threading.Timer(_STEP, self._notice, (self._session.generation,))
            notice.daemon = True
            notice.start()

    def _notice(self, generation: int) -> None:
        """Stop waiting for gradients if a step is still running, and tell the agent of the lost peer."""
        session = self._session
        left = session.epoch is None and not session.trains_outside and script_position().epoch_loops > 0
        if session.consensus.loops_over or left:  # `break` may have left the epochs
            return  # there are no more steps; any other collective that needs the lost peer fails by itself
        # Made before the comparison: the training thread may begin the next generation meanwhile.
        given_up = [model.giving_up("a replica is gone") for model in session.models]
        if session.generation == generation and not self.waiting:
            for give_up in given_up:
                give_up()
            session.send(PeerLost(generation, "a replica is gone"))

    def on_plan(self, message: RecoveryPlan) -> None:
        """Take the agent's plan of a generation without dead replicas. Runs in the channel's thread."""
        # Before the plan is stored: afterwards the training thread may already be in the next generation.
        session, generation = self._session, message.generation
        if not self.waiting and generation > session.generation:
            session.consensus.lose("the agents say that a replica is gone")
        with self._told:
            self._plans.append(message)
            self._told.notify_all()
        reducer = session.reducer  # read before the comparison, so that it cannot be the new generation's
        if reducer is not None and generation > session.generation:
            reducer.abort()  # a peer that is stopped or unreachable keeps its connections open

    def newer(self) -> bool:
        """Return whether there is a recovery plan of a generation after the current one."""
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

    @torch.inference_mode(False)
    def recover(self, reason: str, helper: ElasticLoader | None = None, at_end: bool = False) -> None:
        """Form a generation without the dead replica, and go to the position at which training continues.

        Args:
            reason: How the death was noticed.
            helper: Loader of the running data loop; None: look it up.
            at_end: Whether that loop has handed out all its batches.

        Raises:
            PeerLostError: the failed step cannot be undone, so that this replica must restart; or a peer has
                reached the end of the script.
            UnrecoverableStateError: the survivors have no common state from which to continue.
            SystemExit: the plan does not include this replica.
        """
        self._session.consensus.drift.check()
        reducer = self._session.reducer
        # A peer that has ended regularly is no death. (Only checked once this generation has formed.)
        if self.armed and reducer is not None and reducer.finished is not None:
            raise reducer.finished
        began, helper = time.monotonic(), helper or current_dataloader()
        # a failed backward pass in an evaluation loop is not a failed training step
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
        # No time limit: a survivor may be busy outside of all loops for any time. The agents detect replicas
        # that have died or hang, and their next plan, or the coordinator's time limit, ends this wait.
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
        top = newest_step(everybody)
        if self._failed and mine.step == top:  # before the state is sent to others
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
        for one in everybody:
            # Loaders that a script makes in every epoch are others in another epoch.
            if one.position[0] == mine.position[0]:
                script_position().seeds = {**one.seeds, **script_position().seeds}
            script_position().announced = max(script_position().announced, one.announced)
        memory_limit(session).agree(one.memory for one in everybody)
        self._same_sums(everybody)
        where = max(one.position for one in everybody)
        here = [one for one in everybody if one.position == where]
        train = any(one.training for one in here)
        # Replicas inside this training loop keep their own buffers. A replica that is not in this loop yet
        # may have different buffers since an earlier loop.
        self._buffers_diverged = any(
            one.buffers_diverged and not (train and one.position == where) for one in everybody
        )
        self._even_buffers()
        if train:
            self._same_index(mine, where)
            if knows_sums_alone(everybody, everybody) and session.rank == 0:
                log.warning("what the dead had added to accumulators in this data loop is lost")
        elif knows_sums_alone(here, everybody) if where[-1] else any(one.marked for one in here):
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
        training = helper is not None and helper.training
        index = state.index
        if self._failed:
            assert self._before is not None
            index = self._before.index
        elif helper is not None and training and state.looping:
            index = helper.index_trained  # another survivor may not have come to leaving out the rest
        mark = self._mark if self._mark is not None and self._mark.place == self._place() else None
        return SurvivorReport(
            rank=session.rank,
            step=session.step,
            position=(*self._place(), not state.looping),
            index=index,
            training=training,
            partially_restored=self._partially_restored,
            buffers_diverged=self._buffers_diverged,
            synced={name: count for name, (_, _, count) in known_sums(session).items()},
            unsynced=tuple(name for name, (_, own, _) in sums_of(session).items() if own),
            mark=None if mark is None else mark.index,
            marked=mark is not None and any(own for _, own, _ in mark.sums.values()),
            seeds=dict(state.seeds),
            announced=state.announced,
            memory=memory_limit(session).state_dict(),
        )

    def _heal(self, mine: SurvivorReport, top: int, behind: list[int]) -> None:
        """Send the models of the newest survivors to the survivors that are behind."""
        session = self._session
        if any(model.needed_groups() for model in session.models):
            # every part was stepped where it is, or the step could not be certain anywhere
            if mine.step < top and not all(model.confirm_step() for model in session.models):
                raise UnrecoverableStateError(f"the parts of step {top} are not on all replicas")
            self._catch_up(mine, top)
            return
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
        self._catch_up(mine, top)

    def _catch_up(self, mine: SurvivorReport, top: int) -> None:
        """Record that this replica has the step `top`."""
        if mine.step < top:
            script_position().step = top
            if self._failed and self._before is not None:  # the window is committed after all
                script_position().samples += script_position().index - self._before.index
            mine.index, self._failed = script_position().index, False

    def _will_be_overwritten(self) -> None:
        self._partially_restored = True  # the model is a mixture until the transfer is complete

    def _same_sums(self, everybody: list[SurvivorReport]) -> None:
        """Take the accumulator sums of replicas that have finished a sync which failed on this replica."""
        session = self._session
        assert session.reducer is not None
        newest = newest_sums(everybody)
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
        """Check that all replicas in the training loop continue from the same sample.

        Raises:
            UnrecoverableStateError: they do not.
        """
        assert self._session.reducer is not None
        indices = self._session.reducer.allreduce([(mine.position, mine.index)], tag="index")
        found = {index for at, index in indices if tuple(at) == where}
        if len(found) > 1:
            raise UnrecoverableStateError(f"the replicas stand at different samples: {sorted(found)}")
        if mine.position == where:
            script_position().index = mine.index

    def _stand(self, here: list[SurvivorReport]) -> None:
        """Go back to the last Mark in a running evaluation loop, unless nothing was done since.

        Raises:
            UnrecoverableStateError: the survivors have no common Mark.
        """
        if any(one.training for one in here) or here[0].position[-1]:
            return
        marks = {one.mark for one in here}
        if all(one.index == one.mark for one in here):
            return  # no batch was handed out since the Mark
        if len(marks) > 1 or None in marks or self._mark is None:
            raise UnrecoverableStateError(
                "an evaluation loop cannot be begun again: its sums are gone with the dead"
            )
        script_position().index = self._mark.index
        put_sums(self._session, self._mark.sums)
