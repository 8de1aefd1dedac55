"""Who rules, what a successor knows, and what must not end the autoscaler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_provider import FakeProvider
from scaling_cluster import KEYS, POOL, Cluster
from scaling_world import World

from adaptdl_elastic.autoscaler.providers.base import (
    Capacity,
    InstanceState,
    NoPermissionError,
    NotOursError,
    Pool,
    ProviderError,
    UnknownPoolError,
)
from adaptdl_elastic.autoscaler.scaling.autoscaler_loop import LoopOptions
from adaptdl_elastic.autoscaler.scaling.observed_history import shifted
from adaptdl_elastic.autoscaler.scaling.scaling_types import InVain, Known, Memory, PoolMemory, Release
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus
from adaptdl_elastic.rendezvous.store.base import Lease
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

OTHER = records.encode(records.LeaderRecord("other", "box", 42))


class Recording(FakeProvider):
    """Says who takes over and hands back, in `calls`."""

    def take_over(self) -> None:
        self.calls.append(("take_over", ""))

    def hand_back(self) -> None:
        self.calls.append(("hand_back", ""))

    @property
    def rule(self) -> list[str]:
        return [name for name, _ in self.calls if name in ("take_over", "hand_back")]


def ruling(store: MemoryStore) -> Cluster:
    """An autoscaler that rules."""
    cluster = Cluster(store, provider=Recording({"workers": POOL}, lambda: 0.0, boot_seconds=0))
    assert not cluster.ruler.attempt(first=True)
    return cluster


def lease_of(cluster: Cluster) -> Lease:
    lease = cluster.ruler.lease
    assert lease is not None
    return lease


def lose_lease(cluster: Cluster) -> None:
    lease = lease_of(cluster)
    lease.revoke()
    lease.lost.set()


# -- what must not end it


@pytest.mark.parametrize(
    "error", [NoPermissionError("ExpiredToken"), ProviderError("throttled"), ZeroDivisionError("defect")]
)
def test_a_later_error_is_reported_and_tried_again(store: MemoryStore, error: Any) -> None:
    cluster = ruling(store)
    cluster.submit()
    cluster.provider.errors["capacity"] = [error]
    assert not cluster.ruler.attempt(first=False)
    assert str(error) in cluster.events("warning")[-1]["message"]
    cluster.now += 60
    assert not cluster.ruler.attempt(first=False)
    assert len(cluster.instances) == 1


@pytest.mark.parametrize(
    "error", [NoPermissionError("denied"), ProviderError("no price"), UnknownPoolError("no group")]
)
def test_an_error_at_the_first_look_ends_the_autoscaler(store: MemoryStore, error: ProviderError) -> None:
    cluster = Cluster(store, provider=Recording({"workers": POOL}, lambda: 0.0))
    cluster.provider.errors["capacity"] = [error]
    with pytest.raises(type(error)):
        cluster.ruler.run()
    assert cluster.provider.rule == ["take_over", "hand_back"]
    assert store.get(KEYS.autoscaler_leader) is None


@pytest.mark.parametrize("error", [UnknownPoolError("no group is left"), NotOursError("of cluster two")])
def test_when_there_is_nothing_left_to_rule_it_ends(store: MemoryStore, error: ProviderError) -> None:
    cluster = ruling(store)
    cluster.provider.errors["capacity"] = [error]
    with pytest.raises(type(error)):
        cluster.ruler.attempt(first=False)


@pytest.mark.parametrize(("interval", "said"), [(10.0, False), (11.0, True)])
def test_hooks_that_wait_shorter_than_it_looks_away_are_said(
    store: MemoryStore, interval: float, said: bool
) -> None:
    pool = replace(POOL, hook_timeout=30.0)
    provider = FakeProvider({"workers": pool}, lambda: 0.0, boot_seconds=0)
    cluster = Cluster(store, provider=provider, options=LoopOptions(interval=interval))
    cluster.ruler.attempt(first=True)
    told = [event["message"] for event in cluster.events("warning")]
    assert any("workers: a termination hook waits 30 s" in text for text in told) == said
    assert all("--interval 10" in text for text in told)


def test_a_dry_run_reads_no_queue(store: MemoryStore) -> None:
    """What is read from it is gone, and another autoscaler waits for it."""
    cluster = Cluster(store, options=LoopOptions(dry_run=True)).submit()
    cluster.provider.interrupt("workers-1")
    assert cluster.ruler.run() == 0
    assert len(cluster.provider.signals()) == 1


# -- one at a time


def test_an_autoscaler_that_lost_its_lease_hands_nothing_back(store: MemoryStore) -> None:
    cluster = ruling(store)
    lose_lease(cluster)
    store.put(KEYS.autoscaler_leader, OTHER)
    cluster.ruler.stop()
    assert not cluster.ruler.attempt(first=False)
    cluster.ruler.hand_back()
    assert cluster.provider.rule == ["take_over"]


def test_an_autoscaler_that_leads_again_knows_the_acts_of_the_other(store: MemoryStore) -> None:
    cluster = ruling(store)
    lose_lease(cluster)
    other = Cluster(store, provider=cluster.provider)
    other.now += 100.0
    other.submit()
    for _ in range(2):
        other.tick()
    assert len(other.ruler.memory.known) == 1
    cluster.now = other.now
    assert not cluster.ruler.attempt(first=False)
    assert cluster.provider.rule == ["take_over", "take_over"]
    assert cluster.ruler.memory.known.keys() == other.ruler.memory.known.keys()
    cluster.ruler.hand_back()
    assert cluster.provider.rule[-1] == "hand_back"


def test_no_node_is_bought_while_another_autoscaler_may_lead(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a SIGSTOP that outlasted the lease: nobody has told us yet that it is lost."""
    cluster = ruling(store)
    cluster.submit()
    monkeypatch.setattr(lease_of(cluster), "remaining", lambda: 0.0)
    assert not cluster.ruler.attempt(first=False)
    assert cluster.instances == []
    assert "not certain" in cluster.events("warning")[-1]["message"]


