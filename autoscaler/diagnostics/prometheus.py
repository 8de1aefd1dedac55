"""Prometheus metrics of a coordinator, served on loopback by default.

Metrics of jobs are made from the last view when they are scraped, so a job that has ended leaves none behind.
A coordinator that does not lead reports `adaptdl_leader 0`, and of jobs only how many have not ended. Names
follow Prometheus' rules: counters end in `_total`, everything else says its unit and is a gauge or a
histogram.
"""

from __future__ import annotations

import errno
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from socket import AF_INET, AF_INET6
from threading import Thread
from typing import Any, cast

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    MetricsHandler,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from adaptdl_elastic.autoscaler.cluster_view import BILL_SECONDS, JobView, View, failed_jobs
from adaptdl_elastic.autoscaler.coordinator.decision_types import CompareAndSwap, Decided, Say
from adaptdl_elastic.autoscaler.coordinator.slots import Ledger
from adaptdl_elastic.autoscaler.diagnostics.rows import (
    ENDED_STATES,
    STATES,
    WAITING_STATES,
    Row,
    job_rows,
    last_hints,
)
from adaptdl_elastic.rendezvous.schema.records import Plan
from adaptdl_elastic.rendezvous.services.connections import BoundedServer
from adaptdl_elastic.rendezvous.services.submitted import Submitted
from adaptdl_elastic.rendezvous.store.base import StoreError

DEFAULT_PORTS = range(9300, 9310)
"""Ports that are tried one after another: a machine may have several coordinators, of several jobs."""

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


_OF_ROWS: dict[str, tuple[str, str]] = {  # metric → text, name of the value in the row of a job
    "adaptdl_job_replicas": ("Replicas in the current plan.", "replicas"),
    "adaptdl_job_nodes": ("Nodes in the current plan.", "nodes"),
    "adaptdl_job_generation": ("The current generation.", "generation"),
    "adaptdl_job_batch_size_samples": ("Global batch size.", "batch_size"),
    "adaptdl_job_goodput_samples_per_second": ("Measured goodput.", "goodput"),
    "adaptdl_job_goodput_predicted_samples_per_second": (
        "Goodput that the model predicts for what the job has.",
        "predicted_goodput",
    ),
    "adaptdl_job_prediction_error_ratio": (
        "Measured over predicted goodput of this generation, minus one.",
        "prediction_error",
    ),
    "adaptdl_job_throughput_samples_per_second": ("Samples per second.", "throughput"),
    "adaptdl_job_efficiency_ratio": ("Statistical efficiency, 0 to 1.", "efficiency"),
    "adaptdl_job_gain": ("Gain of the batch size, in steps.", "gain"),
    "adaptdl_job_lr_factor": ("Factor on the learning rate.", "lr_factor"),
    "adaptdl_job_progress_ratio": ("Fraction of the job that is done.", "progress"),
    "adaptdl_job_steps_total": ("Steps of the optimizer.", "step"),
    "adaptdl_job_last_pause_seconds": ("Seconds without a step at the last change.", "last_pause"),
    "adaptdl_job_restarts_used": ("Restarts that failures have cost.", "restarts_used"),
    "adaptdl_job_restarts_allowed": ("Restarts that failures may cost.", "max_restarts"),
    "adaptdl_job_cost_total": ("What the job's nodes have cost so far, by the autoscaler.", "cost.so_far"),
    "adaptdl_job_cost_forecast": ("What they will have cost at its end, by the autoscaler.", "cost.forecast"),
}

_LABELLED: dict[str, tuple[str, tuple[str, ...]]] = {
    "adaptdl_job_straggler_ratio": (
        "Busy time per step of a replica that the others wait for, over theirs.",
        ("job_name", "rank", "host", "part"),
    ),
    "adaptdl_job_reported": ("Number that the script last reported under this name.", ("job_name", "name")),
}

