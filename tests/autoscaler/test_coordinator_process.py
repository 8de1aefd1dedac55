"""The coordinator as a process against a real etcd: elections, takeovers, and stores that come and go."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from coordinator_pump import share_policy
from etcd_server import EtcdServer
from fake_agents import FakeAgent, spec_of, submit
from ports import free_port
from submitted_jobs import put_submission, submission_by

from adaptdl_elastic.agent.cluster.store_link import Registration
from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
from adaptdl_elastic.autoscaler.coordinator.policy_adapter import Policy
from adaptdl_elastic.autoscaler.coordinator.process import Coordinator
from adaptdl_elastic.autoscaler.policy.policy_types import Decision
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobRequest, LeaderRecord, Plan
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.rendezvous.store.connect import StoreOptions, connect

pytestmark = pytest.mark.etcd
# the command with a lease of so many seconds: a long one does not run out on a busy machine
COMMAND = """
import sys
from adaptdl_elastic.autoscaler import __main__
from adaptdl_elastic.autoscaler.coordinator.process import Coordinator
Coordinator.__init__.__kwdefaults__["ttl"] = float(sys.argv.pop(1))
__main__.main()
"""
PATIENCE = 120.0  # the machine may be busy; every wait ends as soon as what is waited for has happened


@dataclass
class Cluster:
    """A cluster of fake agents in a real etcd, with every plan that was ever written in it."""

    server: EtcdServer
    keys: Keys
    stack: ExitStack
    plans: list[Plan] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.store = self.client(StoreOptions(timeout=60.0))
        self._watch = self.store.watch(self.keys.root, self.store.range(self.keys.root).revision + 1)
        self.stack.callback(self._watch.close)
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        for change in self._watch:
            with self.changed:
                if change.kind == "put" and change.key.endswith("/plan"):
                    with suppress(records.MalformedRecordError):
                        self.plans.append(records.decode(Plan, change.value or ""))
                self.changed.notify_all()

    def client(self, options: StoreOptions | None = None) -> Store:
        store = connect(self.server.endpoint, options=options)
        self.stack.callback(store.close)
        return store

    def until(self, done: Callable[[], object], what: str = "") -> None:
        """Wait until `done` is true, looking whenever the store changes."""
        deadline = time.monotonic() + PATIENCE
        with self.changed:
            while not done():
                left = deadline - time.monotonic()
                assert left > 0, f"waited in vain for {what or done}: {self.plans[-3:]}"
                self.changed.wait(min(left, 0.5))

    def coordinator(self, policy: Policy = share_policy, ttl: float = 60.0, **settings: Any) -> Coordinator:
        """Start one in a thread of this process; on a busy machine, too, its lease does not run out."""
        chosen = {"interval": 1.0, "min_gap": 0.0, "policy_timeout": 600.0, **settings}
        served = Coordinator(self.client(), self.keys, CoordinatorSettings(**chosen), policy, ttl=ttl)
        thread = threading.Thread(target=served.run, daemon=True)
        thread.start()

        def stop() -> None:
            served.stop()
            thread.join(60)
            assert not thread.is_alive()

        self.stack.callback(stop)
        return served

    def process(self, *arguments: str, ttl: float = 60.0, **options: object) -> subprocess.Popen[bytes]:
        """One in a process of its own."""
        command = [sys.executable, "-c", COMMAND, str(ttl), "coordinator", "--interval", "1"]
        command += ["--etcd", self.server.endpoint, "--cluster", self.keys.cluster, *arguments]
        process = subprocess.Popen(command, **options)  # type: ignore[call-overload]

        def reap() -> None:
            process.kill()
            process.wait()

        self.stack.callback(reap)
        found: subprocess.Popen[bytes] = process
        return found

    def leader(self) -> LeaderRecord | None:
        item = self.store.get(self.keys.coordinator_leader)
        return None if item is None else records.decode(LeaderRecord, item.value)

    def metrics(self) -> str:
        """Wait for a leader; return where it says that it serves metrics."""
        self.until(self.leader, "a leader")
        leader = self.leader()
        assert leader is not None
        return leader.metrics

    def job(self, name: str, slots: int = 4, **changes: object) -> FakeAgent:
        submit(self.store, self.keys, spec_of(name, **changes))
        return self.agent("n0", name, slots)

    def job_on_two(self) -> list[FakeAgent]:
        """Start a job with a replica on each of two nodes; return their agents."""
        agents = [self.job("a", slots=1), self.agent("n1", "a", 1)]
        self.until(lambda: self.size("a") == 2 and all(agent.running is not None for agent in agents))
        return agents

    def job_on_one(self) -> FakeAgent:
        """Start a job that grows to the four slots of a node; return its agent."""
        agent = self.job("a")
        self.until(lambda: agent.history[-1:] == [(2, 4)])
        return agent

    def agent(self, node: str, job: str, slots: int = 4) -> FakeAgent:
        agent = FakeAgent(self.client(), self.keys, node, job, slots, clock=time.time).register().follow()
        self.stack.callback(agent.stop)
        return agent

    def ask(self, job: str, replicas: int | None = None, stop: bool = False) -> None:
        request = JobRequest(replicas=replicas, stop=stop)
        self.store.put(self.keys.job(job, "request"), records.encode(request))

    def size(self, job: str) -> int:
        plans = [plan for plan in self.plans if plan.job == job]
        return plans[-1].replicas if plans else 0

    def scaled(self, job: str, replicas: int) -> None:
        self.ask(job, replicas=replicas)
        self.until(lambda: self.size(job) == replicas, f"{job} at {replicas}")


@pytest.fixture
def cluster(etcd: EtcdServer, keys: Keys) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(etcd, keys, stack)


def fences_never_fall(plans: list[Plan]) -> bool:
    """Whether no plan of a job was written under an older fence than the one before."""
    last: dict[str, int] = {}
    for plan in plans:
        if plan.fence < last.get(plan.job, 0):
            return False
        last[plan.job] = plan.fence
    return True


def test_a_leader_that_stops_is_followed_at_once(cluster: Cluster) -> None:
    first = cluster.coordinator()
    assert first.leads.wait(PATIENCE)
    second = cluster.coordinator()
    agent = cluster.job_on_one()
    assert not second.leads.is_set()
    ran = list(agent.history)
    first.stop()
    assert second.leads.wait(PATIENCE)
    cluster.until(lambda: cluster.plans[-1].fence > cluster.plans[0].fence)
    assert agent.history[: len(ran)] == ran
    cluster.scaled("a", 3)
    assert fences_never_fall(cluster.plans)


def test_no_other_decision_waits_for_a_slow_policy(cluster: Cluster) -> None:
    entered, released = threading.Event(), threading.Event()

    def slow(*question: Any) -> Decision:
        if any(job.name == "b" for job in question[0]):
            entered.set()
            assert released.wait(PATIENCE)
        return share_policy(*question)

    cluster.coordinator(slow)
    cluster.job("a", slots=2)
    doomed = cluster.agent("n1", "a", 1)
    cluster.until(lambda: doomed.running is not None and cluster.size("a") == 3)
    submit(cluster.store, cluster.keys, spec_of("b"))
    cluster.agent("n0", "b", 2)
    assert entered.wait(PATIENCE)
    doomed.vanish()
    cluster.until(lambda: cluster.size("a") == 2, "a plan without the dead node")
    cluster.scaled("a", 1)
    assert cluster.size("b") == 0
    released.set()
    cluster.until(lambda: cluster.size("b") == 1, "the policy's answer")
    assert cluster.size("a") == 1


def test_two_clusters_in_one_etcd_do_not_meet(cluster: Cluster, etcd: EtcdServer) -> None:
    with ExitStack() as stack:
        other = Cluster(etcd, Keys(cluster.keys.cluster + "-other"), stack)
        cluster.coordinator()
        other.coordinator()
        cluster.job("a")
        other.job("a", slots=2)
        cluster.until(lambda: cluster.size("a") == 4)
        other.until(lambda: other.size("a") == 2)


def test_kill_9_of_the_leader_leaves_training_alone(cluster: Cluster) -> None:
    first = cluster.process(ttl=5.0)  # it does not come to give it back
    cluster.until(cluster.leader, "a leader")
    agent = cluster.job_on_one()
    successor = cluster.coordinator()
    first.send_signal(signal.SIGKILL)
    ran = list(agent.history)
    assert successor.leads.wait(PATIENCE)
    cluster.until(lambda: len({plan.fence for plan in cluster.plans}) >= 2)
    assert agent.history == ran
    cluster.scaled("a", 1)
    assert fences_never_fall(cluster.plans)


def test_a_standby_has_seen_the_node_that_was_lost_with_the_leader(cluster: Cluster) -> None:
    """A leader that has not would wait for the node: here, for hours."""
    first = cluster.process(ttl=5.0)  # it does not come to give it back
    cluster.until(cluster.leader, "a leader")
    agents = cluster.job_on_two()
    successor = cluster.coordinator(node_ttl=10_000.0, steady=0.0)
    assert successor.stands_by.wait(PATIENCE)
    (standby,) = cluster.store.range(cluster.keys.coordinator_standby("")).items
    assert records.decode(LeaderRecord, standby.value).id == successor.identity
    first.send_signal(signal.SIGSTOP)
    agents[1].vanish()
    assert successor.leads.wait(PATIENCE)
    cluster.until(lambda: cluster.size("a") == 1, "a plan without the lost node")
    assert cluster.plans[-1].cause.value == "node_lost"
    # nor does the stopped one stand by, as it may if it was slow to keep its lease before
    cluster.until(lambda: cluster.store.range(cluster.keys.coordinator_standby("")).items == ())
    first.send_signal(signal.SIGCONT)
    cluster.until(lambda: cluster.store.range(cluster.keys.coordinator_standby("")).items, "the old one")
    cluster.scaled("a", 1)
    assert fences_never_fall(cluster.plans)


@pytest.mark.slow
def test_a_standby_evicts_no_node_while_the_store_is_away(keys: Keys) -> None:
    """All leases run out in the pause, the leader's as well: those who are missing may be quite well."""
    with ExitStack() as stack:
        server = stack.enter_context(EtcdServer())
        cluster = Cluster(server, keys, stack)
        leader = cluster.process(ttl=5.0)
        cluster.until(cluster.leader, "a leader")
        submit(cluster.store, cluster.keys, spec_of("a"))
        agents = [FakeAgent(cluster.client(), keys, node, "a", clock=time.time) for node in ("n0", "n1")]
        for agent in agents:
            registration = Registration(cluster.client(), keys, agent.record())
            registration.register()
            stack.callback(registration.close)
            agent.follow()
            stack.callback(agent.stop)
        cluster.until(lambda: cluster.size("a") == 2 and all(agent.running is not None for agent in agents))
        # those who were lost get a minute to come back, more than a busy machine needs
        successor = cluster.coordinator(ttl=5.0, steady=10_000.0, node_ttl=60.0)
        assert successor.stands_by.wait(PATIENCE)
        plan = cluster.plans[-1]
        server.pause()
        leader.kill()
        threading.Event().wait(7.0)  # longer than any lease
        server.resume()
        assert successor.leads.wait(PATIENCE)
        cluster.until(lambda: len(cluster.store.range(keys.nodes).items) == 2, "both nodes are back")
        cluster.scaled("a", 1)
        causes = [one.cause.value for one in cluster.plans if one.generation > plan.generation]
        assert set(causes) <= {"manual", "policy"}
        assert fences_never_fall(cluster.plans)


