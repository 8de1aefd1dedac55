"""The coordinator as a process: elected by a lease, fed by a watch, driven by `decide`.

This is the I/O around the pure core. Beside the store it keeps only what a successor does not need
(`Memory`). Three things make an old leader harmless, even one that was stopped for a while: it writes only
while its lease is certain to last, every write is a compare-and-swap against what it has seen, and its
successor has written every plan again by then.

Rounds of the policy are computed in a thread, from an immutable question, while the loop goes on. (numpy and
HiGHS release the interpreter lock most of the time.)
"""

from __future__ import annotations

import dataclasses
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
from typing import TYPE_CHECKING, Any, Protocol

from adaptdl_elastic.autoscaler.cluster_view import View
from adaptdl_elastic.autoscaler.coordinator.decide import deposed
from adaptdl_elastic.autoscaler.coordinator.decision_recorder import DecisionRecorder
from adaptdl_elastic.autoscaler.coordinator.decision_types import (
    Action,
    CompareAndSwap,
    CoordinatorSettings,
    Decided,
    DeletePrefix,
    Memory,
    PolicyAnswer,
    PolicyRound,
    Say,
)
from adaptdl_elastic.autoscaler.coordinator.following import Follower
from adaptdl_elastic.autoscaler.coordinator.policy_adapter import Policy
from adaptdl_elastic.autoscaler.coordinator.rounds import compute
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import LeaderRecord
from adaptdl_elastic.rendezvous.store.base import Lease, LeaseLostError, Store, StoreAuthError, StoreError

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

LEASE_TTL = 5.0
_HEARTBEAT = 1.0  # seconds between two checks of the lease
_LAZY_DELAY = 0.5
_LOUD = {"policy_failed": logging.ERROR, "job_broken": logging.ERROR, "malformed": logging.WARNING}
_SLICE = 0.2  # seconds of writing after which changes of the store are handled first
_LAST_ROUND = 5.0  # seconds to wait for a round of the policy when a leader ends
_ROUNDS = 50  # most decisions in a row without a change from outside


class Observer(Protocol):
    """An object that is told about every decision, such as the metrics."""

    def decided(self, view: View, decided: Decided, seconds: float) -> None:
        """Take note of a decision that took `seconds`."""

    def leading(self, leads: bool) -> None:
        """Take note of whether this process leads."""

    def follows(self, view: View) -> None:
        """Take note of the cluster while another process leads, or none."""


