"""The coordinator as a process: elected by a lease, fed by a watch, driven by `core.decide`.

This is the thin edge around the pure core. It holds nothing that is not in the store, save what a
successor can do without (`Memory`). Three things keep an old leader harmless, one that was stopped and
wakes up included: it writes only while its lease certainly holds, every write is a compare-and-swap
against what it saw, and its successor has written every plan again by then.

Rounds of the policy are computed in a thread of their own, from a snapshot, while the loop goes on. (numpy
and HiGHS let go of the interpreter's lock for most of it.)
"""

from __future__ import annotations

import json
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from adaptdl_elastic.autoscaler.coordinator.core import decide
from adaptdl_elastic.autoscaler.coordinator.policy import Policy
from adaptdl_elastic.autoscaler.coordinator.rounds import Answer, Round, compute
from adaptdl_elastic.autoscaler.coordinator.types import (
    Action,
    CompareAndSwap,
    Decided,
    DeletePrefix,
    Memory,
    Say,
    Settings,
)
from adaptdl_elastic.autoscaler.state import Keeper, View
from adaptdl_elastic.rendezvous import records
from adaptdl_elastic.rendezvous.keys import Keys
from adaptdl_elastic.rendezvous.records import LeaderRecord
from adaptdl_elastic.rendezvous.store import (
    Change,
    CompactedError,
    Lease,
    LeaseLostError,
    Store,
    StoreAuthError,
    StoreError,
    Watch,
)

logger = logging.getLogger(__name__)

LEASE_TTL = 5.0
_HEARTBEAT = 1.0  # how often the lease is looked at, locally
_LAZY = ("hints", "checkpoint")  # changes of these may wait for others to come along
_LAZY_DELAY = 0.5
_LOUD = {"policy_failed": logging.ERROR, "malformed": logging.WARNING}
_SLICE = 0.2  # seconds of writing after which what has happened meanwhile is taken in
_LAST_ROUND = 5.0  # seconds that the end of a term waits for a round of the policy
_ROUNDS = 50  # decisions in a row without anything new from the store


class Observer(Protocol):
    """Told of every decision; metrics are one."""

    def decided(self, view: View, decided: Decided, seconds: float) -> None:
        """`seconds` of wall time it took."""

    def leading(self, leads: bool) -> None:
        """Whether this process leads now."""


@dataclass(frozen=True)
class _Reload:
    """The watch has lost its place."""


@dataclass(frozen=True)
class _Broken:
    error: BaseException


@dataclass(frozen=True)
class _Wake:
    """Somebody wants the loop to look at `stop`."""


_Item = Change | _Reload | _Broken | _Wake


