"""Prometheus metrics of a coordinator: off by default, and served on loopback by default.

Gauges are made from the last view when they are scraped, so a job that has ended leaves no gauge behind. A
coordinator that does not lead reports `adaptdl_leader 0` and nothing about jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adaptdl_elastic.autoscaler.cluster_view import BILL_SECONDS, JobView, View
from adaptdl_elastic.autoscaler.coordinator.decision_types import CompareAndSwap, Decided, Say
from adaptdl_elastic.autoscaler.coordinator.job_phase import this_run
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger
from adaptdl_elastic.protocol.hints import JobHints
from adaptdl_elastic.rendezvous.schema.records import JobCost, JobState, JobStatus, Plan

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class _Facts:
    """What is known of one job that runs or waits."""

    status: JobStatus
    plan: Plan | None
    hints: JobHints | None
    cost: JobCost | None


_Reader = Callable[[_Facts], float | None]


def _hint(name: str) -> _Reader:
    """Return a reader of one field of the job's own report."""

    def read(facts: _Facts) -> float | None:
        value = getattr(facts.hints, name, None)
        return None if value is None else float(value)

    return read


JOB_GAUGES: dict[str, tuple[str, _Reader]] = {
    "adaptdl_job_replicas": ("Replicas in the current plan.", lambda f: f.plan.replicas if f.plan else 0),
    "adaptdl_job_nodes": ("Nodes in the current plan.", lambda f: f.plan.nodes if f.plan else 0),
    "adaptdl_job_generation": ("The current generation.", lambda f: f.plan.generation if f.plan else None),
    "adaptdl_job_batch_size": ("Global batch size, samples.", _hint("batch_size")),
    "adaptdl_job_goodput": ("Measured goodput, samples per second.", _hint("goodput")),
    "adaptdl_job_goodput_predicted": (
        "Goodput that the model predicts for what the job has, samples per second.",
        lambda f: f.status.predicted_goodput or _hint("predicted_goodput")(f),
    ),
    "adaptdl_job_prediction_error": (
        "Measured over predicted goodput of this generation, minus one.",
        lambda f: f.status.prediction_error,
    ),
    "adaptdl_job_throughput": ("Samples per second.", _hint("throughput")),
    "adaptdl_job_efficiency": ("Statistical efficiency, 0 to 1.", _hint("efficiency")),
    "adaptdl_job_gain": ("Gain of the batch size, in steps.", _hint("gain")),
    "adaptdl_job_lr_factor": ("Factor on the learning rate.", _hint("lr_factor")),
    "adaptdl_job_progress": ("Fraction of the job that is done.", _hint("progress")),
    "adaptdl_job_last_pause_seconds": (
        "Seconds without a step at the last change.",
        lambda f: f.status.last_pause if f.status.last_pause is not None else (f.status.pauses or [None])[-1],
    ),
    "adaptdl_job_restarts_used": ("Restarts that failures have cost.", lambda f: f.status.restarts_used),
    "adaptdl_job_cost_total": (
        "What the job's nodes have cost so far, by the autoscaler.",
        lambda f: f.cost.so_far if f.cost else None,
    ),
    "adaptdl_job_cost_forecast": (
        "What they will have cost at its end, by the autoscaler.",
        lambda f: f.cost.forecast if f.cost else None,
    ),
}

STRAGGLER = "adaptdl_job_straggler"
STRAGGLER_HELP = "Busy time per step of a replica that the others wait for, over theirs."

CLUSTER_GAUGES: dict[str, str] = {
    "adaptdl_leader": "Whether this coordinator decides.",
    "adaptdl_nodes": "Registered nodes.",
    "adaptdl_nodes_draining": "Nodes that are being drained.",
    "adaptdl_slots": "Slots of all registered nodes.",
    "adaptdl_slots_used": "Slots that replicas hold.",
    "adaptdl_queue": "Jobs that wait for replicas.",
    "adaptdl_jobs": "Jobs by state.",
    "adaptdl_hourly_cost": "What the nodes cost an hour, by the autoscaler.",
    "adaptdl_cost_total": "What the nodes have cost so far, by the autoscaler.",
}