@pytest.mark.slow
def test_a_leader_that_was_stopped_wakes_up_as_an_old_one(cluster: Cluster) -> None:
    old = cluster.process(ttl=5.0)
    cluster.until(cluster.leader, "a leader")
    cluster.job_on_one()
    old.send_signal(signal.SIGSTOP)
    successor = cluster.coordinator()
    assert successor.leads.wait(PATIENCE)
    fence = successor_fence(cluster)
    # these reach the old one as soon as it wakes up, and it may not act on them
    cluster.scaled("a", 2)
    cluster.job("b", slots=4)
    old.send_signal(signal.SIGCONT)
    cluster.scaled("a", 3)
    cluster.until(lambda: cluster.size("b") == 1)
    cluster.scaled("a", 2)
    assert fences_never_fall(cluster.plans)
    after = [plan for plan in cluster.plans if plan.fence >= fence]
    assert cluster.plans[-len(after) :] == after
    assert old.poll() is None  # it campaigns again


def successor_fence(cluster: Cluster) -> int:
    first = cluster.plans[0].fence
    cluster.until(lambda: cluster.plans[-1].fence > first, "a plan with a new fence")
    return cluster.plans[-1].fence


@pytest.mark.slow
def test_a_leader_that_another_one_follows_stands_by_though_its_lease_still_runs(cluster: Cluster) -> None:
    served = cluster.coordinator()
    assert served.leads.wait(PATIENCE)
    key = cluster.keys.coordinator_leader
    cluster.store.put(key, records.encode(LeaderRecord("another", "host", 1)))  # at once: it would claim it
    assert served.stands_by.wait(PATIENCE)
    assert not served.leads.is_set()
    cluster.store.delete(key)
    assert served.leads.wait(PATIENCE)


