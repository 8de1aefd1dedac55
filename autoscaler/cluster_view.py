"""What is known of a cluster: a `View` of the store, and the `ClusterCache` that keeps it current.

Nothing here decides or does I/O. The cache is given a range and then its changes, in order. It decodes each
value once, keeps a job's last valid hints if a newer report is invalid, and reports an invalid value once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from adaptdl_elastic.protocol import hints as job_hints
from adaptdl_elastic.protocol.hints import JobHints
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import MOST_SLOTS
from adaptdl_elastic.rendezvous.store.base import Change, Snapshot
from adaptdl_elastic.rendezvous.text import weight_problem

R = TypeVar("R")

NodeOfGeneration = tuple[int, str]
"""(generation, node)."""

_DIGITS = 18  # most digits of a generation's number


def _empty() -> Mapping[Any, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Observed(Generic[R]):
    """A record, its revision, and when *this* process first saw it (by its own clock)."""

    record: R
    revision: int
    seen: float


@dataclass(frozen=True)
class JobView:
    """All records of one job in the store."""

    job: str
    spec: Observed[records.JobSpec] | None = None
    request: Observed[records.JobRequest] | None = None
    status: Observed[records.JobStatus] | None = None
    plan: Observed[records.Plan] | None = None
    hints: Observed[JobHints] | None = None
    checkpoint: Observed[records.CheckpointRecord] | None = None
    ready: Mapping[NodeOfGeneration, Observed[records.ReadyRecord]] = field(default_factory=_empty)
    running: Mapping[NodeOfGeneration, Observed[records.RunningRecord]] = field(default_factory=_empty)
    broken: Mapping[NodeOfGeneration, Observed[records.PeerLossRecord]] = field(default_factory=_empty)
    ended: Mapping[NodeOfGeneration, Observed[records.EndedRecord]] = field(default_factory=_empty)
    generations: frozenset[int] = frozenset()  # generations that have any key
    # plan, status, request → revision of an invalid value
    unreadable: Mapping[str, int] = field(default_factory=_empty)

    @property
    def status_now(self) -> records.JobStatus | None:
        """The status of the present run; None if there is none, or only that of an earlier run."""
        if self.status is None or (self.spec is not None and self.status.record.run != self.spec.record.run):
            return None
        return self.status.record

    @property
    def over(self) -> bool:
        """Whether the status says that the present run has ended."""
        status = self.status_now
        return status is not None and status.state.ended

    @property
    def limit(self) -> records.SizeLimit | None:
        """What the present run stays at or below, because its script has failed above.

        It holds until a user asks for a number of replicas.
        """
        if self.plan is None or self.spec is None or self.plan.record.run != self.spec.record.run:
            return None
        limit, asked = self.plan.record.limit, self.request
        by_hand = asked is not None and asked.record.replicas is not None
        return None if limit and asked and by_hand and asked.revision > limit.request else limit


BILL_SECONDS = 60.0
"""Age in seconds after which the hourly cost in the autoscaler's status is no longer valid."""


@dataclass(frozen=True)
class Missing:
    """A registration that was seen to vanish."""

    agent: str
    seen: float


@dataclass(frozen=True)
class View:
    """A cluster as of `revision`. `now` and every `seen` are readings of the same local clock."""

    now: float
    wall: float  # seconds since the epoch, for users
    nodes: Mapping[str, Mapping[str, Observed[records.NodeRecord]]] = field(
        default_factory=_empty
    )  # job → node → registration
    jobs: Mapping[str, JobView] = field(default_factory=_empty)
    drains: Mapping[str, Observed[records.DrainRequest]] = field(default_factory=_empty)
    submitted: frozenset[str] = frozenset()  # names in the keys of submissions, which are not read here
    # (job, node) → registration seen to vanish
    gone: Mapping[tuple[str, str], Missing] = field(default_factory=_empty)
    leader: Observed[records.LeaderRecord] | None = None
    autoscaler: Observed[records.AutoscalerStatus] | None = None
    usage: Mapping[str, Observed[records.NodeUsage]] = field(default_factory=_empty)
    steady_since: float = float("-inf")  # since when the store has answered without a break
    revision: int = 0
    led: bool = True  # whether the leader's key existed at `revision`, even with an invalid value

    def agents(self, job: str) -> Mapping[str, Observed[records.NodeRecord]]:
        """Return the registrations of one job, by node."""
        return self.nodes.get(job, _empty())

    def most_weight(self, spec: records.JobSpec) -> float:
        """Return the largest weight that counts: what the person may give where people submit jobs.

        In a cluster without a submission whoever starts jobs is the administrator.
        """
        return spec.most_weight if self.submitted else math.inf

    def weight_problems(self, job: JobView) -> list[str]:
        """Return a line for the owner of a job that is not over if its weight does not count in full."""
        spec = job.spec.record if job.spec is not None and not job.over else None
        return [] if spec is None else weight_problem(spec.weight, self.most_weight(spec))

    def cost(self, job: str) -> records.JobCost | None:
        """Return the cost of a job's nodes as the autoscaler reports it; None if it reports none."""
        jobs = self.autoscaler.record.jobs if self.autoscaler else ()
        found = next((cost for cost in jobs if cost.job == job), None)
        if found is None or self.bill_age <= BILL_SECONDS:
            return found
        return replace(found, hourly=0.0, forecast=None, seconds_left=None)

    @property
    def bill_age(self) -> float:
        """Seconds since the autoscaler last reported its costs; 0 if it never did."""
        said = self.autoscaler.record.updated if self.autoscaler else 0.0
        return max(0.0, self.wall - said) if said else 0.0

    def draining(self, node: records.NodeRecord) -> bool:
        """Return whether a node is draining, by its registration or by a request."""
        if node.draining:
            return True
        request = self.drains.get(node.node)
        if request is None:
            return False
        instance = request.record.instance
        return instance is None or node.instance is None or instance == node.instance

    @property
    def drained(self) -> list[str]:
        """Which nodes are drained by request, by whom and since when, for users."""
        return [f"{node} is {seen.record.text}" for node, seen in sorted(self.drains.items())]