class CoordinatorMetrics(Collector):
    """Collects metrics as an observer of a coordinator."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._view: View | None = None
        self._leads = False
        self._plans = Counter("adaptdl_plans", "Plans written.", ["cause"], registry=registry)
        self._failures = Counter(
            "adaptdl_policy_failures", "Rounds in which the policy failed.", registry=registry
        )
        self._decision = Histogram(
            "adaptdl_decision_seconds", "Time of one decision.", buckets=_SECONDS, registry=registry
        )
        self._policy = Histogram(
            "adaptdl_policy_seconds", "Time of one round of the policy.", buckets=_SECONDS, registry=registry
        )
        self._answered = 0  # number of the last round of the policy that was counted
        self.port = 0  # port on which the metrics are served
        self.close: Callable[[], None] = lambda: None
        registry.register(self)

    def leading(self, leads: bool) -> None:
        """Take note of whether this process leads."""
        self._leads = leads
        self._answered = 0  # a new leader numbers its rounds from the beginning
        if not leads:
            self._view = None

    def decided(self, view: View, decided: Decided, seconds: float) -> None:
        """Take note of a decision."""
        self._view = view
        self._decision.observe(seconds)
        if decided.memory.answered != self._answered:
            self._answered = decided.memory.answered
            self._policy.observe(decided.memory.policy_seconds)
        for action in decided.actions:
            if (
                isinstance(action, CompareAndSwap)
                and isinstance(action.record, Plan)
                and not action.record.claim
            ):
                self._plans.labels(action.record.cause.value).inc()
            elif isinstance(action, Say) and action.event == "policy_failed":
                self._failures.inc()

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges for the last view."""
        view = self._view
        yield _gauge("adaptdl_leader", float(self._leads))
        if view is None:
            return
        yield from self._cluster(view)
        facts = {
            name: found for name, job in sorted(view.jobs.items()) if (found := _facts(view, job)) is not None
        }
        for name, (text, read) in JOB_GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=["job"])
            for job, fact in facts.items():
                value = read(fact)
                if value is not None:
                    family.add_metric([job], float(value))
            yield family
        lags = GaugeMetricFamily(STRAGGLER, STRAGGLER_HELP, labels=["job", "rank", "host", "part"])
        for job, fact in facts.items():
            for one in fact.hints.stragglers if fact.hints else ():
                lags.add_metric([job, str(one.rank), one.host, one.part], one.ratio)
        yield lags

    def _cluster(self, view: View) -> Iterable[Metric]:
        ledger = Ledger(view)
        draining = {
            node
            for agents in view.nodes.values()
            for node, seen in agents.items()
            if view.draining(seen.record)
        }
        states = [job.status.record.state for job in view.jobs.values() if job.status]
        yield _gauge("adaptdl_nodes", len(ledger.capacity))
        yield _gauge("adaptdl_nodes_draining", len(draining))
        yield _gauge("adaptdl_slots", sum(ledger.capacity.values()))
        yield _gauge("adaptdl_slots_used", ledger.used)
        yield _gauge("adaptdl_queue", sum(state is JobState.PENDING for state in states))
        jobs = GaugeMetricFamily("adaptdl_jobs", CLUSTER_GAUGES["adaptdl_jobs"], labels=["state"])
        for state in JobState:
            jobs.add_metric([state.value], states.count(state))
        yield jobs
        if view.autoscaler is not None:
            if view.bill_age <= BILL_SECONDS:
                yield _gauge("adaptdl_hourly_cost", view.autoscaler.record.hourly_cost)
            yield _gauge("adaptdl_cost_total", view.autoscaler.record.cost_so_far)


def _gauge(name: str, value: float) -> Metric:
    return GaugeMetricFamily(name, CLUSTER_GAUGES[name], value=value)


def _facts(view: View, job: JobView) -> _Facts | None:
    status = job.status_now
    if job.spec is None or status is None or status.state.ended:
        return None
    plan = this_run(job)
    hints = job.hints.record if job.hints else None
    if hints is not None and plan is not None and hints.generation < plan.first:
        hints = None
    return _Facts(status, plan, hints, view.cost(job.job))


def serve(host: str, port: int) -> CoordinatorMetrics:
    """Serve the metrics of this process (port 0: any free port); OSError if the address cannot be used."""
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    server, thread = start_http_server(port, addr=host, registry=registry)
    metrics.port = server.server_port

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    metrics.close = close
    return metrics