def test_an_autoscaler_stopped_in_mid_look_does_not_act_further(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = ruling(store)
    cluster.submit()
    before = cluster.status()
    left = iter([15.0])  # until it looks
    monkeypatch.setattr(lease_of(cluster), "remaining", lambda: next(left, 0.0))
    events = len(list(store.range(KEYS.events).items))
    assert not cluster.ruler.attempt(first=False)
    assert cluster.instances == []
    assert cluster.events("request") == []
    assert "not certain" in cluster.events("warning")[-1]["message"]
    assert cluster.status() == before
    assert len(list(store.range(KEYS.events).items)) == events


def test_a_deposed_autoscaler_does_not_overwrite_the_status_of_its_successor(store: MemoryStore) -> None:
    cluster = ruling(store)
    cluster.submit()
    theirs = AutoscalerStatus("successor", 9, 9, 9.0, 99.0)
    look = cluster.provider.capacity

    def hangs() -> Capacity:
        store.put(KEYS.autoscaler_status, records.encode(theirs))
        cluster.provider.capacity = look
        return look()

    cluster.provider.capacity = hangs
    cluster.now += 10
    assert not cluster.ruler.attempt(first=False)
    assert cluster.status() == theirs
    assert "somebody else has written" in cluster.events("warning")[-1]["message"]
    assert not cluster.ruler.attempt(first=False)
    assert cluster.provider.rule == ["take_over", "take_over"]
    assert cluster.status().provider == "fake"


def test_a_takeover_that_failed_is_made_good(store: MemoryStore) -> None:
    cluster = ruling(store)
    lose_lease(cluster)
    take_over: Callable[[], None] = cluster.provider.take_over
    fails = [ProviderError("throttled")]

    def once() -> None:
        if fails:
            raise fails.pop()
        take_over()

    cluster.provider.take_over = once
    cluster.ruler.attempt(first=False)
    assert cluster.provider.rule == ["take_over"]
    cluster.ruler.attempt(first=False)
    assert cluster.provider.rule == ["take_over", "take_over"]


def test_a_successor_deletes_the_drain_requests_of_the_dead(store: MemoryStore) -> None:
    first = Cluster(store)
    first.submit()
    first.tick()
    (victim,) = first.instances
    node = first.register(victim)
    first.plan(node)
    first.provider.interrupt(victim, 120)
    first.tick(1)
    theirs = KEYS.drain("by-hand")
    store.put(theirs, records.encode(records.DrainRequest("by-hand", "a person's", created=0.0)))
    assert store.get(KEYS.drain(node)) is not None
    first.provider.vanish(victim)  # and with it the agent, and the autoscaler
    store.delete(KEYS.node(node, "train"))
    second = Cluster(store, provider=first.provider)
    second.now = first.now
    second.ruler.memory = second.ruler.recall()
    second.tick()
    assert store.get(KEYS.drain(node)) is None
    assert store.get(theirs) is not None


def test_until_done_ends_with_the_least_nodes_of_the_pools(store: MemoryStore) -> None:
    pool = Pool("workers", desired=1, minimum=1, maximum=4, hourly_price=1.0)
    provider = FakeProvider({"workers": pool}, lambda: 0.0, boot_seconds=0)
    cluster = Cluster(store, provider=provider, options=LoopOptions(until_done=True)).submit(nodes=3).ticks(1)
    cluster.tick(60)
    assert len(cluster.instances) == 3
    cluster.finish()
    assert not cluster.tick()
    assert any(cluster.tick() for _ in range(30))
    assert len(cluster.instances) == 1


# -- a clock that is set


def test_a_clock_that_is_set_back_stops_nothing(store: MemoryStore) -> None:
    cluster = ruling(store)
    cluster.submit(nodes=1).tick()
    cluster.wrong = -3600.0
    cluster.submit(nodes=3).tick(30)
    assert len(cluster.instances) == 3
    assert "the clock was set by -3600 s" in cluster.events("warning")[-1]["message"]


def test_a_clock_that_leaps_makes_no_duds_and_no_bill(store: MemoryStore) -> None:
    cluster = ruling(store)
    cluster.submit(nodes=2).tick()
    before = cluster.instances
    cluster.wrong = 86400.0
    cluster.tick(36)
    assert cluster.instances == before
    assert cluster.events("release") == []
    assert cluster.status().cost_so_far == pytest.approx(2 * 36 / 3600)


def test_a_successor_whose_clock_is_behind_waits_no_longer() -> None:
    world = World(Pool("demand", desired=0, maximum=10, hourly_price=1.0)).want(1).run(120)
    world.now -= 3600
    world.want(3).run(60)
    assert world.desired == {"demand": 3}


def test_everything_that_we_have_dated_moves_with_the_clock() -> None:
    known = {
        "i": Known(
            "p", False, 10.0, registered=20.0, absent=25.0, leaving_since=30.0, deadline=40.0, held=50.0,
            exchange_since=35.0, idle_since=36.0,
        )
    }  # fmt: skip
    pools = {"p": PoolMemory(until=60.0, trouble_seen=70.0, judged=5.0, turned=6.0, highest_seen=15.0)}
    memory = Memory(
        known, pools, updated=80.0, changed=90.0, exchanged=91.0, low_since=95.0, broke_until=99.0,
        vain={"train": InVain(1, 98.0)},
    )  # fmt: skip
    later = shifted(memory, 1000.0)
    assert shifted(later, -1000.0) == memory
    assert later.known["i"] == replace(
        known["i"], first_seen=1010.0, registered=1020.0, absent=1025.0, leaving_since=1030.0, held=1050.0,
        exchange_since=1035.0, idle_since=1036.0,
    )  # fmt: skip
    assert later.pools["p"] == replace(
        pools["p"], until=1060.0, judged=1005.0, turned=1006.0, highest_seen=1015.0
    )
    assert (later.updated, later.changed, later.low_since, later.broke_until) == (1080, 1090, 1095, 1099)
    assert later.vain == {"train": InVain(1, 1098.0)}
    assert later.exchanged == 1091
    assert shifted(Memory(), 5.0).updated is None


# -- out of service, and back


def test_an_instance_that_comes_back_from_standby_stays(store: MemoryStore) -> None:
    cluster = ruling(store)
    cluster.submit().tick()
    (instance,), (node,) = cluster.instances, cluster.placed()
    cluster.tick()

    def state(value: InstanceState) -> None:
        found = cluster.provider.instances[instance]
        cluster.provider.instances[instance] = replace(found, state=value)
        cluster.provider.set_desired("workers", int(value is InstanceState.RUNNING))

    state(InstanceState.LEAVING)  # a person puts it on Standby, with one less desired
    cluster.provider.advance()
    cluster.tick(1)
    assert store.get(KEYS.drain(node)) is not None
    state(InstanceState.RUNNING)
    cluster.ticks(3)
    assert store.get(KEYS.drain(node)) is None
    assert instance in cluster.instances
    assert not [event for event in cluster.events("release") if event["instance"] == instance]
    assert Release not in {type(action) for action in cluster.ruler.acted}
