"""Change the number of replicas without restarting the replicas that stay.

The problem. A restart costs a checkpoint, new processes, and all work that a script does before its training
loop. The replicas that stay have the state in memory and need none of this. Only the newcomers must be
brought to the position of the running replicas. Then all replicas must form a new process group.

Three simple ways fail. Stopping the running replicas while newcomers start takes seconds. Sending newcomers a
position while training continues fails because the position is out of date before they reach it. A checkpoint
is out of date too, and large.

What is done, to form generation g + 1 while generation g trains:

1. Agents start the newcomers with the environment of g + 1 and `ADAPTDL_JOIN=1`, and send the plan to the
   replicas of g. Both meet in a TCPStore that an agent keeps. Training continues.
2. *Preview.* At an agreed boundary, rank 0 writes a copy of all states except models to the store: the
   position of the script, sums of accumulators, profiles. A newcomer starts from it as from a checkpoint:
   finished epochs and data loops are skipped, and `synchronized()` blocks show the same sums as before. Its
   torch process group is a placeholder of the planned size, without peers (`placeholder`). The newcomer runs
   until it reaches the data loop that the others are running, writes "arrived" to the store, and waits.
   Training continues.
3. When all newcomers have arrived, rank 0 requests the change as a command (`consensus`). If the agreed
   boundary is in the data loop at which the newcomers wait, the change is carried out; not after the loop's
   last batch, because no batch would be left for the newcomers, and not at an epoch's beginning, because
   it is not known there which loader's loop comes first. Otherwise rank 0 writes a new preview, and the
   newcomers continue to the new place. A newcomer gives up if it calls a collective on its way whose
   result the others have not kept (`_past_results`), if it reaches a loop over another loader than the
   others, or if it fails. Training then continues in g.
4. *Switch*, inside `__next__` of every loader. States are synchronised over the old process group, which is
   then destroyed. Replicas that are not in g + 1 exit. Rank 0 publishes an address, and all replicas of g + 1
   connect and form torch's process group. Newcomers receive every state from the memory of a replica of g.
   Every AdaptiveDataParallel makes its buckets and its hook again, and the loader divides the rest of the
   pass again.

Until rank 0 publishes the address, the plan can be withdrawn without loss. A failure after that is a failure
in generation g + 1, from which the replicas of g recover (`recovery`).

If rank 0 leaves, the first replica that stays becomes rank 0; every replica has its own profiles. A newcomer
runs the same code again as a restarted script. So the rules of `epoch` apply: work that must be done once per
epoch belongs at the end of the epoch's body.
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
from adaptdl_elastic._session import Session
from adaptdl_elastic._values import Command
from adaptdl_elastic.protocol.messages import ChangePlan
from adaptdl_elastic.torch._data.registry import current_dataloader
from adaptdl_elastic.torch._elastic import eligibility, regroup, state_transfer
from adaptdl_elastic.torch._elastic.script_objects import NAME
from adaptdl_elastic.torch._process_group import backends, capability
from adaptdl_elastic.torch._process_group.store import FOREVER, PATIENCE, CancellableStore, generation_store

log = logging.getLogger(__name__)

_LONGEST_WAIT = 16.0
"""Seconds that the running replicas wait at most for newcomers that are behind them."""


class Plan:
    """Hold the agent's plan of a generation, and its progress."""

    def __init__(self, message: ChangePlan) -> None:
        self.message = message
        self.generation = message.generation
        self.newcomers: list[int] = list(message.newcomers)
        self.attempt = 0  # number of the preview that the newcomers work with
        self.missed = 0  # boundaries that were agreed in another data loop than that of the newcomers
        self.called_off = False
        self.tried = threading.Event()  # set when the switch was tried or the plan was withdrawn

    def staying(self) -> list[int]:
        """Return the ranks of the replicas that stay, in the order of their new ranks."""
        new = {rank: at for rank, at in enumerate(self.message.ranks) if at is not None}
        return sorted(new, key=new.__getitem__)

    def catch_up(self) -> timedelta | None:
        """Count a miss, and return how long to wait for the newcomers now; None: not at all.

        A miss is an agreed boundary in another data loop than the one at which the newcomers wait. Newcomers
        that run through data loops as fast as the others stay as far behind as they were. So the replicas
        wait after 1, 3, 7, 15, … misses, each time longer.
        """
        self.missed += 1
        if self.missed & (self.missed + 1):
            return None
        return timedelta(seconds=min(self.missed + 1.0, _LONGEST_WAIT))

    def meeting(self) -> Any:
        """Return the store of this generation."""
        return generation_store(self.message.master_addr, self.message.master_port, self.generation)

    def loaders(self, store: Any, timeout: timedelta) -> list[str]:
        """Wait until all newcomers have reached a data loop, and return the keys of their loaders."""
        keys = [f"arrived/{self.attempt}/{rank}" for rank in self.newcomers]
        store.wait(keys, timeout)
        return [store.get(key).decode() for key in keys]


