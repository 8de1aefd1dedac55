"""A provider in memory, for the simulator, for tests, and for tests of other packages.

The time comes from `clock`, and nothing happens between two calls: `capacity` first brings everything up to
date. Instances start `boot_seconds` after they were ordered, unless the pool has an outage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from adaptdl_elastic.autoscaler.providers.base import (
    Capacity,
    Instance,
    InstanceState,
    Pool,
    Provider,
    ProviderError,
    Signal,
    SignalKind,
    UnknownInstanceError,
)


@dataclass
class FakeProvider(Provider):
    """Pools that give what is asked for, with configurable delays and failures.

    Settings that may be changed at any time: `boot_seconds`; `outage` (pool → the cloud's message while it
    has no capacity); `dead_on_arrival` (pools whose instances vanish when they start); `errors` (method →
    exceptions to raise, each once).
    """

    pools: Mapping[str, Pool]
    clock: Callable[[], float]
    boot_seconds: float = 60.0
    hooks: bool = False  # leaving instances wait until `let_go`
    outage: dict[str, str] = field(default_factory=dict)
    dead_on_arrival: set[str] = field(default_factory=set)
    boots: dict[str, float] = field(default_factory=dict)  # pool → seconds, if others than `boot_seconds`
    # pool → instances that the cloud has of it
    most: dict[str, int] = field(default_factory=dict)
    # pool → price of new instances, if it differs from the announced one
    true_price: dict[str, float] = field(default_factory=dict)
    errors: dict[str, list[ProviderError]] = field(default_factory=dict)
    name: str = "fake"
    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._pools: dict[str, Pool] = dict(self.pools)
        self.instances: dict[str, Instance] = {}  # by id
        self._signals: list[Signal] = []
        self._known: set[str] = set()
        self._trouble: dict[str, float] = {}
        self.launched = 0  # number of instances ever launched
        self.calls: list[tuple[str, str]] = []  # changes, in order
        self.ruled = False

    def capacity(self) -> Capacity:
        """Bring everything up to date; return instances and pools."""
        self._raise("capacity")
        self.advance()
        pools = tuple(self._described(pool) for pool in self._pools.values())
        return Capacity(pools, tuple(self.instances.values()), settings=self.settings)

    def request(self, pool: str, desired: int) -> None:
        """Set the desired number, within the bounds."""
        self._raise("request")
        known = Capacity(tuple(self._pools.values())).pool(pool)
        if not known.minimum <= desired <= known.maximum:
            raise ProviderError(f"{pool}: {desired} is outside [{known.minimum}, {known.maximum}]")
        there = sum(i.state is not InstanceState.LEAVING for i in self.instances.values() if i.pool == pool)
        self.calls.append(("request", f"{pool}={desired}"))
        self._trouble.pop(pool, None)
        self._pools[pool] = replace(known, desired=max(desired, min(there, known.desired)))
        self.advance()

    def release(self, instance: str, replace: bool = False) -> None:
        """Remove the instance now, or let it wait if there are hooks."""
        self._raise("release")
        if instance not in self._known:
            raise UnknownInstanceError(f"{instance!r} is none of this provider's instances")
        found = self.instances.get(instance)
        if found is None or found.state is InstanceState.LEAVING:
            return
        pool = self._pools[found.pool]
        if not replace and pool.desired <= pool.minimum:
            raise ProviderError(f"{pool.name}: has its minimum of {pool.minimum}")
        self.calls.append(("replace" if replace else "release", instance))
        if not replace:
            self._pools[pool.name] = _with_desired(pool, pool.desired - 1)
        self._leave(found)

    def protect(self, instances: Collection[str], protected: bool) -> None:
        """Record the protection. It has no effect, since these pools never shrink by themselves."""
        self._raise("protect")
        for identifier in instances:
            if identifier in self.instances:
                self.instances[identifier] = replace(self.instances[identifier], protected=protected)

    def signals(self) -> tuple[Signal, ...]:
        """Return what `interrupt`, `recommend` and `vanish` announced."""
        self._raise("signals")
        told, self._signals = tuple(self._signals), []
        return told

    def hold(self, instance: str) -> None:
        """Record a heartbeat in `calls`."""
        self.calls.append(("hold", instance))

    def let_go(self, instance: str) -> None:
        """Remove a waiting instance."""
        self.calls.append(("let_go", instance))
        self.instances.pop(instance, None)

    def take_over(self) -> None:
        """Record the control in `ruled`."""
        self.ruled = True

    def hand_back(self) -> None:
        """Record the end of control in `ruled`."""
        self.ruled = False

    # Events for tests and simulations

    def reprice(self, pool: str, price: float) -> None:
        """Change a pool's price, also for its present instances, as spot prices do."""
        self._pools[pool] = _with_price(self._pools[pool], price)
        for name, instance in self.instances.items():
            if instance.pool == pool:
                self.instances[name] = replace(instance, hourly_price=price)

    def set_desired(self, pool: str, desired: int) -> None:
        """Change a pool's desired number, as a person may in a cloud's console."""
        self._pools[pool] = _with_desired(self._pools[pool], desired)

    def interrupt(self, instance: str, notice_seconds: float = 120.0) -> None:
        """Announce the end of a spot instance; `vanish` ends it."""
        self._signals.append(
            Signal(SignalKind.INTERRUPTION, instance, "spot interruption", self.clock() + notice_seconds)
        )

    def recommend(self, instance: str, told: bool = True) -> None:
        """Announce a rebalance recommendation; a pool that replaces early orders one more instance.

        Args:
            instance: The instance at risk.
            told: Whether `signals` has it; False: the announcement is lost.
        """
        if told:
            self._signals.append(Signal(SignalKind.REBALANCE, instance, "rebalance recommendation"))
        found = self.instances[instance]
        if self._pools[found.pool].replaces_at_risk:
            self._launch(self._pools[found.pool])

    def vanish(self, instance: str) -> None:
        """Remove the instance at once, without a notice."""
        self.instances.pop(instance, None)
        self._signals.append(Signal(SignalKind.GONE, instance, "terminated"))

    def advance(self) -> None:
        """Start, boot and end what is due by now."""
        now = self.clock()
        for instance in list(self.instances.values()):
            if instance.state is InstanceState.PENDING and now >= instance.launched + self.boots.get(
                instance.pool, self.boot_seconds
            ):
                if instance.pool in self.dead_on_arrival:
                    self.instances.pop(instance.id)
                else:
                    self.instances[instance.id] = replace(instance, state=InstanceState.RUNNING)
        for pool in self._pools.values():
            there = sum(
                i.pool == pool.name and i.state is not InstanceState.LEAVING for i in self.instances.values()
            )
            if pool.name in self.outage and there < pool.desired:
                self._trouble.setdefault(pool.name, now)
                continue
            limit = self.most.get(pool.name, pool.desired)
            for _ in range(min(pool.desired, limit) - there):
                self._launch(pool)
            if limit < pool.desired:
                self._trouble.setdefault(pool.name, now)
            else:
                self._trouble.pop(pool.name, None)

    def _launch(self, pool: Pool) -> None:
        self.launched += 1
        identifier = f"{pool.name}-{self.launched}"
        self._known.add(identifier)
        self.instances[identifier] = Instance(
            identifier,
            pool.name,
            InstanceState.PENDING,
            slots=pool.slots,
            preemptible=pool.preemptible,
            instance_type=pool.instance_type,
            hourly_price=self.true_price.get(pool.name, pool.hourly_price),
            launched=self.clock(),
        )

    def _leave(self, instance: Instance) -> None:
        if self.hooks:
            self.instances[instance.id] = replace(instance, state=InstanceState.LEAVING, held=True)
        else:
            self.instances.pop(instance.id)

    def _described(self, pool: Pool) -> Pool:
        if pool.name not in self._trouble:
            return pool
        why, since = self.outage.get(pool.name, "no capacity"), self._trouble[pool.name]
        return replace(pool, trouble=why, trouble_since=since)

    def _raise(self, method: str) -> None:
        if self.errors.get(method):
            raise self.errors[method].pop(0)


def _with_desired(pool: Pool, desired: int) -> Pool:
    return replace(pool, desired=desired)


def _with_price(pool: Pool, price: float) -> Pool:
    return replace(pool, hourly_price=price)
