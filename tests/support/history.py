"""What a run has left in the store and in its event logs, held against what the protocol promises.

`Recorder` writes down every change under a cluster's prefix; `violations` says what in such a history must
not be:

* one coordinator per fencing revision: leaders do not overlap, nobody writes a plan or an event with a
  fence that no leader has won, and no plan with an older fence follows one with a newer;
* generations only grow, and one generation is one plan;
* no replica trains in a generation it is not part of: who runs is named by the plan, under its agent and
  its ranks, and begins only when those that were to leave are gone.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from adaptdl_elastic.rendezvous.schema.held import Held
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    MalformedRecordError,
    NodeRecord,
    Plan,
    Transition,
    decode,
)
from adaptdl_elastic.rendezvous.store.base import Change, Store

Event = dict[str, Any]


class Recorder:
    """Follows a cluster from its first change on; `changes()` is complete up to the call."""

    def __init__(self, store: Store, keys: Keys | None = None) -> None:
        self.keys = keys or Keys()
        self._store, self._changes = store, list[Change]()
        self._watch = store.watch(self.keys.root, 1)
        self._seen = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name="history", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        for change in self._watch:
            with self._seen:
                self._changes.append(change)
                self._seen.notify_all()

    def changes(self, timeout: float = 100.0) -> list[Change]:
        """Everything so far."""
        revision = self._store.put(f"{self.keys.root}history", "")
        with self._seen:
            assert self._seen.wait_for(
                lambda: any(change.revision >= revision for change in reversed(self._changes)), timeout
            ), "the history's watch is late"
            return list(self._changes)

    def close(self) -> None:
        """End the thread."""
        self._watch.close()
        self._thread.join()


@dataclass
class _Job:
    """One job as of some revision."""

    fence: int = -1
    plan: Plan | None = None
    plans: dict[int, Plan] = field(default_factory=dict)  # by generation
    registered: dict[str, str] = field(default_factory=dict)  # node → agent
    unregistered: set[tuple[str, str]] = field(default_factory=set)  # (node, agent) whose entry vanished
    held: dict[str, Held] = field(default_factory=dict)  # node → the last one
    began: set[int] = field(default_factory=set)


@dataclass
class _Checker:
    keys: Keys
    found: list[str] = field(default_factory=list)
    leader: tuple[int, str] | None = None
    fences: dict[int, str] = field(default_factory=dict)  # revision at which it was won → who
    jobs: dict[str, _Job] = field(default_factory=dict)

    def take(self, change: Change) -> None:
        match change.key.removeprefix(self.keys.root).split("/"):
            case ["coordinator", "leader"]:
                self._leader(change)
            case ["events", _] if change.value is not None:
                fence = _fence(change.value)
                if fence is not None and fence not in self.fences:
                    self._say(change, f"an event with fence {fence}, which nobody has won")
            case ["nodes", node, job]:
                self._node(self.jobs.setdefault(job, _Job()), node, change)
            case ["jobs", job, "plan"] if change.value is not None:
                self._plan(self.jobs.setdefault(job, _Job()), change)
            case ["reports", job, node]:
                self._held(self.jobs.setdefault(job, _Job()), node, change)

    def _say(self, change: Change, text: str) -> None:
        self.found.append(f"revision {change.revision}: {text}")

    def _leader(self, change: Change) -> None:
        if change.value is None:
            self.leader = None
            return
        if self.leader is not None:
            self._say(change, f"a leader while fence {self.leader[0]} still leads")
        self.leader = (change.revision, change.value)
        self.fences[change.revision] = change.value

    def _node(self, job: _Job, node: str, change: Change) -> None:
        before = job.registered.pop(node, None)
        record = _read(NodeRecord, change)
        if record is not None:
            job.registered[node] = record.agent
        if before is not None and before != job.registered.get(node):
            job.unregistered.add((node, before))

    def _plan(self, job: _Job, change: Change) -> None:
        plan = _read(Plan, change)
        if plan is None:
            return
        if plan.fence not in self.fences:
            self._say(change, f"a plan with fence {plan.fence}, which nobody has won")
        if plan.fence < job.fence:
            self._say(change, f"a plan with fence {plan.fence} after one with fence {job.fence}")
        job.fence = max(job.fence, plan.fence)
        before, job.plan = job.plan, plan
        if before is not None and plan.generation < before.generation:
            self._say(change, f"generation {plan.generation} after {before.generation}")
        if plan.claim:
            return
        known = job.plans.setdefault(plan.generation, plan)
        if _content(known) != _content(plan):
            self._say(change, f"generation {plan.generation} is planned twice, differently")

    def _held(self, job: _Job, node: str, change: Change) -> None:
        held = _read(Held, change)
        if held is None:
            return
        before, job.held[node] = job.held.get(node), held
        if before is not None and before.agent == held.agent and before.sequence > held.sequence:
            self._say(change, f"record {held.sequence} of node {node} after {before.sequence}")
        generation = held.runs
        if generation < 0 or (before is not None and before.runs == generation):
            return
        plan = job.plans.get(generation)
        if plan is None:
            self._say(change, f"node {node} runs generation {generation}, which nobody has planned")
            return
        named = {placement.node: placement.agent for placement in plan.placements}
        if node not in named:
            self._say(change, f"node {node} runs generation {generation}, which has no place for it")
        elif named[node] and held.agent != named[node]:
            self._say(change, f"another agent than the planned one runs generation {generation} on {node}")
        if generation in job.began or plan.transition not in (Transition.RESTART, Transition.ABORT):
            return
        job.began.add(generation)
        for one in plan.leaving:
            said = job.held.get(one.node)
            gone = said is not None and said.has_left(one.generation, one.agent)
            if not gone and (one.node, one.agent) not in job.unregistered:
                self._say(change, f"generation {generation} runs while {one.node} has not left")

    def events(self, job: str, logs: Mapping[str, Iterable[Event]]) -> None:
        """What the agents have written to their event logs, by `node` or `node#which of its agents`."""
        plans = self.jobs.get(job, _Job()).plans
        ranks: dict[int, dict[int, str]] = {}
        for label, events in logs.items():
            node, last = label.partition("#")[0], -1
            for event in events:
                if event["event"] != "started":
                    continue
                generation = int(event["generation"])
                mine = sorted(int(rank) for rank in event["pids"])
                if generation <= last:
                    self.found.append(f"{node} starts generation {generation} after {last}")
                last = generation
                wanted = plans[generation].ranks(node) if generation in plans else range(0)
                if mine != list(wanted):
                    self.found.append(f"{node} starts ranks {mine} of {generation}, planned {list(wanted)}")
                for rank in mine:
                    other = ranks.setdefault(generation, {}).setdefault(rank, node)
                    if other != node:
                        self.found.append(f"rank {rank} of {generation} is on {other} and {node}")


def _read(kind: Any, change: Change) -> Any:
    try:
        return None if change.value is None else decode(kind, change.value, change.key)
    except MalformedRecordError:
        return None  # garbage, which some tests put there


def _fence(line: str) -> int | None:
    with suppress(ValueError, KeyError, TypeError):
        return int(json.loads(line)["fence"])
    return None


def _content(plan: Plan) -> Plan:
    return replace(plan, fence=0, created=0.0)


def violations(
    changes: Sequence[Change],
    keys: Keys | None = None,
    job: str = "job",
    logs: Mapping[str, Iterable[Event]] | None = None,
) -> list[str]:
    """What must not be, in a whole history; `logs` are the event logs of a job's agents."""
    checker = _Checker(keys or Keys())
    for change in changes:
        checker.take(change)
    checker.events(job, logs or {})
    return checker.found
