"""`adaptdl` against a real etcd, a coordinator in a thread, and fake agents."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from coordinator_pump import share_policy
from etcd_server import EtcdServer
from fake_agents import FakeAgent, spec_of, submit

from adaptdl_elastic import __version__, sched_hints
from adaptdl_elastic.autoscaler.cli import COMMANDS, HEADINGS, CommandError, Place, Where, adaptdl, main
from adaptdl_elastic.autoscaler.commands.jobs import has_stopped
from adaptdl_elastic.autoscaler.commands.tables import layout, read
from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
from adaptdl_elastic.autoscaler.coordinator.process import Coordinator
from adaptdl_elastic.autoscaler.diagnostics import explanation as why
from adaptdl_elastic.autoscaler.diagnostics.explanation import leaders_settings
from adaptdl_elastic.autoscaler.policy.policy_types import Objective, PolicySettings
from adaptdl_elastic.rendezvous.local import runtime_file
from adaptdl_elastic.rendezvous.local.runtime_file import RuntimeFile
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus, JobCost
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    CheckpointRecord,
    JobState,
    JobStatus,
    LeaderRecord,
    NodeRecord,
    Plan,
    encode,
)
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.rendezvous.store.connect import connect
from adaptdl_elastic.rendezvous.store.memory import MemoryStore
from adaptdl_elastic.rendezvous.text import clock


class World:
    """One cluster with a job `mnist` on node n0, and the command that looks at it."""

    def __init__(self, etcd: EtcdServer, keys: Keys, stack: ExitStack) -> None:
        self.etcd, self.keys, self.stack = etcd, keys, stack
        self.store = self.client()
        self.coordinator = Coordinator(
            self.client(), keys, CoordinatorSettings(interval=0.5, min_gap=0.0), share_policy, ttl=60.0
        )
        thread = threading.Thread(target=self.coordinator.run, daemon=True)
        thread.start()
        stack.callback(thread.join, 60)
        stack.callback(self.coordinator.stop)
        self.agent = self.job("mnist")

    def client(self) -> Store:
        store = connect(self.etcd.endpoint)
        self.stack.callback(store.close)
        return store

    def job(self, name: str, **changes: object) -> FakeAgent:
        submit(self.store, self.keys, spec_of(name, **changes))
        agent = FakeAgent(self.client(), self.keys, "n0", name, 4, clock=time.time).register().follow()
        self.stack.callback(agent.stop)
        return agent

    def run(self, *arguments: str) -> Result:
        options = ["--etcd", self.etcd.endpoint, "--cluster", self.keys.cluster]
        return CliRunner().invoke(adaptdl, [*arguments, *options])

    def value(self, name: str) -> str:
        item = self.store.get(self.keys.job("mnist", name))
        assert item is not None
        return item.value

    def until(self, done: Callable[[], bool]) -> None:
        """Look again whenever something in the store has changed."""
        revision = self.store.range(self.keys.root).revision
        with self.store.watch(self.keys.root, revision + 1) as watch:
            changes = iter(watch)
            while not done():
                next(changes)

    def reported(self) -> bool:
        """Whether the agent has reported the present generation, and the coordinator that the job runs."""
        plan, hints = (self.store.get(self.keys.job("mnist", name)) for name in ("plan", "hints"))
        if plan is None or hints is None:
            return False
        generation = records.decode(Plan, plan.value).generation
        told = sched_hints.decode(hints.value).generation == generation
        return told and self.json("ls")[0]["state"] == "running"

    def json(self, *arguments: str) -> Any:
        result = self.run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def says(self, *arguments: str) -> str:
        result = self.run(*arguments)
        assert result.exit_code == 0, result.output
        return result.output


@pytest.fixture
def world(etcd: EtcdServer, keys: Keys) -> Iterator[World]:
    with ExitStack() as stack:
        world = World(etcd, keys, stack)
        assert world.says("scale", "mnist", "--replicas", "2", "--wait", "--timeout", "120")
        world.until(world.reported)
        yield world


@pytest.mark.etcd
def test_ls_and_status_show_what_runs(world: World) -> None:
    (row,) = world.json("ls")
    shown = row["job"], row["state"], row["replicas"], row["placements"]
    assert shown == ("mnist", "running", 2, {"n0": 2})
    assert "mnist" in world.says("ls")
    assert world.says("queue") == "no job waits\n"
    assert world.says("history") == "no job has ended\n"
    status = world.json("status", "mnist")
    assert (status["replicas"], status["requested"], status["bounds"]["replicas"]) == (2, 2, [1, 64])
    text = world.says("status", "mnist")
    parts = ("goodput", "batch", "samples a step: ", "last rescale", "restarts", "2 replicas on 1 node  ")
    assert [part for part in parts if part not in text] == []
    assert "memory" not in text
    world.agent.report(records.decode(Plan, world.value("plan")), memory_limit=8)
    assert "memory        at most 8 samples of one replica fit" in world.says("status", "mnist")
    (node,) = world.json("nodes")
    assert (node["node"], node["slots"], node["free"], node["jobs"]) == ("n0", 4, 2, {"mnist": 2})
    assert "n0" in world.says("nodes")


@pytest.mark.etcd
def test_status_shows_what_a_job_has_cost_and_will(world: World) -> None:
    assert world.json("status", "mnist")["cost"] is None
    assert "cost" not in world.says("status", "mnist")
    known, unknown = JobCost("mnist", 1.5, 6.0, 4.5, 1800.0), JobCost("mnist", 1.5, 6.0)
    for cost, text in (
        (known, "1.50 so far, 6.00 an hour now; 4.50 expected by its end in 30 min"),
        (unknown, "1.50 so far, 6.00 an hour now\n"),
    ):
        said = AutoscalerStatus("ec2", 2, 2, 6.0, 1.5, jobs=(cost,))
        world.store.put(world.keys.autoscaler_status, encode(said))
        assert f"cost          {text}" in world.says("status", "mnist")
        assert world.json("status", "mnist")["cost"]["forecast"] == cost.forecast
    dead = AutoscalerStatus("ec2", 2, 2, 6.0, 1.5, jobs=(known,), updated=time.time() - 7200)
    world.store.put(world.keys.autoscaler_status, encode(dead))
    assert "cost          1.50 120 min ago: no autoscaler has looked since\n" in world.says("status", "mnist")
    old = world.json("status", "mnist")["cost"]
    assert (old["so_far"], old["hourly"], old["forecast"]) == (1.5, 0.0, None)
    assert old["seconds_old"] >= 7200


@pytest.mark.etcd
def test_scale_by_hand_and_back_again(world: World) -> None:
    world.says("scale", "mnist", "--replicas", "3", "--wait", "--timeout", "120")
    assert world.json("ls")[0]["replicas"] == 3
    assert world.json("status", "mnist")["requested"] == 3
    assert "keeps its 3 replicas: adaptdl scale: 3 replicas" in world.says("explain", "mnist")
    world.says("scale", "mnist", "--auto")
    assert world.json("status", "mnist")["requested"] is None
    world.until(lambda: world.json("ls")[0]["replicas"] == 4)  # as the policy would have it


@pytest.mark.etcd
def test_a_job_that_is_done_has_done_all_its_epochs(world: World) -> None:
    plan = records.decode(Plan, world.value("plan"))
    world.agent.report(plan, epoch=2, epochs=3, progress=0.97)
    world.agent.finish()
    world.until(lambda: world.json("ls", "--all")[0]["state"] == "done")
    row = world.json("ls", "--all")[0]
    assert (row["progress"], row["epoch"], row["epochs"]) == (1.0, 3, 3)
    text = world.says("status", "mnist")
    assert "100% (epoch 3/3)" in text
    assert "none: it has ended" in text


WHY = "a long reason for something"


@pytest.mark.parametrize(
    ("width", "last"), [(None, WHY), (41, WHY), (40, "a long reason for somethi…"), (28, "a long reason…")]
)
def test_a_table_is_as_wide_as_the_terminal(width: int | None, last: str) -> None:
    cells = [["JOB", "STATE", "WHY"], ["[j]", "running", WHY]]
    lines = layout(cells, width)
    assert lines[1] == f"[j]  running  {last}".rstrip()
    assert lines[0].startswith("JOB  STATE")
    assert width is None or all(len(line) <= width for line in lines)


def test_a_terminal_too_narrow_for_a_table_gets_records() -> None:
    cells = [["JOB", "STATE", "WHY"], ["j", "running", "a long reason"], ["k", "-", "作业 is a job"]]
    assert layout(cells, 25) == [
        *("JOB: j  STATE: running", "  WHY: a long reason"),
        *("JOB: k", "  WHY: 作业 is a job"),
    ]
    assert layout(cells, 14) == [
        *("JOB: j", "  STATE:", "  running", "  WHY: a long", "  reason"),
        *("JOB: k", "  WHY: 作业 is", "  a job"),
    ]


def test_wide_characters_count_twice() -> None:
    first, second = layout([["作业", "x"], ["jobs", "x"]], None)
    assert (first, second) == ("作业  x", "jobs  x")


@pytest.mark.etcd
def test_an_unreadable_request_is_written_again(world: World) -> None:
    world.store.put(world.keys.job("mnist", "request"), "garbage")
    world.says("scale", "mnist", "--replicas", "3", "--wait", "--timeout", "120")
    assert world.json("status", "mnist")["requested"] == 3


@pytest.mark.etcd
def test_stop_waits_for_the_end_and_says_when_it_is_over_already(world: World) -> None:
    world.says("stop", "mnist", "--wait", "--timeout", "120")
    assert world.json("ls") == []
    assert world.json("ls", "--all")[0]["state"] == "stopped"
    for late in (("stop", "mnist"), ("scale", "mnist", "--replicas", "2"), ("scale", "mnist", "--auto")):
        again = world.run(*late)
        assert again.exit_code == 1
        assert "already ended: stopped" in again.output


@pytest.mark.etcd
def test_stop_waits_for_this_run_whatever_the_status_of_an_earlier_one_says(
    etcd: EtcdServer, keys: Keys
) -> None:
    where = ["--etcd", etcd.endpoint, "--cluster", keys.cluster]
    with connect(etcd.endpoint) as store:  # no coordinator has looked at the new run yet
        submit(store, keys, replace(spec_of("a"), run="new"))
        store.put(keys.node("n0", "a"), encode(NodeRecord("n0", "a", "new", "x", "127.0.0.1", 1)))
        earlier = JobStatus("a", "old", JobState.STOPPED)
        store.put(keys.job("a", "status"), encode(earlier))
        result = CliRunner().invoke(adaptdl, ["stop", "a", "--wait", "--timeout", "0.2", *where])
        assert result.exit_code == 1, result.output
        assert "has not stopped after 0.2 s" in result.output
        view = read(store, keys)
    assert not has_stopped(view, "a", "new")
    assert has_stopped(view, "a", "old"), "there is a later run: this one is over"
    assert has_stopped(view, "b", "new")


@pytest.mark.etcd
@pytest.mark.parametrize("command", [("checkpoint", "mnist"), ("scale", "mnist", "--replicas", "3")])
def test_waiting_for_a_job_ends_with_the_job(world: World, command: tuple[str, ...]) -> None:
    world.agent.stop()  # nothing that is asked for happens
    key = world.keys.job("mnist", "request")
    asked = world.store.range(key).revision
    results: list[Result] = []
    waiting = threading.Thread(target=lambda: results.append(world.run(*command, "--wait")))
    waiting.start()
    with world.store.watch(key, asked + 1) as watch:
        next(iter(watch))
    world.coordinator.stop()
    status = records.decode(JobStatus, world.value("status"))
    ended = replace(status, state=JobState.FAILED, reason="the script failed")
    world.store.put(world.keys.job("mnist", "status"), encode(ended))
    waiting.join(120)
    assert results[0].exit_code == 1
    assert "mnist has ended meanwhile: the script failed" in results[0].output


@pytest.mark.etcd
def test_checkpoint_waits_for_a_newer_one(world: World) -> None:
    key = world.keys.job("mnist", "checkpoint")
    world.store.put(key, records.encode(CheckpointRecord("old", "/x")))

    def save() -> None:
        request = world.keys.job("mnist", "request")
        with world.store.watch(request) as watch:
            for change in watch:
                if change.value and json.loads(change.value)["checkpoint"] == 1:
                    world.store.put(key, records.encode(CheckpointRecord("new", "/x")))
                    return

    thread = threading.Thread(target=save, daemon=True)
    thread.start()
    while thread.is_alive():  # the watch may begin after the first request: ask again
        result = world.run("checkpoint", "mnist", "--wait", "--timeout", "1")
        thread.join(0.01 if result.exit_code else 60)
        if result.exit_code:
            again = world.value("request").replace('"checkpoint":1', '"checkpoint":0')
            world.store.put(world.keys.job("mnist", "request"), again)
    assert world.json("status", "mnist")["checkpoint"] == "new"


@pytest.mark.etcd
def test_drain_moves_everything_away_and_can_be_taken_back(world: World) -> None:
    other = FakeAgent(world.client(), world.keys, "n1", "mnist", 4, clock=time.time).register().follow()
    world.stack.callback(other.stop)
    world.says("drain", "n0", "--wait", "--timeout", "120")
    assert set(world.json("ls")[0]["placements"]) == {"n1"}
    states = {row["node"]: row["state"] for row in world.json("nodes")}
    assert (states["n0"][:14], states["n1"]) == ("drained since ", "ok")
    world.says("drain", "n0", "--cancel")
    assert "not being drained" in world.run("drain", "n0", "--cancel").output


@pytest.mark.etcd
def test_explain_and_events(world: World) -> None:
    found = world.json("explain", "mnist")
    assert found["replicas"] == 2
    assert found["one_more"]["replicas"] == 3
    assert "one more" in world.says("explain", "mnist")
    names = {json.loads(line)["event"] for line in world.says("events", "--json").splitlines()}
    assert {"leader", "plan", "state"} <= names
    assert "plan" in world.says("events")
    for number, garbage in enumerate(
        ("[1]", '{"time": "now", "event": ["x"]}', '{"time": 1e300}', "no JSON")
    ):
        world.store.put(f"{world.keys.events}9999999999999-{number}", garbage)
    assert len(world.says("events", "--tail", "4").splitlines()) == 2


@pytest.mark.etcd
def test_explain_goes_by_what_the_leader_decides_by(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    explain = why.explain
    monkeypatch.setattr(why, "explain", lambda *given: (asked.append(given[3]), explain(*given))[1])
    world.says("explain", "mnist")
    assert asked == [CoordinatorSettings(interval=0.5, min_gap=0.0)]


@pytest.mark.parametrize(
    "told",
    ["garbage", '{"v":1,"id":"a","settings":{"interval":"x"}}', '{"v":1,"id":"a","settings":[1]}', None],
)
def test_a_leader_that_does_not_say_what_it_decides_by(told: str | None) -> None:
    store, keys = MemoryStore(), Keys("c")
    if told is not None:
        store.put(keys.coordinator_leader, told)
    assert leaders_settings(read(store, keys)) == CoordinatorSettings()


def test_the_policys_settings_are_told_whole() -> None:
    store, keys = MemoryStore(), Keys("c")
    settings = CoordinatorSettings(policy=PolicySettings(objective=Objective.SPEEDUP, fairness=-1.0))
    store.put(keys.coordinator_leader, encode(LeaderRecord("a", settings=asdict(settings))))
    assert leaders_settings(read(store, keys)) == settings


@pytest.mark.etcd
def test_mistakes_are_one_clear_line(etcd: EtcdServer, keys: Keys) -> None:
    where = ["--etcd", etcd.endpoint, "--cluster", keys.cluster]
    with connect(etcd.endpoint) as store:
        submit(store, keys, spec_of("mnist"))
        store.put(keys.coordinator_leader, encode(LeaderRecord("a")))
        FakeAgent(store, keys, "n0", "mnist", 4, clock=time.time).register()
        for arguments, message in (
            (("status", "nope"), "no job 'nope' in cluster"),
            (("explain", "nope"), "; its jobs are: mnist"),
            (("stop", "no pe"), "no job 'no pe'"),
            (("scale", "mnist", "--replicas", "65"), "was started for 1 to 64 replicas, not 65"),
            (("drain", "n9"), "there is no node 'n9' in cluster"),
            (("drain", "n9"), "; its nodes are: n0"),
        ):
            result = CliRunner().invoke(adaptdl, [*arguments, *where])
            assert (result.exit_code, message in result.output) == (1, True), result.output
            assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("scale", "a"), 2, "adaptdl scale: give either --replicas N or --auto; see adaptdl scale --help"),
        (("scale", "a", "--auto", "--wait"), 2, "--wait is for --replicas N"),
        (("scale", "a", "--replicas", "0"), 2, "--replicas 0 is less than 1; adaptdl stop a saves"),
        (("statsu",), 2, "adaptdl: there is no command 'statsu' (did you mean status?); see adaptdl --help"),
        (("xyz",), 2, "adaptdl: there is no command 'xyz'; see adaptdl --help"),
        (("ls", "--al"), 2, "adaptdl ls: No such option"),
        (("drain", "a/b"), 2, "cannot be used"),
        (("ls", "--etcd", "127.0.0.1:1"), 1, "cannot be reached"),
        (("ls", "--etcd", "http://x:y:z"), 1, "write HOST:PORT"),
        (("ls", "--etcd-api", "v9"), 2, "'v9' is not one of"),
        (("coordinator", "--interval", "-1"), 2, "not in the range"),
    ],
)
def test_mistakes_without_a_store(
    arguments: tuple[str, ...],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["adaptdl", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert (ended.value.code, message in said) == (code, True), said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("coordinator", "--fairness", "-1"), "--fairness is for --objective speedup"),
        (("coordinator", "--fairness", "-1", "--objective", "completion"), "--fairness is for --objective"),
        (("scale", "a", "--auto", "--timeout", "1"), "--timeout is for --replicas N"),
        (("scale", "a", "--replicas", "2", "--timeout", "1"), "--timeout says how long --wait waits"),
        (("stop", "a", "--timeout", "1"), "--timeout says how long --wait waits"),
        (("checkpoint", "a", "--timeout", "1"), "--timeout says how long --wait waits"),
        (("drain", "a", "--timeout", "1"), "--timeout says how long --wait waits"),
        (("drain", "a", "--cancel", "--wait"), "--wait has no meaning with --cancel"),
        (("drain", "a", "--cancel", "--deadline", "1"), "--deadline has no meaning with --cancel"),
        (("doctor", "--region", "mars"), "--region is for --aws"),
    ],
)
def test_an_option_that_would_be_lost_is_refused(
    arguments: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Where, "locate", None)  # nobody gets there
    result = CliRunner().invoke(adaptdl, arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.output.splitlines()
    assert why in line


def test_help_has_each_command_under_one_heading_and_fits_a_screen() -> None:
    grouped = [name for names in HEADINGS.values() for name in names.split()]
    assert sorted(grouped) == sorted(COMMANDS.names())
    lines = CliRunner().invoke(adaptdl, ["--help"], terminal_width=80).output.splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 80
    for heading in HEADINGS:
        assert f"{heading}:" in lines
    for name in grouped:
        assert sum(line.split()[:1] == [name] for line in lines) == 1, name


def test_an_option_of_the_store_may_stand_before_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTDL_ETCD", "127.0.0.1:2")
    before = CliRunner().invoke(adaptdl, ["--etcd", "127.0.0.1:1", "ls"])
    assert (before.exit_code, "127.0.0.1:1" in before.output) == (1, True)
    named = CliRunner().invoke(adaptdl, ["--cluster", "far", "cluster", "status"])
    assert "this machine knows no cluster 'far'" in named.output
    both = CliRunner().invoke(adaptdl, ["--etcd", "127.0.0.1:1", "ls", "--etcd", "127.0.0.1:3"])
    assert "127.0.0.1:3" in both.output
    useless = CliRunner().invoke(adaptdl, ["--etcd", "127.0.0.1:1", "report", "x"])
    assert (useless.exit_code, "No such option" in useless.output) == (2, True)
    # the option of this name is the path of a program
    other = CliRunner().invoke(adaptdl, ["--etcd", "127.0.0.1:1", "cluster", "up", "n1"])
    assert (other.exit_code, "No such option" in other.output) == (2, True)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("ADAPTDL_ETCD", "ADAPTDL_CLUSTER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("command", ["ls", "queue", "history"])
def test_where_nothing_runs_a_list_is_empty(command: str) -> None:
    listed = CliRunner().invoke(adaptdl, [command])
    assert listed.exit_code == 0
    (line,) = listed.output.splitlines()
    assert line.startswith("no standalone job runs on this machine")
    assert "start a job with adaptdl-run SCRIPT" in line
    assert "give --etcd HOST:PORT" in line
    assert CliRunner().invoke(adaptdl, [command, "--json"]).output == "[]\n"


@pytest.mark.usefixtures("nothing_runs")
def test_one_machine_needs_no_etcd() -> None:
    done = CliRunner().invoke(adaptdl, ["doctor"], standalone_mode=False)
    assert "ok    store: none was given: jobs of one machine need no etcd" in done.output
    assert "FAIL" not in done.output
    assert "address" not in done.output, "no other node is to reach this one"
    assert done.return_value == 0
    several = CliRunner().invoke(adaptdl, ["doctor", "--local-addr", "127.0.0.1"], standalone_mode=False)
    assert "address: 127.0.0.1" in several.output


@pytest.mark.processes
@pytest.mark.parametrize("module", ["adaptdl_elastic.agent", "adaptdl_elastic.autoscaler"])
def test_the_version_is_that_of_the_package(module: str) -> None:
    command = [sys.executable, "-m", module, "--version"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == f"adaptdl-elastic {__version__}\n"


@pytest.mark.processes
def test_the_package_itself_says_which_commands_there_are() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "adaptdl_elastic"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, *commands = done.stdout.splitlines()
    assert first.startswith(f"adaptdl-elastic {__version__} ")
    assert [line.split()[0] for line in commands] == ["adaptdl-run", "adaptdl"]
    assert "adaptdl_elastic" in done.stderr
    assert not re.search(r"\| +(torch|adaptdl_elastic\.(agent|autoscaler))$", done.stderr, re.MULTILINE)


def test_help_says_what_every_option_is_for_and_where_the_store_is_last() -> None:
    for name in adaptdl.list_commands(click.Context(adaptdl)):
        command = adaptdl.get_command(click.Context(adaptdl), name)
        assert command is not None
        options = [p for p in command.params if isinstance(p, click.Option)]
        assert all(option.help for option in options), name
        names = [option.opts[0] for option in options]
        if "--etcd" in names:
            last = ["--etcd", "--etcd-ca", "--etcd-cert", "--etcd-key", "--etcd-user", "--cluster"]
            assert names[-7:] == [*last, "--etcd-api"], name
            text = CliRunner().invoke(adaptdl, [name, "--help"]).output
            assert "ADAPTDL_ETCD]" in text, name
            assert "ADAPTDL_CLUSTER]" in text, name


def test_events_of_another_day_have_their_date() -> None:
    now = time.time()
    assert len(clock(now)) == len("00:00:00")
    assert clock(now - 3 * 86400) == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now - 3 * 86400))


@pytest.mark.etcd
def test_a_cluster_in_which_nothing_was_ever_done(etcd: EtcdServer, keys: Keys) -> None:
    where = ["--etcd", etcd.endpoint, "--cluster", keys.cluster]
    for arguments, said in (
        (["events"], "no events yet\n"),
        (["events", "--json"], ""),
        (["nodes"], "no node is registered\n"),
        (["status", "a"], f"adaptdl: there is no job 'a' in cluster '{keys.cluster}', and no other\n"),
        (["drain", "a"], f"adaptdl: there is no node 'a' in cluster '{keys.cluster}', and no other\n"),
    ):
        assert CliRunner().invoke(adaptdl, [*arguments, *where]).output == said


@pytest.mark.processes
def test_help_needs_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "sys.argv = ['adaptdl', '--help']\n"
        "from adaptdl_elastic.autoscaler.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'scipy', 'boto3', 'rich', 'pydantic', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "coordinator" in result.stdout


def test_a_standalone_job_is_found_by_its_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    import os

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("ADAPTDL_ETCD", raising=False)
    with pytest.raises(CommandError, match="give --etcd HOST:PORT or set ADAPTDL_ETCD"):
        Where().locate()
    runtime_file.write(RuntimeFile("127.0.0.1:4711", "solo", "mnist", os.getpid()))
    assert Where().locate("mnist") == Place("127.0.0.1:4711", "solo", "mnist")
    assert Where().locate() == Place("127.0.0.1:4711", "solo", "mnist")
    with pytest.raises(CommandError, match="those that do: mnist"):
        Where().locate("cifar")
    monkeypatch.setenv("ADAPTDL_ETCD", "etcd0:2379")
    assert Where().locate("mnist") == Place("etcd0:2379", "default")
    assert Where(etcd="other:1", cluster="c").locate("mnist") == Place("other:1", "c")
