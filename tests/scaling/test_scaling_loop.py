from __future__ import annotations

import itertools
import json

import pytest
import scaling_world
from fake_provider import FakeProvider
from scaling_cluster import KEYS, POOL, Cluster

from adaptdl_elastic import sched_hints
from adaptdl_elastic.agent.own_records import job_spec
from adaptdl_elastic.agent.terminal import run_options
from adaptdl_elastic.autoscaler.cluster_view import view_of
from adaptdl_elastic.autoscaler.commands.job_requests import RequestError, resume_started
from adaptdl_elastic.autoscaler.providers.base import Capacity, ProviderError, TryLaterError
from adaptdl_elastic.autoscaler.scaling.autoscaler_loop import LoopOptions
from adaptdl_elastic.autoscaler.scaling.observe import node_uses, observe
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.held import Held
from adaptdl_elastic.rendezvous.store.base import StoreError
from adaptdl_elastic.rendezvous.store.memory import MemoryStore
from adaptdl_elastic.sched_hints import JobHints


def test_a_job_from_nothing_to_nothing(store: MemoryStore) -> None:
    cluster = Cluster(store)
    cluster.tick()
    assert cluster.instances == []
    cluster.submit(nodes=2).tick()
    assert len(cluster.instances) == 2
    nodes = cluster.placed()
    cluster.tick(3600)
    status = cluster.status()
    assert (status.nodes, status.target, status.hourly_cost) == (2, 2, 2.0)
    assert status.cost_so_far == pytest.approx(2.0)
    assert status.jobs[0].job == "train"
    assert status.jobs[0].so_far == pytest.approx(2.0)
    assert status.bought[0][:2] == ("workers", 2)
    cluster.finish()
    for node in nodes:
        cluster.end(node, 0)
        store.delete(KEYS.node(node, "train"))
    cluster.ticks(15)
    assert cluster.instances == []
    assert cluster.status().hourly_cost == 0.0


def test_a_node_that_was_told_no_instance_is_the_one_of_its_name(store: MemoryStore) -> None:
    cluster = Cluster(store).submit().ticks(1)
    for name in (*cluster.instances, "by-hand"):
        store.put(
            KEYS.node(name, "train"), records.encode(records.NodeRecord(name, "train", "run", "a", "-", 1))
        )
    cluster.tick()
    assert cluster.status().nodes == 1


def test_an_interrupted_node_gets_a_drain_request_that_goes_with_it(store: MemoryStore) -> None:
    cluster = Cluster(store).submit().ticks(1)
    (victim,), (node,) = cluster.instances, cluster.placed()
    view = view_of(KEYS, store.range(KEYS.root), 0.0, 0.0)
    assert node_uses(view, Capacity())[victim].planned == {"train"}
    cluster.provider.interrupt(victim, 120)
    deadline = cluster.now + 120
    cluster.tick(1)
    (item,) = asked = store.range(KEYS.drains).items
    request = records.decode(records.DrainRequest, item.value, item.key)
    assert (request.node, request.instance, request.deadline) == (node, victim, deadline)
    cluster.tick(1)
    assert store.range(KEYS.drains).items == asked  # said once
    assert victim in cluster.instances  # its replica is still there
    cluster.end(node, 0)
    cluster.tick()
    assert cluster.instances != [victim]
    assert len(cluster.instances) == 1
    store.delete(KEYS.node(node, "train"))
    cluster.tick()
    assert store.get(KEYS.drain(node)) is None


def test_the_slots_that_a_job_without_nodes_needs_come_from_its_spec(store: MemoryStore) -> None:
    command = ["--nnodes=1:4", "--nproc-per-node=4", "--etcd=e:1", "--rdzv-id=train", __file__]
    store.put(KEYS.job("train", "spec"), records.encode(job_spec(run_options.parse(command, {}))))
    (info,) = observe(view_of(KEYS, store.range(KEYS.root), 0.0, 0.0), Capacity((POOL,)), ()).jobs
    assert (info.min_replicas, info.min_slots) == (1, 4)


