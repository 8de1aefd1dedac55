"""The content of the watched part of the store, and the events that follow from its changes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TypeVar

from adaptdl_elastic.agent.cluster.store_link import Keyspace
from adaptdl_elastic.agent.core import states
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    CheckpointRecord,
    DrainRequest,
    EndedRecord,
    JobRequest,
    JobSpec,
    JobStatus,
    MasterRecord,
    NodeRecord,
    Plan,
    decode,
)
from adaptdl_elastic.rendezvous.store.base import Change, read_text

logger = logging.getLogger(__name__)
_KEPT = ("checkpoint", "request", "plan", "spec")
"""Records of a job that its agents write back to a store that has lost them, in this order."""
R = TypeVar("R")


class StoreView:
    """Keys and values as last reported by the watches, translated into events for the agent."""

    def __init__(self, keys: Keys, job: str, node: str) -> None:
        self._keys, self._job, self._node = keys, job, node
        self._values: dict[str, str] = {}
        self.agents: dict[str, NodeRecord] = {}  # node → its registration for this job
        self.request: JobRequest | None = None
        self.checkpoint: CheckpointRecord | None = None
        self.drain: DrainRequest | None = None
        self.host: str | None = None  # holder of the first coordinator's key
        self.second: str | None = None  # holder of the second coordinator's key
        self.leader: str | None = None
        self.ended: dict[tuple[int, str], EndedRecord] = {}

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes to watch."""
        keys = self._keys
        return keys.job(self._job), keys.nodes, keys.coordinators, keys.drain(self._node)

    def apply(self, news: Keyspace | Change) -> Iterator[states.Event]:
        """Apply a change to the view; yield the events that the agent's decisions need."""
        if isinstance(news, Change):
            yield from self._set(news.key, news.value)
            return
        changed = [(k, None) for k in self._values if k.startswith(news.prefix) and k not in news.items]
        changed += [(k, v) for k, v in news.items.items() if self._values.get(k) != v]  # type: ignore[misc]
        for key, value in changed:
            for event in self._set(key, value):
                # registrations are reported after all of them have been read: a node later in the list has
                # not vanished
                if not isinstance(event, states.NodesSeen):
                    yield event
        if news.prefix == self._keys.nodes:
            yield self._nodes()

    def lost_records(self, news: Keyspace) -> dict[str, str]:
        """Return this job's records that are lost in `news`, because the store is a new or an older one.

        They are known to be lost if the specification is not there, or the plan is an older one. The records
        are those that no other process writes again by itself.
        """
        own = self._keys.job(self._job)
        known = {f"{own}{name}": self._values.get(f"{own}{name}") for name in _KEPT}
        records = {key: text for key, text in known.items() if text is not None}
        status = read_text(JobStatus, self._values.get(f"{own}status"))
        if news.prefix != own or f"{own}spec" not in records or (status is not None and status.state.ended):
            return {}
        specs = [read_text(JobSpec, items.get(f"{own}spec")) for items in (news.items, records)]
        if runs_later(*specs):
            return {}
        plans = [read_text(Plan, items.get(f"{own}plan")) for items in (records, news.items)]
        mine, theirs = (-1 if plan is None else plan.generation for plan in plans)
        return records if f"{own}spec" not in news.items or theirs < mine else {}

    def last_step_before(self, plan: Plan) -> float | None:
        """Return the wall-clock end of the last step in earlier generations of a plan's run, as reported."""
        times = [
            record.last_step
            for (generation, _), record in self.ended.items()
            if plan.first <= generation < plan.generation and record.last_step is not None
        ]
        return max(times, default=None)

    def _set(self, key: str, value: str | None) -> Iterator[states.Event]:
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value
        try:
            yield from self._translate(key, value)
        except ValueError as error:  # a malformed record, or a key that should hold a number
            logger.warning("ignored a value in the store: %s", error)

    def _translate(self, key: str, value: str | None) -> Iterator[states.Event]:
        match self._keys.parse(key):
            case ("jobs", self._job, *parts):
                yield from self._of_job(parts, key, value)
            case ("nodes", node, self._job):
                self.agents.pop(node, None)
                if value is not None:
                    self.agents[node] = decode(NodeRecord, value, key)
                yield self._nodes()
            case ("coordinator", "host"):
                self.host = value
            case ("coordinator", "second"):
                self.second = value
            case ("coordinator", "leader"):
                self.leader = value
            case ("drains", self._node):
                self.drain = _decode(DrainRequest, value, key)

    def _of_job(self, parts: list[str], key: str, value: str | None) -> Iterator[states.Event]:
        match parts:
            case ["plan"] if value is not None:
                yield states.PlanSeen(decode(Plan, value, key))
            case ["status"] if value is not None:
                yield states.StatusSeen(decode(JobStatus, value, key))
            case ["spec"] if value is not None:
                spec = decode(JobSpec, value, key)
                yield states.SpecSeen(spec.run)
            case ["request"]:
                self.request = _decode(JobRequest, value, key)
            case ["checkpoint"]:
                self.checkpoint = _decode(CheckpointRecord, value, key)
            case ["generations", _, "master"] if value is not None:
                yield states.MasterSeen(decode(MasterRecord, value, key))
            case ["generations", generation, "ended", node] if value is not None:
                record = decode(EndedRecord, value, key)
                self.ended[int(generation), node] = record
                yield states.EndedSeen(int(generation), node, record.outcome)

    def _nodes(self) -> states.NodesSeen:
        own = self.agents.get(self._node)
        holder = f"the agent at {own.host}, process {own.pid}" if own is not None else ""
        return states.NodesSeen({node: record.agent for node, record in self.agents.items()}, holder)


def runs_later(one: JobSpec | None, other: JobSpec | None) -> bool:
    """Return whether `one` is the specification of a later run of a job than `other`."""
    return one is not None and other is not None and one.run != other.run and one.created > other.created


def _decode(kind: type[R], value: str | None, key: str) -> R | None:
    return None if value is None else decode(kind, value, key)
