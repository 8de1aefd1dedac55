"""Large plans: each agent reads what concerns its node, so that a change costs bytes linear in the nodes.

A plan for N nodes names N nodes, and N agents read it. One for many nodes is therefore kept in parts,
a node's part by the hash of its name; only a *head* of constant size stands where the plan would stand::

    coordinator: put parts/<job>/<name>/0 … n, then compare-and-swap jobs/<job>/plan to the head
    agent:       hears of the head, reads its one part; the agent of rank 0, who waits for all, reads them all

The compare-and-swap of the head is what publishes the plan: parts without a head mean nothing, and their
`name` is new for every attempt. Parts are deleted when a later plan that ends all processes is published:
who does not find them any more is about to hear of that plan.

A change in which processes live on is not divided: everybody has to know who becomes who.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import zlib
from collections.abc import Iterator
from dataclasses import field, replace

from pydantic.dataclasses import dataclass

from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    Extent,
    Leaving,
    MalformedRecordError,
    Placement,
    Plan,
    Transition,
    decode,
    encode,
)
from adaptdl_elastic.rendezvous.store.base import (
    Change,
    KeyValue,
    Lease,
    Snapshot,
    Store,
    StoreError,
    Watch,
)

logger = logging.getLogger(__name__)

UNDIVIDED = 32  # nodes that a plan may name and still stand in one piece
SHARE = 16  # nodes to a part, on average
_RETRY = 0.2  # seconds
_ATTEMPTS = 5
_PLAN_KEY = re.compile(r"/adaptdl/v1/([^/]+)/jobs/([^/]+)/plan")
_JOB_PREFIX = re.compile(r"/adaptdl/v1/([^/]+)/jobs/([^/]+)/")
_MISSING = '"parts of this plan are missing"'  # no plan: whoever may write one writes another


@dataclass(frozen=True)
class PlanPart:
    """What a plan says of some of its nodes."""

    placements: tuple[tuple[int, int, Placement], ...] = field(default_factory=tuple)  # index, first rank
    leaving: tuple[tuple[int, Leaving], ...] = field(default_factory=tuple)  # index


def divisible(plan: Plan) -> bool:
    """Whether to keep it in parts."""
    entries = max(len(plan.placements), len(plan.leaving))
    return plan.transition in (Transition.RESTART, Transition.ABORT) and entries > UNDIVIDED


def divide(plan: Plan, name: str) -> tuple[Plan, tuple[PlanPart, ...]]:
    """The head and the parts of a plan.

    The head names the node of rank 0, and one of the newest generation that is to leave.
    """
    count = -(-max(len(plan.placements), len(plan.leaving)) // SHARE)
    placements: list[list[tuple[int, int, Placement]]] = [[] for _ in range(count)]
    leaving: list[list[tuple[int, Leaving]]] = [[] for _ in range(count)]
    rank = 0
    for index, placement in enumerate(plan.placements):
        placements[_part_of(placement.node, count)].append((index, rank, placement))
        rank += placement.replicas
    for index, leaver in enumerate(plan.leaving):
        leaving[_part_of(leaver.node, count)].append((index, leaver))
    newest = sorted(plan.leaving, key=lambda leaver: -leaver.generation)[:1]
    head = replace(
        plan,
        placements=plan.placements[:1],
        leaving=tuple(newest),
        extent=Extent(name, count, plan.nodes, plan.replicas),
    )
    return head, tuple(PlanPart(tuple(p), tuple(g)) for p, g in zip(placements, leaving, strict=True))


def join(head: Plan, parts: list[PlanPart]) -> Plan:
    """The plan that was divided."""
    placements = sorted((entry for part in parts for entry in part.placements), key=lambda entry: entry[0])
    leaving = sorted((entry for part in parts for entry in part.leaving), key=lambda entry: entry[0])
    return replace(
        head,
        placements=tuple(placement for _, _, placement in placements),
        leaving=tuple(leaver for _, leaver in leaving),
        extent=None,
    )


def excerpt(head: Plan, part: PlanPart, node: str) -> Plan:
    """What a plan says of one node; `replicas`, `nodes`, `ranks(node)` and `index(node)` are the whole's."""
    assert head.extent is not None
    own = [entry for entry in part.placements if entry[2].node == node]
    index, rank = own[0][:2] if own else (0, 0)
    leaving = [leaver for _, leaver in part.leaving if leaver.node == node]
    return replace(
        head,
        placements=tuple(placement for _, _, placement in own),
        leaving=tuple(dict.fromkeys((*leaving, *head.leaving))),
        extent=replace(head.extent, index=index, rank=rank),
    )