def test_a_replica_with_several_gpus_takes_as_many_slots(store: MemoryStore) -> None:
    command = ["--nnodes=1:4", "--nproc-per-node=1:4", "--gpus-per-replica=2", "--etcd=e:1"]
    spec = job_spec(run_options.parse([*command, "--rdzv-id=train", __file__], {}))
    store.put(KEYS.job("train", "spec"), records.encode(spec))
    (waiting,) = observe(view_of(KEYS, store.range(KEYS.root), 0.0, 0.0), Capacity((POOL,)), ()).jobs
    assert (waiting.min_replicas, waiting.min_slots) == (2, 2)
    gpus = tuple(f"GPU-{number}" for number in range(8))
    record = records.NodeRecord("metal", "train", spec.run, "a", "127.0.0.1", 4, devices=gpus)
    store.put(KEYS.node("metal", "train"), records.encode(record))
    seen = observe(view_of(KEYS, store.range(KEYS.root), 0.0, 0.0), Capacity((POOL,)), ())
    assert (seen.other_slots, seen.other_nodes) == (8, 1)
    assert seen.jobs[0].min_replicas == 2


def test_an_expected_job_gets_its_first_node(store: MemoryStore) -> None:
    cluster = Cluster(store, options=LoopOptions(expected=("train",), until_done=True))
    assert not cluster.tick()
    assert len(cluster.instances) == 1
    cluster.submit()
    cluster.finish()
    ended = [cluster.tick() for _ in range(20)]
    assert ended[-1]
    assert cluster.instances == []


def test_a_job_that_is_resumed_gets_nodes_whatever_its_earlier_run_was_asked(store: MemoryStore) -> None:
    """The request to stop stays in the store, and is of the run that it stopped."""
    cluster = Cluster(store)
    cluster.ask(stop=True, run="earlier")
    cluster.submit(nodes=2).ticks(5)
    assert len(cluster.instances) == 2


@pytest.mark.parametrize("state", [records.JobState.STOPPED, records.JobState.FAILED])
def test_a_job_that_was_started_by_hand_gets_nodes_once_it_is_resumed(
    store: MemoryStore, state: records.JobState
) -> None:
    cluster = Cluster(store, options=LoopOptions(until_done=True)).submit()
    with pytest.raises(RequestError, match="train runs: only a job that was stopped or has failed"):
        resume_started(store, KEYS, "train")
    with pytest.raises(RequestError, match="there is no job 'other'"):
        resume_started(store, KEYS, "other")
    cluster.ask(stop=True, run="run")
    cluster.finish(state=state)
    assert cluster.tick()
    assert not cluster.instances
    assert "train goes on when a node starts" in resume_started(store, KEYS, "train")
    assert not cluster.tick()
    cluster.tick()
    assert len(cluster.instances) == 1
    # the request was for the run that has ended
    assert store.get(KEYS.job("train", "request")) is not None
    cluster.finish()
    with pytest.raises(RequestError, match="train is done"):
        resume_started(store, KEYS, "train")


def test_nodes_that_were_not_bought_count(store: MemoryStore) -> None:
    cluster = Cluster(store).submit(nodes=1)
    record = records.NodeRecord("metal", "train", "run", "a", "127.0.0.1", 1)
    store.put(KEYS.node("metal", "train"), records.encode(record))
    cluster.tick()
    assert cluster.instances == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_the_node_of_rank_0_is_kept(store: MemoryStore, order: tuple[int, ...]) -> None:
    """Without it a job is started again; without any other it goes on in place."""
    cluster = Cluster(store).submit(nodes=3).ticks(1)
    nodes = [cluster.register(name) for name in cluster.instances]
    cluster.plan(*[nodes[i] for i in order])
    cluster.tick()
    cluster.submit(nodes=1)
    cluster.ask(replicas=2)
    cluster.ticks(15)
    drained = [node for node in nodes if store.get(KEYS.drain(node)) is not None]
    assert len(drained) == 1
    assert drained[0] != nodes[order[0]]


def test_a_size_that_a_person_asked_for_is_bought(store: MemoryStore) -> None:
    """The policy is told of what the nodes there are can hold of it; the nodes must come from us."""
    cluster = Cluster(store).submit(nodes=1).ticks(1)
    cluster.placed()
    cluster.ask(replicas=3)
    cluster.tick(60)
    assert len(cluster.instances) == 3


def test_a_dry_run_says_and_does_nothing(store: MemoryStore) -> None:
    cluster = Cluster(store, options=LoopOptions(dry_run=True)).submit(nodes=3)
    before = store.range("").items
    assert cluster.ruler.run() == 0
    assert cluster.provider.calls == []
    assert not cluster.provider.ruled
    assert store.range("").items == before
    (target,) = cluster.events("target")
    assert (target["nodes"], target["target"]) == (0, 3)
    assert "3 slots are worth their price" in target["reason"]
    (would,) = cluster.events("would request")
    assert (would["pool"], would["desired"]) == ("workers", 3)


