"""The content of the watched part of the store, and the events that follow from its changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from adaptdl_elastic.agent.core import states
from adaptdl_elastic.rendezvous.schema.held import Left
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    CheckpointRecord,
    DrainRequest,
    JobRequest,
    JobSpec,
    JobStatus,
    MasterRecord,
    NodeRecord,
    Plan,
)
from adaptdl_elastic.rendezvous.store.base import Change, KeyValue, Snapshot, read_text
from adaptdl_elastic.rendezvous.store.prefix_cache import Entry, PrefixCache

_KEPT = ("checkpoint", "request", "plan", "spec")
"""Records of a job that its agents write back to a store that has lost them, in this order."""


class StoreView:
    """Keys and values as last reported by the watches, translated into events for the agent."""

    def __init__(self, keys: Keys, job: str, node: str) -> None:
        self._keys, self._job, self._node = keys, job, node
        self._cache = PrefixCache[Any](lambda item: keys.decode(item.key, item.value))
        self.agents: dict[str, NodeRecord] = {}  # node → its registration for this job
        self.request: JobRequest | None = None
        self.checkpoint: CheckpointRecord | None = None
        self.drain: DrainRequest | None = None
        self.host: str | None = None  # holder of the first coordinator's key
        self.second: str | None = None  # holder of the second coordinator's key
        self.leader: str | None = None
        self._last_steps: dict[int, float] = {}  # generation → end of its last step, as reported

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes to watch."""
        keys = self._keys
        return keys.job(self._job), keys.nodes, keys.coordinators, keys.drain(self._node)

    def apply(self, news: Snapshot | Change) -> Iterator[states.Event]:
        """Apply a change to the view; yield the events that the agent's decisions need."""
        if isinstance(news, Change):
            for key, _, entry in self._cache.take(news):
                yield from self._translate(key, entry)
            return
        for key, _, entry in self._cache.take(news):
            for event in self._translate(key, entry):
                # registrations are reported after all of them have been read: a node later in the list has
                # not vanished
                if not isinstance(event, states.NodesSeen):
                    yield event
        if news.prefix == self._keys.nodes:
            yield self._nodes()

    def saved(self, record: CheckpointRecord) -> None:
        """Take over a checkpoint that was saved here, unless a later generation has recorded one."""
        if self.checkpoint is None or self.checkpoint.generation <= record.generation:
            self.checkpoint = record

    def lost_records(self, news: Snapshot) -> list[KeyValue]:
        """Return this job's records that are lost in `news`, because the store is a new or an older one.

        They are known to be lost if the specification is not there, or the plan is an older one. The records
        are those that no other process writes again by itself. Their revisions are 0: unknown.
        """
        own = self._keys.job(self._job)
        status, spec, plan = (self._cache.record(f"{own}{name}") for name in ("status", "spec", "plan"))
        if news.prefix != own or spec is None or (status is not None and status.state.ended):
            return []
        texts = {item.key: item.value for item in news.items}
        new_spec = read_text(JobSpec, texts.get(f"{own}spec"))
        new_plan = read_text(Plan, texts.get(f"{own}plan"))
        if runs_later(new_spec, spec):
            return []
        mine, theirs = (-1 if one is None else one.generation for one in (plan, new_plan))
        if f"{own}spec" in texts and theirs >= mine:
            return []
        entries = [entry for name in _KEPT if (entry := self._cache.get(f"{own}{name}")) is not None]
        return [replace(entry.item, create_revision=0, mod_revision=0) for entry in entries]

    def last_step_before(self, plan: Plan) -> float | None:
        """Return the wall-clock end of the last step in earlier generations of a plan's run, as reported."""
        earlier = range(plan.first, plan.generation)
        return max((time for g, time in self._last_steps.items() if g in earlier), default=None)

    def _translate(self, key: str, entry: Entry[Any] | None) -> Iterator[states.Event]:
        record = None if entry is None else entry.record
        match self._keys.parse(key), record:
            case ("coordinator", "host" | "second" | "leader" as name), _:
                setattr(self, name, None if entry is None else entry.item.value)
            case _ if entry is not None and not entry.readable:
                return
            case ("jobs", self._job, *_), Plan():
                yield states.PlanSeen(record)
            case ("jobs", self._job, *_), JobStatus():
                yield states.StatusSeen(record)
            case ("jobs", self._job, *_), JobSpec():
                yield states.SpecSeen(record.run)
            case ("jobs", self._job, "request"), _:
                self.request = record
            case ("jobs", self._job, "checkpoint"), _:
                self.checkpoint = record
            case ("jobs", self._job, *_), MasterRecord():
                yield states.MasterSeen(record)
            case ("jobs", self._job, *_), Left():
                for end in record.ends:
                    if end.last_step is not None:
                        before = self._last_steps.get(end.generation, end.last_step)
                        self._last_steps[end.generation] = max(before, end.last_step)
                yield states.LeftSeen(record)
            case ("nodes", node, self._job), _:
                self.agents.pop(node, None)
                if record is not None:
                    self.agents[node] = record
                yield self._nodes()
            case ("drains", self._node), _:
                self.drain = record

    def _nodes(self) -> states.NodesSeen:
        own = self.agents.get(self._node)
        holder = f"the agent at {own.host}, process {own.pid}" if own is not None else ""
        return states.NodesSeen({node: record.agent for node, record in self.agents.items()}, holder)


def runs_later(one: JobSpec | None, other: JobSpec | None) -> bool:
    """Return whether `one` is the specification of a later run of a job than `other`."""
    return one is not None and other is not None and one.run != other.run and one.created > other.created
