"""The autoscaler's loop: every few seconds it observes, decides, acts and reports.

It reads all keys of its cluster each time instead of following a watch: nothing here is urgent (a notice
becomes a plan in the coordinator without the autoscaler), and an error cannot persist if each observation
starts from scratch. One autoscaler controls a cluster: it holds `autoscaler/leader` under a lease, and acts
only with it.
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

from adaptdl_elastic.autoscaler.cluster_view import View, view_of
from adaptdl_elastic.autoscaler.providers.base import (
    NotOursError,
    Provider,
    ProviderError,
    Signal,
    TryLaterError,
    UnknownInstanceError,
    UnknownPoolError,
)
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.autoscaler.scaling.live_settings import usable
from adaptdl_elastic.autoscaler.scaling.observe import all_ended, observe
from adaptdl_elastic.autoscaler.scaling.observed_history import not_done, refused, running_replicas, shifted
from adaptdl_elastic.autoscaler.scaling.scaling_types import (
    Action,
    Drain,
    Forecast,
    Hold,
    LetGo,
    Memory,
    Observation,
    PoolMemory,
    Protect,
    Release,
    Request,
    Step,
    StopJob,
)
from adaptdl_elastic.autoscaler.scaling.setting_texts import parse_change
from adaptdl_elastic.autoscaler.scaling.step import step
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus, IdleNode, JobCost
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.base import Lease, Store, StoreAuthError, StoreError

logger = logging.getLogger(__name__)

_LEASE = 15.0  # time to live of the leader's lease, in seconds
_LEAP = 5.0  # seconds by which the two clocks may drift between two rounds before the time counts as set
_MEMORY: TypeAdapter[Memory] = TypeAdapter(Memory)

Say = Callable[[str, Mapping[str, Any]], None]
"""Called with the name and the fields of every event."""


@dataclass(frozen=True)
class LoopOptions:
    """How the loop runs. Times in seconds."""

    interval: float = 5.0
    dry_run: bool = False  # report what would be done, and do nothing
    expected: tuple[str, ...] = ()  # jobs that get a node before they are started
    until_done: bool = False  # end when every job has ended and every node is released


class Autoscaler:
    """The autoscaler of one provider and one cluster.

    Args:
        store: the cluster's store.
        keys: the keys of the cluster.
        provider: starts and stops nodes.
        settings: settings of the decisions.
        options: settings of the loop.
        say: called with every event, for users.
        clock: seconds since the epoch.
        steady: monotonic seconds, to notice that the time was set.
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
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._keys, self._provider = store, keys, provider
        self._given, self._options = settings, options or LoopOptions()
        self._settings = settings  # in this round
        self._changes: Mapping[str, float] = {}  # what holds instead of `_given`, as told last
        self._say, self._clock, self._steady = say, clock, steady
        self._offset: float | None = None  # between the two clocks, in the last round
        self._ruling = False  # control of the provider was taken over and not handed back
        self.memory = Memory()
        """What is known from earlier rounds."""
        self._end = threading.Event()
        self._drained: set[str] = set()  # nodes whose drain request this autoscaler has written
        self._said: frozenset[str] = frozenset()
        self.acted: set[Action] = set()
        """Actions already reported in the present decision."""
        self.lease: Lease | None = None
        """The lease of this autoscaler's leadership."""
        self._sizes: Mapping[str, int] = {}  # sizes of the jobs in the last round
        self._written: int | None = None  # revision of this autoscaler's status; None: not read yet

    def stop(self) -> None:
        """End `run` after the present round; may be called in a signal handler."""
        self._end.set()

    def change(self, settings: ScalingSettings) -> None:
        """Use other settings from the next round on; may be called from any thread.

        What tags of the groups say holds instead of them, too.
        """
        self._given = settings

    def run(self) -> int:
        """Control the provider until stopped or done; return the exit code.

        Later errors of the provider or the store are reported, and the round is repeated.

        Raises:
            ProviderError: the first round failed.
            StoreError: the first round failed.
        """
        if self._options.dry_run:
            self.memory = self.recall()
        try:
            done = self.attempt(first=True)
            while not done and not self._end.wait(self._options.interval):
                done = self.attempt(first=False)
        finally:
            self.hand_back()
        return 0

    # One round

    def tick(self) -> bool:
        """Observe, decide, act and report once; return whether all is done."""
        self._mind_the_clock()
        view, seen = self._observe()
        trouble = self._take_settings(seen.capacity.settings)
        decision = step(seen, self.memory, self._settings)
        self.memory = decision.memory
        failed = [] if self._options.dry_run else self._act(decision.actions)
        if self._options.dry_run:
            nodes = {"nodes": len(seen.capacity.instances), "target": decision.target}
            self._event("target", nodes | {"reason": decision.reason})
            for action in decision.actions:
                self._tell(action, "would ")
        else:
            self._sure()
            self._tidy(seen)
            self._publish(seen, decision, (*failed, *trouble))
            self._bill(seen, decision)
        self._warn((*trouble, *decision.warnings, *failed, *self._too_slow(seen)))
        least = max(self._settings.min_nodes, sum(pool.minimum for pool in seen.capacity.pools))
        over = all_ended(view, self._options.expected) and len(seen.capacity.instances) <= least
        return self._options.dry_run or (self._options.until_done and over)

    def _take_settings(self, tagged: Sequence[str]) -> list[str]:
        """Take over the settings that hold in this round; return warnings where some cannot be used.

        Args:
            tagged: settings that the provider has, as KEY=VALUE.
        """
        unfit, values, refused = "what a tag says cannot be used", dict[str, float](), list[str]()
        for text in tagged:
            try:
                said = parse_change(text, self._clock()).items()
                values |= {name: value for name, value in said if value is not None}
            except ValueError as error:
                refused.append(str(error))
        self._settings, changes, unusable = usable(self._given, values)
        if changes != self._changes:
            told = ", ".join(f"{name} {value:g}" for name, value in sorted(changes.items()))
            self._event("settings", {"message": f"set by tags: {told or 'nothing any more'}"})
            self._changes = changes
        return [f"{unfit}: {why}" for why in (*refused, *unusable)]

    def _too_slow(self, seen: Observation) -> list[str]:
        """Return warnings about pools whose hooks wait for a shorter time than the interval allows."""
        pace = self._options.interval
        return [
            f"{pool.name}: a termination hook waits {pool.hook_timeout:g} s for a heartbeat, and we look "
            f"every {pace:g} s: give --interval {max(1.0, pool.hook_timeout // 3):g}, or the hook a longer "
            f"HeartbeatTimeout"
            for pool in seen.capacity.pools
            if pool.hook_timeout < 3 * pace
        ]

    def attempt(self, first: bool) -> bool:
        """Make sure that this autoscaler leads, then `tick`; report errors unless this is the first round."""
        try:
            self._ensure_rule()
            return self.tick()
        except (UnknownPoolError, NotOursError):
            raise  # nothing is left to control
        except (ProviderError, StoreError) as error:
            if first:
                raise
            refused = "the store refuses us: " if isinstance(error, StoreAuthError) else ""
            self._warn((f"{refused}{error}",))
        except Exception as error:
            if first:
                raise
            logger.exception("a defect of the autoscaler; it looks again")
            self._warn((f"a defect, tried again: {type(error).__name__}: {error}",))
        return False

    def _mind_the_clock(self) -> None:
        """Adapt the times in the memory if the clock was set since the last round."""
        offset = self._clock() - self._steady()
        by = 0.0 if self._offset is None else offset - self._offset
        self._offset = offset
        if abs(by) > _LEAP:
            self.memory = shifted(self.memory, by)
            self._event("warning", {"message": f"the clock was set by {by:+.0f} s"})

    def _observe(self) -> tuple[View, Observation]:
        now = self._clock()
        view = view_of(self._keys, self._store.range(self._keys.root), time.monotonic(), now)
        capacity = self._provider.capacity()
        if self._options.dry_run:  # reading signals would delete them, and another autoscaler may lead
            return view, observe(view, capacity, (), self._options.expected, self._provider.instance_of)
        try:
            signals: tuple[Signal, ...] = self._provider.signals()
        except ProviderError as error:  # notices also come from the nodes themselves
            signals, capacity = (), replace(capacity, warnings=(*capacity.warnings, str(error)))
        return view, observe(view, capacity, signals, self._options.expected, self._provider.instance_of)

    # Acting

    def _act(self, actions: Sequence[Action]) -> list[str]:
        """Carry out the actions; return the errors as text. Failed actions will be decided again.

        Each action is reported before it is done.

        Raises:
            StoreError: another autoscaler may lead; the remaining actions are dropped.
        """
        before, self.acted = self.acted, set()
        failed: list[str] = []
        for place, action in enumerate(actions):
            try:
                self._sure()
            except StoreError:
                for left in actions[place:]:
                    if isinstance(left, Release):
                        self.memory = not_done(self.memory, left.instance)
                raise
            if action not in before:
                self._tell(action, "")
            self.acted.add(action)
            try:
                self._carry_out(action)
            except ProviderError as error:
                failed.append(str(error))
                if isinstance(action, Release):
                    self.memory = not_done(self.memory, action.instance)
                self._back_off(action, error)
        return failed

    def _back_off(self, action: Action, error: ProviderError) -> None:
        """Let a pool wait that refuses instances for now, or whose instance cannot be released."""
        pool, now = "", self._clock()
        if isinstance(action, Request) and isinstance(error, TryLaterError):
            pool = action.pool
        elif isinstance(action, Release) and not isinstance(error, (TryLaterError, UnknownInstanceError)):
            pool = self.memory.known[action.instance].pool
        if pool and self.memory.pools.get(pool, PoolMemory()).until <= now:
            self.memory = refused(self.memory, pool, str(error), now, self._settings)

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
            case StopJob():
                self._request_stop(action)

    def _request_stop(self, stop: StopJob) -> None:
        """Write the request that a job's run stops; a person's change at the same time goes first."""
        key = self._keys.job(stop.job, "request")
        there, old = self._store.get(key), records.JobRequest()
        if there is not None:
            try:
                old = records.decode(records.JobRequest, there.value, key)
            except records.MalformedRecordError:
                logger.warning("the request of job %s cannot be read, and is written again", stop.job)
        if old.run not in ("", stop.run):  # to an earlier run
            old = records.JobRequest(checkpoint=old.checkpoint)
        request = replace(old, stop=True, run=stop.run)
        revision = 0 if there is None else there.mod_revision
        self._store.compare_and_swap(key, records.encode(request), revision)

    def _request_drain(self, drain: Drain) -> None:
        """Write the drain request unless there is one for the same instance and deadline."""
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
        """Delete this autoscaler's drain requests for nodes that are gone or are to stay.

        A new node may get the same name.
        """
        known = self.memory.known
        leaving = {
            use.node
            for instance, use in seen.nodes.items()
            if seen.capacity.instance(instance) and instance in known and known[instance].leaving
        }
        for node in self._drained - leaving:
            self._sure()
            self._store.delete(self._keys.drain(node))
            self._drained.discard(node)

    def _tell(self, action: Action, would: str) -> None:
        if not isinstance(action, (Hold, Protect)):
            names = {
                Request: "request",
                Drain: "drain",
                Release: "release",
                LetGo: "let_go",
                StopJob: "stop_job",
            }
            name = names[type(action)]
            self._event(f"{would}{name}", vars(action) | {"hourly_cost": self._hourly()})

    def _hourly(self) -> float:
        return round(sum(known.hourly_price for known in self.memory.known.values()), 6)

    def _warn(self, warnings: Sequence[str]) -> None:
        """Report warnings that were not given in the last round."""
        fresh = frozenset(warnings)
        steady = {_shape(text) for text in self._said}
        for text in warnings:
            if _shape(text) not in steady:
                self._event("warning", {"message": text})
        self._said = fresh

    def _event(self, event: str, fields: Mapping[str, Any]) -> None:
        self._say(event, fields)
        if self._options.dry_run or not self._certain():
            return
        now = self._clock()
        line = {"time": now, "event": f"autoscaler_{event}", **fields}
        key = f"{self._keys.events}{int(now * 1000):013d}-{secrets.token_hex(3)}"
        try:
            self._store.put(key, json.dumps(line, default=str))
        except StoreError as error:
            logger.warning("could not log the event %s: %s", event, error)

    # Publishing and remembering

    def _publish(self, seen: Observation, decision: Step, failed: Sequence[str]) -> None:
        memory = self.memory
        jobs = []
        for name in sorted(set(memory.job_costs) | set(decision.forecasts)):
            so_far, told = memory.job_costs.get(name, 0.0), decision.forecasts.get(name, Forecast(0.0))
            end = None if told.cost_left is None else so_far + told.cost_left
            jobs.append(JobCost(name, so_far, told.hourly, end, told.seconds_left))
        status = AutoscalerStatus(
            provider=self._provider.name,
            nodes=len(seen.nodes),
            target=decision.target,
            hourly_cost=decision.hourly_cost,
            cost_so_far=memory.cost,
            reason=decision.reason,
            jobs=tuple(jobs),
            bought=tuple((n, p.instances, p.hours, p.cost) for n, p in sorted(memory.pools.items())),
            warnings=(*decision.warnings, *failed),
            idle=tuple(
                IdleNode(name, entry.idle_since, entry.hourly_price, bool(entry.leaving))
                for name, entry in memory.known.items()
                if entry.idle_since is not None
            ),
            memory=_MEMORY.dump_json(memory).decode(),
            updated=seen.now,
        )
        key, text = self._keys.autoscaler_status, records.encode(status)
        self._sure()
        self._written = self._store.compare_and_swap(key, text, self._revision())
        if self._written is None:
            self._ruling = False  # its writer has newer information
            raise StoreError("somebody else has written the autoscaler's status: what it says is read first")

    def _bill(self, seen: Observation, decision: Step) -> None:
        """Report the costs of a job when its size changes and when it ends."""
        running, wanted = running_replicas(seen), {job.name for job in seen.jobs}
        sizes = {name: running.get(name, 0) for name in wanted}
        for name in sorted({*sizes, *self._sizes}):
            size = sizes.get(name)
            if size == self._sizes.get(name, 0):
                continue
            so_far, told = self.memory.job_costs.get(name, 0.0), decision.forecasts.get(name, Forecast(0.0))
            fields: dict[str, Any] = {"job": name, "cost_so_far": round(so_far, 4)}
            if size is not None:
                fields |= {"replicas": size, "job_hourly_cost": round(told.hourly, 4)}
                fields["forecast"] = None if told.cost_left is None else round(so_far + told.cost_left, 4)
            self._event("job_ended" if size is None else "job_resized", fields)
        self._sizes = sizes

    def _revision(self) -> int:
        """Return the revision of the status that the memory was read from; 0: there is none."""
        if self._written is None:
            item = self._store.get(self._keys.autoscaler_status)
            self._written = 0 if item is None else item.mod_revision
        return self._written

    def recall(self) -> Memory:
        """Return the memory of the last autoscaler; pools that it had closed are tried again.

        The account of such a pool begins anew. Other pools keep theirs: a program that is restarted again and
        again must not forget how soon nodes are lost.
        """
        item = self._store.get(self._keys.autoscaler_status)
        self._written = 0 if item is None else item.mod_revision
        if item is None:
            return Memory()
        try:
            status = records.decode(AutoscalerStatus, item.value, item.key)
            memory = _MEMORY.validate_json(status.memory) if status.memory else Memory()
        except (records.MalformedRecordError, ValidationError) as error:
            logger.warning("what the last autoscaler knew cannot be read, and is forgotten: %s", error)
            return Memory()
        self._drained |= self._requested(memory)
        pools = {
            name: replace(pool, closed="", wasted=0, spent=0.0, gained=0.0) if pool.closed else pool
            for name, pool in memory.pools.items()
        }
        return replace(memory, pools={name: replace(pool, failures=0) for name, pool in pools.items()})

    def _requested(self, memory: Memory) -> set[str]:
        """Return nodes with drain requests of the last autoscaler, which this one takes over."""
        found = set()
        for item in self._store.range(self._keys.drains).items:
            try:
                request = records.decode(records.DrainRequest, item.value, item.key)
            except records.MalformedRecordError:
                continue
            if request.instance is not None and request.instance in memory.known:
                found.add(request.node)
        return found

    # Leading

    def _ensure_rule(self) -> None:
        """Make sure that this autoscaler leads and controls the provider; else raise StoreError.

        The memory is read again, since another autoscaler may have led meanwhile.
        """
        if self._options.dry_run:
            return
        if self.lease is None or self.lease.lost.is_set():
            self._ruling = False
            self._campaign()
        if not self._ruling:
            self._provider.take_over()
            self._ruling = True
            self.memory = self.recall()
        self._sure()

    def _certain(self) -> bool:
        """Return whether no other autoscaler can be leading."""
        return self.lease is None or self.lease.remaining() > 0

    def _sure(self) -> None:
        """Raise StoreError if another autoscaler may lead: then nothing may be written or requested."""
        if not self._certain():
            raise StoreError("it is not certain that this autoscaler still rules: what was decided is left")

    def _campaign(self) -> None:
        """Become the leader; StoreError if stopped while waiting."""
        key = self._keys.autoscaler_leader
        self.lease = self._store.lease(_LEASE)
        me = records.LeaderRecord(f"{socket.gethostname()}-{os.getpid()}", socket.gethostname(), os.getpid())
        told = ""
        while self._store.compare_and_swap(key, records.encode(me), 0, self.lease) is None:
            item = self._store.get(key)
            who = records.decode(records.LeaderRecord, item.value, key) if item else None
            name = f"pid {who.pid} on {who.host}" if who else "somebody"
            if name != told:
                self._say(
                    "waiting", {"message": f"another autoscaler rules this cluster: {name}; waiting for it"}
                )
            told = name
            if self._end.wait(_LEASE / 3):
                raise StoreError("stopped while another autoscaler ruled")

    def hand_back(self) -> None:
        """Hand the provider back at the end; report errors, since nothing can be repeated.

        Nothing is handed back if another autoscaler may have taken over.
        """
        if self._ruling and self.lease is not None and not self.lease.lost.is_set():
            try:
                self._provider.hand_back()
            except ProviderError as error:
                self._say("warning", {"message": f"not handed back: {error}"})
        if self.lease is not None:
            self.lease.revoke()


def identity(store: Store, keys: Keys, create: bool = True) -> str:
    """Return an id that differs between all clusters, even of the same name in other stores.

    The first call with `create` makes it; "" if there is none.
    """
    key = keys.autoscaler_owner
    if create:
        store.compare_and_swap(key, secrets.token_hex(6), 0)
    item = store.get(key)
    return "" if item is None else f"{keys.cluster}/{item.value}"


def _shape(text: str) -> str:
    """Return a warning without its numbers, so that a countdown is not reported again and again."""
    return "".join("#" if c.isdigit() else c for c in text)