def _part_of(node: str, count: int) -> int:
    return zlib.crc32(node.encode()) % count


class PlanStore(Store):
    """A store whose plans are whole, or excerpts for one node, however they are kept."""

    def __init__(self, store: Store, node: str | None = None) -> None:
        self.driver, self._node = store, node
        self._whole: dict[int, Plan] = {}  # generation → the plan, where an excerpt is not enough
        self._heads: dict[str, Plan] = {}  # plan's key → the last head

    def of_node(self, node: str) -> PlanStore:
        """The same store, with the plans that this node's agent has to know. Closing either closes both."""
        return PlanStore(self.driver, node)

    def whole(self, plan: Plan) -> Plan:
        """All of an excerpt, once a change in place after it was heard of; no I/O."""
        return plan if plan.extent is None else self._whole[plan.generation]

    # Reading -----------------------------------------------------------------------------------

    def get(self, key: str) -> KeyValue | None:
        """As `Store.get`."""
        for _ in range(_ATTEMPTS):
            item = self.driver.get(key)
            if item is None or (value := self._resolve(key, item.value)) == item.value:
                return item
            if value is not None:
                break
        return item and replace(item, value=value or _MISSING)

    def range(self, prefix: str) -> Snapshot:
        """As `Store.range`."""
        for _ in range(_ATTEMPTS):
            snapshot = self.driver.range(prefix)
            values = [self._resolve(item.key, item.value) for item in snapshot.items]
            if None not in values:
                break
        items = zip(snapshot.items, (_MISSING if value is None else value for value in values), strict=True)
        return replace(
            snapshot,
            items=tuple(item if value == item.value else replace(item, value=value) for item, value in items),
        )

    def watch(self, prefix: str, start_revision: int = 0) -> Watch:
        """As `Store.watch`."""
        return _PlanWatch(self, self.driver.watch(prefix, start_revision))

    def _resolve(self, key: str, value: str) -> str | None:
        """What a value stands for; None: a plan whose parts are gone, because another has taken its place."""
        found = _PLAN_KEY.fullmatch(key)
        if found is None:
            return value
        try:
            plan = decode(Plan, value, key)
        except MalformedRecordError:
            return value
        if plan.extent is not None:
            self._heads[key] = plan
            resolved = self._read(Keys(found[1]), plan, self._node)
            return None if resolved is None else encode(resolved)
        head = self._heads.get(key)
        if head is not None and head.extent is not None and not _ends_all(plan) and self._node is not None:
            whole = self._read(Keys(found[1]), head, None)
            if whole is None:
                return None
            self._whole = {head.generation: whole}
        self._heads.pop(key, None)  # not before it has been read: a store that fails is asked again
        return value

    def _read(self, keys: Keys, head: Plan, node: str | None) -> Plan | None:
        extent = head.extent
        assert extent is not None
        try:
            if node is None or any(placement.node == node for placement in head.placements):
                items = self.driver.range(keys.parts(head.job, extent.name, "")).items
                parts = [decode(PlanPart, item.value, item.key) for item in items]
                return join(head, parts) if len(parts) == extent.parts else None
            item = self.driver.get(keys.parts(head.job, extent.name, str(_part_of(node, extent.parts))))
            return None if item is None else excerpt(head, decode(PlanPart, item.value, item.key), node)
        except MalformedRecordError as error:
            logger.warning("a part of a plan can not be read: %s", error)
            return None

    # Writing -----------------------------------------------------------------------------------

    def compare_and_swap(
        self, key: str, value: str | None, expected_revision: int, lease: Lease | None = None
    ) -> int | None:
        """As `Store.compare_and_swap`; a large plan that ends all processes is put in parts first."""
        found = _PLAN_KEY.fullmatch(key)
        plan = _plan(value, key) if found is not None and value is not None else None
        if found is None or plan is None or not _ends_all(plan):
            return self.driver.compare_and_swap(key, value, expected_revision, lease)
        prefix = Keys(found[1]).parts(found[2])
        name = ""
        if divisible(plan):
            name = f"{plan.generation}-{secrets.token_hex(4)}"
            head, parts = divide(plan, name)
            value = encode(head)
            for number, part in enumerate(parts):
                self.driver.put(f"{prefix}{name}/{number}", encode(part))
        done = self.driver.compare_and_swap(key, value, expected_revision, lease)
        if done is not None:
            self._sweep(prefix, name, done)
        return done

    def _sweep(self, prefix: str, but: str, done: int) -> None:
        """Delete the parts of earlier plans, and those that somebody did not come to use.

        done: the revision of our head. Parts that were put before it and are not its own can not become a
        plan any more: their head was replaced by ours, or its compare-and-swap will fail. What was put
        later is a successor's, who may rule by now.
        """
        try:
            items = self.driver.range(prefix).items
            found = {i.key.removeprefix(prefix).partition("/")[0] for i in items if i.mod_revision < done}
            for name in found - {but}:
                self.driver.delete_prefix(f"{prefix}{name}/")
        except StoreError as error:
            logger.debug("parts of older plans stay for now: %s", error)

    def put(self, key: str, value: str, lease: Lease | None = None) -> int:
        """As `Store.put`; plans are compared and swapped."""
        return self.driver.put(key, value, lease)

    def delete(self, key: str) -> bool:
        """As `Store.delete`."""
        return self.driver.delete(key)

    def delete_prefix(self, prefix: str) -> int:
        """As `Store.delete_prefix`; with all of a job go the parts of its plans."""
        found = _JOB_PREFIX.fullmatch(prefix)
        if found is not None:
            self.driver.delete_prefix(Keys(found[1]).parts(found[2]))
        return self.driver.delete_prefix(prefix)

    def lease(self, ttl: float) -> Lease:
        """As `Store.lease`."""
        return self.driver.lease(ttl)

    def close(self) -> None:
        """As `Store.close`."""
        self.driver.close()


class _PlanWatch(Watch):
    """Resolves the plans among the changes."""

    def __init__(self, store: PlanStore, watch: Watch) -> None:
        self._plans, self._watch = store, watch
        self._closing = threading.Event()

    def __iter__(self) -> Iterator[Change]:
        for change in self._watch:
            if change.value is None or (value := self._patiently(change.key, change.value)) == change.value:
                yield change
            else:
                yield replace(change, value=value)

    def _patiently(self, key: str, value: str) -> str:
        """As a watch does, outlive a server that is away or refuses us."""
        while True:
            try:
                found = self._plans._resolve(key, value)
            except StoreError:
                if self._closing.wait(_RETRY):
                    return value
            else:
                return _MISSING if found is None else found

    def close(self) -> None:
        self._closing.set()
        self._watch.close()


def _ends_all(plan: Plan) -> bool:
    """Whether every process ends with this plan."""
    return plan.transition in (Transition.RESTART, Transition.ABORT)


def _plan(value: str, key: str) -> Plan | None:
    try:
        return decode(Plan, value, key)
    except MalformedRecordError:
        return None
