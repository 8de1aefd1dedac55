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
   is one of the planned size, with nobody in it (`_waiting_group`). It runs until it comes to the data loop
   under way, says so in the store ("arrived"), and waits. Training goes on.
3. When all have arrived, rank 0 has the change agreed on like any other (`_control`). If the boundary is
   in the data loop that the newcomers wait at, it is carried out; else rank 0 writes a new preview, and
   they go on to where the script is now. A newcomer that calls a collective on its way can not be
   answered and gives up, as do one that has come to a loop over another loader (its Python variables
   decided otherwise) and one that breaks for whatever reason: training goes on in g.
4. *Switch*, inside `__next__` of every loader: states are synchronised over the old group, which is then
   destroyed; who leaves exits; rank 0 publishes an address; all of g + 1 connect, form torch's group,
   and newcomers get every state from the memory of one who was there. Every AdaptiveDataParallel makes
   its buckets and its hook anew; the loader divides what is left of the pass anew.

Until rank 0 publishes the address nothing has been given up, and the plan can be withdrawn. From then on
a failure is one of generation g + 1, from which those go on who were in g (`_recovery`).

If rank 0 leaves, the first of those who stay takes its place; every replica has profiles of its own. What
newcomers run twice is what a restart would run again, so the rules of `epoch` are the rules here: what
must happen once per epoch stands at the end of its body.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from adaptdl_elastic import checkpoint, collective, env
from adaptdl_elastic._session import Identity, Session
from adaptdl_elastic.reducer import Reducer
from adaptdl_elastic.torch import _ability, _backend, _habits, _recovery, _transfer, _waiting_group
from adaptdl_elastic.torch._loops import loops
from adaptdl_elastic.torch._process_group import connect_torch, leave_torch, listening_host, relax_torch
from adaptdl_elastic.torch._registry import current_dataloader
from adaptdl_elastic.torch._store import ImpatientStore

if TYPE_CHECKING:
    from adaptdl_elastic.channel import Message
    from adaptdl_elastic.torch._control import Command, Position

dist: Any = torch.distributed  # its stub does not export the stores

log = logging.getLogger(__name__)

JOIN_VARIABLE = "ADAPTDL_JOIN"

PATIENCE = 20.0
"""Seconds that those who have begun to switch wait for each other."""

_WAITS, _CATCH_UP = (1, 3), timedelta(seconds=2)
"""At which misses of each other those who train wait for the newcomers, and for how long."""

_TRANSFER = 60.0  # seconds that one tensor may take from one replica to another

_NEWCOMER, _RESCALER = "newcomer", "rescaler"  # in the session's scratch
_FOREVER = timedelta(days=365)


