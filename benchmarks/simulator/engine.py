"""The simulated clock: advances jobs, asks a policy and applies its decisions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from adaptdl_elastic.autoscaler.coordinator.job_models import DeclaredEnd
from adaptdl_elastic.autoscaler.policy.policy_types import (
    Allocation,
    Decision,
    JobInfo,
    NodeInfo,
    PolicySettings,
)
from simulator.application import Application
from simulator.reported import Reports, TrueModels
from simulator.simulated_job import SimJob
from simulator.workload import Submission

PolicyFunction = Callable[
    [Sequence[JobInfo], Sequence[NodeInfo], Mapping[str, Allocation], float, PolicySettings], Decision
]


class Cluster(Protocol):
    """The nodes of a simulation, and when they change next."""

    def nodes(self, now: float) -> Sequence[NodeInfo]:
        """Return the nodes at `now`, in a stable order."""

    def next_change(self, now: float) -> float | None:
        """Return when the nodes change next after `now`; None if they do not change by themselves."""


@dataclass(frozen=True)
class FixedCluster:
    """A cluster of `num_nodes` equal nodes that never change."""

    num_nodes: int
    slots: int

    def nodes(self, now: float) -> Sequence[NodeInfo]:
        """Return the same nodes at any time."""
        return [NodeInfo(f"node-{i:04d}", self.slots) for i in range(self.num_nodes)]

    def next_change(self, now: float) -> float | None:
        """Return None: the nodes never change."""
        return None


@dataclass(frozen=True)
class GivenCluster:
    """A cluster of given nodes, which never change."""

    given: Sequence[NodeInfo]

    def nodes(self, now: float) -> Sequence[NodeInfo]:
        """Return the same nodes at any time."""
        return self.given

    def next_change(self, now: float) -> float | None:
        """Return None: the nodes never change."""
        return None


@dataclass(frozen=True)
class SimulationOptions:
    """Options of a simulation."""

    pause: float = 30.0  # seconds that every change of allocation costs a job
    interval: float = 60.0  # seconds between decisions
    events: bool = False  # also decide on arrivals, completions and first measurements
    report_delay: float = 5.0  # with events: seconds of training after which a new size counts as measured
    min_gap: float = 1.0  # with events: least seconds between two decisions
    tuned: bool = False  # use requested replicas and batch sizes instead of adaptive ones
    # by job, the factor of error of its declared length; None: exact
    declared: Mapping[str, float] | None = None
    undeclared: bool = False  # jobs do not declare how much work is left
    clairvoyant: bool = False  # the policy knows every step time on every type from the start
    max_time: float = 30 * 86400.0


@dataclass
class Outcome:
    """The result of a simulation."""

    jobs: Sequence[SimJob]
    policy_seconds: float = 0.0


class Simulation:
    """Replays a workload. Deterministic: the same arguments give the same outcome."""

    def __init__(
        self,
        workload: Sequence[Submission],
        apps: Mapping[str, Application],
        cluster: Cluster,
        policy: PolicyFunction,
        settings: PolicySettings = PolicySettings(),  # noqa: B008 (frozen)
        options: SimulationOptions = SimulationOptions(),
    ) -> None:
        self.cluster, self.policy, self.options = cluster, policy, options
        self.settings = replace(settings, default_pause=options.pause)
        self.jobs = [self._job(submission, apps[submission.application]) for submission in workload]
        self.now = 0.0
        self.outcome = Outcome(self.jobs)
        self._waiting = sorted(self.jobs, key=lambda job: job.submission.time)  # not submitted yet
        self._active: list[SimJob] = []  # in the workload's order
        self._order = {job.name: i for i, job in enumerate(self.jobs)}
        reports = TrueModels if options.clairvoyant else Reports
        self._reports = reports(self.jobs, self._remaining)
        self._ends: dict[str, DeclaredEnd] = {}  # by job
        self._seen: set[tuple[str, str, int]] = set()  # (job, node type, replicas) already measured
        self._types: tuple[str, ...] = ("",)  # types of the present nodes

    def _job(self, submission: Submission, app: Application) -> SimJob:
        fixed = submission.batch_size if self.options.tuned else app.fixed_batch_size
        return SimJob(submission, app, fixed)

    def run(self) -> Outcome:
        """Simulate until every job is done.

        Raises:
            RuntimeError: If jobs are not done after `max_time`.
        """
        tick = self.options.interval
        while self._waiting or self._active:
            changes = self.cluster.next_change(self.now)
            target = self._next_stop(tick)
            due = self._advance(target - self.now)
            if target in (tick, changes) or (self.options.events and due):
                self._decide()
            if target == tick:
                tick += self.options.interval
            if self.now > self.options.max_time:
                stuck = [job.name for job in (*self._active, *self._waiting)]
                days = self.options.max_time / 86400
                raise RuntimeError(
                    f"{len(stuck)} of {len(self.jobs)} jobs are not done after {days:.0f} simulated days, "
                    f"the first is {stuck[0]}"
                )
        return self.outcome

    def _advance(self, seconds: float) -> bool:
        """Advance the clock; return whether an event calls for a decision."""
        due = False
        for job in self._active:
            job.step(seconds)
            due = due or job.completed is not None or self._measured(job)
        self.now += seconds
        self._active = [job for job in self._active if job.completed is None]
        while self._waiting and self._waiting[0].submission.time <= self.now:
            job = self._waiting.pop(0)
            job.now = self.now
            self._active.append(job)
            self._active.sort(key=lambda job: self._order[job.name])
            due = True
        return due

    def _measured(self, job: SimJob) -> bool:
        """Return whether a job has just measured a number of replicas for the first time."""
        if not job.parts or job.ran_since < self.options.report_delay:
            return False
        key = job.name, job.node_type, job.replicas
        new = key not in self._seen
        self._seen.add(key)
        return new

    def _next_stop(self, tick: float) -> float:
        stops = [tick]
        changes = self.cluster.next_change(self.now)
        if changes is not None:
            stops.append(changes)
        if self.options.events:
            if self._waiting:
                stops.append(self._waiting[0].submission.time)
            for job in self._active:
                if not job.parts:
                    continue
                stops.append(self.now + max(job.next_stop(tick - self.now), self.options.min_gap))
                if (job.name, job.node_type, job.replicas) not in self._seen:
                    wait = job.pause_left + max(self.options.report_delay - job.ran_since, 0.0)
                    stops.append(self.now + max(wait, self.options.min_gap))
        return min(stop for stop in stops if stop > self.now)

    def _decide(self) -> None:
        active = self._active
        nodes = self.cluster.nodes(self.now)
        if not active:
            return
        types = {node.name: node.node_type for node in nodes}
        self._types = tuple(sorted({node.node_type for node in nodes}))
        current = {job.name: job.allocation for job in active}
        infos = [self.info(job) for job in active]
        started = time.process_time()
        decided = self.policy(infos, nodes, current, self.now, self.settings)
        self.outcome.policy_seconds += time.process_time() - started
        for job in active:
            allocation = decided.allocations.get(job.name, {})
            if dict(allocation) != dict(job.allocation):
                there = {types[node] for node in allocation if node in types}
                job.allocate(allocation, self.options.pause, "+".join(sorted(there)))

    def info(self, job: SimJob) -> JobInfo:
        """Return what a coordinator would know about a job."""
        app, options = job.app, self.options
        known, remaining = self._reports.known(job, self.now, self._types), self._remaining(job)
        done = job.progress * app.init_batch_size
        end = self._ends[job.name] = self._ends.get(job.name, DeclaredEnd()).after(done, remaining, self.now)
        return JobInfo(
            name=job.name,
            max_replicas=app.max_replicas,
            requested_replicas=job.submission.num_replicas if options.tuned else None,
            max_profiled_replicas=known.max_profiled_replicas,
            attained=done,
            pause=options.pause if job.starts else None,
            submitted=job.submission.time,
            waiting_since=job.waiting_since,
            last_change=job.last_change,
            remaining=remaining,
            outlived=end.outlived(self.now),
            kind_totals=known.totals,
            model=known.model,
            models=known.models,
            speeds=known.speeds,
        )

    def _remaining(self, job: SimJob) -> float | None:
        if self.options.undeclared:
            return None
        factor = (self.options.declared or {}).get(job.name, 1.0)
        left = job.app.total_progress * factor - job.progress
        return max(left, 0.0) * job.app.init_batch_size  # jobs report it in samples