def limited(view: View) -> View:
    """Return the view with the limits of jobs in their specifications."""
    jobs = dict(view.jobs)
    for name, job in view.jobs.items():
        if job.spec is None:
            continue
        spec = was = job.spec.record
        if job.limit is not None and job.limit.replicas is not None:
            spec = replace(spec, max_replicas=min(spec.max_replicas, job.limit.replicas))
        if spec.weight > view.most_weight(spec):
            spec = replace(spec, weight=spec.most_weight)
        if spec is not was:
            jobs[name] = replace(job, spec=replace(job.spec, record=spec))
    return replace(view, jobs=MappingProxyType(jobs))


def failed_jobs(view: View) -> int:
    """Return how often jobs of a cluster have failed."""
    return max((job.status.record.failed_jobs for job in view.jobs.values() if job.status), default=0)


@dataclass(frozen=True)
class Problem:
    """An invalid value in the store."""

    key: str
    message: str


class ClusterCache:
    """The store's keys of one cluster, decoded; `view` returns an immutable copy.

    Not thread-safe: use it from one thread.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._nodes: dict[str, Mapping[str, Observed[records.NodeRecord]]] = {}
        self._jobs: dict[str, JobView] = {}
        self._drains: dict[str, Observed[records.DrainRequest]] = {}
        self._submitted: frozenset[str] = frozenset()
        self._usage: dict[str, Observed[records.NodeUsage]] = {}
        self._gone: dict[tuple[str, str], Missing] = {}
        self._leader: Observed[records.LeaderRecord] | None = None
        self._autoscaler: Observed[records.AutoscalerStatus] | None = None
        self._revision = 0
        self._known: set[str] = set()
        self._problems: list[Problem] = []
        self._complained: set[str] = set()
        self.events: dict[str, int] = {}  # key of an event → revision; the values are not kept

    @property
    def revision(self) -> int:
        """The newest revision that has been applied."""
        return self._revision

    @property
    def led(self) -> bool:
        """Whether the leader's key exists, even with an invalid value."""
        return self._keys.coordinator_leader in self._known

    def take(self, news: Snapshot | Change, now: float) -> bool:
        """Apply what `Follow` yields; return False if it changes nothing that was known."""
        if isinstance(news, Change):
            return self.apply(news, now)
        self.load(news, now)
        return True

    def load(self, snapshot: Snapshot, now: float) -> None:
        """Apply a whole range: keys that are not in it have been deleted."""
        for key in self._known - {item.key for item in snapshot.items}:
            self._remove(key, now)
        for item in snapshot.items:
            known = self._find(item.key)
            if known is None or known.revision != item.mod_revision:  # otherwise nothing has changed
                self._put(item.key, item.value, item.mod_revision, now)
        self._revision = max(self._revision, snapshot.revision)

    def apply(self, change: Change, now: float) -> bool:
        """Apply one change.

        Return False if the change is not newer than what is known, as after this process's own writes.
        """
        current = self._find(change.key)
        if current is not None and current.revision >= change.revision:
            return False
        if change.kind == "delete" and change.key not in self._known:
            return False
        if change.kind == "delete" or change.value is None:
            self._remove(change.key, now)
        else:
            self._put(change.key, change.value, change.revision, now)
        self._revision = max(self._revision, change.revision)
        return True

    def note(self, key: str, record: object, revision: int, now: float) -> None:
        """Apply this process's own write at once, before the watch reports it."""
        self._put(key, record, revision, now)

    def forget(self, prefix: str, now: float) -> None:
        """Apply this process's own deletion at once, before the watch reports it."""
        for key in [key for key in self._known if key.startswith(prefix)]:
            self._remove(key, now)

    def problems(self) -> list[Problem]:
        """Return the invalid values found since the last call, each message once."""
        found, self._problems = self._problems, []
        return found

    def view(self, now: float, wall: float, steady_since: float = float("-inf")) -> View:
        """Return an immutable view of what is known."""
        return View(
            now=now,
            wall=wall,
            nodes=MappingProxyType(dict(self._nodes)),
            jobs=MappingProxyType(dict(self._jobs)),
            drains=MappingProxyType(dict(self._drains)),
            submitted=self._submitted,
            usage=MappingProxyType(dict(self._usage)),
            gone=MappingProxyType(dict(self._gone)),
            leader=self._leader,
            autoscaler=self._autoscaler,
            steady_since=steady_since,
            revision=self._revision,
            led=self.led,
        )

    # Decoding

    def _find(self, key: str) -> Observed[Any] | None:
        match self._parts(key):
            case ["nodes", node, job]:
                return self._nodes.get(job, {}).get(node)
            case ["drains", node]:
                return self._drains.get(node)
            case ["usage", node]:
                return self._usage.get(node)
            case ["coordinator", "leader"]:
                return self._leader
            case ["autoscaler", "status"]:
                return self._autoscaler
            case ["jobs", job, ("spec" | "request" | "status" | "plan" | "hints" | "checkpoint") as name]:
                view = self._jobs.get(job)
                found: Observed[Any] | None = getattr(view, name) if view else None
                return found
            case ["jobs", job, "generations", g, name, node] if (
                _is_generation(g) and name in self._OF_GENERATION
            ):
                view = self._jobs.get(job)
                table: Mapping[NodeOfGeneration, Observed[Any]] = getattr(view, name) if view else {}
                return table.get((int(g), node))
        return None

    def _parts(self, key: str) -> list[str]:
        match self._keys.parse(key):
            case ("reports", job, *rest):
                return ["jobs", job, "generations", *rest]
            case parts:
                return list(parts)

    def _decode(
        self, kind: type[R], key: str, value: object, revision: int, now: float
    ) -> Observed[R] | None:
        if isinstance(value, kind):
            return Observed(value, revision, now)
        try:
            return Observed(records.decode(kind, str(value), key), revision, now)
        except records.MalformedRecordError as error:
            self._complain(key, str(error))
            return None

    def _complain(self, key: str, message: str) -> None:
        if message not in self._complained:
            if len(self._complained) > 10_000:
                self._complained.clear()
            self._complained.add(message)
            self._problems.append(Problem(key, message))

    def _put(self, key: str, value: object, revision: int, now: float) -> None:
        self._known.add(key)
        parts = self._parts(key)
        match parts:
            case ["nodes", node, job]:
                self._put_node(key, node, job, value, revision, now)
            case ["drains", node]:
                drain = self._decode(records.DrainRequest, key, value, revision, now)
                if drain is not None:
                    self._drains[node] = drain
            case ["submissions", job]:
                self._submitted |= {job}
            case ["usage", node]:
                usage = self._decode(records.NodeUsage, key, value, revision, now)
                if usage is not None:
                    self._usage[node] = usage
            case ["coordinator", "leader"]:
                self._leader = self._decode(records.LeaderRecord, key, value, revision, now)
            case ["autoscaler", "status"]:
                self._autoscaler = self._decode(records.AutoscalerStatus, key, value, revision, now)
            case ["jobs", job, *rest]:
                self._put_job(key, job, rest, value, revision, now)
            case ["events", _]:
                self.events[key] = revision

    def _put_node(self, key: str, node: str, job: str, value: object, revision: int, now: float) -> None:
        found = self._decode(records.NodeRecord, key, value, revision, now)
        if found is None:
            return
        record = found.record
        if (record.node, record.job) != (node, job):
            self._complain(key, f"{key}: says it is node {record.node!r} of job {record.job!r}")
            return
        if not 1 <= record.min_slots <= record.slots <= MOST_SLOTS:
            self._complain(
                key,
                f"{key}: slots {record.slots} (at least {record.min_slots}) cannot be: "
                f"1 <= min_slots <= slots <= {MOST_SLOTS}; the node is not used, "
                f"start its agent with another --nproc-per-node",
            )
            self._forget_node(node, job)
            return
        self._nodes[job] = MappingProxyType({**self._nodes.get(job, {}), node: found})
        self._gone.pop((job, node), None)

    def _forget_node(self, node: str, job: str) -> Observed[records.NodeRecord] | None:
        of_job = dict(self._nodes.get(job, {}))
        was = of_job.pop(node, None)
        if of_job:
            self._nodes[job] = MappingProxyType(of_job)
        else:
            self._nodes.pop(job, None)
        return was

    _SINGLE: Mapping[str, type[Any]] = MappingProxyType(
        {
            "spec": records.JobSpec,
            "request": records.JobRequest,
            "status": records.JobStatus,
            "plan": records.Plan,
            "checkpoint": records.CheckpointRecord,
        }
    )
    _OF_GENERATION: Mapping[str, type[Any]] = MappingProxyType(
        {
            "ready": records.ReadyRecord,
            "running": records.RunningRecord,
            "broken": records.PeerLossRecord,
            "ended": records.EndedRecord,
        }
    )

    def _put_job(self, key: str, job: str, rest: list[str], value: object, revision: int, now: float) -> None:
        view = self._jobs.get(job, JobView(job))
        match rest:
            case ["hints"]:
                hints = self._decode_hints(key, value, revision, now)
                if hints is not None and hints.record.job == job:
                    view = replace(view, hints=hints)
            case [name] if name in self._SINGLE:
                found = self._decode(self._SINGLE[name], key, value, revision, now)
                others = {other: at for other, at in view.unreadable.items() if other != name}
                if found is not None:
                    view = replace(_with(view, name, found), unreadable=MappingProxyType(others))
                # the next write of these keys must know the revision that it replaces
                elif name in ("plan", "status", "request"):
                    view = replace(view, unreadable=MappingProxyType({**others, name: revision}))
                else:
                    return
            case ["generations", g, name, node] if _is_generation(g) and name in self._OF_GENERATION:
                found = self._decode(self._OF_GENERATION[name], key, value, revision, now)
                generations = view.generations | {int(g)}
                if found is not None:
                    table = {**getattr(view, name), (int(g), node): found}
                    view = _with(view, name, MappingProxyType(table))
                view = replace(view, generations=generations)
            case ["generations", g, *_] if _is_generation(g):
                view = replace(view, generations=view.generations | {int(g)})
            case _:
                return
        self._jobs[job] = view

    def _decode_hints(self, key: str, value: object, revision: int, now: float) -> Observed[JobHints] | None:
        if isinstance(value, JobHints):
            return Observed(value, revision, now)
        try:
            return Observed(job_hints.decode(str(value)), revision, now)
        except job_hints.MalformedHintsError as error:
            self._complain(key, f"{key}: {error}; the last good report is kept")
            return None

    def _remove(self, key: str, now: float) -> None:
        self._known.discard(key)
        match self._parts(key):
            case ["nodes", node, job]:
                was = self._forget_node(node, job)
                if was is not None:
                    self._gone[job, node] = Missing(was.record.agent, now)
            case ["drains", node]:
                self._drains.pop(node, None)
            case ["submissions", job]:
                self._submitted -= {job}
            case ["usage", node]:
                self._usage.pop(node, None)
            case ["coordinator", "leader"]:
                self._leader = None
            case ["autoscaler", "status"]:
                self._autoscaler = None
            case ["jobs", job, *rest] if job in self._jobs:
                self._remove_of_job(job, rest)
            case ["events", _]:
                self.events.pop(key, None)

    def _remove_of_job(self, job: str, rest: list[str]) -> None:
        view = self._jobs[job]
        match rest:
            case [name] if name in self._SINGLE or name == "hints":
                others = {other: at for other, at in view.unreadable.items() if other != name}
                view = replace(_with(view, name, None), unreadable=MappingProxyType(others))
            case ["generations", g, name, node] if _is_generation(g) and name in self._OF_GENERATION:
                table = {at: seen for at, seen in getattr(view, name).items() if at != (int(g), node)}
                view = _with(view, name, MappingProxyType(table))
                view = replace(view, generations=_generations(view))
            case ["generations", g, *_] if _is_generation(g):
                view = replace(view, generations=_generations(view))
        if view == JobView(job):
            del self._jobs[job]
            for where in [where for where in self._gone if where[0] == job]:
                del self._gone[where]
        else:
            self._jobs[job] = view


def _is_generation(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _DIGITS


def _with(view: JobView, name: str, value: Any) -> JobView:
    changes: dict[str, Any] = {name: value}
    return replace(view, **changes)


def _generations(view: JobView) -> frozenset[int]:
    tables: Iterable[Mapping[NodeOfGeneration, Observed[Any]]] = (
        view.ready,
        view.running,
        view.broken,
        view.ended,
    )
    return frozenset(generation for table in tables for generation, _ in table)


def view_of(keys: Keys, snapshot: Snapshot, now: float, wall: float) -> View:
    """Return the view of one range, for commands that read once."""
    keeper = ClusterCache(keys)
    keeper.load(snapshot, now)
    return keeper.view(now, wall)