_CLUSTER: dict[str, tuple[str, tuple[str, ...]]] = {
    "adaptdl_leader": ("Whether this coordinator decides.", ()),
    "adaptdl_nodes": ("Registered nodes.", ()),
    "adaptdl_nodes_draining": ("Nodes that are being drained.", ()),
    "adaptdl_slots": ("Slots of all registered nodes.", ()),
    "adaptdl_slots_used": ("Slots that replicas hold.", ()),
    "adaptdl_queue": ("Jobs that wait for replicas.", ()),
    "adaptdl_jobs": ("Jobs by state.", ("state",)),
    "adaptdl_unfinished_jobs": ("Jobs that have not ended.", ()),
    "adaptdl_failed_jobs_total": ("How often jobs of this cluster have failed.", ()),
    "adaptdl_hourly_cost": ("What the nodes cost an hour, by the autoscaler.", ()),
    "adaptdl_cost_total": ("What the nodes have cost so far, by the autoscaler.", ()),
    "adaptdl_node_slots": ("Slots of a node.", ("node",)),
    "adaptdl_node_slots_used": ("Slots of a node that replicas hold.", ("node",)),
    "adaptdl_node_cpu_utilization_ratio": ("Busy fraction of a node's processors.", ("node",)),
    "adaptdl_node_memory_used_bytes": ("Memory of a node that is in use.", ("node",)),
    "adaptdl_node_memory_size_bytes": ("Memory of a node.", ("node",)),
    "adaptdl_node_gpu_utilization_ratio": ("Fraction of the time in which a kernel ran.", ("node", "gpu")),
    "adaptdl_node_gpu_memory_used_bytes": ("Memory of a GPU that is in use.", ("node", "gpu")),
    "adaptdl_node_gpu_memory_size_bytes": ("Memory of a GPU.", ("node", "gpu")),
}

JOB_METRICS = (*_OF_ROWS, *_LABELLED)
"""Names of the metrics that have the label `job_name`. (Prometheus uses `job` for the scraped service.)"""

CLUSTER_METRICS = tuple(_CLUSTER)
"""Names of the metrics of the cluster and of its nodes that are made from the view."""

_Sample = tuple[tuple[str, ...], float]


class CoordinatorMetrics(Collector):
    """Collects metrics as an observer of a coordinator."""

    def __init__(self, registry: CollectorRegistry, version: str = "") -> None:
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
        build = Gauge("adaptdl_build_info", "Versions, as labels.", ["version", "python"], registry=registry)
        build.labels(version, platform.python_version()).set(1)
        self._answered = 0  # number of the last round of the policy that was counted
        self.read_submitted: Callable[[], Submitted] | None = None  # None: it is not known what was submitted
        self.port = 0  # port on which the metrics are served
        self.close: Callable[[], None] = lambda: None
        registry.register(self)

    def leading(self, leads: bool) -> None:
        """Take note of whether this process leads."""
        self._leads = leads
        self._answered = 0  # a new leader numbers its rounds from the beginning

    def follows(self, view: View) -> None:
        """Take note of the cluster while another process leads, or none."""
        self._view = view

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
        """Yield the metrics for the last view."""
        view = self._view
        yield _family("adaptdl_leader", *_CLUSTER["adaptdl_leader"], [((), float(self._leads))])
        if view is None:
            return
        rows = job_rows(view, self._submitted(view))
        states = [row["state"] for row in rows.values()]
        unfinished = sum(state not in ENDED_STATES for state in states)
        yield _family("adaptdl_unfinished_jobs", *_CLUSTER["adaptdl_unfinished_jobs"], [((), unfinished)])
        if not self._leads:
            return
        live = {name: job for name, job in sorted(view.jobs.items()) if job.spec and job.status_now}
        live = {name: job for name, job in live.items() if not job.over}
        samples = {**_of_cluster(view, states), **_of_nodes(view), **_of_reports(live)}
        for name, (text, labels) in (_CLUSTER | _LABELLED).items():
            if name in samples:
                yield _family(name, text, labels, samples[name])
        for name, (text, key) in _OF_ROWS.items():
            values = [(job, _value(rows[job], key)) for job in live]
            known: list[_Sample] = [((job,), float(value)) for job, value in values if value is not None]
            yield _family(name, text, ("job_name",), known)

    def _submitted(self, view: View) -> Submitted | None:
        """Return the submissions; None if there are none, or if the store may not answer in time."""
        if not (self._leads and view.submitted and self.read_submitted):
            return None
        try:
            return self.read_submitted()
        except StoreError:
            return None


def _of_cluster(view: View, states: Sequence[str]) -> dict[str, list[_Sample]]:
    ledger = Ledger(view)
    draining = {
        node for agents in view.nodes.values() for node, seen in agents.items() if view.draining(seen.record)
    }
    found: dict[str, list[_Sample]] = {
        "adaptdl_nodes": [((), len(ledger.capacity))],
        "adaptdl_nodes_draining": [((), len(draining))],
        "adaptdl_slots": [((), sum(ledger.capacity.values()))],
        "adaptdl_slots_used": [((), ledger.used)],
        "adaptdl_queue": [((), sum(state in WAITING_STATES for state in states))],
        "adaptdl_jobs": [((state,), states.count(state)) for state in STATES],
        "adaptdl_failed_jobs_total": [((), failed_jobs(view))],
    }
    if view.autoscaler is not None:
        found["adaptdl_cost_total"] = [((), view.autoscaler.record.cost_so_far)]
        if view.bill_age <= BILL_SECONDS:
            found["adaptdl_hourly_cost"] = [((), view.autoscaler.record.hourly_cost)]
    return found


