"""An autoscaler on a store in memory: the test writes what agents and the coordinator would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fake_provider import FakeProvider
from typing_extensions import Self

from adaptdl_elastic.autoscaler.providers.base import Pool
from adaptdl_elastic.autoscaler.scaling.autoscaler_loop import Autoscaler, LoopOptions
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus
from adaptdl_elastic.rendezvous.schema.held import Held
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

POOL = Pool("workers", desired=0, maximum=4, hourly_price=1.0)
KEYS = Keys("test")


class Cluster:
    """An autoscaler on a store in memory; agents register and plans are written by the test."""

    def __init__(
        self, store: MemoryStore, *, provider: Any = None, options: LoopOptions | None = None
    ) -> None:
        self.now = 5000.0
        self.wrong = 0.0  # what somebody has set the clock by
        self.store = store
        self.provider = provider or FakeProvider({"workers": POOL}, lambda: self.now, boot_seconds=0)
        self.said: list[tuple[str, Mapping[str, Any]]] = []
        self.ruler = Autoscaler(
            store,
            KEYS,
            self.provider,
            ScalingSettings(),
            options,
            say=lambda event, fields: self.said.append((event, fields)),
            clock=lambda: self.now + self.wrong,
            steady=lambda: self.now,
        )

    def tick(self, seconds: float = 10.0) -> bool:
        self.now += seconds
        return self.ruler.tick()

    def ticks(self, number: int, seconds: float = 10.0) -> Self:
        for _ in range(number):
            self.tick(seconds)
        return self

    def submit(self, job: str = "train", nodes: int = 1) -> Self:
        spec = records.JobSpec(
            job, "run", min_nodes=nodes, max_nodes=4, min_replicas=nodes, max_replicas=4, created=self.now
        )
        self.store.put(KEYS.job(job, "spec"), records.encode(spec))
        return self

    def ask(self, job: str = "train", **request: Any) -> Self:
        self.store.put(KEYS.job(job, "request"), records.encode(records.JobRequest(**request)))
        return self

    def placed(self) -> list[str]:
        """Register every instance as a node, and let the job run on all of them; return the nodes."""
        nodes = [self.register(name) for name in self.instances]
        self.plan(*nodes)
        return nodes

    def finish(self, job: str = "train", state: records.JobState = records.JobState.DONE) -> None:
        status = records.JobStatus(job, "run", state)
        self.store.put(KEYS.job(job, "status"), records.encode(status))

    def register(self, instance: str, job: str = "train", **more: Any) -> str:
        node = f"node-{instance}"
        record = records.NodeRecord(
            node, job, "run", f"a-{instance}", "127.0.0.1", 1, instance=instance, **more
        )
        self.store.put(KEYS.node(node, job), records.encode(record))
        return node

    def plan(self, *nodes: str, job: str = "train", generation: int = 0) -> None:
        plan = records.Plan(
            job,
            "run",
            generation,
            tuple(records.Placement(node, 1, f"a-{node.removeprefix('node-')}") for node in nodes),
            records.Cause.START,
            records.Transition.RESTART,
            "test",
        )
        self.store.put(KEYS.job(job, "plan"), records.encode(plan))

    def end(self, node: str, generation: int, job: str = "train") -> None:
        held = Held(node, f"a-{node.removeprefix('node-')}", acted=generation)
        self.store.put(KEYS.held(job, node), records.encode(held))
        self.store.put(KEYS.left(job, node), records.encode(held.left))

    def status(self) -> AutoscalerStatus:
        item = self.store.get(KEYS.autoscaler_status)
        assert item is not None
        return records.decode(AutoscalerStatus, item.value)

    @property
    def instances(self) -> list[str]:
        return [i.id for i in self.provider.capacity().instances]

    def events(self, name: str) -> list[Mapping[str, Any]]:
        return [fields for event, fields in self.said if event == name]
