"""Changing the number of replicas without restarting those that stay.

The problem. A restart costs a checkpoint, new processes, and everything that a script does before its
loop. Those that stay need none of it: they have the state. Only the newcomers have to be brought to the
place in the script where the others are, and then all of them into one new process group.

What does not do. Stopping the others while newcomers start (seconds); handing newcomers a position while
training goes on (the others are elsewhere before the newcomers have got there); loading a checkpoint
(gone by, too, and large).

What is done, for generation g + 1 beside the running g:

1. Agents start the newcomers with the environment of g + 1 and `ADAPTDL_JOIN=1`, and send the plan to the
   replicas of g. A TCPStore kept by an agent is where both meet. Training goes on.
2. *Preview.* At an agreed boundary rank 0 puts a copy of everything but models into the store: where the
   script is, sums of accumulators, profiles. A newcomer goes on from it as from a checkpoint: finished
   epochs and data loops are skipped, `synchronized()` blocks show what they showed. Torch's process group
   is one of the planned size, with nobody in it (`placeholder`). It runs until it comes to the data loop
   under way, says so in the store ("arrived"), and waits. Training goes on.
3. When all have arrived, rank 0 has the change agreed on like any other (`consensus`). If the boundary is
   in the data loop that the newcomers wait at, it is carried out (not behind the loop's last batch, where no
   batch would be left for them); else rank 0 writes a new preview, and
   they go on to where the script is now. A newcomer that calls a collective on its way can not be
   answered and gives up, as do one that has come to a loop over another loader (its Python variables
   decided otherwise) and one that breaks for whatever reason: training goes on in g.
4. *Switch*, inside `__next__` of every loader: states are synchronised over the old group, which is then
   destroyed; who leaves exits; rank 0 publishes an address; all of g + 1 connect, form torch's group,
   and newcomers get every state from the memory of one who was there. Every AdaptiveDataParallel makes
   its buckets and its hook anew; the loader divides what is left of the pass anew.

Until rank 0 publishes the address nothing has been given up, and the plan can be withdrawn. From then on
a failure is one of generation g + 1, from which those go on who were in g (`recovery`).

If rank 0 leaves, the first of those who stay takes its place; every replica has profiles of its own. What
newcomers run twice is what a restart would run again, so the rules of `epoch` are the rules here: what
must happen once per epoch stands at the end of its body.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from adaptdl_elastic import _codec, checkpoint
from adaptdl_elastic._interfaces import Command
from adaptdl_elastic._session import Session
from adaptdl_elastic.protocol.messages import ChangePlan
from adaptdl_elastic.torch._data.registry import current_dataloader
from adaptdl_elastic.torch._elastic import eligibility, regroup, state_transfer
from adaptdl_elastic.torch._process_group import backends, capability
from adaptdl_elastic.torch._process_group.store import FOREVER, PATIENCE, CancellableStore, generation_store

log = logging.getLogger(__name__)

_WAITS, _CATCH_UP = (1, 3), timedelta(seconds=2)
"""At which misses of each other those who train wait for the newcomers, and for how long."""


class Plan:
    """A generation that may come."""

    def __init__(self, message: ChangePlan) -> None:
        self.message = message
        self.generation = message.generation
        self.newcomers: list[int] = list(message.newcomers)
        self.attempt = 0  # previews that the newcomers were shown
        self.missed = 0  # how often they were elsewhere when the change had been agreed on
        self.called_off = False
        self.tried = threading.Event()  # the switch was come to, or nobody wants it any more

    def meeting(self) -> Any:
        """Return the store of this generation."""
        return generation_store(self.message.master_addr, self.message.master_port, self.generation)

    def loaders(self, store: Any, timeout: timedelta) -> list[str]:
        """Wait in `store` until all newcomers have come to a data loop; the keys of their loaders."""
        keys = [f"arrived/{self.attempt}/{rank}" for rank in self.newcomers]
        store.wait(keys, timeout)
        return [store.get(key).decode() for key in keys]


class Rescaler:
    """A survivor's or leaver's side: one a session, made when its agent first speaks of a plan."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Condition()
        self._plans: dict[int, Plan] = {}  # as our agent told us
        self._past: dict[str, Any] = {}  # states of epochs that newcomers may still be on their way through

    def handlers(self) -> dict[str, Callable[[Command], None]]:
        """Return what is done at agreed boundaries, by the kind of the command."""
        return {"preview": self._preview, "switch": self._switch, capability.COMMAND: self._able}

    def on_withdrawn(self, generation: int) -> None:
        """Withdraw the plan of that generation, as the agent orders. Runs in the channel's thread."""
        plan = self._plans.get(generation)
        if plan is not None:
            plan.called_off = True
            plan.tried.set()
            self._release(plan)

    def on_plan(self, message: ChangePlan) -> None:
        """Take the agent's plan of a change in place. Runs in the channel's thread."""
        generation, plan = message.generation, Plan(message)
        with self._lock:
            self._plans[generation] = plan
            self._lock.notify_all()
        if self._session.rank == 0:
            name = f"adaptdl-generation-{generation}"
            threading.Thread(target=self._lead, args=(plan,), name=name, daemon=True).start()

    def _release(self, plan: Plan) -> None:
        """Rank 0: wake the thread that waits for newcomers who will not come any more."""
        if self._session.rank != 0 or not plan.newcomers:
            return
        with contextlib.suppress(RuntimeError):  # the store is gone, and nobody waits
            store = plan.meeting()
            for rank in plan.newcomers:
                store.set(f"arrived/{plan.attempt}/{rank}", "")

    def _wanted(self, plan: Plan) -> bool:
        return not plan.called_off and self._session.generation < plan.generation

    def epoch_ends(self, epoch: int) -> None:
        """States of `epoch` are about to be dropped: keep what newcomers will need to get through it."""
        if any(self._wanted(plan) for plan in list(self._plans.values())):
            states = self._session.states.items()
            gone = [name for name, state in states if state.expires is not None and state.expires <= epoch]
            self._past.update(checkpoint.snapshot_states(gone))

    def _lead(self, plan: Plan) -> None:
        """Rank 0, beside the training: bring the newcomers to where it is, then have the change agreed."""
        try:
            if 0 not in plan.message.ranks:
                raise ValueError("one of those who stay must be rank 0")
            store = plan.meeting()
            # A script may have made more since its first data loop.
            eligibility.scan_user_objects(self._session, again=True)
            why = self._why_not(plan)
            if why is not None:
                self._refuse(plan, why)
            while self._wanted(plan):
                plan.tried.clear()
                command: Command = {"generation": plan.generation, "attempt": plan.attempt}
                if plan.newcomers:
                    self._session.consensus.request({**command, "kind": "preview"})
                    command["newcomers"] = True
                    command["loaders"] = plan.loaders(store, FOREVER)
                    if not self._wanted(plan):
                        return
                    command["at"] = json.loads(store.get(f"preview/{plan.attempt}"))
                self._session.consensus.request({**command, "kind": "switch"})
                plan.tried.wait()
                plan.attempt += 1
        except Exception as error:
            log.warning("generation %d can not begin in place: %s", plan.generation, error)

    # -- at agreed boundaries, in the training thread ----------------------------------------------

    def _preview(self, command: Command) -> None:
        """Rank 0 shows the newcomers where the script is, and all states that are not models."""
        plan = self._plans.get(command["generation"])
        if self._session.rank != 0 or plan is None or not self._wanted(plan):
            return
        at, attempt = list(command["position"][:2]), command["attempt"]
        heavy = {model.name for model in self._session.models}
        names = [name for name in self._session.states if name not in heavy]
        try:
            store = plan.meeting()
            store.set(f"preview/{attempt}", json.dumps(at))
            states = regroup.pack_states({**self._past, **checkpoint.snapshot_states(names)})
            store.set(f"step/{attempt}", _codec.encode({"preview": states, "at": at}))
        except RuntimeError as error:  # the store is gone with its agent: training goes on
            log.warning("generation %d can not begin in place: %s", plan.generation, error)

    def _able(self, _: Command) -> None:
        """Allow changes in place and survival of deaths, after all nodes have passed the self-test."""
        session, known = self._session, capability.known_capability(self._session)
        for _name, state in sorted(session.states.items()):
            state.sync()  # to be armed is to remember sums that all have
        if known is not None:
            known.agree()
        session.report_eligibility()
        session.recovery.arm()

    def _switch(self, command: Command) -> None:
        """Become generation g + 1, or leave."""
        session, generation, position = self._session, command["generation"], command["position"]
        assert session.reducer is not None
        go, safe = False, session.recovery
        if session.rank == 0:
            known = self._plans.get(generation)
            go = known is not None and self._wanted(known) and self._met(known, command)
            go = go and known is not None and self._wanted(known)
        attempt = session.reducer.broadcast(command["attempt"] if go else None, tag="switch")
        if attempt is None:
            if session.rank == 0 and known is not None:
                known.tried.set()
            return
        try:
            plan = self._plan(generation)
        except RuntimeError as error:
            return safe.recover(str(error))
        message = plan.message
        began = time.monotonic()
        for _, state in sorted(session.states.items()):
            state.sync()
        group = backends.present(session)
        if group is not None:
            group.synchronize()
        session.reducer.barrier(tag="switch")
        new_rank = message.ranks[session.rank]
        if new_rank is None:
            regroup.tell_switched(session, generation)
            # Its exit should not wait for what others abort.
            if group is not None and group.completion_is_unreliable:
                group.destroy()
            raise SystemExit(0)
        session.reducer.close()
        regroup.become(session, message, generation, new_rank)
        try:
            regroup.form(session, plan.meeting(), attempt, lambda: plan.called_off or safe.newer())
            donors = [rank for rank in range(session.replicas) if rank not in plan.newcomers]
            state_transfer.give(session, plan.newcomers, donors)
            regroup.finish(session, position, began)
        except (RuntimeError, OSError) as error:  # somebody died on the way
            safe.recover(str(error))
        plan.tried.set()
        self._plans = {g: p for g, p in self._plans.items() if g > generation}
        self._past = {}

    def _why_not(self, plan: Plan) -> str | None:
        """Return why this plan cannot be carried out in place; None: it can."""
        why = eligibility.why_not_remade(self._session)
        return why if why or not plan.newcomers else eligibility.why_nobody_may_join(self._session)

    def _refuse(self, plan: Plan, why: str) -> None:
        """Rank 0: let a plan be, and its newcomers give up. Its time limit makes it a restart."""
        plan.called_off = True
        log.warning("generation %d can not begin in place: %s", plan.generation, why)
        self._session.metrics.set_inplace(False, why)
        with contextlib.suppress(RuntimeError):  # the store is gone, and nobody waits
            store = plan.meeting()
            for attempt in (plan.attempt, plan.attempt + 1):  # the one they wait for
                store.set(f"step/{attempt}", _codec.encode({"refused": why}))

    def _met(self, plan: Plan, command: Command) -> bool:
        """Rank 0: whether the newcomers wait where the script is, or come there within moments."""
        why = self._why_not(plan)
        if why is not None:
            self._refuse(plan, why)
            return False
        if command.get("at") not in (None, list(command["position"][:2])):
            # Where data loops are short the next boundary is always in another one: then the others wait.
            plan.missed += 1
            if plan.missed not in _WAITS:
                return False
            command["attempt"] = plan.attempt = plan.attempt + 1
            self._preview(command)
            try:
                store = CancellableStore(plan.meeting(), lambda: self._session.consensus.lost, _CATCH_UP)
                command["loaders"] = plan.loaders(store, _CATCH_UP)
            except RuntimeError:  # not in time: they get another preview
                return False
        return self._same_loader(plan, command)

    def _same_loader(self, plan: Plan, command: Command) -> bool:
        """Rank 0: whether the newcomers wait at a loop over our loader. Who does not is told to give up."""
        here, there = current_dataloader(), command.get("loaders", [])
        if here is None or all(loader == here.key for loader in there):
            return True
        plan.called_off = True
        with contextlib.suppress(RuntimeError):  # the store is gone, and nobody waits
            elsewhere = _codec.encode({"elsewhere": here.key})
            plan.meeting().set(f"step/{command['attempt'] + 1}", elsewhere)
        return False

    def _plan(self, generation: int) -> Plan:
        """Our own agent's message of a plan that all replicas have agreed to carry out."""
        with self._lock:
            if not self._lock.wait_for(lambda: generation in self._plans, PATIENCE):
                raise RuntimeError(f"the agent has not told this replica of generation {generation}")
            return self._plans[generation]
