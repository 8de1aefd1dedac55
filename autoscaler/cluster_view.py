"""What is known of a cluster: a `View` of the store, and the `ClusterCache` that keeps it current.

Nothing here decides or does I/O. The cache is given a range and then its changes, in order. It keeps the last
valid record of a key if a newer value is invalid, and reports an invalid value once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from adaptdl_elastic.autoscaler.held_facts import Facts, Observed, empty, facts_of
from adaptdl_elastic.protocol import hints as job_hints
from adaptdl_elastic.protocol.hints import JobHints
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus, JobCost
from adaptdl_elastic.rendezvous.schema.held import Held
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import MOST_SLOTS
from adaptdl_elastic.rendezvous.store.base import Change, KeyValue, Snapshot
from adaptdl_elastic.rendezvous.store.prefix_cache import Difference, Entry, PrefixCache
from adaptdl_elastic.rendezvous.text import weight_problem


@dataclass(frozen=True)
class JobView(Facts):
    """All records of one job in the store."""

    job: str
    spec: Observed[records.JobSpec] | None = None
    request: Observed[records.JobRequest] | None = None
    status: Observed[records.JobStatus] | None = None
    plan: Observed[records.Plan] | None = None
    hints: Observed[JobHints] | None = None
    checkpoint: Observed[records.CheckpointRecord] | None = None
    generations: frozenset[int] = frozenset()  # generations that have keys of their own
    left: Mapping[str, int] = field(default_factory=empty)  # node → revision of its `Left`
    # plan, status, request → revision of an invalid value
    unreadable: Mapping[str, int] = field(default_factory=empty)

    @property
    def newest_generation(self) -> int:
        """The newest generation that any record but the plan speaks of; -1: none does."""
        held = (seen.record for seen in self.held.values())
        return max([*self.generations, *(max(one.acted, *one.generations) for one in held)], default=-1)

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
        limit = self.plan.record.limit
        return None if limit and self._scaled_after(limit.request) else limit

    @property
    def left_out(self) -> tuple[records.LeftOut, ...]:
        """The nodes that have failed the present run, until a user asks for a number of replicas."""
        if self.plan is None or self.spec is None or self.plan.record.run != self.spec.record.run:
            return ()
        return tuple(one for one in self.plan.record.left_out if not self._scaled_after(one.request))

    def _scaled_after(self, request: int) -> bool:
        asked = self.request
        return asked is not None and asked.record.replicas is not None and asked.revision > request


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
    # job → node → registration
    nodes: Mapping[str, Mapping[str, Observed[records.NodeRecord]]] = field(default_factory=empty)
    jobs: Mapping[str, JobView] = field(default_factory=empty)
    drains: Mapping[str, Observed[records.DrainRequest]] = field(default_factory=empty)
    submitted: frozenset[str] = frozenset()  # names in the keys of submissions, which are not read here
    # (job, node) → registration seen to vanish
    gone: Mapping[tuple[str, str], Missing] = field(default_factory=empty)
    leader: Observed[records.LeaderRecord] | None = None
    autoscaler: Observed[AutoscalerStatus] | None = None
    usage: Mapping[str, Observed[records.NodeUsage]] = field(default_factory=empty)
    steady_since: float = float("-inf")  # since when the store has answered without a break
    revision: int = 0
    led: bool = True  # whether the leader's key existed at `revision`, even with an invalid value

    def agents(self, job: str) -> Mapping[str, Observed[records.NodeRecord]]:
        """Return the registrations of one job, by node."""
        return self.nodes.get(job, empty())

    def most_weight(self, spec: records.JobSpec) -> float:
        """Return the largest weight that counts: what the person may give where people submit jobs.

        In a cluster without a submission whoever starts jobs is the administrator.
        """
        return spec.most_weight if self.submitted else math.inf

    def weight_problems(self, job: JobView) -> list[str]:
        """Return a line for the owner of a job that is not over if its weight does not count in full."""
        spec = job.spec.record if job.spec is not None and not job.over else None
        return [] if spec is None else weight_problem(spec.weight, self.most_weight(spec))

    def cost(self, job: str) -> JobCost | None:
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
        return request is not None and request.record.concerns(node.instance)

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
        if job.limit is not None and job.limit.replicas is not None and view.wall < job.limit.until:
            spec = replace(spec, max_replicas=min(spec.max_replicas, job.limit.replicas))
        if spec.weight > view.most_weight(spec):
            spec = replace(spec, weight=spec.most_weight)
        if spec is not was:
            jobs[name] = replace(job, spec=replace(job.spec, record=spec))
    return replace(view, jobs=MappingProxyType(jobs))


def without_older_agents(view: View) -> tuple[View, dict[str, str]]:
    """Return the view without agents of the release before, and why jobs that they carry are left alone.

    Their reports cannot be read. A job keeps what it has as long as its plan counts on such an agent.
    """
    nodes, carried = dict(view.nodes), dict[str, str]()
    for job, agents in view.nodes.items():
        older = {n: s.record for n, s in agents.items() if s.record.records < records.HELD_VERSION}
        plan = view.jobs[job].plan if older and job in view.jobs else None
        counted_on = set[tuple[str, str]]()
        if plan is not None:
            counted_on |= {(one.node, one.agent) for one in plan.record.placements}
            counted_on |= {(one.node, one.agent) for one in plan.record.leaving}
        named = {node for node, record in older.items() if counted_on & {(node, ""), (node, record.agent)}}
        if named:
            where = ", ".join(sorted(named))
            carried[job] = (
                f"the agents on {where} are of an older release, whose reports are not read: let the job "
                f"end, or end its agents, then upgrade adaptdl-elastic there and start it again"
            )
        elif older:
            left = {node: seen for node, seen in agents.items() if node not in older}
            nodes[job] = MappingProxyType(left)
    return replace(view, nodes=MappingProxyType(nodes)), carried


def failed_jobs(view: View) -> int:
    """Return how often jobs of a cluster have failed."""
    return max((job.status.record.failed_jobs for job in view.jobs.values() if job.status), default=0)


@dataclass(frozen=True)
class Problem:
    """An invalid value in the store."""

    key: str
    message: str


_Entry = Entry[Observed[Any]]


class ClusterCache:
    """The store's keys of one cluster, decoded; `view` returns an immutable copy.

    Not thread-safe: use it from one thread.
    """

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._cache = PrefixCache[Observed[Any]](
            self._read, self._complain, lambda key: bool(self._place(key))
        )
        # (part of the view, job or "") → node, or what else identifies an entry → entry
        self._held: dict[tuple[str, str], dict[Any, _Entry]] = defaultdict(dict)
        # what of it has changed since the last view, in that order, which the view's jobs have, too
        self._stale: dict[tuple[str, str], None] = {}
        self._nodes: dict[str, Mapping[str, Observed[records.NodeRecord]]] = {}
        self._jobs: dict[str, JobView] = {}
        self._gone: dict[tuple[str, str], Missing] = {}
        self._now = 0.0
        self._problems: list[Problem] = []
        self._complained: set[str] = set()

    @property
    def revision(self) -> int:
        """The newest revision that has been applied."""
        return self._cache.revision

    @property
    def led(self) -> bool:
        """Whether the leader's key exists, even with an invalid value."""
        return self._cache.get(self._keys.coordinator_leader) is not None

    @property
    def events(self) -> list[KeyValue]:
        """The bounded log of events, in no order."""
        return [entry.item for entry in self._held["events", ""].values()]

    def take(self, news: Snapshot | Change, now: float) -> bool:
        """Apply what `Follow` yields; return False if it changes nothing that was known."""
        self._now = now
        return self._apply(self._cache.take(news))

    def note(self, key: str, text: str | None, revision: int, now: float) -> None:
        """Apply this process's own write at once, before the watch reports it."""
        self._now = now
        self._apply(self._cache.note(Change("put", key, text, revision)))

    def forget(self, prefix: str, now: float, but: Container[str] = ()) -> None:
        """Apply this process's own deletion at once, before the watch reports it; the keys in `but` stay."""
        self._now = now
        self._apply(self._cache.forget(prefix, but))

    def problems(self) -> list[Problem]:
        """Return the invalid values found since the last call, each message once."""
        found, self._problems = self._problems, []
        return found

    def view(self, now: float, wall: float, steady_since: float = float("-inf")) -> View:
        """Return an immutable view of what is known."""
        for place in self._stale:
            self._build(*place)
        self._stale.clear()
        return View(
            now=now,
            wall=wall,
            nodes=MappingProxyType(dict(self._nodes)),
            jobs=MappingProxyType(dict(self._jobs)),
            drains=self._records("drains"),
            submitted=frozenset(self._held["submissions", ""]),
            usage=self._records("usage"),
            gone=MappingProxyType(dict(self._gone)),
            leader=self._records("coordinator").get("leader"),
            autoscaler=self._records("autoscaler").get("status"),
            steady_since=steady_since,
            revision=self.revision,
            led=self.led,
        )

    def _build(self, part: str, job: str) -> None:
        """Make a job's part of the view again."""
        if part == "nodes":
            self._nodes[job] = self._records("nodes", job)
            if not self._nodes[job]:
                del self._nodes[job]
        elif part == "jobs":
            before = self._jobs.get(job, JobView(job))
            self._jobs[job] = _job_view(before, self._held["jobs", job])
            if self._jobs[job] == JobView(job):
                del self._jobs[job]
                self._gone = {where: missing for where, missing in self._gone.items() if where[0] != job}
        if not self._held[part, job]:
            del self._held[part, job]

    def _records(self, part: str, job: str = "") -> Mapping[Any, Observed[Any]]:
        held = self._held.get((part, job), {})
        return MappingProxyType({at: entry.record for at, entry in held.items() if entry.record is not None})

    def _apply(self, differences: Sequence[Difference[Observed[Any]]]) -> bool:
        for key, before, after in differences:
            part, job, at = self._place(key) or ("", "", "")
            self._stale[part, job] = None
            if after is None:
                self._held[part, job].pop(at, None)
            else:
                self._held[part, job][at] = after
            if part == "nodes" and after is None and before is not None and before.record is not None:
                self._gone[job, at] = Missing(before.record.record.agent, self._now)
            elif part == "nodes" and after is not None and after.record is not None:
                self._gone.pop((job, at), None)
        return bool(differences)

    def _place(self, key: str) -> tuple[str, str, Any] | None:
        """Return where `_held` has a key; None if it does not hold it."""
        match self._keys.parse(key):
            case ("nodes", node, job):
                return "nodes", job, node
            case ("drains" | "submissions" | "usage" | "events" as part, name):
                return part, "", name
            case ("coordinator", "leader") | ("autoscaler", "status") as parts:
                return parts[0], "", parts[1]
            case ("jobs", job, name):
                return "jobs", job, (name,)
            case ("reports", job, node):
                return "jobs", job, ("held", node)
            case ("jobs", job, "left", node):
                return "jobs", job, ("left", node)
            case ("jobs", job, "generations", number, name) if _is_generation(number):
                return "jobs", job, (int(number), name)
        return None

    def _read(self, item: KeyValue) -> Observed[Any] | None:
        found, parts = self._keys.decode(item.key, item.value), self._keys.parse(item.key)
        if parts[0] == "jobs" and parts[2:] == ("hints",):
            found = job_hints.decode(item.value)
            if found.job != parts[1]:
                raise job_hints.MalformedHintsError(f"is a report of job {found.job!r}")
        if isinstance(found, Held) and found.node != parts[2]:
            raise ValueError(f"{item.key}: says it is node {found.node!r}")
        if isinstance(found, records.NodeRecord):
            found = replace(found, records=records.version_of(item.value))
            if (found.node, found.job) != parts[1:]:
                raise ValueError(f"{item.key}: says it is node {found.node!r} of job {found.job!r}")
            if not 1 <= found.min_slots <= found.slots <= MOST_SLOTS:
                message = (
                    f"{item.key}: slots {found.slots} (at least {found.min_slots}) cannot be: "
                    f"1 <= min_slots <= slots <= {MOST_SLOTS}; the node is not used, "
                    f"start its agent with another --nproc-per-node"
                )
                self._complain(item.key, ValueError(message))
                return None
        return None if found is None else Observed(found, item.mod_revision, self._now)

    def _complain(self, key: str, error: ValueError) -> None:
        message = str(error)
        if isinstance(error, job_hints.MalformedHintsError):
            message = f"{key}: {error}; the last good report is kept"
        if message not in self._complained:
            if len(self._complained) > 10_000:
                self._complained.clear()
            self._complained.add(message)
            self._problems.append(Problem(key, message))


