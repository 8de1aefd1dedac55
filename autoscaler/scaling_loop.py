"""The autoscaler at work: look, decide, act, say; again every few seconds.

It reads the whole of its cluster's keys each time instead of following a watch: nothing here is urgent
(a notice becomes a plan in the coordinator, without us), and a look that depends on nothing before it
can not go wrong for long. One autoscaler rules a cluster: `autoscaler/leader` is held under a lease,
and without it nothing is done.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from adaptdl_elastic.autoscaler.providers.base import (
    NoPermissionError,
    Provider,
    ProviderError,
    Signal,
    TryLaterError,
    UnknownPoolError,
)
from adaptdl_elastic.autoscaler.scaling import ScalingSettings
from adaptdl_elastic.autoscaler.scaling_memory import refused
from adaptdl_elastic.autoscaler.scaling_observe import all_ended, observe
from adaptdl_elastic.autoscaler.scaling_step import step
from adaptdl_elastic.autoscaler.scaling_types import (
    Action,
    Drain,
    Hold,
    LetGo,
    Memory,
    Observation,
    Protect,
    Release,
    Request,
    Step,
)
from adaptdl_elastic.autoscaler.state import View, view_of
from adaptdl_elastic.rendezvous import records
from adaptdl_elastic.rendezvous.keys import Keys
from adaptdl_elastic.rendezvous.store import Lease, Store, StoreError

logger = logging.getLogger(__name__)

_LEASE = 15.0  # seconds
_MEMORY: TypeAdapter[Memory] = TypeAdapter(Memory)

Say = Callable[[str, Mapping[str, Any]], None]
"""Called with every event and its fields."""


@dataclass(frozen=True)
class LoopOptions:
    """How the loop runs. Seconds."""

    interval: float = 5.0
    dry_run: bool = False  # say what would be done, and do nothing
    expected: tuple[str, ...] = ()  # jobs to have a node for before anybody has started them
    until_done: bool = False  # end when every job has ended and every node is given back


class Autoscaler:
    """One provider, one cluster.

    Args:
        store: where the cluster's records are.
        keys: of the cluster.
        provider: who gives and takes nodes.
        settings: what to decide by.
        options: how to run.
        say: called with every event; what people read.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        provider: Provider,
        settings: ScalingSettings,
        options: LoopOptions | None = None,
        say: Say = lambda event, fields: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._keys, self._provider = store, keys, provider
        self._settings, self._options = settings, options or LoopOptions()
        self._say, self._clock = say, clock
        self._memory = Memory()
        self._end = threading.Event()
        self._drained: set[str] = set()  # nodes whose drain request is ours
        self._said: frozenset[str] = frozenset()
        self._acted: set[Action] = set()  # what was said of the present decision
        self._lease: Lease | None = None

    def stop(self) -> None:
        """End `run` after the present look; callable from a signal handler."""
        self._end.set()

    def change(self, settings: ScalingSettings) -> None:
        """Decide by other settings from the next look on; callable from any thread."""
        self._settings = settings

    def run(self) -> int:
        """Rule until stopped, or until all is done; the exit code.

        Raises ProviderError and StoreError for what is wrong from the beginning; later the same is
        said, and tried again.
        """
        self._rule()
        if not self._options.dry_run:
            self._provider.take_over()
        self._memory = self._recall()
        try:
            done = self._tick(first=True)
            while not done and not self._end.wait(self._options.interval):
                done = self._tick(first=False)
        finally:
            self._hand_back()
        return 0

    # -- one look

    def tick(self) -> bool:
        """Look, decide, act and say once; whether all is done."""
        view, seen = self._observe()
        decision = step(seen, self._memory, self._settings)
        self._memory = decision.memory
        failed = [] if self._options.dry_run else self._act(decision.actions)
        if self._options.dry_run:
            self._tell(decision.actions, "would ")
        else:
            self._tidy(seen)
            self._publish(seen, decision, failed)
        self._warn((*decision.warnings, *failed))
        over = all_ended(view, self._options.expected) and not seen.capacity.instances
        return self._options.dry_run or (self._options.until_done and over)

    def _tick(self, first: bool) -> bool:
        try:
            self._check_lease()
            return self.tick()
        except (UnknownPoolError, NoPermissionError):
            raise  # nothing that waiting could mend
        except (ProviderError, StoreError) as error:
            if first:
                raise
            self._warn((str(error),))
            return False

    def _observe(self) -> tuple[View, Observation]:
        now = self._clock()
        view = view_of(self._keys, self._store.range(self._keys.root), time.monotonic(), now)
        capacity = self._provider.capacity()
        try:
            signals: tuple[Signal, ...] = self._provider.signals()
        except ProviderError as error:  # the second path of a notice; the first one does without
            signals, capacity = (), replace(capacity, warnings=(*capacity.warnings, str(error)))
        return view, observe(view, capacity, signals, self._options.expected)

    # -- acting

    def _act(self, actions: Sequence[Action]) -> list[str]:
        """Carry out what was decided; what failed, in words. It will be decided again."""
        self._tell(actions, "")
        failed = []
        for action in actions:
            try:
                self._carry_out(action)
            except ProviderError as error:
                failed.append(str(error))
                if isinstance(error, TryLaterError) and isinstance(action, Request):
                    now = self._clock()
                    self._memory = refused(self._memory, action.pool, str(error), now, self._settings)
        return failed

    def _carry_out(self, action: Action) -> None:
        match action:
            case Request(pool, desired, _):
                self._provider.request(pool, desired)
            case Release(instance, again, _):
                self._provider.release(instance, again)
            case Protect(instances):
                self._provider.protect(instances, True)
            case Hold(instance):
                self._provider.hold(instance)
            case LetGo(instance):
                self._provider.let_go(instance)
            case Drain():
                self._request_drain(action)

    def _request_drain(self, drain: Drain) -> None:
        """Write the request unless one for the same instance and time is there."""
        key = self._keys.drain(drain.node)
        there = self._store.get(key)
        if there is not None:
            try:
                found = records.decode(records.DrainRequest, there.value, key)
            except records.MalformedRecordError:
                found = None
            if found is not None and (found.instance, found.deadline) == (drain.instance, drain.deadline):
                self._drained.add(drain.node)
                return
        request = records.DrainRequest(
            drain.node, drain.reason, drain.deadline, drain.instance, created=self._clock()
        )
        self._store.put(key, records.encode(request))
        self._drained.add(drain.node)

    def _tidy(self, seen: Observation) -> None:
        """Delete our drain requests for nodes that are gone: a newcomer may get the same name."""
        there = {use.node for instance, use in seen.nodes.items() if seen.capacity.instance(instance)}
        for node in self._drained - there:
            self._store.delete(self._keys.drain(node))
            self._drained.discard(node)

    def _tell(self, actions: Sequence[Action], would: str) -> None:
        """One event for each action that was not said at the last look already."""
        for action in actions:
            if action not in self._acted and not isinstance(action, (Hold, Protect)):
                name = {Request: "request", Drain: "drain", Release: "release", LetGo: "let_go"}[type(action)]
                self._event(f"{would}{name}", vars(action) | {"hourly_cost": self._hourly()})
        self._acted = set(actions)

    def _hourly(self) -> float:
        return round(sum(known.hourly_price for known in self._memory.known.values()), 6)

    def _warn(self, warnings: Sequence[str]) -> None:
        """Say what was not said at the last look."""
        fresh = frozenset(warnings)
        steady = {_shape(text) for text in self._said}
        for text in warnings:
            if _shape(text) not in steady:
                self._event("warning", {"message": text})
        self._said = fresh

    def _event(self, event: str, fields: Mapping[str, Any]) -> None:
        self._say(event, fields)
        if self._options.dry_run:
            return
        now = self._clock()
        line = {"time": now, "event": f"autoscaler_{event}", **fields}
        key = f"{self._keys.events}{int(now * 1000):013d}-{secrets.token_hex(3)}"
        try:
            self._store.put(key, json.dumps(line, default=str))
        except StoreError as error:
            logger.warning("could not log the event %s: %s", event, error)

    # -- what is published, and remembered

    def _publish(self, seen: Observation, decision: Step, failed: Sequence[str]) -> None:
        memory = self._memory
        jobs = []
        for name in sorted(set(memory.job_costs) | set(decision.forecasts)):
            hourly, left = decision.forecasts.get(name, (0.0, None))
            so_far = memory.job_costs.get(name, 0.0)
            forecast = None if left is None else so_far + hourly * left / 3600
            jobs.append(records.JobCost(name, so_far, hourly, forecast, left))
        status = records.AutoscalerStatus(
            provider=self._provider.name,
            nodes=len(seen.nodes),
            target=decision.target,
            hourly_cost=decision.hourly_cost,
            cost_so_far=memory.cost,
            reason=decision.reason,
            jobs=tuple(jobs),
            bought=tuple((n, p.instances, p.hours, p.cost) for n, p in sorted(memory.pools.items())),
            warnings=(*decision.warnings, *failed),
            memory=_MEMORY.dump_json(memory).decode(),
            updated=seen.now,
        )
        self._store.put(self._keys.autoscaler_status, records.encode(status))

    def _recall(self) -> Memory:
        """What the last autoscaler knew; pools that it had closed get another chance."""
        item = self._store.get(self._keys.autoscaler_status)
        if item is None:
            return Memory()
        try:
            status = records.decode(records.AutoscalerStatus, item.value, item.key)
            memory = _MEMORY.validate_json(status.memory) if status.memory else Memory()
        except (records.MalformedRecordError, ValidationError) as error:
            logger.warning("what the last autoscaler knew can not be read, and is forgotten: %s", error)
            return Memory()
        pools = {name: replace(pool, failures=0, closed="") for name, pool in memory.pools.items()}
        return replace(memory, pools=pools)

    # -- ruling

    def _rule(self) -> None:
        """Become the only one; StoreError when another one rules."""
        if self._options.dry_run:
            return
        key = self._keys.autoscaler_leader
        self._lease = self._store.lease(_LEASE)
        me = records.LeaderRecord(f"{socket.gethostname()}-{os.getpid()}", socket.gethostname(), os.getpid())
        while self._store.compare_and_swap(key, records.encode(me), 0, self._lease) is None:
            item = self._store.get(key)
            who = records.decode(records.LeaderRecord, item.value, key) if item else None
            name = f"pid {who.pid} on {who.host}" if who else "somebody"
            self._say(
                "waiting", {"message": f"another autoscaler rules this cluster: {name}; waiting for it"}
            )
            if self._end.wait(_LEASE / 3):
                raise StoreError("stopped while another autoscaler ruled")

    def _check_lease(self) -> None:
        if self._lease is not None and self._lease.lost.is_set():
            self._rule()

    def _hand_back(self) -> None:
        """Leave things as they should be without us. What fails is said; there is nobody to try again."""
        if not self._options.dry_run:
            try:
                self._provider.hand_back()
            except ProviderError as error:
                self._say("warning", {"message": f"not handed back: {error}"})
        if self._lease is not None:
            self._lease.revoke()


def _shape(text: str) -> str:
    """A warning without its numbers: one that only counts down is not said again."""
    return "".join("#" if c.isdigit() else c for c in text)