def test_a_restart_and_a_pause_of_the_store_evict_no_node(keys: Keys) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(EtcdServer())
        cluster = Cluster(server, keys, stack)
        cluster.coordinator(ttl=5.0)
        cluster.job_on_two()
        generation = cluster.plans[-1].generation
        server.kill()
        server.start()
        cluster.until(
            lambda: cluster.store.get(cluster.keys.coordinator_leader), "a leader after the restart"
        )
        server.pause()
        threading.Event().wait(7.0)  # longer than the coordinator's lease
        server.resume()
        cluster.ask("a", replicas=1)
        cluster.until(lambda: cluster.size("a") == 1, "a decision after the pause")
        later = [(plan.cause.value, plan.reason) for plan in cluster.plans if plan.generation > generation]
        assert {cause for cause, _ in later} <= {"manual", "policy"}, later
        assert fences_never_fall(cluster.plans)


@pytest.mark.parametrize("parent", [True, False])
def test_a_coordinator_ends_with_its_parent_or_without_one_at_sigterm(cluster: Cluster, parent: bool) -> None:
    reader, writer = os.pipe()
    options = ("--parent-fd", str(reader)) if parent else ()
    serves = {**os.environ, "ADAPTDL_METRICS_PORT": "0"}
    process = cluster.process(*options, "--metrics-port", "off", pass_fds=(reader,), env=serves)
    os.close(reader)
    assert cluster.metrics() == ""
    process.terminate()
    if parent:
        cluster.job("a")
        cluster.until(lambda: cluster.size("a") == 4, "a decision after the signal")
    os.close(writer)
    assert process.wait(PATIENCE) == 0
    assert cluster.leader() is None  # let go of, not left to run out


