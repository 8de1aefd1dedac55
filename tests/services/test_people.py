"""`adaptdl cluster grant` and `revoke`, and the password that nodes share, without nodes and without etcd."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from adaptdl_elastic.autoscaler.cli import Where, adaptdl
from adaptdl_elastic.autoscaler.commands import cluster_setup
from adaptdl_elastic.autoscaler.provisioning import bring_up, store_users
from adaptdl_elastic.autoscaler.provisioning.credentials import Credentials
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError
from adaptdl_elastic.autoscaler.web.actions import Actions
from adaptdl_elastic.rendezvous.local import runtime_file
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import DrainRequest, encode
from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord
from adaptdl_elastic.rendezvous.services import context as contexts
from adaptdl_elastic.rendezvous.services.context import ClusterContext
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader
from adaptdl_elastic.rendezvous.store.memory import MemoryStore

pytestmark = pytest.mark.processes  # ssh-keygen


READ_ONLY = {
    *("ls", "queue", "history", "status", "logs", "wait", "explain", "events", "nodes", "doctor", "report"),
    *("cluster status", "web", "page output", "replay", "cp", "tensorboard"),
}
OF_ONE_S_OWN = {  # job, by `check_owner`; or account of AWS
    *("submit", "scale", "checkpoint", "stop", "resume", "cancel", "cloud pack", "cloud up", "cloud down"),
    *("page scale", "page stop", "page cancel", "page resume"),
}
OF_ADMINISTRATORS = (  # with arguments; `cluster` is for the one who brought it up
    *("drain node1", "drain node1 --cancel", "coordinator", "autoscale --asg workers --dry-run"),
    *("cluster up", "cluster up node3", "cluster add node3", "cluster remove node1", "cluster down"),
    *("cluster down --purge", "cluster grant alice KEY", "cluster revoke eve"),
)


class Lab:
    """The cluster `lab` of eve, whose nodes and etcd are played.

    Attributes:
        calls: What nodes and etcd were asked for, in order.
        nodes_are_down: Whether the nodes cannot be reached.
    """

    def __init__(self, context: ClusterContext, key: Path) -> None:
        self.context, self.key = context, key
        self.credentials = Credentials(context)
        self.calls: list[str] = []
        self.nodes_are_down = False

    def send_people(self, context: ClusterContext) -> None:
        self.calls.append(f"nodes: {', '.join(self.credentials.people())}")
        if self.nodes_are_down:
            raise ProvisionError("node2: ssh cannot log in")

    def remove_user(self, context: ClusterContext, person: str) -> None:
        self.calls.append(f"etcd: no {person}")

    def add_user(self, context: ClusterContext, person: str) -> str:
        self.calls.append(f"etcd: {person}")
        return "password"

    def run(self, *arguments: str) -> Result:
        self.calls.clear()
        return CliRunner().invoke(adaptdl, ["cluster", *arguments], prog_name="adaptdl")

    def grant(self, person: str, *options: str) -> Result:
        return self.run("grant", person, str(self.key), *options)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(runtime_file, "read_all", list)  # a job of another test may still be ending
    context = ClusterContext("lab", "abc", "https://h:1", "eve", ("node1", "node2"))
    contexts.save(context)
    Credentials(context).prepare()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "alice"], check=True)
    made = Lab(context, tmp_path / "alice.pub")
    store, keys = MemoryStore(), Keys("lab")
    reader = SubmissionReader(store, keys, "abc")
    monkeypatch.setattr(cluster_setup, "open_cluster", lambda _: (reader, store, keys))
    monkeypatch.setattr(bring_up, "send_people", made.send_people)
    monkeypatch.setattr(store_users, "remove", made.remove_user)
    monkeypatch.setattr(store_users, "add", made.add_user)
    return made


def test_a_revoke_that_did_not_reach_every_node_may_be_repeated(lab: Lab) -> None:
    assert lab.grant("alice").exit_code == 0
    lab.nodes_are_down = True
    failed = lab.run("revoke", "alice")
    assert failed.exit_code == 1
    assert failed.output.startswith("adaptdl: node2: ssh cannot log in (https://")
    assert lab.calls == ["etcd: no alice", "nodes: eve"], "the store lets her in no more"
    lab.nodes_are_down = False
    again = lab.run("revoke", "alice")
    assert lab.calls == ["etcd: no alice", "nodes: eve"]
    assert again.output == "adaptdl: alice has no right to use cluster lab; every node knows that\n"
    assert again.exit_code == 1


def test_how_much_priority_and_weight_a_person_may_give(lab: Lab) -> None:
    assert lab.grant("alice").exit_code == 0
    assert lab.grant("bob", "--admin").exit_code == 0
    assert lab.grant("carol", "--most-priority", "-5", "--most-weight", "2.5").exit_code == 0
    people = lab.credentials.people()
    limits = {name: (person.priority_limit, person.weight_limit) for name, person in people.items()}
    assert limits == {"eve": (1000, 1e6), "alice": (0, 1.0), "bob": (1000, 1e6), "carol": (-5, 2.5)}
    assert lab.grant("alice", "--most-weight", "nan").exit_code == 2
    assert lab.grant("alice", "--most-priority", "30").exit_code == 0
    assert lab.credentials.people()["alice"].priority_limit == 30
    assert lab.grant("alice", "--most-priority", "1001").exit_code == 2


def test_an_archive_that_cannot_be_written_lets_no_person_in(lab: Lab, tmp_path: Path) -> None:
    for place in (tmp_path / "none" / "a.tar", lab.key / "a.tar"):
        refused = lab.grant("alice", "--archive", str(place))
        assert refused.exit_code == 2
        assert refused.output.count("\n") == 1
        assert f"--archive {place}: " in refused.output
        assert "a directory where you may write" in refused.output
        assert (lab.calls, list(lab.credentials.people())) == ([], ["eve"])
    assert lab.grant("alice", "--archive", str(tmp_path / "a.tar")).exit_code == 0
    assert (tmp_path / "a.tar").exists()
    assert lab.calls == ["nodes: alice, eve", "etcd: alice"]


def test_the_password_of_the_nodes_is_kept_and_is_their_users_alone(lab: Lab) -> None:
    password = lab.context.directory / "password"
    first = password.read_text()
    lab.credentials.prepare()
    assert password.read_text() == first
    assert password.stat().st_mode & 0o077 == 0


def commands(group: click.Group, prefix: str = "") -> Iterator[str]:
    """Return the names of all commands of a group, with those of its groups."""
    for name in group.list_commands(context := click.Context(group)):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name


def test_every_command_and_action_is_classified_by_whose_things_it_changes() -> None:
    every = [*commands(adaptdl), *(f"page {name}" for name in vars(Actions) if not name.startswith("_"))]
    third = [name for name in every if any(line.startswith(name) for line in OF_ADMINISTRATORS)]
    assert sorted(every) == sorted([*READ_ONLY, *OF_ONE_S_OWN, *third])


class Node:
    """A node that knows that the person who asks is no administrator."""

    def get_json(self, service: ServiceRecord, path: str) -> dict[str, object]:
        assert (service.node, path) == ("node1", "/v1/status")
        return {"node": "node1", "admin": False}


@pytest.mark.parametrize("line", OF_ADMINISTRATORS)
def test_a_person_who_was_let_in_changes_nothing_that_others_have(
    lab: Lab, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, keys = MemoryStore(), Keys("lab")
    store.put(keys.service("node1"), encode(ServiceRecord("node1", "127.0.0.1", 1, 1)))
    store.put(keys.drain("node1"), encode(DrainRequest("node1", "new disk", person="eve")))
    monkeypatch.setattr(Where, "open", lambda where, place: store.client())
    monkeypatch.setattr(cluster_setup, "client_of", lambda context: Node())
    (lab.context.directory / "ca-key.pem").unlink()  # a person's archive has none
    before = {path: path.read_bytes() for path in lab.context.directory.iterdir()}, store.range(keys.root)
    refused = CliRunner().invoke(adaptdl, line.replace("KEY", str(lab.key)).split())
    assert (refused.exit_code, refused.output.count("\n"), lab.calls) == (1, 1, [])
    said = "this changes what others have: ask an administrator of cluster lab"
    if line.startswith("cluster"):
        said = "cluster lab was brought up by another user, who alone changes"
    assert refused.output.startswith(f"adaptdl: {said}")
    after = {path: path.read_bytes() for path in lab.context.directory.iterdir()}, store.range(keys.root)
    assert after == before
    assert contexts.choose(None).nodes == ("node1", "node2")
