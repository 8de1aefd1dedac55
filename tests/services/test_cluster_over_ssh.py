"""`adaptdl cluster up`, `submit`, `logs` and `cancel` on nodes that are reached by a real ssh."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from etcd_server import find_etcd
from package_index import stub_wheel
from ports import free_port
from ssh_nodes import NoSshError, SshNodes

from adaptdl_elastic import _program
from adaptdl_elastic.autoscaler.cli import adaptdl
from adaptdl_elastic.autoscaler.provisioning import nodes
from adaptdl_elastic.autoscaler.provisioning.nodes import NodeFacts, NodeReport
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError, Ssh
from adaptdl_elastic.rendezvous.services.service_config import ServiceDirectory
from adaptdl_elastic.rendezvous.store.base import StoreAuthError
from adaptdl_elastic.rendezvous.store.connect import connect
from adaptdl_elastic.rendezvous.store.store_options import StoreOptions

pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.slow, pytest.mark.timeout(600)]

FILES = _program.files
TRAIN = Path(__file__).parents[1] / "agent" / "scripts" / "train.py"
PATIENCE = 200.0  # seconds that a slow and busy machine may need for anything


class Lab:
    """The cluster `lab` of the nodes node1 and node2, and the commands of its user."""

    def __init__(self, nodes: SshNodes, folder: Path) -> None:
        self.nodes, self.work = nodes, folder / "work"
        self.work.mkdir()
        shutil.copy(TRAIN, self.work)
        self.etcd_port = free_port()

    def run(self, *arguments: str, code: int = 0, env: Mapping[str, str] | None = None) -> str:
        """Run `adaptdl` in the working directory, and return what it said."""
        done = CliRunner().invoke(adaptdl, arguments, prog_name="adaptdl", env=env)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == code, done.output + self.logs()
        return done.output

    def up(self, *nodes: str, code: int = 0, python: str = sys.executable) -> str:
        """Run `adaptdl cluster up` with this test's ssh, interpreter and etcd."""
        options = ["--cluster", "lab", "-F", str(self.nodes.config), "--python", python]
        options += ["--etcd", str(find_etcd()), "--etcd-port", str(self.etcd_port), "--person", "eve"]
        return self.run("cluster", "up", *nodes, *options, code=code)

    def directory(self, node: str) -> ServiceDirectory:
        return ServiceDirectory(self.nodes.home(node) / ".local" / "share" / "adaptdl" / "lab")

    def service(self, node: str) -> int:
        """The process of a node's service."""
        return int(json.loads((self.directory(node).state / "service.json").read_text())["pid"])

    def agents(self, job: str) -> dict[str, int]:
        """The processes of a job's agents, by node."""
        pids = dict[str, int]()
        for node in self.nodes.names:
            with contextlib.suppress(FileNotFoundError):  # the note goes with the agent
                note = (self.directory(node).state / "agents" / f"{job}.json").read_text()
                pids[node] = int(json.loads(note)["pid"])
        return {node: pid for node, pid in pids.items() if psutil.pid_exists(pid)}

    def output(self, node: str, job: str) -> str:
        path = self.directory(node).log(job)
        return path.read_text() if path.exists() else ""

    def states(self) -> list[tuple[str, str, str]]:
        """What `cluster status` says of each node: its name, its state, its problem."""
        rows = json.loads(self.run("cluster", "status", "--json"))["nodes"]
        return [(row["node"], row["state"], row["problem"]) for row in rows]

    def job(self, name: str) -> dict[str, object]:
        (row,) = (row for row in json.loads(self.run("ls", "--all", "--json")) if row["job"] == name)
        return row

    def wait_for(self, what: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not what():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """Processes that belong to this cluster's nodes, by their home directory."""
        found = []
        for process in psutil.process_iter():
            try:
                home = process.environ().get("HOME", "")
            except psutil.Error:
                continue
            if home.startswith(str(self.nodes.folder)):
                found.append(process)
        return found

    def of(self, what: Callable[[psutil.Process], object]) -> list[psutil.Process]:
        """Those of `processes` that are so; some, which check a signature, end while they are looked at."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if what(process):
                    found.append(process)
        return found

    def kill(self) -> None:
        """Kill what a test that has failed leaves behind."""
        while left := self.processes():  # a keeper may just have started another service
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(left, PATIENCE)

    def logs(self) -> str:
        files = sorted(self.nodes.folder.glob("*/home/.local/share/adaptdl/lab/**/*.log"))
        return "".join(f"--- {file}\n{file.read_text(errors='replace')[-3000:]}" for file in files)


def _forks_agents(process: psutil.Process, node: str, lab: Lab) -> bool:
    """Return whether a process is the one that forks the agents of a node."""
    home = process.environ().get("HOME")
    return home == str(lab.nodes.home(node)) and any("fork_server" in one for one in process.cmdline())


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Lab]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    runtime = tmp_path / "runtime"  # other tests run standalone jobs on this machine
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    with ExitStack() as stack:
        try:
            names = getattr(request, "param", ("node1", "node2"))
            nodes = stack.enter_context(SshNodes(tmp_path / "nodes", *names))
        except NoSshError as error:
            pytest.skip(str(error))
        made = Lab(nodes, tmp_path)
        monkeypatch.chdir(made.work)
        stack.callback(made.kill)
        stack.callback(_program.version.cache_clear)
        yield made


def test_three_commands_from_machines_to_a_watched_job(lab: Lab) -> None:
    refused = lab.up("node1", "node9", code=1)
    assert refused.count("\n") == 1
    assert "node9: ssh cannot log in" in refused
    assert "cluster lab is not up yet" in lab.run("cluster", "status", code=1)
    lab.wait_for(lambda: lab.processes() == [])  # nothing was started; what ssh has asked there ends
    assert lab.directory("node1").path.exists()
    assert lab.run("cluster", "down", "--purge") == "cluster lab is down, and nothing of it is left\n"
    assert not lab.directory("node1").path.exists()
    assert "node2: started" in lab.up("node1", "node2")
    again = lab.up()
    assert "node1: unchanged at 127.0.0.1, etcd, 1 slot" in again
    assert "node2: unchanged" in again
    (etcd,) = lab.of(lambda process: process.name() == "etcd")
    listening = [one.laddr.port for one in etcd.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert listening == [lab.etcd_port]  # none for other members, who would be asked for no password

    dry = lab.run("submit", "--dry-run", "--replicas", "3", "train.py")
    assert "train would wait: needs 3 slots, the cluster has 2" in dry
    array = lab.run("submit", "--dry-run", "--array", "lr=1,2", "--replicas", "2", "train.py", "{lr}")
    assert "train-lr-1 would begin now" in array
    assert "train-lr-2 would wait: needs 2 slots, jobs before it need 2 of 2" in array
    secret = "not-in-the-store"
    options = ["--replicas", "1:2", "--env", f"TOKEN={secret}"]
    submitted = lab.run("submit", *options, "train.py", "60", "0.05")
    assert submitted.startswith("submitted train (1 file")
    after = lab.run("submit", "--name", "then", "--after", "train", "train.py", "1", "0")
    assert "it waits: waits for train" in after
    assert (lab.job("then")["state"], lab.job("then")["reason"]) == ("queued", "waits for train")
    lab.wait_for(lambda: any("epoch 0" in lab.output(node, "train") for node in ("node1", "node2")))

    typed = {"COMP_WORDS": "adaptdl logs t", "COMP_CWORD": "2"}
    completed = lab.run(env={"_ADAPTDL_COMPLETE": "bash_complete", **typed})
    assert completed.split() == ["plain,train", "plain,then"]
    assert "then is cancelled" in lab.run("cancel", "then")
    assert (lab.job("then")["state"], lab.job("then")["reason"]) == ("cancelled", "by eve")
    assert "there is a job then already" in lab.run("submit", "--name", "then", "train.py", code=1)

    # a service that is killed comes back, and finds its agent
    before = lab.service("node1")
    agents = lab.agents("train")
    assert agents
    os.kill(before, signal.SIGKILL)
    lab.wait_for(lambda: lab.service("node1") != before)
    assert agents.items() & lab.agents("train").items()  # the job may have left a node meanwhile
    assert "train is running: only a job that was stopped" in lab.run("resume", "train", code=1)
    lab.run("stop", "train", "--wait")
    assert lab.job("train")["state"] == "stopped"
    assert "train is resumed" in lab.run("resume", "train")
    lab.wait_for(lambda: lab.job("train")["state"] == "running")
    for node in ("node1", "node2"):
        lab.wait_for(lambda node=node: lab.directory(node).work("train").is_dir())
        (lab.directory(node).work("train") / "hurry").touch()
    followed = lab.run("logs", "-f", "train")
    assert "[rank0]: epoch 59 had 200" in followed
    assert followed.count("[rank0]: epoch 0 had") == 1  # it went on where it was stopped
    assert "rank1" not in lab.run("logs", "--rank", "0", "train")
    assert lab.job("train")["state"] == "done"
    assert lab.job("train")["owner"] == "eve"
    options = StoreOptions.from_environment(lab.directory("node1").store_environment())
    with connect(f"https://127.0.0.1:{lab.etcd_port}", api="v3", options=options) as store:
        values = [item.value for item in store.range("/adaptdl/v1/lab/").items]
    assert values
    assert not any(secret in value for value in values)
    # a service that comes back starts none of the jobs that have ended
    before = lab.service("node2")
    os.kill(before, signal.SIGKILL)
    lab.wait_for(lambda: lab.service("node2") != before)
    well = [("node1", "up", ""), ("node2", "up", "")]
    lab.wait_for(lambda: lab.states() == well)

    # a job on two nodes that is cancelled moves to neither of them, and every command says that it is
    lab.run("submit", "--name", "two", "--replicas", "2", "train.py", "60", "0.05")
    lab.wait_for(lambda: "[rank1]: epoch" in "".join(lab.output(node, "two") for node in ("node1", "node2")))
    lab.wait_for(lambda: lab.job("two")["state"] == "running")
    generation = int(str(lab.job("two")["generation"]))
    assert "two is cancelled" in lab.run("cancel", "two")
    lab.wait_for(lambda: lab.job("two")["state"] == "cancelled")
    assert lab.job("two")["generation"] == generation + 1
    shown = lab.run("status", "two")
    assert re.search(r"^job +two   cancelled ", shown, re.MULTILINE)
    assert re.search(r"^ran on +node1, node2$", shown, re.MULTILINE)

    # another person sees the cluster, and etcd knows a person who was revoked no more
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", "alice"], check=True)
    assert "alice may use" in lab.run("cluster", "grant", "alice", "alice.pub", "--archive", "alice.tar")
    hers = {"XDG_CONFIG_HOME": str(lab.work / "hers")}
    (lab.work / "hers" / "adaptdl").mkdir(parents=True)
    subprocess.run(["tar", "-xf", "alice.tar", "-C", lab.work / "hers" / "adaptdl"], check=True)
    shutil.copy("alice", lab.work / "hers" / "adaptdl" / "lab" / "identity")
    assert "train" in lab.run("ls", "--all", env=hers)
    for command in ("logs", "stop", "checkpoint"):
        assert "job train belongs to eve" in lab.run(command, "train", env=hers, code=1)
    assert "ask an administrator of cluster lab" in lab.run("drain", "node2", env=hers, code=1)

    (lab.work / ".gitignore").write_text("hers\nalice*\n")
    # what she has running saves and ends, what waits does not begin, and neither is a problem later
    lab.run("submit", "--name", "hers", "train.py", "600", "0.05", env=hers)
    lab.wait_for(lambda: "epoch 0 had" in lab.run("logs", "hers"))
    lab.run("submit", "--name", "later", "--replicas", "2", "train.py", "1", "0", env=hers)
    said = lab.run("cluster", "revoke", "alice")
    assert "hers of alice is cancelled" in said
    assert "later of alice is cancelled" in said
    assert "alice may not use" in said
    with pytest.raises(
        StoreAuthError, match="alice may not use cluster lab any more, or has a newer archive"
    ):
        lab.run("cluster", "status", env=hers)
    lab.wait_for(lambda: not lab.agents("hers"))
    assert (lab.job("hers")["state"], lab.job("later")["state"]) == ("cancelled", "cancelled")
    assert re.search(r"^checkpoint +\d+-g", lab.run("status", "hers"), re.MULTILINE)
    lab.wait_for(lambda: [problem for _, _, problem in lab.states()] == ["", ""])
    assert "train" in lab.run("ls", "--all")

    assert "nothing of it is left" in lab.run("cluster", "down", "--purge")
    assert lab.processes() == []
    assert not lab.directory("node1").path.exists()
    assert "knows no cluster" in lab.run("cluster", "status", code=1)


@pytest.mark.parametrize("lab", [("node1", "node2", "node3")], indirect=True)
def test_a_node_that_cannot_be_reached_hinders_no_change_of_the_others(lab: Lab) -> None:
    lab.up("node1", "node2")
    lab.nodes.stop("node2")
    (etcd,) = lab.of(lambda process: process.name() == "etcd")
    etcd.suspend()
    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(lab.run, "cluster", "add", "node3")
        try:
            # the service runs; it is not said to have started before the store lists it
            lab.wait_for(
                lambda: adding.done() or lab.of(lambda process: _forks_agents(process, "node3", lab))
            )
            assert not adding.done()
            assert not (lab.directory("node3").state / "service.json").exists()
        finally:
            etcd.resume()
        added = adding.result(PATIENCE)
    assert "node2: ssh cannot log in" in added
    assert "until then it is left as it is" in added
    assert "node1: unchanged" in added
    assert "node3: started" in added
    assert (lab.directory("node3").state / "jobs.json").read_text() == "{}"  # what the others remember
    assert lab.states()[2][:2] == ("node3", "up")
    # the service of node2 goes on; leases may have ended while etcd was stopped
    lab.wait_for(lambda: [state for _, state, _ in lab.states()] == ["up", "up", "up"])
    for refused in (lab.run("cluster", "remove", "node2", code=1), lab.up(code=1)):
        assert refused.count("\n") == 1
        assert "adaptdl cluster remove --lost node2" in refused
    said = lab.run("cluster", "remove", "--lost", "node2")
    assert "node2 is not in cluster lab any more; it cannot be reached, and keeps what it has" in said
    assert "adaptdl cluster status" in lab.run("nodes")  # no job has begun
    assert "node3 is being drained" in lab.run("drain", "node3")
    assert "node3 may be used again" in lab.run("drain", "node3", "--cancel")
    assert "node3: unchanged" in lab.up()
    lab.nodes.start("node2")
    assert "node2: unchanged" in lab.up("node2")
    # a node that is removed keeps nothing but what jobs wrote, until the cluster is purged
    lab.directory("node2").checkpoints("job").mkdir(parents=True)
    removed = lab.run("cluster", "remove", "node2", "node3")
    kept = lab.directory("node2").path
    assert f"node2 is not in cluster lab any more; what jobs wrote stays in {kept} (" in removed
    assert "adaptdl cluster remove --purge node2 deletes it" in removed
    assert {path.name for path in kept.iterdir()} == {"checkpoints", "cluster-id"}
    assert "node3 is not in cluster lab any more\n" in removed
    assert not lab.directory("node3").path.exists()
    # without the first node
    etcd.suspend()
    try:
        assert "it runs on node1, the first node of cluster lab" in lab.run("ls", code=1)
    finally:
        etcd.resume()
    lab.nodes.stop("node1")
    assert "adaptdl cluster down --lost" in lab.run("cluster", "down", "--purge", code=1)
    assert not kept.exists()
    assert "down but on node1, which cannot be reached" in lab.run("cluster", "down", "--lost")
    lab.nodes.start("node1")
    assert lab.run("cluster", "down", "--purge") == "cluster lab is down, and nothing of it is left\n"
    assert lab.processes() == []


def test_a_node_lost_with_its_disk_costs_no_step_of_a_checkpoint(lab: Lab) -> None:
    lab.up("node1", "node2")
    lab.run("submit", "--name", "job", "train.py", "60", "0.05")
    lab.wait_for(lambda: any("epoch 1" in lab.output(node, "job") for node in ("node1", "node2")))
    lost, other = ("node1", "node2") if lab.output("node1", "job") else ("node2", "node1")
    lab.run("checkpoint", "job", "--wait")
    copies = lab.directory(other).checkpoints("job")
    lab.wait_for(lambda: list(copies.glob("[0-9]*/manifest.json")))
    lab.wait_for(lambda: lab.directory(other).work("job").is_dir())
    (lab.directory(other).work("job") / "hurry").touch()
    kept = lab.directory(other).log("job", of=lost)
    lab.wait_for(lambda: kept.exists() and "epoch 1" in kept.read_text())
    for process in lab.processes():  # the keeper of the service among them; etcd is the cluster's
        with contextlib.suppress(psutil.Error):
            if process.environ()["HOME"] == str(lab.nodes.home(lost)) and process.name() != "etcd":
                process.kill()
    shutil.rmtree(lab.directory(lost).path / "checkpoints")
    assert f"{lost} has gone; what {other} has of its output: --all" in lab.run("logs", "-f", "job")
    assert lab.job("job")["state"] == "done"
    whole = lab.run("logs", "--all", "--timestamps", "job")
    time_of = r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    for node, line in ((lost, "epoch 1 had"), (other, "epoch 59 had")):
        assert re.search(rf"{time_of} \[{node}\] \[rank0\]: {line}", whole, re.MULTILINE)
    assert "epoch" not in lab.run("logs", "--all", "--since", "2100-01-01T00:00Z", "job")
    first = re.search(r"epoch (\d+) had", lab.output(other, "job"))
    assert first is not None
    assert int(first[1]) >= 1
    (down,) = (
        row for row in json.loads(lab.run("cluster", "status", "--json"))["nodes"] if row["node"] == lost
    )
    assert (down["state"], "no service is registered" in down["problem"]) == ("down", True)
    assert f"{lost}: started" in lab.up()  # it comes back by the command that brought it up


def _another_build(lab: Lab, monkeypatch: pytest.MonkeyPatch, path: str, text: str) -> str:
    """Have the commands be of a build with another content of this file; return its version."""
    changed = lab.work / path.replace("/", "-")
    changed.write_text(text)
    files = {**FILES(), path: changed}
    monkeypatch.setattr(_program, "files", lambda: files)
    _program.version.cache_clear()
    return _program.version()


def test_a_job_from_before_two_upgrades_grows_and_survives_deaths_with_its_own_version(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.up("node1", "node2")
    lab.run("submit", "--name", "job", "--replicas", "1:2", "train.py", "600", "0.05")
    lab.wait_for(lambda: lab.job("job")["state"] == "running")
    lab.run("scale", "job", "--replicas", "1", "--wait")
    lab.wait_for(lambda: len(lab.agents("job")) == 1)
    before = _program.version()

    def versions() -> set[str]:
        return {str(one["version"]) for one in json.loads(lab.run("nodes", "--json"))}

    def trains(replicas: int) -> bool:
        job = lab.job("job")
        return (job["state"], job["replicas"]) == ("running", replicas)

    # the same version number, and a library that the running script cannot use; node2 does not get so far
    broken = "raise ImportError('a module of another version')"
    same_number = _another_build(lab, monkeypatch, "adaptdl_elastic/torch/__init__.py", broken)
    starts, service, agents = nodes.start_service, lab.service("node2"), lab.agents("job")

    def ends_before_the_second(ssh: Ssh, facts: NodeFacts, python: str, etcd: bool) -> NodeReport:
        if etcd:
            return starts(ssh, facts, python, etcd)
        raise ProvisionError(f"{facts.node}: ssh ended")

    with monkeypatch.context() as patch:
        patch.setattr(nodes, "start_service", ends_before_the_second)
        assert "node2: ssh ended" in lab.up(code=1)
    os.kill(service, signal.SIGKILL)  # what keeps it starts the version that it had
    lab.wait_for(lambda: lab.service("node2") != service)
    lab.wait_for(lambda: {row[1] for row in lab.states()} == {"up"})
    (problem,) = (problem for _, _, problem in lab.states() if problem)
    assert problem.endswith(": adaptdl cluster up")
    assert {before, same_number} == set(re.findall(r"\S+\+\w{8}", problem))
    assert trains(1)
    assert lab.agents("job") == agents
    mended = lab.up()
    assert ("node1: unchanged" in mended, "node2: started" in mended) == (True, True)
    assert lab.up().count(": unchanged at") == 2
    lab.run("scale", "job", "--replicas", "2", "--wait")  # on both nodes, of a slot each
    lab.wait_for(lambda: [row[1:] for row in lab.states()] == [("up", "")] * 2)
    assert versions() == {before}

    # another version number, after which a replica and a whole agent are killed
    text = FILES()["adaptdl_elastic/__init__.py"].read_text().replace(f'"{_program.__version__}"', '"9.9.9"')
    monkeypatch.setattr(_program, "__version__", "9.9.9")
    new = _another_build(lab, monkeypatch, "adaptdl_elastic/__init__.py", text)
    assert lab.up().count(": started at") == 2
    victim = next(iter(lab.agents("job").values()))
    generation = int(str(lab.job("job")["generation"]))
    # of the processes in the job's directory the fork server has children, and the agent is known
    work = psutil.Process(victim).cwd()
    inside = lab.of(lambda process: process.cwd() == work and process.ppid() != victim)
    (replica,) = (process for process in inside if process.pid != victim and not process.children())
    replica.kill()
    lab.wait_for(lambda: int(str(lab.job("job")["generation"])) > generation and trains(2))
    # the agent of a node that had no replica for a moment may have ended, and another one has followed
    node, victim = next(iter(lab.agents("job").items()))
    os.killpg(victim, signal.SIGKILL)
    lab.wait_for(lambda: lab.agents("job").get(node, victim) != victim and trains(2))
    assert versions() == {before}
    assert lab.job("job")["restarts_used"] == 0
    of_agents = [one for pid in lab.agents("job").values() for one in psutil.Process(pid).children()]
    assert not [one for one in of_agents if "coordinator" in one.cmdline()], "those of the services decide"
    lab.run("stop", "job", "--wait")
    assert "job is resumed" in lab.run("resume", "job")
    lab.wait_for(lambda: lab.job("job")["state"] == "running")
    assert versions() == {new}


def test_jobs_of_a_cluster_one_after_another(lab: Lab, tmp_path: Path) -> None:
    """Each of the functions below says what a job does. Only bringing the cluster up takes much CPU time."""
    lab.up("node1", "node2")
    costs_processes_only_where_it_has_replicas(lab)
    fails_and_gives_its_slots_back_if_no_node_can_start_it(lab)
    goes_on_with_mended_code_under_its_name(lab)
    runs_where_its_owner_wants_it_with_the_packages_that_it_names(lab, tmp_path)
    assert "nothing of it is left" in lab.run("cluster", "down", "--purge")
    assert lab.processes() == []


def costs_processes_only_where_it_has_replicas(lab: Lab) -> None:
    lab.run("submit", "--name", "job", "--replicas", "1:2", "train.py", "600", "0.05")
    lab.wait_for(lambda: lab.agents("job"))
    lab.run("scale", "job", "--replicas", "2", "--wait")
    assert set(lab.agents("job")) == {"node1", "node2"}
    lab.run("scale", "job", "--replicas", "1", "--wait")
    lab.wait_for(lambda: len(lab.agents("job")) == 1)
    (node,) = lab.agents("job")
    other = {"node1": "node2", "node2": "node1"}[node]
    # the node that it has left takes another job, and both get it back in the end
    lab.run("submit", "--name", "guest", "train.py", "600", "0.05")
    lab.wait_for(lambda: lab.agents("guest"))
    assert set(lab.agents("guest")) == {other}
    assert f"{other} is being drained" in lab.run("drain", other)
    lab.wait_for(lambda: not lab.agents("guest"))
    lab.wait_for(lambda: lab.job("guest")["state"] == "pending")
    (problem,) = (problem for node, state, problem in lab.states() if (node, state) == (other, "drained"))
    assert re.match(rf"drained by eve since .*; adaptdl drain {other} --cancel", problem)
    why = str(lab.job("guest")["reason"])
    assert (f"{other} is drained by eve since " in why, "none is registered" in why) == (True, False)
    assert "drained by eve since " in lab.run("nodes")
    lab.run("drain", other, "--cancel")
    lab.wait_for(lambda: lab.agents("guest"))
    for job in ("job", "guest"):
        lab.run("cancel", job)
    lab.wait_for(lambda: not lab.agents("job") and not lab.agents("guest"))
    assert [lab.job(name)["state"] for name in ("job", "guest")] == ["cancelled", "cancelled"]


def fails_and_gives_its_slots_back_if_no_node_can_start_it(lab: Lab) -> None:
    for node in ("node1", "node2"):
        lab.directory(node).work("stuck").parent.mkdir(parents=True, exist_ok=True)
        lab.directory(node).work("stuck").touch()  # a file, where a folder is to be
    lab.run("submit", "--name", "stuck", "--replicas", "2", "train.py", "1", "0")
    lab.run("submit", "--name", "next", "--replicas", "2", "train.py", "1", "0")
    said = lab.run("wait", "stuck", code=1)
    assert "stuck is failed: node1: the working directory cannot be unpacked" in said
    assert "next is done" in lab.run("wait", "next")
    for node in ("node1", "node2"):
        lab.directory(node).work("stuck").unlink()
    assert "stuck is resumed" in lab.run("resume", "stuck")
    assert "stuck is done" in lab.run("wait", "stuck")


def goes_on_with_mended_code_under_its_name(lab: Lab) -> None:
    script = lab.work / "train.py"
    good = script.read_text()
    says = 'had {script_position().samples}", flush=True)\n'
    failing = good.replace(says, f"{says}    assert epoch < 20\n")
    # it does not come to its failure before it is told to hurry
    failing = failing.replace("epoch / 5", "epoch**3 / 20")
    assert failing.count("epoch**3") == failing.count("assert") == 1
    script.write_text(failing)

    def output() -> str:
        return lab.output("node1", "mended") + lab.output("node2", "mended")

    def runs_anew() -> list[str]:
        return re.findall(r"epoch 0 had", output())

    submitted = ("submit", "--name", "mended", "--retry", "0")
    lab.run(*submitted, "train.py", "60", "0.02")
    lab.wait_for(lambda: "epoch 1 had" in output())
    lab.run("checkpoint", "mended", "--wait")
    for node in ("node1", "node2"):  # it may go on at the other one
        lab.wait_for(lambda node=node: lab.directory(node).work("mended").is_dir())
        (lab.directory(node).work("mended") / "hurry").touch()
    assert "mended is failed: " in lab.run("wait", "mended", code=1)
    assert "AssertionError" in lab.run("logs", "-f", "mended", code=1)
    # the same code again fails again
    assert "mended is resumed" in lab.run("resume", "mended")
    assert "mended is failed: " in lab.run("wait", "mended", code=1)
    assert output().count("epoch 20 had") == 2
    assert len(runs_anew()) == 1
    # mended code goes on from the checkpoint
    script.write_text(good)
    assert "submitted mended" in lab.run(*submitted, "--replace", "train.py", "22", "0")
    assert "mended is done: " in lab.run("wait", "mended")
    assert "epoch 21 had" in lab.run("logs", "-f", "mended")
    # and so does a job that is done, with more epochs
    assert "submitted mended" in lab.run(*submitted, "--replace", "train.py", "24", "0")
    assert "mended is done: " in lab.run("wait", "mended")
    assert output().count("epoch 23 had") == 1
    assert (len(runs_anew()), output().count("epoch 21 had")) == (1, 1)
    # one that was cancelled in the queue has the name for another one, too
    lab.run("submit", "--name", "queued", "--replicas", "3", "train.py", "1", "0")
    lab.run("cancel", "queued")
    assert "queued is cancelled: by eve" in lab.run("wait", "queued", code=143)
    assert "submitted queued" in lab.run("submit", "--replace", "--name", "queued", "train.py", "1", "0")
    assert "queued is done: " in lab.run("wait", "queued")


def runs_where_its_owner_wants_it_with_the_packages_that_it_names(lab: Lab, tmp_path: Path) -> None:
    data = tmp_path / "data"
    thing = stub_wheel(tmp_path, "thing", "1", files={"thing.py": "NUMBER = 1\n"})
    shutil.copy(thing, lab.work)
    (lab.work / "requirements.txt").write_text(f"./{thing.name}\n")
    (lab.work / "show.py").write_text(
        "import os, time, thing\nwhile not os.path.exists('hurry'): time.sleep(0.1)\n"
        "open('out', 'w').write('done')\nprint('thing', thing.NUMBER)\n"
    )
    lab.run("submit", "--node", "node2", "--has", str(data), "show.py")
    waits = f"node1: --node node2; node2: there is no {data} (--has)"
    lab.wait_for(lambda: waits in str(lab.job("show")["reason"]))
    assert all(problem == "" for _, _, problem in lab.states())
    data.mkdir()
    lab.wait_for(lambda: lab.job("show")["state"] == "running")
    assert "not on node1: --node node2" in lab.run("explain", "show")
    (lab.directory("node2").work("show") / "hurry").touch()
    assert "[rank0]: thing 1" in lab.run("logs", "-f", "show")
    assert not lab.output("node1", "show")
    lab.run("cp", "show:out", str(tmp_path / "mine"))
    assert (tmp_path / "mine").read_text() == "done"
    (lab.work / "requirements.txt").write_text("./nothing.whl\n")
    lab.run("submit", "--name", "fails", "show.py")
    lab.wait_for(lambda: "its packages cannot be installed: " in str(lab.job("fails")["reason"]))
    lab.run("cancel", "fails")