def _is_generation(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


def _job_view(before: JobView, held: Mapping[tuple[Any, ...], _Entry]) -> JobView:
    """Return a job's records by what `_place` says of their keys."""
    nodes, unreadable, fields = dict[str, Any](), dict[str, int](), dict[str, Any]()
    left = dict[str, int]()
    for at, entry in held.items():
        match at:
            case (str(name),):
                if entry.record is not None:
                    fields[name] = entry.record
                # the next write of these keys must know the revision that it replaces
                if not entry.readable and name in ("plan", "status", "request"):
                    unreadable[name] = entry.item.mod_revision
            case ("held", node) if entry.record is not None:
                nodes[node] = entry.record
            case ("left", node):
                left[node] = entry.item.mod_revision
    plan = fields["plan"].record if "plan" in fields else None
    fields.update(facts_of(nodes, plan, before))
    return JobView(
        before.job,
        **fields,
        generations=frozenset(at[0] for at in held if isinstance(at[0], int)),
        unreadable=MappingProxyType(unreadable),
        left=MappingProxyType(left),
    )


def view_of(keys: Keys, snapshot: Snapshot, now: float, wall: float) -> View:
    """Return the view of one range, for commands that read once."""
    keeper = ClusterCache(keys)
    keeper.take(snapshot, now)
    return keeper.view(now, wall)
