"""Write the state of an agent's replicas, and what they report, to the store."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from adaptdl_elastic.agent.cluster import ended_run
from adaptdl_elastic.agent.cluster.store_link import Writer
from adaptdl_elastic.agent.cluster.store_view import runs_later
from adaptdl_elastic.agent.core.held_record import ends_of_predecessor
from adaptdl_elastic.agent.core.states import AgentIdentity
from adaptdl_elastic.protocol.hints import MalformedHintsError
from adaptdl_elastic.protocol.hints import decode as decode_hints
from adaptdl_elastic.rendezvous.schema.held import MOST_ENDS, GenerationEnd, Held, Left
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    CheckpointRecord,
    JobSpec,
    MasterRecord,
    NodeRecord,
    Plan,
    encode,
)
from adaptdl_elastic.rendezvous.store.base import KeyValue, Store, read_record, read_text

logger = logging.getLogger(__name__)

_MOST_REPORTED, _LONGEST_NAME = 100, 100  # values of a script, characters of a name, as `JobHints` has them


class NodeReporter:
    """The reports of one node about one job. The writer's thread writes them in order."""

    def __init__(self, store: Store, keys: Keys, writer: Writer, me: AgentIdentity) -> None:
        self._store, self._keys, self._writer = store, keys, writer
        self._job, self._node, self._agent, self._run = me.spec.job, me.node, me.agent, me.spec.run
        self._reported: dict[str, float] = {}
        self._master: MasterRecord | None = None  # of the newest generation that begins here
        self._held: Held | None = None  # the newest, with times
        self._left = Left(me.node, me.agent)  # what of it was submitted last for other agents
        self._inherited: tuple[GenerationEnd, ...] = ()  # by an earlier agent of this node
        self._revisions: dict[str, int] = {}  # of this agent's own records, by key

    def master(self, record: MasterRecord) -> None:
        """Publish where the replicas of a generation meet."""
        self._master = record
        self._writer.submit(lambda: self._store_put(*self._published(record)))

    def _published(self, record: MasterRecord) -> tuple[str, str]:
        return self._keys.generation(self._job, record.generation, "master"), encode(record)

    def held(self, record: Held, last_step: float | None) -> None:
        """Report what this node holds.

        A record that waits to be written is left out if a newer one waits, unless the node has left a
        generation: replicas of other nodes may start then, and what they report comes behind it.

        Args:
            record: What the node holds; the times of what is new in it are filled in.
            last_step: Wall-clock end of the last step, for generations that have just ended.
        """
        now, before = time.time(), self._held or Held(self._node)
        begun = record.runs >= 0 and record.runs != before.runs
        started = now if begun else before.started if record.runs >= 0 else 0.0
        known = {end.generation: end for end in before.ends}

        def timed(end: GenerationEnd) -> GenerationEnd:
            if end.generation in known:
                return known[end.generation]
            began = before.started if end.generation == before.runs else now
            return replace(end, agent=self._agent, started=began, last_step=last_step, time=now)

        self._held = replace(record, started=started, ends=tuple(map(timed, record.ends)))
        self._submit_held(self._held)

    def _submit_held(self, held: Held, look: bool = False) -> None:
        """Submit a record, and behind it what of it other agents wait for, if that is new."""
        left = held.left
        if look or left != self._left:
            self._left = left
            self._writer.submit(lambda: self._swap(held, True, look))
            self._writer.submit(lambda: self._swap(held, False, look))
        else:
            self._writer.submit(lambda: self._write_newest(held))

    def _write_newest(self, held: Held) -> None:
        # a newer one follows in the queue, behind what has to be written before it
        if self._held is None or held.sequence >= self._held.sequence:
            self._swap(held, True, False)

    def _swap(self, record: Held, whole: bool, look: bool) -> None:
        """Write a record over an older one, but not over that of an agent that has this node's name now.

        Args:
            record: The record.
            whole: Write all of it; else what it says of what the node has left.
            look: Read first, and write only what is not there.
        """
        key = (self._keys.held if whole else self._keys.left)(self._job, self._node)
        while True:
            # what an earlier agent of this node has said of ends is carried on
            kept = replace(record, ends=(*self._inherited, *record.ends)[-MOST_ENDS:])
            text = encode(kept if whole else kept.left)
            if not look:
                revision = self._revisions.get(key, 0)
                if (done := self._store.compare_and_swap(key, text, revision)) is not None:
                    self._revisions[key] = done
                    return
            found, look = self._store.get(key), False
            if found is None:
                if self._is_of_another_run():
                    return
                self._revisions.pop(key, None)
                continue
            if found.value == text:
                self._revisions[key] = found.mod_revision
                return
            theirs = read_record(Held, found) if whole else read_record(Left, found)
            if theirs is not None and theirs.agent != self._agent:
                if self._is_of_another_run() or not self._has_the_name():
                    logger.info("agent %s reports for this node", theirs.agent)
                    return
                if isinstance(theirs, Held):
                    self._inherited = ends_of_predecessor(theirs)
            self._revisions[key] = found.mod_revision

    def _has_the_name(self) -> bool:
        registered = read_record(NodeRecord, self._store.get(self._keys.node(self._node, self._job)))
        return registered is None or registered.agent == self._agent

    def cannot_be_planned(self, why: str) -> None:
        """End the job as failed, unless it has a plan, has ended, or a coordinator leads."""
        self._writer.submit_latest("status", lambda: self._fail(why))

    def _fail(self, why: str) -> None:
        made = read_record(Plan, self._store.get(self._keys.job(self._job, "plan")))
        led = self._store.get(self._keys.coordinator_leader) is not None
        if not (led or self._is_of_another_run() or (made is not None and made.run == self._run)):
            ended_run.fail(self._store, self._keys, self._job, self._run, why, time.time())

    def checkpoint(self, record: CheckpointRecord) -> None:
        """Record the newest checkpoint, unless a later generation has recorded one or the run is over.

        An agent that was cut off from the store writes what it has kept when it is back.
        """
        self._writer.submit(lambda: self._record_checkpoint(record))

    def _record_checkpoint(self, record: CheckpointRecord) -> None:
        key = self._keys.job(self._job, "checkpoint")
        while True:
            found = self._store.get(key)
            if self._is_of_another_run() or (found is not None and _generation(found) > record.generation):
                logger.info("checkpoint %s is not recorded: others have taken over", record.id)
                return
            revision = found.mod_revision if found is not None else 0
            if self._store.compare_and_swap(key, encode(record), revision) is not None:
                return

    def _is_of_another_run(self) -> bool:
        found = read_record(JobSpec, self._store.get(self._keys.job(self._job, "spec")))
        return found is not None and found.run != self._run

    def restore(self, records: Mapping[str, str]) -> None:
        """Write back what a store has lost that was replaced by an empty or an older one.

        The agent that writes the plan writes the other records. What has been written to the store meanwhile
        is newer and stays.

        Args:
            records: Key → text of the job's records, in the order in which they are written: the plan follows
                those that are lost if the agent breaks off, and the specification is the last.
        """
        self._writer.submit(lambda: self._restore(dict(records)))

    def _restore(self, records: dict[str, str]) -> None:
        while not self._put_back(records):
            logger.info("the plan changes while it is written back")

    def repeat(self) -> None:
        """Write what this node holds, and where its newest generation meets, if the store has lost that.

        Another agent may have written the job's records back before this one has read them.
        """
        if self._held is not None:
            self._submit_held(self._held, look=True)
        if (record := self._master) is not None:
            self._writer.submit_latest("master", lambda: self._repeat(*self._published(record)))

    def _repeat(self, key: str, text: str) -> None:
        if not self._is_of_another_run() and self._store.get(key) is None:
            self._store.put(key, text)

    def _put_back(self, records: Mapping[str, str]) -> bool:
        """Write the records that are lost; return False if another agent writes the plan meanwhile."""
        plan, spec, saved = (self._keys.job(self._job, name) for name in ("plan", "spec", "checkpoint"))
        found = {key: self._store.get(key) for key in (plan, *records)}
        if runs_later(read_record(JobSpec, found[spec]), read_text(JobSpec, records[spec])):
            return True
        theirs, mine = read_record(Plan, found[plan]), read_text(Plan, records.get(plan))
        if mine is None or (theirs is not None and theirs.generation >= mine.generation):
            if found[spec] is None:
                self._store.compare_and_swap(spec, records[spec], 0)
            return True
        newest = read_record(CheckpointRecord, found.get(saved))
        for key, text in records.items():
            item, one = found[key], read_text(CheckpointRecord, text) if key == saved else None
            if one is not None and newest is not None and newest.time > one.time:
                continue
            done = self._store.compare_and_swap(key, text, 0 if item is None else item.mod_revision)
            if key == plan and done is None:
                return False
        return True

    def script_reported(self, fields: Mapping[str, object]) -> None:
        """Keep the numbers that the script has reported for the next hints."""
        for name, value in fields.items():
            known = name in self._reported or len(self._reported) < _MOST_REPORTED
            if isinstance(value, int | float) and known and len(name) <= _LONGEST_NAME:
                with suppress(OverflowError):  # a whole number beyond every float
                    self._reported[name] = float(value)

    def hints(self, hints: dict[str, Any]) -> bool:
        """Write rank 0's newest hints; return False if they are invalid."""
        text = json.dumps({"v": 1, **hints, "reported": self._reported})
        try:
            decode_hints(text)
        except MalformedHintsError as error:
            logger.warning("hints that do not fit the schema: %s", error)
            return False
        key = self._keys.job(self._job, "hints")
        self._writer.submit_latest(key, lambda: self._store_put(key, text))
        return True

    def _store_put(self, key: str, value: str) -> None:
        self._store.put(key, value)


def _generation(found: KeyValue) -> int:
    """Return the generation of a recorded checkpoint, -1 where the record cannot be read."""
    record = read_record(CheckpointRecord, found)
    return -1 if record is None else record.generation