def test_garbage_under_the_prefix_is_said_and_survived(cluster: Cluster) -> None:
    root = cluster.keys.root
    for index, key in enumerate(("jobs/a/plan", "jobs/b/spec", "nodes/n/a", "reports/a/n0")):
        cluster.store.put(root + key, "\x7f" * index + "{")
    cluster.store.put(cluster.keys.job("a", "hints"), "[" * 1000)
    cluster.coordinator()
    cluster.job("a")
    cluster.until(lambda: cluster.size("a") == 4)

    def complaints() -> set[str]:
        events = [json.loads(item.value) for item in cluster.store.range(cluster.keys.events).items]
        return {event["key"] for event in events if event["event"] == "malformed"}

    cluster.until(lambda: len(complaints()) >= 3, "complaints")


def test_the_log_of_events_is_bounded(cluster: Cluster) -> None:
    cluster.coordinator(max_events=20)
    cluster.job("a", slots=8)
    cluster.until(lambda: cluster.size("a") == 8)
    for size in (1, 2, 3, 4, 5, 6, 7) * 3:
        cluster.scaled("a", size)
    assert len(cluster.store.range(cluster.keys.events).items) <= 25


def test_a_coordinator_serves_metrics_unasked_and_says_where(cluster: Cluster) -> None:
    cluster.process(env={**os.environ, "ADAPTDL_METRICS_PORT": "0"})
    cluster.job("a")
    cluster.until(lambda: cluster.size("a") == 4)
    address = cluster.metrics()
    assert address.startswith("127.0.0.1:")

    def scraped() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE) as answer:
            return str(answer.read(), "utf-8")

    labels = f'adaptdl_cluster="{cluster.keys.cluster}",job_name="a"'
    wanted = f"adaptdl_job_replicas{{{labels}}} 4.0"
    cluster.until(lambda: wanted in scraped(), "the metrics of the job")
    assert "process_cpu_seconds_total" in scraped()