class Rescaler:
    """Carry out planned changes on a running replica, which may stay or leave. One object per session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Condition()
        self._plans: dict[int, Plan] = {}  # generation → plan of this replica's agent
        self._past: dict[str, Any] = {}  # states of finished epochs that newcomers may still run through

    def handlers(self) -> dict[str, Callable[[Command], None]]:
        """Return the functions that carry out agreed commands, by the kind of the command."""
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
        """Wake rank 0's thread that waits for newcomers of a withdrawn plan."""
        if self._session.rank != 0 or not plan.newcomers:
            return
        with contextlib.suppress(RuntimeError):  # the store is gone: no newcomer waits
            store = plan.meeting()
            for rank in plan.newcomers:
                store.set(f"arrived/{plan.attempt}/{rank}", "")

    def _wanted(self, plan: Plan) -> bool:
        return not plan.called_off and self._session.generation < plan.generation

    def epoch_ends(self, epoch: int) -> None:
        """Keep the states of `epoch`, which are about to be dropped, if newcomers may need them."""
        if any(self._wanted(plan) for plan in list(self._plans.values())):
            states = self._session.states.items()
            gone = [name for name, state in states if state.expires is not None and state.expires <= epoch]
            self._past.update(checkpoint.snapshot_states(gone))

    def _lead(self, plan: Plan) -> None:
        """Bring the newcomers to the current data loop, then request the change. A thread on rank 0."""
        try:
            if 0 not in plan.message.ranks:
                raise ValueError("one of those who stay must be rank 0")
            store = plan.meeting()
            # The script may have made more objects since its first data loop.
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
        """Write the script's position and all states except models to the store, on rank 0."""
        plan = self._plans.get(command["generation"])
        if self._session.rank != 0 or plan is None or not self._wanted(plan):
            return
        (epoch, loop), attempt = command["position"][:2], command["attempt"]
        at = [epoch, max(loop, 1)]  # at an epoch's beginning: its first data loop, where newcomers can join
        heavy = {NAME, *(model.name for model in self._session.models)}
        names = [name for name in self._session.states if name not in heavy]
        try:
            store = plan.meeting()
            store.set(f"preview/{attempt}", json.dumps(at))
            states = regroup.pack_states({**self._past, **checkpoint.snapshot_states(names)})
            step = {"preview": states, "at": at, "results": self._session.past_results.to_plain()}
            store.set(f"step/{attempt}", _codec.encode(step))
        except RuntimeError as error:  # the store is gone with its agent: training continues
            log.warning("generation %d can not begin in place: %s", plan.generation, error)

    def _able(self, _: Command) -> None:
        """Allow changes in place and recoveries, after all nodes have passed the self-test."""
        session, known = self._session, capability.known_capability(self._session)
        for _name, state in sorted(session.states.items()):
            state.sync()  # a recovery needs sums that all replicas have
        if known is not None:
            known.agree()
        session.report_eligibility()
        session.recovery.arm()

    def _switch(self, command: Command) -> None:
        """Switch to the next generation, or exit if the plan does not include this replica."""
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
        if NAME in session.states:
            session.states[NAME].collect_for_save()
        for _, state in sorted(session.states.items()):
            state.sync()
        group = backends.present(session)
        order = plan.staying()
        if order != list(range(session.replicas)):
            for model in session.models:
                model.hand_over(order)
        if group is not None:
            group.synchronize()
        session.reducer.barrier(tag="switch")
        new_rank = message.ranks[session.rank]
        if new_rank is None:
            regroup.tell_switched(session, generation)
            # Otherwise its exit would wait for operations that the other replicas abort.
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
            if session.rank == 0 and not session.recovery.armed:
                # a death will cost what comes after the newest checkpoint
                session.consensus.request({"kind": "checkpoint"})
        except (RuntimeError, OSError) as error:  # a replica died during the switch
            safe.recover(str(error))
        plan.tried.set()
        self._plans = {g: p for g, p in self._plans.items() if g > generation}
        self._past = {}

    def _why_not(self, plan: Plan) -> str | None:
        """Return why this plan cannot be carried out in place; None if it can."""
        why = eligibility.why_not_remade(self._session)
        return why if why or not plan.newcomers else eligibility.why_nobody_may_join(self._session)

    def _refuse(self, plan: Plan, why: str) -> None:
        """Drop a plan, and tell its newcomers to give up. Runs on rank 0.

        When the plan's time limit is over, the agents restart the job instead.
        """
        plan.called_off = True
        log.warning("generation %d can not begin in place: %s", plan.generation, why)
        self._session.inplace = (False, why)
        with contextlib.suppress(RuntimeError):  # the store is gone: no newcomer waits
            store = plan.meeting()
            for attempt in (plan.attempt, plan.attempt + 1):  # the newcomers wait for one of these two
                store.set(f"step/{attempt}", _codec.encode({"refused": why}))

    def _met(self, plan: Plan, command: Command) -> bool:
        """Return whether the newcomers wait in the current data loop, or reach it soon. Runs on rank 0."""
        why = self._why_not(plan)
        if why is not None:
            self._refuse(plan, why)
            return False
        if command.get("at") not in (None, list(command["position"][:2])):
            # If data loops are short, the agreed boundary is always in another one: wait for the newcomers.
            if (patience := plan.catch_up()) is None:
                return False
            command["attempt"] = plan.attempt = plan.attempt + 1
            self._preview(command)
            try:
                store = CancellableStore(plan.meeting(), lambda: self._session.consensus.lost, patience)
                command["loaders"] = plan.loaders(store, patience)
            except RuntimeError:  # not in time: the newcomers get another preview
                return False
        return self._same_loader(plan, command)

    def _same_loader(self, plan: Plan, command: Command) -> bool:
        """Return whether the newcomers wait at a loop over rank 0's loader; otherwise let them give up."""
        here, there = current_dataloader(), command.get("loaders", [])
        if here is None or all(loader == here.key for loader in there):
            return True
        plan.called_off = True
        with contextlib.suppress(RuntimeError):  # the store is gone: no newcomer waits
            elsewhere = _codec.encode({"elsewhere": here.key})
            plan.meeting().set(f"step/{command['attempt'] + 1}", elsewhere)
        return False

    def _plan(self, generation: int) -> Plan:
        """Return the plan of `generation`; wait for the message of this replica's agent.

        Raises:
            RuntimeError: the message has not come within `PATIENCE` seconds.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: generation in self._plans, PATIENCE):
                raise RuntimeError(f"the agent has not told this replica of generation {generation}")
            return self._plans[generation]
