"""A small world for the autoscaler's decision: a fake provider, a clock, and nodes that come to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from fake_provider import FakeProvider
from typing_extensions import Self

from adaptdl_elastic.autoscaler.policy.policy_types import GoodputModel, JobInfo
from adaptdl_elastic.autoscaler.providers.base import Capacity, InstanceState, Pool
from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings
from adaptdl_elastic.autoscaler.scaling.scaling_types import (
    Drain,
    Hold,
    LetGo,
    Memory,
    NodeUse,
    Observation,
    Protect,
    Release,
    Request,
    Step,
)
from adaptdl_elastic.autoscaler.scaling.step import step
from adaptdl_elastic.goodput import GradParams, PerfParams

MODEL = GoodputModel(
    PerfParams(0.05, 0.005, 0.02, 0.001, 0.01, 0.0005, 1.5),
    GradParams(0.001, 0.02),
    init_batch_size=128,
    max_batch_size=4096,
    local_bsz_bounds=(32, 512),
    accumulation=True,
)


def job(name: str = "train", **more: object) -> JobInfo:
    facts: dict[str, object] = {
        "max_replicas": 64,
        "model": MODEL,
        "max_profiled_replicas": 64,
        "remaining": 1e6,
    }
    return JobInfo(name, **{**facts, **more})  # type: ignore[arg-type]


def waiting(name: str = "train", replicas: int = 1) -> JobInfo:
    """A job that says exactly how many replicas it wants."""
    return JobInfo(name, max_replicas=replicas, requested_replicas=replicas)


T = TypeVar("T")


class World:
    """Ticks of one autoscaler. `broken`: instances never become nodes. Replicas spread over all nodes.

    `adjust` changes what is seen of the nodes.
    """

    def __init__(
        self, *pools: Pool, settings: ScalingSettings | None = None, boot: float = 60.0, hooks: bool = False
    ) -> None:
        self.now = 1000.0
        self.provider = FakeProvider({p.name: p for p in pools}, lambda: self.now, boot, hooks)
        self.settings = settings or ScalingSettings()
        self.memory = Memory()
        self.jobs: tuple[JobInfo, ...] = ()
        self.unsettled: frozenset[str] = frozenset()
        self.others = 0  # nodes of one slot that are not the provider's
        self.runs: dict[str, str] = {}
        self.broken = False
        self.hidden: set[str] = set()  # instances whose registration is away
        self.stuck: set[str] = set()  # instances whose replicas do not leave
        self.draining: dict[str, float | None] = {}
        self.asked: set[str] = set()  # of these, by the autoscaler: their agents leave for good
        self.at_risk: set[str] = set()
        self.log: list[object] = []
        self.last: Step | None = None
        self.dearest = 0.0  # of all ticks
        self.adjust: Callable[[dict[str, NodeUse]], dict[str, NodeUse]] = lambda found: found

    def tick(self, seconds: float = 10.0) -> Step:
        self.now += seconds
        capacity = self.look()
        nodes = {} if self.broken else self.nodes_in_use()
        seen = Observation(
            self.now,
            capacity,
            nodes,
            self.jobs,
            self.provider.signals(),
            other_slots=self.others,
            other_nodes=self.others,
            runs=self.runs,
            unsettled=self.unsettled,
        )
        done = step(seen, self.memory, self.settings)
        self.memory = done.memory
        for action in done.actions:
            self._act(action)
        self.last = done
        self.dearest = max(self.dearest, done.hourly_cost)
        return done

    def look(self) -> Capacity:
        return self.provider.capacity()

    def run(self, seconds: float, every: float = 10.0) -> Self:
        for _ in range(round(seconds / every)):
            self.tick(every)
        return self

    def until(self, what: Callable[[], bool], seconds: float = 3600.0) -> Self:
        end = self.now + seconds
        while not what():
            assert self.now < end, self.last
            self.tick()
        return self

    def until_running(self, nodes: int, seconds: float = 3600.0) -> Self:
        return self.until(lambda: len(self.running) == nodes, seconds)

    def want(self, replicas: int) -> Self:
        """A job wants so many replicas, or none is there."""
        return self.of_jobs(*((waiting(replicas=replicas),) if replicas else ()))

    def of_jobs(self, *jobs: JobInfo) -> Self:
        self.jobs = jobs
        return self

    def grown(self, replicas: int) -> Self:
        """A job wants so many replicas, and has them on nodes of one slot."""
        return self.want(replicas).until_running(replicas)

    @property
    def running(self) -> list[str]:
        instances = self.provider.capacity().instances
        return [i.id for i in instances if i.state is InstanceState.RUNNING]

    @property
    def desired(self) -> dict[str, int]:
        return {pool.name: pool.desired for pool in self.provider.capacity().pools}

    def of(self, *kinds: type[T]) -> list[T]:
        return [action for action in self.log if isinstance(action, kinds)]

    def nodes_in_use(self) -> dict[str, NodeUse]:
        up: Iterable[str] = [
            i.id for i in self.provider.capacity().instances if i.state is not InstanceState.PENDING
        ]
        found = {}
        for name in set(up) - self.hidden:
            drains = name in self.draining
            busy = (not drains or name in self.stuck) and bool(self.jobs)
            replicas = {self.jobs[0].name: 1} if busy else {}
            risk = name in self.at_risk
            found[name] = NodeUse(f"node-{name}", replicas, drains, self.draining.get(name), risk)
        return self.adjust(found)

    def _act(self, action: object) -> None:
        self.log.append(action)
        match action:
            case Request(pool, desired, _):
                self.provider.request(pool, desired)
            case Drain(instance, _, _, deadline):
                self.draining[instance] = deadline
                self.asked.add(instance)
            case Release(instance, replace, _):
                self.provider.release(instance, replace)
            case Protect(instances):
                self.provider.protect(instances, True)
            case Hold(instance):
                self.provider.hold(instance)
            case LetGo(instance):
                self.provider.let_go(instance)
