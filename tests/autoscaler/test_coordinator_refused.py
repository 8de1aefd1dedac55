"""Coordinators whose store refuses them, on a real etcd with TLS and users."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from coordinator_pump import share_policy
from fake_agents import FakeAgent, spec_of, submit
from guarded_etcd import GuardedEtcd

from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
from adaptdl_elastic.autoscaler.coordinator.process import Coordinator, Observer
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobRequest, LeaderRecord, Plan, decode, encode
from adaptdl_elastic.rendezvous.store.base import Store, StoreAuthError
from adaptdl_elastic.rendezvous.store.connect import connect
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

KEYS = Keys()
NEXT_PASSWORD = "second-password"
PATIENCE = 120.0  # seconds, for what is only waited for when a test fails


class Office(Observer):
    """Whether a coordinator has given up its office since it led for the last time."""

    def __init__(self) -> None:
        self.given_up = threading.Event()

    def leading(self, leads: bool) -> None:
        (self.given_up.clear if leads else self.given_up.set)()


def coordinator(store: Store, identity: str, *observers: Observer) -> Coordinator:
    settings = CoordinatorSettings(interval=1.0, min_gap=0.0)
    return Coordinator(store, KEYS, settings, share_policy, identity=identity, observers=observers)


class World:
    """Coordinators with a password file each, and a store that is always let in."""

    def __init__(self, guarded: GuardedEtcd, folder: Path, stack: ExitStack) -> None:
        self.guarded, self.folder, self.stack = guarded, folder, stack
        self.offices: dict[str, Office] = {}
        self.store = stack.enter_context(connect(guarded.etcd.endpoint, options=guarded.admin_options()))

    def password(self, name: str) -> Path:
        return self.folder / f"password-of-{name}"

    def start(self, name: str) -> Coordinator:
        file = self.password(name)
        file.write_text(self.guarded.password_file.read_text())
        options = replace(self.guarded.options(), password_file=file)
        store = self.stack.enter_context(connect(self.guarded.etcd.endpoint, options=options))
        self.offices[name] = Office()
        served = coordinator(store, name, self.offices[name])
        thread = threading.Thread(target=served.run, daemon=True)
        thread.start()

        def stop() -> None:
            served.stop()
            thread.join(PATIENCE)
            assert not thread.is_alive()

        self.stack.callback(stop)
        return served

    def until(self, key: str, wanted: Callable[[str], bool]) -> None:
        """Wait until a key has a value that is wanted."""
        found = self.store.get(key)
        if found is not None and wanted(found.value):
            return
        with self.store.watch(key, found.mod_revision + 1 if found else 1) as watch:
            alarm = threading.Timer(PATIENCE, watch.close)
            alarm.start()
            try:
                assert any(change.value is not None and wanted(change.value) for change in watch), key
            finally:
                alarm.cancel()

    def led_by(self, name: str) -> None:
        self.until(KEYS.coordinator_leader, lambda text: decode(LeaderRecord, text).id == name)

    def resized(self, job: str, replicas: int) -> None:
        self.store.put(KEYS.job(job, "request"), encode(JobRequest(replicas=replicas)))
        self.until(KEYS.job(job, "plan"), lambda text: decode(Plan, text).replicas == replicas)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with GuardedEtcd(tmp_path / "etcd") as guarded, ExitStack() as stack:
        made = World(guarded, tmp_path, stack)
        submit(made.store, KEYS, spec_of("job"))
        agent = FakeAgent(made.store, KEYS, "n0", "job", 4, clock=time.time).register().follow()
        stack.callback(agent.stop)
        yield made


@pytest.mark.etcd
def test_a_leader_that_is_refused_leaves_its_office_to_one_that_is_not(world: World) -> None:
    first = world.start("first")
    world.led_by("first")
    world.resized("job", 2)
    second = world.start("second")
    assert second.stands_by.wait(PATIENCE)
    world.guarded.change_password(NEXT_PASSWORD)
    world.password("second").write_text(NEXT_PASSWORD)
    world.resized("job", 3)  # the first one cannot
    world.led_by("second")
    assert world.offices["first"].given_up.wait(PATIENCE)
    assert not first.leads.is_set()
    world.password("first").write_text(NEXT_PASSWORD)
    assert first.stands_by.wait(PATIENCE)
    second.stop()
    world.led_by("first")
    world.resized("job", 1)


@pytest.mark.etcd
def test_a_coordinator_goes_on_when_it_is_let_in_again(world: World) -> None:
    served = world.start("first")
    world.led_by("first")
    world.resized("job", 2)
    world.guarded.change_password(NEXT_PASSWORD)
    world.store.put(KEYS.job("job", "request"), encode(JobRequest(replicas=3)))  # needs a write
    with world.store.watch(KEYS.coordinator_leader, 1) as watch:  # until it has given its office up
        assert any(change.kind == "delete" for change in watch)
    assert world.offices["first"].given_up.wait(PATIENCE)
    assert not served.leads.is_set()
    world.password("first").write_text(NEXT_PASSWORD)
    world.until(KEYS.job("job", "plan"), lambda text: decode(Plan, text).replicas == 3)
    world.led_by("first")


class Closed(MemoryStore):
    """Refuses whoever wants a lease."""

    def lease(self, ttl: float):  # type: ignore[no-untyped-def]
        raise StoreAuthError("permission denied")


def test_a_coordinator_that_is_refused_from_the_beginning_says_so_and_ends() -> None:
    with pytest.raises(StoreAuthError, match="permission denied"):
        coordinator(Closed(), "first").run()