class Coordinator:
    """Campaigns, leads, and campaigns again, until it is stopped.

    `clock` is monotonic, `wall` gives times for users, `metrics` is where metrics are served, `decisions` the
    file for the last decisions. `stop()` may be called from any thread.
    """

    def __init__(
        self,
        store: Store,
        keys: Keys,
        settings: CoordinatorSettings,
        policy: Policy,
        *,
        ttl: float = LEASE_TTL,
        observers: Iterable[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        identity: str | None = None,
        version: str = "",
        metrics: str = "",
        decisions: Path | None = None,
    ) -> None:
        self._store, self._keys, self._settings = store, keys, settings
        self._policy = policy
        self._ttl, self._clock, self._wall = ttl, clock, wall
        self._observers = tuple(observers)
        self.identity = identity or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._decisions = decisions
        known = dataclasses.asdict(settings), metrics, str(decisions or "")
        self._record = LeaderRecord(self.identity, socket.gethostname(), os.getpid(), version, *known)
        self.follower = Follower(store, keys, clock)
        self._stopped = threading.Event()
        self.computing: threading.Thread | None = None  # thread of the last round of the policy
        self._ended = threading.Event()  # set when that round has ended
        self._admitted = False  # the store has accepted this process once
        self.leads = threading.Event()
        self.stands_by = threading.Event()

    def stop(self) -> None:
        """End `run` soon; a leader revokes its lease, so that another coordinator can lead at once."""
        self._stopped.set()
        self.follower.wake()

    def run(self) -> None:
        """Serve until `stop`; retry while the store is away or refuses this process.

        Raises:
            StoreAuthError: the store has refused this process from the beginning.
        """
        delay = 0.1
        while not self._stopped.is_set():
            try:
                self._campaign_and_lead()
                delay = 0.1
            except (StoreError, OSError) as error:
                refused = isinstance(error, StoreAuthError)
                if refused and not self._admitted:
                    raise
                what = "the store refuses us" if refused else "the store cannot be used"
                logger.warning("%s (%s); trying again in %.1f s", what, error, delay)
                self._stopped.wait(delay)
                delay = min(5.0, 2 * delay)
            except Exception:  # a defect, which the next leader would meet, too
                logger.exception("the coordinator could not decide; trying again in %.1f s", delay)
                self._stopped.wait(delay)
                delay = min(5.0, 2 * delay)

    # Election

    def _campaign_and_lead(self) -> None:
        lease = self._store.lease(self._ttl)
        follower = self.follower = Follower(self._store, self._keys, self._clock)
        try:
            fence = self._claim(lease)
            self._admitted = True
            if fence is None:
                fence = self._stand_by(lease)
            if fence is not None:
                self._lead(fence, lease)
        except LeaseLostError:
            logger.warning("lost the lease of %s", self._keys.coordinator_leader)
        finally:
            self._tell(False)
            follower.close()
            with suppress(StoreError, OSError):
                lease.revoke()

    def _claim(self, lease: Lease) -> int | None:
        """Become the leader if there is none; return the fence, or None."""
        key, value = self._keys.coordinator_leader, records.encode(self._record)
        return self._store.compare_and_swap(key, value, 0, lease)

    def _stand_by(self, lease: Lease) -> int | None:
        """Follow the store until there is no leader, then lead; return the fence.

        Returns:
            None if stopped, or if the lease was lost, so that what was seen is out of date.
        """
        follower = self.follower
        standby = self._keys.coordinator_standby(self.identity)
        self._store.put(standby, records.encode(self._record), lease)
        follower.load()
        self.stands_by.set()
        try:
            while not self._stopped.is_set() and not lease.lost.is_set():
                if not follower.keeper.led and (fence := self._claim(lease)) is not None:
                    self._store.delete(standby)
                    return fence
                follower.take(_HEARTBEAT)
                follower.check(lease)
                for observer in self._observers:
                    observer.follows(follower.keeper.view(self._clock(), self._wall()))
        finally:
            self.stands_by.clear()
        return None

    # Leading

    def _lead(self, fence: int, lease: Lease) -> None:
        term = Term(self, fence, lease)
        logger.info("leads with fence %d", fence)
        self._tell(True)
        term.say(
            "leader",
            {"id": self.identity, "fence": fence, "host": self._record.host, "metrics": self._record.metrics},
        )
        try:
            if not self.follower.loaded:
                self.follower.load()
            while not self._stopped.is_set() and not lease.lost.is_set() and not term.deposed:
                term.step()
        finally:
            term.close()

    def _tell(self, leads: bool) -> None:
        (self.leads.set if leads else self.leads.clear)()
        for observer in self._observers:
            observer.leading(leads)


class Term:
    """One term as the leader."""

    def __init__(self, owner: Coordinator, fence: int, lease: Lease) -> None:
        self._o, self._fence, self._lease = owner, fence, lease
        self.follower, self.cache = owner.follower, owner.follower.keeper
        self._memory = Memory()
        self.decisions = DecisionRecorder(owner._decisions, owner._keys, fence, owner._settings)
        self._wake_at = owner._clock()
        self._answers: queue.SimpleQueue[PolicyAnswer] = queue.SimpleQueue()
        self.deposed = False  # the lease was lost, as the store shows
        self._asked: tuple[int, float] | None = None  # number and start of the round under way

    def close(self) -> None:
        """Wait for the round of the policy, and for the file with the last decisions."""
        self.decisions.close()
        if self._o.computing is not None:
            self._o.computing.join(_LAST_ROUND)

    def step(self) -> None:
        """Wait until something happens or is due, apply it, and decide."""
        heard = self.follower.take(min(_HEARTBEAT, max(0.0, self._wake_at - self._o._clock())))
        now = self._o._clock()
        if heard.lazy:
            self._wake_at = min(self._wake_at, now + _LAZY_DELAY)
        self.follower.check(self._lease)
        self._check_round(now)
        if heard.eager or now >= self._wake_at or not self._answers.empty():
            self._decide()

    # Deciding

    def _compute(self, asked: PolicyRound) -> None:
        """Start a round of the policy in a thread; `_answers` gets its answer."""
        before, now = self._o.computing, self._o._clock()
        if before is not None and before.is_alive() and not self._o._ended.is_set():
            # a thread cannot be stopped; another one would only slow it down
            self._give_up(asked.number, 0.0, "the round before has not come to an end yet")
            return
        self._asked = asked.number, now
        ended = self._o._ended = threading.Event()

        def work() -> None:
            answer = PolicyAnswer(asked.number, None, 0.0, "its thread was ended")
            try:
                answer = compute(self._o._policy, asked, self._o._clock)
            finally:  # after any error the waiting decision gets an answer
                ended.set()
                self._answers.put(answer)
                self.follower.wake()

        self._o.computing = threading.Thread(target=work, name="coordinator-policy", daemon=True)
        self._o.computing.start()

    def _check_round(self, now: float) -> None:
        """Give up a round that takes too long."""
        if self._asked is None or now - self._asked[1] < self._o._settings.policy_timeout:
            return
        (number, since), self._asked = self._asked, None
        self._give_up(number, now - since, f"no answer after {now - since:.0f} s")

    def _give_up(self, number: int, seconds: float, why: str) -> None:
        self._answers.put(PolicyAnswer(number, None, seconds, f"{why}; jobs keep what they have"))

    def _decide(self) -> None:
        owner = self._o
        for _ in range(_ROUNDS):
            answer = None if self._answers.empty() else self._answers.get()
            if answer is not None and self._asked is not None and answer.number == self._asked[0]:
                self._asked = None
            started = owner._clock()
            view = self.cache.view(started, owner._wall(), self.follower.steady_since)
            if deposed(view, self._fence):
                logger.warning("no longer the leader: the lease of fence %d was lost", self._fence)
                self.deposed = True
                return
            decided = self.decisions.decide(view, self._memory, answer)
            self._memory, self._wake_at = decided.memory, decided.wake_at
            for observer in owner._observers:
                try:
                    observer.decided(view, decided, owner._clock() - started)
                except Exception:  # an observer's error must not prevent decisions
                    logger.exception("%s could not take note of a decision", observer)
            for problem in self.cache.problems():
                self.say("malformed", {"key": problem.key, "message": problem.message})
            if decided.ask is not None:
                self._compute(decided.ask)
            if not self._carry_out(decided.actions):
                return
        logger.error("the decisions do not settle; going on in a second")
        self._wake_at = owner._clock() + 1.0

    def _carry_out(self, actions: tuple[Action, ...]) -> bool:
        """Write what was decided; return whether something was written, so that the rest is decided at once.

        A round of the policy can change hundreds of jobs. After `_SLICE` seconds, changes of the store are
        handled first, and the rest is decided again.
        """
        written, began = False, self._o._clock()
        for action in actions:
            if written and self._o._clock() - began > _SLICE and self.follower.pending:
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
                        self.cache.forget(action.prefix, self._o._clock())
                    case Say():
                        self.say(action.event, action.fields)
            except StoreAuthError:
                raise  # another coordinator may be accepted: give up the lease
            except StoreError as error:
                logger.warning("could not write (%s); trying again", error)
                self.follower.shaken()
                self._wake_at = self._o._clock() + _HEARTBEAT
                return False
        return written

    def _swap(self, action: CompareAndSwap) -> bool:
        try:
            text = None if action.record is None else records.encode(action.record)
        except Exception:  # an error of one job: what is decided about the others is written
            logger.exception("%s cannot be written", action.key)
            return False
        revision = self._o._store.compare_and_swap(action.key, text, action.expected_revision)
        if revision is None:
            # another program wrote; the watch reports it, or else the next decision reads it
            logger.debug("%s has changed meanwhile", action.key)
            now = self._o._clock()
            self._wake_at = min(max(self._wake_at, now + _LAZY_DELAY), now + _HEARTBEAT)
            return False
        self.cache.note(action.key, text, revision, self._o._clock())
        return True

    def say(self, event: str, fields: Any) -> None:
        """Write one line of the bounded log in the store; a failure is only logged."""
        wall = self._o._wall()
        logger.log(_LOUD.get(event, logging.INFO), "%s %s", event, fields)
        key = f"{self._o._keys.events}{int(wall * 1000):013d}-{secrets.token_hex(3)}"
        line = {"time": wall, "event": event, "fence": self._fence, **fields}
        try:
            text = json.dumps(line, default=str)
            self.cache.note(key, text, self._o._store.put(key, text), self._o._clock())
            kept = sorted(item.key for item in self.cache.events)
            surplus = len(kept) - self._o._settings.max_events
            if surplus > self._o._settings.max_events // 10:
                for old in kept[:surplus]:
                    self._o._store.delete(old)
                # at once, because each time all keys of the cluster are looked through
                self.cache.forget(self._o._keys.events, self._o._clock(), but=set(kept[surplus:]))
        except StoreError as error:
            logger.warning("could not log the event %s: %s", event, error)


def stop_with_parent(descriptor: int, stop: Callable[[], None]) -> threading.Thread:
    """Call `stop` when the other end of a pipe is closed because the parent process has ended."""

    def wait() -> None:
        with suppress(OSError):
            while os.read(descriptor, 1024):
                pass
        stop()

    thread = threading.Thread(target=wait, name="coordinator-parent", daemon=True)
    thread.start()
    return thread
