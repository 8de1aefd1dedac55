"""What happens in `make ec2-demo`, as it is told, drawn and billed; and what is seen of it in the store."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaptdl_elastic import sched_hints
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus
from adaptdl_elastic.rendezvous.schema.held import Held
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.base import Store

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / ".ec2-demo"  # `make demo` removes .demo
GROUP, TYPE, ZONE, JOB = "workers", "p4d.24xlarge", "eu-central-1a", "images"
ON_DEMAND, CHEAP, DEAR = 32.77, 0.6, 32.0  # dollars per hour; the spot price moves between the last two
HOUR_VALUE, BUDGET = 8.0, 40.0  # dollars: what an hour of the job's time is worth, and the most per hour
NOTICE = 120.0  # seconds, as AWS gives
KEYS = Keys("default")


@dataclass
class Sample:
    """One moment of the run."""

    time: float
    instances: int
    nodes: int
    replicas: int
    price: float
    hourly: float
    goodput: float | None


@dataclass
class Line:
    """One instance's line in the bill, kept by this program: the autoscaler's own is held against it."""

    began: float
    seconds: float = 0.0
    cost: float = 0.0
    ended: float | None = None
    why: str = ""


@dataclass
class Story:
    """What happened, for the table and the picture."""

    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    bill: dict[str, Line] = field(default_factory=dict)
    shortcomings: list[str] = field(default_factory=list)

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    def mark(self, text: str) -> None:
        self.marks.append((self.now, text))
        print(f"{self.now:6.1f} s  {text}", flush=True)

    def check(self, fine: bool, text: str) -> None:
        if not fine:
            self.shortcomings.append(text)

    def say(self, event: str, fields: Mapping[str, Any]) -> None:
        """Print one of the autoscaler's events."""
        if event == "release" and fields["instance"] in self.bill:
            self.bill[fields["instance"]].why = fields["reason"]
        what = fields.get("message") or ", ".join(
            f"{text} {fields[name]}" for name, text in _TOLD.items() if fields.get(name) not in (None, "")
        )
        print(f"{self.now:6.1f} s    autoscaler: {event}: {what}", flush=True)


# fields of the autoscaler's events, and what is printed before their values
_TOLD = {
    "pool": "pool",
    "desired": "desired",
    "instance": "instance",
    "node": "node",
    "job": "job",
    "replicas": "replicas",
    "job_hourly_cost": "$ an hour",
    "cost_so_far": "$ so far",
    "reason": "reason",
}


class Watcher:
    """Reads what the store says, as `adaptdl status` would."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._replicas = 0

    def _get(self, kind: type[Any], *parts: str) -> Any:
        item = self._store.get(KEYS.job(JOB, *parts))
        return None if item is None else records.decode(kind, item.value, item.key)

    def state(self) -> records.JobState | None:
        status = self._get(records.JobStatus, "status")
        return None if status is None else records.JobState(status.state)

    def plan(self) -> records.Plan | None:
        found: records.Plan | None = self._get(records.Plan, "plan")
        return None if found is None or found.claim else found

    def begun(self, plan: records.Plan) -> float | None:
        """When the last node of a plan took its first step; None: not all have."""
        steps = self._first_steps(plan.generation)
        return max(steps) if plan.nodes and len(steps) >= plan.nodes else None

    def stepped(self, generation: int) -> float | None:
        """When the first step of `generation`, or of one after it, was finished."""
        now = self.plan()
        for one in range(generation, -1 if now is None else now.generation + 1):
            if steps := self._first_steps(one):
                return min(steps)
        return None

    def _first_steps(self, generation: int) -> list[float]:
        items = self._store.range(KEYS.reports(JOB)).items
        nodes = [records.decode(Held, item.value, item.key) for item in items]
        found = [node.first_step for node in nodes if node.runs == generation]
        found += [end.first_step for node in nodes if (end := node.end_of(generation)) is not None]
        return [step for step in found if step is not None]

    def replicas(self) -> int:
        """How many train. While a change in place is under way, those before it do."""
        plan = self.plan()
        if plan is None:
            self._replicas = 0
        elif self.begun(plan) is not None:
            self._replicas = plan.replicas
        elif plan.transition is not records.Transition.INPLACE:
            self._replicas = 0
        return self._replicas

    def at_work(self, replicas: int) -> bool:
        plan = self.plan()
        return plan is not None and plan.replicas == replicas and self.begun(plan) is not None

    def uses(self, node: str) -> bool:
        """Whether the plan in force has replicas on it."""
        plan = self.plan()
        return plan is not None and len(plan.ranks(node)) > 0

    def nodes(self) -> dict[str, records.NodeRecord]:
        """By instance."""
        found = (
            records.decode(records.NodeRecord, i.value, i.key) for i in self._store.range(KEYS.nodes).items
        )
        return {record.instance: record for record in found if record.instance}

    def goodput(self) -> float | None:
        item = self._store.get(KEYS.job(JOB, "hints"))
        return None if item is None else sched_hints.decode(item.value).goodput

    def bill(self) -> AutoscalerStatus | None:
        item = self._store.get(KEYS.autoscaler_status)
        return None if item is None else records.decode(AutoscalerStatus, item.value, item.key)