class Plan:
    """A generation that may come."""

    def __init__(self, message: Message) -> None:
        self.message = message
        self.generation = int(message["generation"])
        self.newcomers: list[int] = list(message["newcomers"])
        self.attempt = 0  # previews that the newcomers were shown
        self.missed = 0  # how often they were elsewhere when the change had been agreed on
        self.called_off = False
        self.tried = threading.Event()  # the switch was come to, or nobody wants it any more

    def meeting(self) -> Any:
        """The store where this generation meets."""
        return meeting(self.message["master_addr"], int(self.message["master_port"]), self.generation)

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
        """What is done at agreed boundaries."""
        return {"preview": self._preview, "switch": self._switch, _ability.COMMAND: self._able}

    def on_plan(self, message: Message) -> None:
        """The agent's `plan` message. In the channel's thread."""
        generation = int(message["generation"])
        if message.get("withdraw"):
            plan = self._plans.get(generation)
            if plan is not None:
                plan.called_off = True
                plan.tried.set()
                self._release(plan)
            return
        plan = Plan(message)
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
            if 0 not in plan.message["ranks"]:
                raise ValueError("one of those who stay must be rank 0")
            store = plan.meeting()
            _habits.look(self._session, again=True)  # a script may have made more since its first data loop
            why = self._why_not(plan)
            if why is not None:
                self._refuse(plan, why)
            while self._wanted(plan):
                plan.tried.clear()
                command: Command = {"generation": plan.generation, "attempt": plan.attempt}
                if plan.newcomers:
                    self._session.control.request({**command, "kind": "preview"})
                    command["loaders"] = plan.loaders(store, _FOREVER)
                    if not self._wanted(plan):
                        return
                    command["at"] = json.loads(store.get(f"preview/{plan.attempt}"))
                self._session.control.request({**command, "kind": "switch"})
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
        heavy = {model._state.name for model in _recovery.models(self._session)}
        names = [name for name in self._session.states if name not in heavy]
        try:
            store = plan.meeting()
            store.set(f"preview/{attempt}", json.dumps(at))
            step = {"preview": {**self._past, **checkpoint.snapshot_states(names)}, "at": at}
            store.set(f"step/{attempt}", _seal(step))
        except RuntimeError as error:  # the store is gone with its agent: training goes on
            log.warning("generation %d can not begin in place: %s", plan.generation, error)

    def _able(self, _: Command) -> None:
        """The self-test has passed on all nodes: this job changes in place, and survives deaths."""
        session, known = self._session, _ability.ability(self._session)
        for _name, state in sorted(session.states.items()):
            state.sync()  # to be armed is to remember sums that all have
        if known is not None:
            known.agree()
        session.metrics.inplace(*may_change(session))
        _recovery.recovery(session).arm()

    def _switch(self, command: Command) -> None:
        """Become generation g + 1, or leave."""
        session, generation, position = self._session, command["generation"], command["position"]
        assert session.reducer is not None
        go, safe = False, _recovery.recovery(session)
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
        group = _backend.present(session)
        if group is not None:
            group.quiesce()
        session.reducer.barrier(tag="switch")
        new_rank = message["ranks"][session.rank]
        if new_rank is None:
            tell_switched(session, generation)
            if group is not None and group.early:  # what others abort, its exit should not wait for
                group.leave()
            raise SystemExit(0)
        session.reducer.close()
        become(session, message, generation, new_rank)
        try:
            form(session, plan.meeting(), attempt, lambda: plan.called_off or safe.newer())
            donors = [rank for rank in range(session.replicas) if rank not in plan.newcomers]
            _transfer.give(session, plan.newcomers, donors)
            finish(session, position, began)
        except (RuntimeError, OSError) as error:  # somebody died on the way
            safe.recover(str(error))
        plan.tried.set()
        self._plans = {g: p for g, p in self._plans.items() if g > generation}
        self._past = {}

    def _why_not(self, plan: Plan) -> str | None:
        """What forbids this plan; None: nothing. Who stays has of its own what newcomers would have not."""
        why = _habits.why_not_remade(self._session)
        return why if why or not plan.newcomers else _habits.why_nobody_may_join(self._session)

    def _refuse(self, plan: Plan, why: str) -> None:
        """Rank 0: let a plan be, and its newcomers give up. Its time limit makes it a restart."""
        plan.called_off = True
        log.warning("generation %d can not begin in place: %s", plan.generation, why)
        self._session.metrics.inplace(False, why)
        with contextlib.suppress(RuntimeError):  # the store is gone, and nobody waits
            store = plan.meeting()
            for attempt in (plan.attempt, plan.attempt + 1):  # the one they wait for
                store.set(f"step/{attempt}", _seal({"refused": why}))

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
                store = ImpatientStore(plan.meeting(), lambda: self._session.control.lost, _CATCH_UP)
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
            plan.meeting().set(f"step/{command['attempt'] + 1}", _seal({"elsewhere": here.key}))
        return False

    def _plan(self, generation: int) -> Plan:
        """Our own agent's message of a plan that all replicas have agreed to carry out."""
        with self._lock:
            if not self._lock.wait_for(lambda: generation in self._plans, PATIENCE):
                raise RuntimeError(f"the agent has not told this replica of generation {generation}")
            return self._plans[generation]