class Coordinator:
    """Campaigns, leads, and campaigns again, until it is stopped.

    `clock` is monotonic, `wall` is what people read. `stop()` may be called from any thread.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        settings: Settings,
        policy: Policy,
        *,
        ttl: float = LEASE_TTL,
        observers: Iterable[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        identity: str | None = None,
        version: str = "",
    ) -> None:
        self._store, self._keys, self._settings = store, keys, settings
        self._policy = policy
        self._ttl, self._clock, self._wall = ttl, clock, wall
        self._observers = tuple(observers)
        self._identity = identity or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._record = LeaderRecord(self._identity, socket.gethostname(), os.getpid(), version)
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._watch: Watch | None = None
        self._computing: threading.Thread | None = None  # of the last round of the policy
        self._ended = threading.Event()  # whether that round came to its end
        self._steady_since = clock()
        self.leads = threading.Event()

    def stop(self) -> None:
        """End `run` soon; a leader lets go of its lease, so that another can lead at once."""
        self._stopped.set()
        self._queue.put(_Wake())
        watch = self._watch
        if watch is not None:
            watch.close()

    def run(self) -> None:
        """Serve until `stop`. Raises StoreAuthError when the store refuses us; outlives everything else."""
        delay = 0.1
        while not self._stopped.is_set():
            try:
                self._campaign_and_lead()
                delay = 0.1
            except StoreAuthError:
                raise
            except (StoreError, OSError) as error:
                logger.warning("the store can not be used (%s); trying again in %.1f s", error, delay)
                self._stopped.wait(delay)
                delay = min(5.0, 2 * delay)
            except Exception:  # a defect: whoever leads next would meet it, too
                logger.exception("the coordinator could not decide; trying again in %.1f s", delay)
                self._stopped.wait(delay)
                delay = min(5.0, 2 * delay)

    # -- election

    def _campaign_and_lead(self) -> None:
        lease = self._store.lease(self._ttl)
        try:
            key, value = self._keys.coordinator_leader, records.encode(self._record)
            fence = self._store.compare_and_swap(key, value, 0, lease)
            if fence is None:
                self._wait_for_vacancy(lease)
                return
            self._steady_since = self._clock()
            self._lead(fence, lease)
        except LeaseLostError:
            logger.warning("lost the lease of %s", self._keys.coordinator_leader)
        finally:
            self._tell(False)
            with suppress(StoreError, OSError):
                lease.revoke()

    def _wait_for_vacancy(self, lease: Lease) -> None:
        """Until there is no leader any more (or the watch can not say)."""
        with suppress(StoreError, OSError):
            lease.revoke()
        key = self._keys.coordinator_leader
        snapshot = self._store.range(key)
        if not any(item.key == key for item in snapshot.items):
            return
        with self._store.watch(key, snapshot.revision + 1) as watch:
            self._watch = watch
            if self._stopped.is_set():
                return
            with suppress(CompactedError):
                for change in watch:
                    if self._stopped.is_set() or (change.key == key and change.kind == "delete"):
                        return

    # -- leading

    def _lead(self, fence: int, lease: Lease) -> None:
        term = _Term(self, fence, lease)
        logger.info("leads with fence %d", fence)
        self._tell(True)
        term.say("leader", {"id": self._identity, "fence": fence, "host": self._record.host})
        try:
            term.load()
            while not self._stopped.is_set() and not lease.lost.is_set():
                term.step()
        finally:
            term.close()

    def _tell(self, leads: bool) -> None:
        (self.leads.set if leads else self.leads.clear)()
        for observer in self._observers:
            observer.leading(leads)


class _Term:
    """One time in office."""

    def __init__(self, owner: Coordinator, fence: int, lease: Lease) -> None:
        self._o, self._fence, self._lease = owner, fence, lease
        self._keeper = Keeper(owner._keys)
        self._memory = Memory()
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        owner._queue = self._queue
        self._watch: Watch | None = None
        self._wake_at = owner._clock()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._asked: tuple[int, float] | None = None  # number of the round under way, and since when

    # -- following the store

    def load(self) -> None:
        """Read everything, and watch from there."""
        self._close_watch()
        self._queue = self._o._queue = queue.SimpleQueue()  # what the old watch may still bring is old
        snapshot = self._o._store.range(self._o._keys.root)
        self._keeper.load(snapshot, self._o._clock())
        watch = self._o._store.watch(self._o._keys.root, snapshot.revision + 1)
        self._watch = self._o._watch = watch
        threading.Thread(
            target=_pump, args=(watch, self._queue), name="coordinator-watch", daemon=True
        ).start()
        self._wake_at = self._o._clock()

    def close(self) -> None:
        """Let go of the watch, and of the policy."""
        self._close_watch()
        if self._o._computing is not None:
            self._o._computing.join(_LAST_ROUND)

    def _close_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def step(self) -> None:
        """Wait for something to happen or to be due, take it in, and decide."""
        eager = self._take()
        now = self._o._clock()
        self._check_health(now)
        self._check_round(now)
        if eager or now >= self._wake_at or not self._answers.empty():
            self._decide()

    def _take(self) -> bool:
        """Wait for changes and take in all there are; whether they call for a decision at once."""
        timeout = min(_HEARTBEAT, max(0.0, self._wake_at - self._o._clock()))
        try:
            item = self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()
        except queue.Empty:
            return False
        eager = False
        while True:
            eager = self._digest(item) or eager
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return eager

    def _digest(self, item: _Item) -> bool:
        match item:
            case Change():
                now = self._o._clock()
                if not self._keeper.apply(item, now):
                    return False  # what we wrote ourselves comes back
                last = item.key.rsplit("/", 1)[-1]
                if item.key.startswith(self._o._keys.events):
                    return False
                if last in _LAZY:
                    self._wake_at = min(self._wake_at, now + _LAZY_DELAY)
                    return False
                return True
            case _Reload():
                logger.info("the store has forgotten what the watch asked for: reading everything again")
                self.load()
                return True
            case _Broken(error):
                if isinstance(error, StoreAuthError):
                    raise error
                raise StoreError(f"the watch ended: {error}") from error
            case _:
                return False

    def _check_health(self, now: float) -> None:
        """Note a break of the store: what expired meanwhile proves nothing."""
        if self._lease.remaining() < self._o._ttl / 3:
            self._o._steady_since = now

    # -- deciding

    def _compute(self, asked: Round) -> None:
        """Begin a round of the policy; `_answers` gets what comes of it."""
        before, now = self._o._computing, self._o._clock()
        if before is not None and before.is_alive() and not self._o._ended.is_set():
            # a thread can not be ended: a second one beside it would only take its time away
            self._give_up(asked.number, 0.0, "the round before has not come to an end yet")
            return
        self._asked = asked.number, now
        ended = self._o._ended = threading.Event()

        def work() -> None:
            answer = Answer(asked.number, None, 0.0, "its thread was ended")
            try:
                answer = compute(self._o._policy, asked, self._o._clock)
            finally:  # whatever may come: who waits for the answer gets one
                ended.set()
                self._answers.put(answer)
                self._o._queue.put(_Wake())

        self._o._computing = threading.Thread(target=work, name="coordinator-policy", daemon=True)
        self._o._computing.start()

    def _check_round(self, now: float) -> None:
        """Wait no longer for a round that takes longer than it may."""
        if self._asked is None or now - self._asked[1] < self._o._settings.policy_timeout:
            return
        (number, since), self._asked = self._asked, None
        self._give_up(number, now - since, f"no answer after {now - since:.0f} s")

    def _give_up(self, number: int, seconds: float, why: str) -> None:
        self._answers.put(Answer(number, None, seconds, f"{why}; jobs keep what they have"))

    def _decide(self) -> None:
        owner = self._o
        for _ in range(_ROUNDS):
            answer = None if self._answers.empty() else self._answers.get()
            if answer is not None and self._asked is not None and answer.number == self._asked[0]:
                self._asked = None
            started = owner._clock()
            view = self._keeper.view(started, owner._wall(), owner._steady_since)
            decided = decide(
                view,
                self._memory,
                keys=owner._keys,
                fence=self._fence,
                settings=owner._settings,
                answer=answer,
            )
            self._memory, self._wake_at = decided.memory, decided.wake_at
            for observer in owner._observers:
                observer.decided(view, decided, owner._clock() - started)
            for problem in self._keeper.problems():
                self.say("malformed", {"key": problem.key, "message": problem.message})
            if decided.ask is not None:
                self._compute(decided.ask)
            if not self._carry_out(decided.actions):
                return
        logger.error("the decisions do not settle; going on in a second")
        self._wake_at = owner._clock() + 1.0

    def _carry_out(self, actions: tuple[Action, ...]) -> bool:
        """Write what was decided; whether something was written and the rest should be decided now.

        A round of the policy can change hundreds of jobs at once. What happens meanwhile does not wait for
        the last of them: after `_SLICE` seconds it is taken in, and the rest is decided anew.
        """
        written, began = False, self._o._clock()
        for action in actions:
            if written and self._o._clock() - began > _SLICE and not self._queue.empty():
                self._wake_at = began
                return False
            if self._lease.lost.is_set() or self._lease.remaining() <= 0:
                self._wake_at = self._o._clock() + _HEARTBEAT
                return False
            try:
                match action:
                    case CompareAndSwap():
                        written = self._swap(action) or written
                    case DeletePrefix():
                        self._o._store.delete_prefix(action.prefix)
                        self._keeper.forget(action.prefix, self._o._clock())
                    case Say():
                        self.say(action.event, action.fields)
            except StoreAuthError:
                raise
            except StoreError as error:
                logger.warning("could not write (%s); trying again", error)
                self._o._steady_since = self._o._clock()
                self._wake_at = self._o._clock() + _HEARTBEAT
                return False
        return written

    def _swap(self, action: CompareAndSwap) -> bool:
        text = records.encode(action.record)
        revision = self._o._store.compare_and_swap(action.key, text, action.expected_revision)
        if revision is None:
            # somebody else wrote: the watch brings what, and if it does not, a look in a moment does
            logger.debug("%s has changed meanwhile", action.key)
            now = self._o._clock()
            self._wake_at = min(max(self._wake_at, now + _LAZY_DELAY), now + _HEARTBEAT)
            return False
        self._keeper.note(action.key, action.record, revision, self._o._clock())
        return True

    def say(self, event: str, fields: Any) -> None:
        """One line of the bounded log in the store; never the reason for anything to fail."""
        wall = self._o._wall()
        logger.log(_LOUD.get(event, logging.INFO), "%s %s", event, fields)
        key = f"{self._o._keys.events}{int(wall * 1000):013d}-{secrets.token_hex(3)}"
        line = {"time": wall, "event": event, "fence": self._fence, **fields}
        try:
            revision = self._o._store.put(key, json.dumps(line, default=str))
            self._keeper.events[key] = revision
            surplus = len(self._keeper.events) - self._o._settings.max_events
            if surplus > self._o._settings.max_events // 10:
                for old in sorted(self._keeper.events)[:surplus]:
                    self._o._store.delete(old)
                    self._keeper.events.pop(old, None)
        except StoreError as error:
            logger.warning("could not log the event %s: %s", event, error)


def _pump(watch: Watch, into: queue.SimpleQueue[_Item]) -> None:
    """Carry a watch's changes into the queue, from a thread of its own."""
    try:
        for change in watch:
            into.put(change)
    except CompactedError:
        into.put(_Reload())
    except BaseException as error:
        into.put(_Broken(error))


def stop_with_parent(descriptor: int, stop: Callable[[], None]) -> threading.Thread:
    """Call `stop` when the other end of a pipe is closed: our parent is gone."""

    def wait() -> None:
        with suppress(OSError):
            while os.read(descriptor, 1024):
                pass
        stop()

    thread = threading.Thread(target=wait, name="coordinator-parent", daemon=True)
    thread.start()
    return thread