def test_the_next_autoscaler_remembers_the_amount_that_was_paid(store: MemoryStore) -> None:
    first = Cluster(store)
    first.submit()
    first.tick()
    first.tick(7200)
    paid = first.status().cost_so_far
    assert paid == pytest.approx(2.0)
    second = Cluster(store, provider=first.provider)
    second.ruler.memory = second.ruler.recall()
    second.now = first.now
    second.tick(3600)
    assert second.status().cost_so_far == pytest.approx(3.0)


def test_a_garbled_memory_is_forgotten(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    store.put(KEYS.autoscaler_status, "{}")
    assert Cluster(store).ruler.recall().cost == 0.0
    assert "forgotten" in caplog.text


def test_a_request_that_the_provider_refuses_is_said_once_and_tried_again(store: MemoryStore) -> None:
    cluster = Cluster(store).submit()
    cluster.provider.errors["request"] = [ProviderError(f"throttled, {n} s") for n in range(3)]
    cluster.ticks(5)
    assert [w["message"] for w in cluster.events("warning")] == ["throttled, 0 s"]
    assert len(cluster.instances) == 1


def test_a_quota_is_shown_and_asked_for_less_and_less(store: MemoryStore) -> None:
    cluster = Cluster(store).submit()
    asked: list[float] = []
    cluster.provider.request = lambda pool, desired: _refuse(asked, cluster.now)  # type: ignore[method-assign]
    cluster.ticks(100)
    gaps = [round(b - a) for a, b in itertools.pairwise(asked)]
    assert gaps[:4] == [60, 120, 240, 480]
    assert len(asked) == 5  # in 1000 s
    assert any("VcpuLimitExceeded" in text for text in cluster.status().warnings)


def _refuse(asked: list[float], now: float) -> None:
    asked.append(now)
    raise TryLaterError("autoscaling:SetDesiredCapacity on workers: VcpuLimitExceeded: 64 vCPUs")


def test_a_notice_that_comes_twice_or_late_changes_nothing(store: MemoryStore) -> None:
    """EventBridge delivers at least once and in any order; the agent's own word comes beside it."""
    cluster = Cluster(store).submit().ticks(1)
    (victim,), (node,) = cluster.instances, cluster.placed()
    for _ in range(3):
        cluster.provider.interrupt(victim, 120)
        cluster.tick(1)
    assert len(cluster.events("drain")) == 1
    cluster.end(node, 0)
    cluster.tick()
    store.delete(KEYS.node(node, "train"))
    cluster.tick(60)
    (successor,) = cluster.instances
    before = cluster.ruler.memory
    cluster.provider.interrupt(victim, 120)  # it has long gone
    cluster.provider.interrupt("i-of-nobody", 120)
    cluster.tick(1)
    assert cluster.instances == [successor]
    assert cluster.ruler.memory.known.keys() == before.known.keys()
    assert len(cluster.events("drain")) == 1


def test_a_queue_that_fails_does_not_stop_the_rest(store: MemoryStore) -> None:
    cluster = Cluster(store).submit()
    cluster.provider.errors["signals"] = [ProviderError("no queue")]
    cluster.tick()
    assert len(cluster.instances) == 1
    assert cluster.status().warnings == ("no queue",)


def test_only_one_rules(store: MemoryStore) -> None:
    store.put(KEYS.autoscaler_leader, records.encode(records.LeaderRecord("other", "box", 42)))
    cluster = Cluster(store)
    cluster.ruler.stop()
    with pytest.raises(StoreError):
        cluster.ruler.run()
    assert "pid 42 on box" in cluster.events("waiting")[0]["message"]
    assert not cluster.provider.ruled


def test_a_static_cluster_is_watched_and_left_alone(store: MemoryStore) -> None:
    cluster = Cluster(store, provider=FakeProvider({}, lambda: 0.0)).submit(nodes=2).ticks(1)
    assert cluster.status().provider == "fake"
    assert "needs 2 nodes to run, and 0 can be had now" in cluster.status().warnings[0]


def test_nodes_bought_for_a_job_stay_while_its_change_to_them_lasts(store: MemoryStore) -> None:
    """The plan has the nodes that were there when it was made; it may take long (--rescale-timeout)."""
    cluster = Cluster(store).submit().ticks(2)
    first = cluster.register(cluster.instances[0])
    cluster.plan(first)
    held = Held(first, f"a-{first.removeprefix('node-')}", acted=0, generation=0, library=True)
    store.put(KEYS.held("train", first), records.encode(held))
    hints = JobHints(
        "train", 0, 1, 1, 128, 128, 128, max_batch_size=4096, local_bsz_bounds=(32, 512),
        gradient_accumulation=True, max_profiled_replicas=4, grad_params=(0.001, 0.02),
        perf_params=tuple(scaling_world.MODEL.perf_params), remaining_samples=1e6,
    )  # fmt: skip
    store.put(KEYS.job("train", "hints"), sched_hints.encode(hints))
    cluster.ticks(4)
    assert len(cluster.instances) == 4
    nodes = [first, *(cluster.register(name) for name in cluster.instances[1:])]
    cluster.plan(first, nodes[1], generation=1)
    cluster.ticks(40)
    assert len(cluster.instances) == 4
    assert cluster.status().target == 4
    assert list(store.range(KEYS.drains).items) == []


@pytest.mark.parametrize("by", ["a person", "itself", "an instance", "a deadline"])
def test_a_node_that_was_drained_by_hand_keeps_its_machine(store: MemoryStore, by: str) -> None:
    """Only a node's own word, or a drain that is about its instance or has a deadline, gives it back."""
    cluster = Cluster(store).submit(nodes=1).ticks(2)
    (instance,), (node,) = cluster.instances, cluster.placed()
    cluster.tick()
    if by == "itself":
        cluster.register(instance, draining=True)
    else:
        more = {"an instance": {"instance": instance}, "a deadline": {"deadline": cluster.now + 60}}.get(
            by, {}
        )
        request = records.DrainRequest(node, "adaptdl drain", created=1.0, **more)  # type: ignore[arg-type]
        store.put(KEYS.drain(node), records.encode(request))
    cluster.tick()
    cluster.plan(generation=1)
    cluster.end(node, 0)
    cluster.ticks(3)
    assert (instance in cluster.instances) is (by == "a person")
    if instance not in cluster.instances:
        store.delete(KEYS.node(node, "train"))  # its agent is gone with it
    cluster.ticks(20)
    assert len(cluster.instances) == 1
    if by == "a person":
        assert store.get(KEYS.drain(node)) is not None


def test_the_cost_of_a_job_is_said_when_its_size_changes_and_when_it_ends(store: MemoryStore) -> None:
    cluster = Cluster(store).submit(nodes=2).ticks(2)
    nodes = cluster.placed()
    cluster.tick(1800)
    cluster.tick(1800)
    (resized,) = cluster.events("job_resized")
    assert (resized["job"], resized["replicas"], resized["job_hourly_cost"]) == ("train", 2, 2.0)
    cluster.finish()
    for node in nodes:
        cluster.end(node, 0)
    cluster.ticks(2)
    (ended,) = cluster.events("job_ended")
    assert ended["cost_so_far"] == pytest.approx(2.0, rel=0.01)
    kinds = [json.loads(item.value)["event"] for item in store.range(KEYS.events).items]
    assert kinds.count("autoscaler_job_ended") == 1


def test_bills_go_by_run_and_are_forgotten_with_their_job(store: MemoryStore) -> None:
    cluster = Cluster(store)
    for name in ("train", "other"):
        cluster.submit(name)
    cluster.ticks(2)
    first, second = cluster.instances
    cluster.plan(cluster.register(first))
    cluster.plan(cluster.register(second, "other"), job="other")
    cluster.tick(3600)
    hour = 1 + 10 / 3600  # while it boots a node is on the bill of the job that waits for it
    assert cluster.ruler.memory.job_costs == pytest.approx({"train": hour, "other": hour})
    spec = records.JobSpec("train", "again", min_nodes=1, max_nodes=4, min_replicas=1, max_replicas=4)
    store.put(KEYS.job("train", "spec"), records.encode(spec))
    cluster.tick(0)
    assert cluster.ruler.memory.job_costs == pytest.approx({"train": 0.0, "other": hour})
    cluster.finish("other")
    cluster.end(f"node-{second}", 0, "other")
    cluster.tick(60)
    assert "other" in cluster.ruler.memory.job_costs
    cluster.ticks(25, 3600)
    assert "other" not in cluster.ruler.memory.job_costs