@pytest.mark.parametrize("given", ["by the environment", "to a child"])
def test_a_job_goes_on_without_metrics_whose_port_is_taken(
    cluster: Cluster, given: str, tmp_path: Path
) -> None:
    """Nobody is there to choose another one."""
    with socket.create_server(("127.0.0.1", 0)) as taken, (tmp_path / "log").open("wb") as log:
        port = str(taken.getsockname()[1])
        if given == "to a child":
            reader, writer = os.pipe()
            options = ["--parent-fd", str(reader), "--metrics-port", port]
            cluster.process(*options, pass_fds=(reader,), stderr=log)
            os.close(reader)
        else:
            cluster.process(env={**os.environ, "ADAPTDL_METRICS_PORT": port}, stderr=log)
        cluster.job("a")
        cluster.until(lambda: cluster.size("a") == 4, "the job")
        assert cluster.metrics() == ""
    if given == "to a child":
        os.close(writer)
    (line,) = (line for line in (tmp_path / "log").read_text().splitlines() if "metrics" in line)
    assert f"WARNING no metrics are served: 127.0.0.1:{port}: Address already in use" in line


def test_a_port_for_metrics_that_was_asked_for_and_is_taken_is_an_error(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = cluster.process("--metrics-port", str(port))
        assert process.wait(PATIENCE) == 1


@pytest.mark.exhaustive
def test_a_failure_is_counted_once_and_by_every_leader(cluster: Cluster) -> None:
    ports = [free_port(), free_port()]

    def served(port: int) -> dict[str, float]:
        """What a coordinator serves; nothing before it listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return {}
        of_one = (re.sub(r'{adaptdl_cluster="\w+"}|adaptdl_cluster="\w+",', "", line) for line in lines)
        return {line.split()[0]: float(line.split()[1]) for line in of_one if line.startswith("adaptdl_")}

    first = cluster.process("--metrics-port", str(ports[0]))
    cluster.until(cluster.leader, "a leader")
    second = cluster.process("--metrics-port", str(ports[1]))
    # of one size: replicas that fail while they are about to leave are no failure
    agent = cluster.job("a", max_restarts=0, max_replicas=1)
    put_submission(cluster.store, cluster.keys, submission_by("eve", "queued", command=("t.py",)))
    cluster.until(lambda: served(ports[0]).get('adaptdl_jobs{state="running"}') == 1)
    found = served(ports[0])
    assert (found["adaptdl_failed_jobs_total"], found['adaptdl_jobs{state="queued"}']) == (0, 1)
    assert found["adaptdl_unfinished_jobs"] == 2
    cluster.until(lambda: served(ports[1]).get("adaptdl_unfinished_jobs") == 1, "the one that stands by")
    cluster.until(lambda: agent.running is not None, "the replicas")
    agent.fail()
    cluster.until(lambda: served(ports[0]).get("adaptdl_failed_jobs_total") == 1, "the failure")
    cluster.until(lambda: served(ports[1]).get("adaptdl_unfinished_jobs") == 0, "the one that stands by")
    assert served(ports[1])["adaptdl_leader"] == 0
    first.terminate()
    cluster.until(lambda: served(ports[1])["adaptdl_leader"] == 1, "another leader")
    cluster.until(lambda: served(ports[1]).get("adaptdl_failed_jobs_total") == 1, "the same number")
    assert second.poll() is None