class Newcomer:
    """A newcomer's side, from its start until it is one of the others."""

    def __init__(self, session: Session, backend: str, store: Any) -> None:
        self.session, self.backend, self._store = session, backend, store
        self._attempt = 0
        self._at: tuple[int, int] = (0, 0)  # epoch and data loop where the others were last seen

    def preview(self, step: dict[str, Any] | None = None) -> None:
        """Go on from where the others were when rank 0 looked last."""
        again = step is not None
        step = step or self._next()
        states = step["preview"]
        if again:  # our own way there is to be gone, not jumped over
            states.pop("adaptdl-loops", None)
        epoch, loop = step["at"]
        self._at = (epoch, max(loop, 1))
        checkpoint.restore_states(states)

    def _next(self) -> dict[str, Any]:
        key = f"step/{self._attempt}"
        self._store.wait([key], _FOREVER)
        step = _open(self._store.get(key))
        if "refused" in step:
            collective.give_up(step["refused"])
        return step

    def arrive(self, place: tuple[int, int], loader: str) -> bool:
        """Come to a loop over `loader`: join the others in it, or pass it by because they have (False)."""
        session, known = self.session, _ability.ability(self.session)
        if known is not None:
            known.insist()  # before anybody counts on this replica
        _habits.look(session)  # now, while nobody waits for it
        while place >= self._at:
            self._store.set(f"arrived/{self._attempt}/{session.rank}", loader)
            session.send({"type": "ready", "generation": session.generation})
            self._attempt += 1
            step = self._next()
            if "elsewhere" in step:
                collective.give_up(
                    f"data loop {place[1]} of epoch {place[0]} is over loader {loader} here, and over "
                    f"{step['elsewhere']} on the running replicas (is it for a variable of theirs?)"
                )
            if "preview" in step:
                self.preview(step)
                continue
            self._join()
            return True
        return False

    def _join(self) -> None:
        session, began = self.session, time.monotonic()
        _waiting_group.leave()
        form(session, self._store, self._attempt - 1)
        _transfer.take(session)
        session.joining = False
        known = _ability.ability(session)
        if known is not None:
            known.agree()  # as the others have, or they would not have changed in place
        os.environ.pop(JOIN_VARIABLE, None)
        state = loops()
        finish(session, (state.finished, state.entered, state.index), began)
        session.scratch.pop(_NEWCOMER)


def newcomer(session: Session) -> Newcomer:
    """This process's, while `session.joining`."""
    found = session.scratch[_NEWCOMER]
    assert isinstance(found, Newcomer)
    return found


def rescaler(session: Session) -> Rescaler:
    """This process's side of changes in place, once it is one of those who were there."""
    with session.lock:
        found = session.scratch.get(_RESCALER)
        if found is None:
            found = session.scratch[_RESCALER] = Rescaler(session)
        assert isinstance(found, Rescaler)
        return found


def epoch_ends(session: Session, epoch: int) -> None:
    """An epoch's states are about to be dropped."""
    if _RESCALER in session.scratch:
        rescaler(session).epoch_ends(epoch)


def on_plan(session: Session, message: Message) -> None:
    """The agent speaks of another generation. In the channel's thread."""
    if message.get("recover"):
        _recovery.recovery(session).on_plan(message)
    else:
        rescaler(session).on_plan(message)


def may_change(session: Session) -> tuple[bool, str]:
    """Whether this script and backend can change their size in place, newcomers and all; and why not."""
    able, why = possible(session)
    if able:
        why = _habits.why_not_remade(session) or _habits.why_nobody_may_join(session) or ""
    return not why, why


def possible(session: Session) -> tuple[bool, str]:
    """Whether replicas of this script and backend can be of another generation; the same on all; why not."""
    why = _ability.why_not(session)
    if why is not None:
        return False, why
    if any(model._ddp_kwargs.get("process_group") is not None for model in _recovery.models(session)):
        return False, "an AdaptiveDataParallel was given a process group of its own"
    if not _recovery.models(session):
        return False, "no AdaptiveDataParallel has been made"
    if _habits.own_groups():
        return False, _habits.GROUPS
    if session.channel is not None and env.secret() is None:
        return False, "there is no ADAPTDL_SECRET"
    return True, ""


def begin_joining(session: Session, backend: str) -> None:
    """A newcomer's `init_process_group`: a group of the planned size, and the others' states."""
    store = meeting(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), session.generation)
    found = session.scratch[_NEWCOMER] = Newcomer(session, backend, store)
    session.start()
    checkpoint.agree(lambda _: (None, None))  # nothing is loaded from disk
    session.joining = True
    # a newcomer passes ends of epochs without the optimizer steps before them, and gets the result later
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
    found.preview()
    hook = sys.excepthook
    _waiting_group.enter(backend, session.rank, session.replicas)
    sys.excepthook = hook
    _warm_up(_backend.kind(backend).training_device())


