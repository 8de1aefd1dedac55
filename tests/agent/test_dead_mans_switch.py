"""When a node that nobody accounts for ends itself, and that it saves its job first."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from cluster import JOB, Cluster
from fake_imds import FakeImds

from adaptdl_elastic.agent.machine import node_end
from adaptdl_elastic.agent.machine.dead_mans_switch import Look, Silence, decide, watch
from adaptdl_elastic.agent.machine.node_end import end_node, main, read_look, take_look
from adaptdl_elastic.protocol.hints import JobHints
from adaptdl_elastic.protocol.hints import encode as encode_hints
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus, IdleNode
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    LeaderRecord,
    NodeRecord,
    Placement,
    Plan,
    Transition,
    encode,
)
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

HEARD, AWAY = Look(autoscaler=True), Look(trouble="no answer")
HOUR, INTERVAL = 3600.0, 30.0


def ended_after(looks: Iterable[tuple[float, Look]]) -> float | None:
    """When the node ends itself, if these are the times and results of its looks."""
    silence = Silence()
    for now, look in looks:
        decision = decide(silence, look, now, HOUR, INTERVAL)
        if decision.leave:
            return now
        silence = decision.silence
    return None


def every(interval: float, look: Callable[[float], Look], until: float) -> list[tuple[float, Look]]:
    return [(n * interval, look(n * interval)) for n in range(int(until / interval) + 1)]


def test_a_node_whose_store_is_gone_ends_after_an_hour() -> None:
    assert ended_after(every(INTERVAL, lambda now: HEARD if now < 600 else AWAY, 3 * HOUR)) == 570 + HOUR


@pytest.mark.parametrize(
    ("look", "accounted_for"),
    [
        (Look(autoscaler=True), True),
        (Look(autoscaler=True, coordinator=True), True),
        (Look(coordinator=True, at_work=True), True),
        (Look(coordinator=True), False),
        (Look(at_work=True), False),
        (Look(), False),
        (Look(trouble="the store refuses us", autoscaler=True), False),
    ],
)
def test_a_leading_coordinator_or_the_autoscaler_accounts_for_a_node(look: Look, accounted_for: bool) -> None:
    """A job that a coordinator leads keeps its nodes; an idle node needs the autoscaler to give it back."""
    assert (ended_after(every(INTERVAL, lambda _: look, 2 * HOUR)) is None) == accounted_for


def accounted(*steps: tuple[str, int]) -> Look:
    return Look(autoscaler=True, steps=steps)


@pytest.mark.parametrize(
    ("look", "end"),
    [
        (lambda now: accounted((JOB, int(now))), None),
        (lambda now: accounted((JOB, int(now // 3000))), None),  # long steps, or a long compilation
        (lambda now: accounted((JOB, min(int(now), 600))), 600 + HOUR),
        (lambda now: accounted((JOB, 1), ("other", int(now))), None),
        (lambda now: accounted(), HOUR),  # no replica at all
        (lambda now: HEARD, None),  # a job that has never reported a step
        (lambda now: AWAY if 600 < now < 1200 else accounted((JOB, 1)), HOUR),
    ],
    ids=["steps", "long steps", "stalled", "one of two", "no replica", "unknown", "store away"],
)
def test_a_node_on_which_no_step_is_made_ends_though_its_autoscaler_lives(
    look: Callable[[float], Look], end: float | None
) -> None:
    assert ended_after(every(INTERVAL, look, 3 * HOUR)) == end


def test_one_good_look_begins_the_count_again() -> None:
    """A restart of etcd, or a partition that heals."""
    heals = every(INTERVAL, lambda now: HEARD if now % 3300 == 0 else AWAY, 24 * HOUR)
    assert ended_after(heals) is None


def test_time_without_looks_is_no_silence() -> None:
    """A process that was suspended for a day has not heard nothing for a day."""
    day = 24 * HOUR
    looks = [(0.0, HEARD), (30.0, AWAY), (30.0 + day, AWAY), (60.0 + day, HEARD)]
    assert ended_after(looks) is None
    rare = every(600.0, lambda _: AWAY, 8 * HOUR)  # a machine too busy to look more often
    assert ended_after(rare) == 600.0 * HOUR / (3 * INTERVAL), "each gap counts as three intervals"


def test_a_clock_that_goes_back_does_not_count() -> None:
    back = [(1000.0, AWAY), (1030.0, AWAY), (0.0, AWAY), (30.0, AWAY)]
    silence = Silence()
    for now, look in back:
        silence = decide(silence, look, now, HOUR, INTERVAL).silence
    assert silence == Silence(60.0, 30.0)


def test_the_log_says_why_at_the_beginning_half_way_and_at_the_end() -> None:
    said: list[str] = []
    now = [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    looks = iter([HEARD, AWAY, HEARD, HEARD, *[AWAY] * 1000])
    why = watch(lambda: next(looks), said.append, lambda: now[0], wait, HOUR, INTERVAL)
    nothing = "nothing has accounted for it"
    assert said == [
        "the store cannot be read (no answer); this node ends itself after 60 min of that",
        "heard again: this node stays",
        "the store cannot be read (no answer); this node ends itself after 60 min of that",
        f"this node ends itself in 30 min: {nothing} for 30 min: the store cannot be read (no answer)",
        f"this node ends itself: {nothing} for 60 min: the store cannot be read (no answer)",
    ]
    assert why == said[-1]
    said, now[0] = [], 0.0
    why = watch(lambda: accounted((JOB, 1)), said.append, lambda: now[0], wait, HOUR, INTERVAL)
    nothing = "no job has made a step on it"
    assert said == [
        f"this node ends itself in 30 min: {nothing} for 30 min",
        f"this node ends itself: {nothing} for 60 min",
    ]
    assert why == said[-1]


# What the store shows


def node(instance: str, run: str = "run") -> NodeRecord:
    return NodeRecord(f"node-of-{instance}", JOB, run, "agent", "10.0.0.1", 1, instance=instance)


def plan(*instances: str) -> Plan:
    placements = tuple(Placement(f"node-of-{one}", 1) for one in instances)
    return Plan(JOB, "run", 1, placements, Cause.START, Transition.RESTART, "", first=1)


def test_a_look_reads_the_coordinator_the_agent_and_its_plan() -> None:
    store, keys = MemoryStore(), Keys()
    with store:
        leader = encode(LeaderRecord("one"))
        assert read_look(store, keys, "i-1") == Look(steps=())
        store.put(keys.coordinator_leader, leader)
        assert read_look(store, keys, "i-1") == Look(coordinator=True, steps=())
        store.put(keys.job(JOB, "plan"), encode(plan("i-1", "i-2")))
        assert read_look(store, keys, "i-1") == Look(coordinator=True, steps=()), (
            "its agent is not there any more"
        )
        for instance in ("i-1", "i-3"):
            store.put(keys.node(f"node-of-{instance}", JOB), encode(node(instance)))
        assert read_look(store, keys, "i-1") == Look(coordinator=True, at_work=True)
        assert read_look(store, keys, "i-3") == Look(coordinator=True, steps=()), "it waits for work"
        store.put(keys.job(JOB, "hints"), encode_hints(JobHints(JOB, 1, 1, 1, 32, 32, 32, step=7)))
        assert read_look(store, keys, "i-1").steps == ((JOB, 7),)
        store.put(keys.job(JOB, "hints"), encode_hints(JobHints(JOB, 0, 1, 1, 32, 32, 32, step=7)))
        assert read_look(store, keys, "i-1").steps is None, "reported by an earlier run of this name"
        store.put(keys.job(JOB, "hints"), encode_hints(JobHints(JOB, 1, 1, 1, 32, 32, 32, step=0)))
        assert read_look(store, keys, "i-1").steps is None, "no step yet"
        store.put(keys.node("node-of-i-1", JOB), encode(node("i-1", run="another")))
        store.put(keys.node("node-of-i-4", JOB), "garbage")
        assert read_look(store, keys, "i-1") == Look(coordinator=True, steps=()), "the plan is of another run"
        store.put(keys.autoscaler_leader, leader)
        assert read_look(store, keys, "i-1") == Look(autoscaler=True, coordinator=True, steps=())


def test_looks_of_an_autoscaler_that_keeps_an_idle_node_stand_for_its_steps() -> None:
    store, keys = MemoryStore(), Keys()

    def steps_after(*idle: IdleNode) -> object:
        store.put(keys.autoscaler_status, encode(AutoscalerStatus("ec2", 1, 1, 1.0, 1.0, idle=idle)))
        return read_look(store, keys, "i-1").steps

    with store:
        kept, leaves = IdleNode("i-1", 1.0, 0.3), IdleNode("i-1", 1.0, 0.3, leaves=True)
        first = steps_after(kept)
        assert first != ()
        assert first == read_look(store, keys, "i-1").steps, "without a new report nothing changes"
        assert steps_after(kept) not in ((), first)
        assert steps_after(IdleNode("i-2", 1.0, 0.3, leaves=True)) != ()
        assert steps_after(leaves) == steps_after(leaves) == ()


def test_a_store_that_cannot_be_used_is_trouble_and_no_error(tmp_path: Path) -> None:
    away = {"ADAPTDL_ETCD_TIMEOUT": "0.2"}
    assert take_look("127.0.0.1:1", "default", "i-1", away).trouble
    missing = {**away, "ADAPTDL_ETCD_CA": str(tmp_path / "ca.pem")}  # a node that is still booting
    assert "ca.pem" in take_look("https://127.0.0.1:1", "default", "i-1", missing).trouble


# How it ends


class Group:
    """Auto Scaling as far as a node uses it; the first `refusals` calls fail."""

    def __init__(self, refusals: int = 0) -> None:
        self.refusals = refusals
        self.calls: list[dict[str, Any]] = []

    def terminate_instance_in_auto_scaling_group(self, **arguments: Any) -> None:
        self.calls.append(arguments)
        if len(self.calls) <= self.refusals:
            raise RuntimeError("AccessDenied")


@pytest.mark.parametrize(
    ("refusals", "calls", "off"),
    [(0, 1, False), (2, 3, False), (99, 5, True)],
    ids=["at once", "late", "never"],
)
def test_a_node_leaves_its_group_and_is_switched_off_only_if_it_cannot(
    refusals: int, calls: int, off: bool
) -> None:
    group, done = Group(refusals), list[str]()
    end_node("i-1", lambda: done.append("stop"), lambda: group, lambda: done.append("off"), lambda _: None)
    assert len(group.calls) == calls
    assert group.calls[0] == {"InstanceId": "i-1", "ShouldDecrementDesiredCapacity": True}
    assert done == (["stop", "off"] if off else ["stop"])


def test_an_agent_that_does_not_stop_goes_with_the_machine(caplog: pytest.LogCaptureFixture) -> None:
    def stop() -> None:
        raise subprocess.TimeoutExpired("systemctl", 180.0)

    group = Group()
    end_node("i-1", stop, lambda: group, pytest.fail, lambda _: None)
    assert len(group.calls) == 1
    assert "the agent could not be stopped" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--stop=true", "--after=60"), "give at least 600 seconds"),
        (("--stop=true", "--after=nan"), "give at least 600 seconds"),
        (("--stop=true", "--after=1h"), "1h: give at least 600 seconds"),
        (("--stop=true",), "no etcd was given"),
        (("--etcd=e:1",), "--stop"),
    ],
)
def test_bad_options_are_named(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(list(arguments), {})
    assert words in capsys.readouterr().err


@pytest.mark.processes
def test_the_whole_process_runs_its_command_and_ends_the_instance_it_is_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    imds, group, now = FakeImds("i-7"), Group(), [0.0]

    def wait(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(node_end, "autoscaling_client", lambda: group)
    monkeypatch.setattr(node_end, "take_look", lambda *_: AWAY)
    environ = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.endpoint, "ADAPTDL_ETCD": "head:2379"}
    try:
        done = main(
            ["--stop", f"touch '{tmp_path / 'here too'}'", "--after=600"], environ, lambda: now[0], wait
        )
    finally:
        imds.close()
    assert done == 0
    assert (tmp_path / "here too").exists()
    assert [call["InstanceId"] for call in group.calls] == ["i-7"]
    assert now == [600.0]


@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
def test_a_job_that_trains_without_its_store_is_saved_before_its_node_ends(cluster: Cluster) -> None:
    """The node is accounted for while its coordinator leads; then the store falls silent."""
    run = cluster.train("first", "--checkpoint-interval=0", env={"ADAPTDL_INSTANCE_ID": "i-1"})
    run.wait_for_event("generation")
    endpoint, away, now = cluster.etcd.endpoint, {"ADAPTDL_ETCD_TIMEOUT": "0.5"}, [0.0]
    group, said = Group(), list[str]()
    assert not read_look(cluster.store, cluster.keys, "i-1").missing

    def wait(seconds: float) -> None:
        now[0] += seconds

    def stop() -> None:
        assert group.calls == [], "saving comes first"
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 143, run.text()

    cluster.etcd.pause()
    try:
        name = cluster.keys.cluster
        watch(lambda: take_look(endpoint, name, "i-1", away), said.append, lambda: now[0], wait, 90.0)
        assert run.process.poll() is None, "it trains on until it is stopped"
        end_node("i-1", stop, lambda: group, pytest.fail, wait)
    finally:
        cluster.etcd.resume()
    assert [event["kind"] for event in run.of("checkpoint")] == ["stop"]
    assert len(group.calls) == 1
    assert "this node ends itself" in said[-1]
