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
from adaptdl_elastic.agent.core.states import AgentIdentity
from adaptdl_elastic.protocol.hints import MalformedHintsError
from adaptdl_elastic.protocol.hints import decode as decode_hints
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    CheckpointRecord,
    EndedRecord,
    JobSpec,
    MasterRecord,
    PeerLossRecord,
    Plan,
    ReadyRecord,
    RunningRecord,
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
        self._of_newest: dict[str, str] = {}  # this node's reports of its newest generation, by key
        self._newest = -1

    def master(self, record: MasterRecord) -> None:
        """Publish where the replicas of a generation meet."""
        self._of_generation("master", record)

    def ready(self, generation: int) -> None:
        """Report that this node's newcomers are ready to join."""
        self._of_generation("ready", ReadyRecord(self._node, generation, time.time()))

    def running(self, generation: int, first_step: float | None, library: bool, resilient: bool) -> None:
        """Report that this node's replicas have started."""
        record = RunningRecord(
            self._node, generation, time.time(), first_step, library, resilient, self._agent
        )
        self._of_generation("running", record)

    def peer_loss(self, record: PeerLossRecord) -> None:
        """Report that replicas have died and the living ones wait."""
        self._of_generation("broken", replace(record, time=time.time()))

    def ended(self, record: EndedRecord) -> None:
        """Report that this node's replicas of a generation are gone."""
        self._of_generation("ended", record)

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
        """Write this node's reports of its newest generation again if the store has lost them.

        Another agent may have written the job's records back before this one has read them.
        """
        reports = dict(self._of_newest)
        self._writer.submit_latest("reports", lambda: self._repeat(reports))

    def _repeat(self, reports: Mapping[str, str]) -> None:
        if not self._is_of_another_run():
            for key, text in reports.items():
                found = self._store.get(key)
                if found is None or found.value != text:
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

    def _of_generation(
        self, what: str, record: MasterRecord | ReadyRecord | RunningRecord | PeerLossRecord | EndedRecord
    ) -> None:
        place = () if isinstance(record, MasterRecord) else (self._node,)
        key = self._keys.generation(self._job, record.generation, what, *place)
        if record.generation > self._newest:
            self._newest, self._of_newest = record.generation, {}
        if record.generation == self._newest:
            self._of_newest[key] = encode(record)
        self._writer.submit(lambda: self._store_put(key, encode(record)))

    def _store_put(self, key: str, value: str) -> None:
        self._store.put(key, value)


def _generation(found: KeyValue) -> int:
    """Return the generation of a recorded checkpoint, -1 where the record cannot be read."""
    record = read_record(CheckpointRecord, found)
    return -1 if record is None else record.generation