def meeting(host: str, port: int, generation: int) -> Any:
    """The store where generation `generation` meets."""
    store = dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=PATIENCE)
    )
    return dist.PrefixStore(f"adaptdl/{generation}", store)


def become(session: Session, message: Message, generation: int, rank: int) -> None:
    """Leave torch's present group, and be `rank` of the generation that `message` describes."""
    session.control.abandon()
    leave_torch(session)
    os.environ.update({name: str(value) for name, value in message["environ"].items()})
    session.identity = Identity(rank, message["replicas"], message["nodes"], generation, session.job)


def form(
    session: Session,
    store: Any,
    attempt: int,
    cancelled: Callable[[], bool] = lambda: False,
    patience: timedelta = timedelta(seconds=PATIENCE),
) -> None:
    """Connect all of this generation: first the library's collectives, then torch's.

    Raises RuntimeError when they have not all come within `patience`, or it can not be done, or
    `cancelled()` meanwhile.
    """
    key = f"go/{session.generation}"
    if session.rank == 0:
        host, secret = listening_host(), secrets.token_hex(16)

        def publish(port: int) -> None:
            store.set(key, json.dumps([host, port, secret]))
            store.set(f"step/{attempt + 1}", _seal({"go": True}))

        reducer = _reducer(session, host, 0, secret, publish, cancelled, patience)
    else:
        why = "there is another plan"
        ImpatientStore(store, lambda: why if cancelled() else None, patience).wait([key])
        host, port, secret = json.loads(store.get(key))
        reducer = _reducer(session, host, port, secret, None, cancelled)
    session.reducer = reducer
    reducer.barrier(tag="formed")  # all live: torch's group will not wait in vain
    connect_torch(session, session.scratch["backend"], store, timedelta(seconds=_TRANSFER))


def _reducer(
    session: Session,
    host: str,
    port: int,
    secret: str,
    publish: Any,
    cancelled: Callable[[], bool],
    patience: timedelta = timedelta(seconds=PATIENCE),
) -> Reducer:
    return Reducer(
        session.rank,
        session.replicas,
        host,
        port,
        secret=secret.encode(),
        timeout=patience.total_seconds(),
        on_control=session.on_control,
        on_lost=session.on_lost,
        publish=publish,
        cancelled=cancelled,
    )


def finish(session: Session, position: Position, began: float, recovered: bool = False) -> None:
    """What everybody in a new generation does last."""
    for model in _recovery.models(session):
        model.reinit_process_group()
    assert session.reducer is not None
    epoch, loop, index = position  # a list, if it came through a message
    session.control.renew((epoch, loop, index), recovered)
    session.reducer.barrier(tag="switched")
    relax_torch(session)
    session.metrics.pause()
    tell_switched(session, session.generation)
    _recovery.recovery(session).arm()
    log.info(
        "generation %d: rank %d of %d after %.3f s",
        session.generation,
        session.rank,
        session.replicas,
        time.monotonic() - began,
    )


def tell_switched(session: Session, generation: int) -> None:
    """Tell the agent that generation g is behind this replica, and when its last step ended."""
    session.send({"type": "switched", "generation": generation, "last_step": session.last_step_time})


def _warm_up(device: torch.device) -> None:
    """What torch does once, at the first backward pass, in advance: the others will wait for that pass."""
    layer = torch.nn.Linear(64, 64, device=device)
    layer(torch.ones(64, 64, device=device)).sum().backward()


def _seal(step: dict[str, Any]) -> bytes:
    """A step for the newcomers, so that whoever else writes into the store can not run code in them."""
    data = pickle.dumps(step)
    return _sign(data) + data


def _open(sealed: bytes) -> dict[str, Any]:
    import hmac

    signature, data = sealed[:32], sealed[32:]
    if not hmac.compare_digest(signature, _sign(data)):
        raise RuntimeError("the preview was not written by a replica that knows ADAPTDL_SECRET")
    found: dict[str, Any] = pickle.loads(data)
    return found


def _sign(data: bytes) -> bytes:
    import hashlib
    import hmac

    return hmac.new(env.secret() or b"", data, hashlib.sha256).digest()