def _of_nodes(view: View) -> dict[str, list[_Sample]]:
    ledger = Ledger(view)
    used = dict.fromkeys(ledger.capacity, 0)
    for job in view.jobs:
        for node, held in ledger.held(job).items():
            used[node] = used.get(node, 0) + held
    usage = {node: seen.record for node, seen in sorted(view.usage.items()) if node in ledger.capacity}
    gpus = [
        ((node, str(index)), gpu) for node, record in usage.items() for index, gpu in enumerate(record.gpus)
    ]
    return {
        "adaptdl_node_slots": [((node,), slots) for node, slots in sorted(ledger.capacity.items())],
        "adaptdl_node_slots_used": [((node,), held) for node, held in sorted(used.items())],
        "adaptdl_node_cpu_utilization_ratio": [((node,), record.cpu) for node, record in usage.items()],
        "adaptdl_node_memory_used_bytes": [((node,), record.memory_used) for node, record in usage.items()],
        "adaptdl_node_memory_size_bytes": [((node,), record.memory) for node, record in usage.items()],
        "adaptdl_node_gpu_utilization_ratio": [(labels, gpu.utilization) for labels, gpu in gpus],
        "adaptdl_node_gpu_memory_used_bytes": [(labels, gpu.memory_used) for labels, gpu in gpus],
        "adaptdl_node_gpu_memory_size_bytes": [(labels, gpu.memory) for labels, gpu in gpus],
    }


def _value(row: Row, key: str) -> float | None:
    """Return a value of a row, or of the row of its cost; None if it is not known."""
    whole, _, part = key.partition(".")
    value: Any = row[whole]
    found: float | None = value[part] if part and value is not None else value
    return found


def _of_reports(live: Mapping[str, JobView]) -> dict[str, list[_Sample]]:
    hints = {name: found for name, job in live.items() if (found := last_hints(job)) is not None}
    return {
        "adaptdl_job_straggler_ratio": [
            ((job, str(one.rank), one.host, one.part), one.ratio)
            for job, found in hints.items()
            for one in found.stragglers
        ],
        "adaptdl_job_reported": [
            ((job, name), value)
            for job, found in hints.items()
            for name, value in sorted(found.reported.items())
        ],
    }


def _family(name: str, text: str, labels: Sequence[str], samples: Iterable[_Sample]) -> Metric:
    """Return a metric: a counter if its name says so, else a gauge."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


class PortsTakenError(OSError):
    """Every port that metrics are served on by default is in use."""


class _OfCluster(CollectorRegistry):
    """A registry whose samples all have the name of their cluster as the label `adaptdl_cluster`."""

    def __init__(self, cluster: str) -> None:
        super().__init__()
        self._label = {"adaptdl_cluster": cluster}

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [one._replace(labels={**self._label, **one.labels}) for one in metric.samples]
            yield metric


def serve(host: str, port: int | None, version: str = "", cluster: str = "default") -> CoordinatorMetrics:
    """Serve the metrics of this process.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0: any free one; None: the first of `DEFAULT_PORTS` that is free.
        version: Version of adaptdl-elastic.
        cluster: Name of the cluster: one Prometheus may read several.

    Raises:
        PortsTakenError: none of the default ports is free.
        OSError: the address cannot be used.
    """
    registry = _OfCluster(cluster)
    server = _listen(host, port, registry)
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    metrics = CoordinatorMetrics(registry, version)
    ProcessCollector(registry=registry)
    metrics.port = server.server_port

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    metrics.close = close
    return metrics


def _listen(host: str, port: int | None, registry: CollectorRegistry) -> BoundedServer:
    """Return a server of the metrics. Strangers may open any number of connections to it."""
    handler = MetricsHandler.factory(registry)
    family = AF_INET6 if ":" in host else AF_INET
    server = type("MetricsServer", (BoundedServer,), {"address_family": family})
    for number in DEFAULT_PORTS if port is None else (port,):
        try:
            return cast(BoundedServer, server((host, number), handler))
        except OSError as error:
            if port is not None or error.errno != errno.EADDRINUSE:
                raise
    raise PortsTakenError(
        errno.EADDRINUSE, f"the ports {DEFAULT_PORTS[0]} to {DEFAULT_PORTS[-1]} are all in use"
    )
