"""Keep large plans in parts, so that each agent reads only what concerns its node.

A plan for N nodes names N nodes, and N agents read it. To keep the bytes of a change linear in N, a plan for
many nodes is divided: the hash of a node's name chooses its part, and a *head* of constant size is written in
the place of the plan::

    coordinator: put parts/<job>/<name>/0 … n, then compare-and-swap jobs/<job>/plan to the head
    agent:       sees the head and reads its own part; the agent of rank 0 reads all

The compare-and-swap of the head publishes the plan: parts without a head have no effect, and their `name` is
new for every attempt. Parts are deleted when a later plan that ends all processes is published. An agent that
no longer finds its part is about to see that plan.

A plan by which processes live on is not divided, since every agent needs all new ranks.
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
from adaptdl_elastic.rendezvous.store.base import Change, KeyValue, Lease, Snapshot, Store, StoreError, Watch

logger = logging.getLogger(__name__)

MOST_UNDIVIDED_NODES = 32  # most nodes of a plan that is not divided
NODES_PER_PART = 16  # average number of nodes per part
_RETRY = 0.2  # seconds between two attempts of a watch to read a plan
_ATTEMPTS = 5
_PLAN_KEY = re.compile(r"/adaptdl/v1/([^/]+)/jobs/([^/]+)/plan")
_JOB_PREFIX = re.compile(r"/adaptdl/v1/([^/]+)/jobs/([^/]+)/")
# stands for a plan whose parts are gone; it is no valid plan, so the coordinator writes another
_MISSING = '"parts of this plan are missing"'


@dataclass(frozen=True)
class PlanPart:
    """What a plan says of some of its nodes."""

    # (index, first rank, placement)
    placements: tuple[tuple[int, int, Placement], ...] = field(default_factory=tuple)
    leaving: tuple[tuple[int, Leaving], ...] = field(default_factory=tuple)  # (index, leaving)


def divisible(plan: Plan) -> bool:
    """Return whether to keep a plan in parts."""
    entries = max(len(plan.placements), len(plan.leaving))
    return plan.transition in (Transition.RESTART, Transition.ABORT) and entries > MOST_UNDIVIDED_NODES


def divide(plan: Plan, name: str) -> tuple[Plan, tuple[PlanPart, ...]]:
    """Return the head and the parts of a plan.

    The head names the node of rank 0, and one node of the newest generation that has to leave.
    """
    count = -(-max(len(plan.placements), len(plan.leaving)) // NODES_PER_PART)
    placements: list[list[tuple[int, int, Placement]]] = [[] for _ in range(count)]
    leaving: list[list[tuple[int, Leaving]]] = [[] for _ in range(count)]
    rank = 0
    for index, placement in enumerate(plan.placements):
        placements[part_of(placement.node, count)].append((index, rank, placement))
        rank += placement.replicas
    for index, leaver in enumerate(plan.leaving):
        leaving[part_of(leaver.node, count)].append((index, leaver))
    newest = sorted(plan.leaving, key=lambda leaver: -leaver.generation)[:1]
    head = replace(
        plan,
        placements=plan.placements[:1],
        leaving=tuple(newest),
        extent=Extent(name, count, plan.nodes, plan.replicas),
    )
    return head, tuple(PlanPart(tuple(p), tuple(g)) for p, g in zip(placements, leaving, strict=True))


def join(head: Plan, parts: list[PlanPart]) -> Plan:
    """Return the whole plan, put together from its parts."""
    placements = sorted((entry for part in parts for entry in part.placements), key=lambda entry: entry[0])
    leaving = sorted((entry for part in parts for entry in part.leaving), key=lambda entry: entry[0])
    return replace(
        head,
        placements=tuple(placement for _, _, placement in placements),
        leaving=tuple(leaver for _, leaver in leaving),
        extent=None,
    )


def excerpt(head: Plan, part: PlanPart, node: str) -> Plan:
    """Return what a plan says of one node.

    `replicas`, `nodes`, `ranks(node)` and `index(node)` of the excerpt are those of the whole plan.
    """
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


def part_of(node: str, count: int) -> int:
    """Return the number of the part that holds what concerns a node."""
    return zlib.crc32(node.encode()) % count


class PlanStore(Store):
    """A store that divides large plans when writing, and returns whole plans or one node's excerpts."""

    def __init__(self, store: Store, node: str | None = None) -> None:
        self.driver, self._node = store, node
        self._whole: dict[int, Plan] = {}  # generation → whole plan, if an excerpt is not enough
        self._heads: dict[str, Plan] = {}  # key of a plan → its last head

    def of_node(self, node: str) -> PlanStore:
        """Return the same store, limited to what one node's agent needs of plans.

        Closing either closes both.
        """
        return PlanStore(self.driver, node)

    def whole(self, plan: Plan) -> Plan:
        """Return the whole plan of an excerpt, read when a change in place followed it. No I/O."""
        return plan if plan.extent is None else self._whole[plan.generation]

    # Reading

    def get(self, key: str) -> KeyValue | None:
        """Return the key as `Store.get` does, with its plan resolved."""
        for _ in range(_ATTEMPTS):
            item = self.driver.get(key)
            if item is None or (value := self._resolve(key, item.value)) == item.value:
                return item
            if value is not None:
                break
        return item and replace(item, value=value or _MISSING)

    def range(self, prefix: str) -> Snapshot:
        """Return the keys as `Store.range` does, with their plans resolved."""
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
        """Watch as `Store.watch` does, with plans resolved."""
        return _PlanWatch(self, self.driver.watch(prefix, start_revision))

    def _resolve(self, key: str, value: str) -> str | None:
        """Return the value with its plan resolved; None if parts are missing.

        Parts are missing if another plan has replaced this one.
        """
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
        self._heads.pop(key, None)  # removed only after the read, since a read that fails is repeated
        return value

    def _read(self, keys: Keys, head: Plan, node: str | None) -> Plan | None:
        extent = head.extent
        assert extent is not None
        try:
            if node is None or any(placement.node == node for placement in head.placements):
                items = self.driver.range(keys.parts(head.job, extent.name, "")).items
                parts = [decode(PlanPart, item.value, item.key) for item in items]
                return join(head, parts) if len(parts) == extent.parts else None
            item = self.driver.get(keys.parts(head.job, extent.name, str(part_of(node, extent.parts))))
            return None if item is None else excerpt(head, decode(PlanPart, item.value, item.key), node)
        except MalformedRecordError as error:
            logger.warning("a part of a plan cannot be read: %s", error)
            return None

    # Writing

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
        """Delete parts of earlier plans and of attempts that were not published.

        Args:
            prefix: prefix of the parts of a job.
            but: name of the parts of the present plan.
            done: revision of the present head. Other parts written before it cannot become a plan any more:
                their head was replaced, or its compare-and-swap will fail. Later parts belong to the next
                leader and stay.
        """
        try:
            items = self.driver.range(prefix).items
            found = {i.key.removeprefix(prefix).partition("/")[0] for i in items if i.mod_revision < done}
            for name in found - {but}:
                self.driver.delete_prefix(f"{prefix}{name}/")
        except StoreError as error:
            logger.debug("parts of older plans stay for now: %s", error)

    def put(self, key: str, value: str, lease: Lease | None = None) -> int:
        """Write as `Store.put` does; plans are only written by `compare_and_swap`."""
        return self.driver.put(key, value, lease)

    def delete(self, key: str) -> bool:
        """Delete as `Store.delete` does."""
        return self.driver.delete(key)

    def delete_prefix(self, prefix: str) -> int:
        """Delete as `Store.delete_prefix` does; with all keys of a job, delete the parts of its plans."""
        found = _JOB_PREFIX.fullmatch(prefix)
        if found is not None:
            self.driver.delete_prefix(Keys(found[1]).parts(found[2]))
        return self.driver.delete_prefix(prefix)

    def lease(self, ttl: float) -> Lease:
        """Return a lease as `Store.lease` does."""
        return self.driver.lease(ttl)

    def close(self) -> None:
        """Close the store."""
        self.driver.close()


class _PlanWatch(Watch):
    """A watch that resolves the plans among the changes."""

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
        """Resolve a value; repeat it while the store is away or refuses, as a watch does."""
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
    """Return whether every process ends with this plan."""
    return plan.transition in (Transition.RESTART, Transition.ABORT)


def _plan(value: str, key: str) -> Plan | None:
    try:
        return decode(Plan, value, key)
    except MalformedRecordError:
        return None
