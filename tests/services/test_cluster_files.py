"""What `adaptdl cluster up` and `submit` read and write on the user's machine, without any node."""

from __future__ import annotations

import os
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from submitted_jobs import submission_by

from adaptdl_elastic._whole_file import write_whole
from adaptdl_elastic.agent.service.agents import agent_environment, agent_options, write_spec
from adaptdl_elastic.autoscaler.cli import CommandError, OptionError, Place, Where
from adaptdl_elastic.autoscaler.commands.cluster_setup import with_options
from adaptdl_elastic.autoscaler.commands.logs import chosen
from adaptdl_elastic.autoscaler.commands.submit import (
    command_of,
    name_of,
    replicas_of,
    variables_of,
)
from adaptdl_elastic.autoscaler.commands.tables import ask_all
from adaptdl_elastic.autoscaler.provisioning import nodes, wheel
from adaptdl_elastic.autoscaler.provisioning.nodes import Wanted, parse_probe
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError, Ssh, UnreachableError
from adaptdl_elastic.rendezvous.services import context as contexts
from adaptdl_elastic.rendezvous.services.admission import JobState, Request
from adaptdl_elastic.rendezvous.services.context import ClusterContext, ContextError
from adaptdl_elastic.rendezvous.services.etcd_gateway import etcd_warning
from adaptdl_elastic.rendezvous.services.service_config import (
    ServiceConfig,
    ServiceConfigError,
    ServiceDirectory,
)
from adaptdl_elastic.rendezvous.store.memory import MemoryStore
from adaptdl_elastic.rendezvous.text import stamp

PROBE = {
    "claimed": "abc",
    "directory": "/home/a/.local/share/adaptdl/lab",
    "host": "10.0.0.5",
    "free": "9999999",
    "python": "/usr/bin/python3",
    "version": "3.11.7",
    "venv": "yes",
    "etcd": "/usr/bin/etcd",
    "etcd_version": "3.5.9",
    "gpus": "2",
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    runtime = tmp_path / "runtime"  # this user's standalone jobs elsewhere on this machine are not meant
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    return tmp_path / "adaptdl"


def test_a_context_is_read_as_it_was_written_and_by_its_user_only(config: Path) -> None:
    made = ClusterContext("lab", "abc", "https://h:1", 'eve "x"', ("n1", "n2"), ssh_config="/c", slots=3)
    path = contexts.save(made)
    assert path == config / "lab.toml"
    assert path.stat().st_mode & 0o077 == 0
    assert "left" not in path.read_text(), "an older version would refuse it"
    assert contexts.load("lab") == made
    assert contexts.choose(None) == made
    contexts.save(ClusterContext("other", "def"))
    with pytest.raises(ContextError, match="clusters lab, other: say which with --cluster NAME"):
        contexts.choose(None)
    with pytest.raises(ContextError, match=r"no cluster 'x'; known are: lab, other: adaptdl cluster up"):
        contexts.choose("x")


@pytest.mark.parametrize("line", ["slots = 'x'", "colour = 1", "slots", "nodes = [1]", "endpoint = 3"])
def test_a_context_that_was_edited_wrongly_names_the_line(line: str) -> None:
    with pytest.raises(ContextError, match=r"f\.toml, line 3: .* is not what adaptdl writes there"):
        contexts.parse(f'name = "lab"\ncluster_id = "a"\n{line}\n', "f.toml")


def test_two_commands_do_not_change_a_cluster_at_the_same_time(config: Path) -> None:
    with (
        contexts.locked("lab"),
        pytest.raises(ContextError, match="wait until it ends"),
        contexts.locked("lab"),
    ):
        pass
    with contexts.locked("lab"):
        pass


def test_commands_find_the_cluster_of_the_context(config: Path) -> None:
    lab = ClusterContext("lab", "a", "https://h:1")
    contexts.save(lab)
    assert Where().locate() == Where(cluster="lab").locate() == Place("https://h:1", "lab", context=lab)
    assert Where(etcd="e:1", cluster="lab").locate() == Place("e:1", "lab")
    contexts.save(ClusterContext("other", "b", "https://i:1"))
    assert Where(cluster="lab").locate().cluster == "lab"
    with pytest.raises(CommandError, match="clusters lab, other: say which with --cluster"):
        Where().locate()


def test_up_keeps_what_the_cluster_has_and_adds_nodes() -> None:
    known = ClusterContext("lab", "a", person="eve", nodes=("n1", "n2"), slots=2)
    assert with_options(known, False, (), {"slots": None}) == known
    assert with_options(known, False, ("n3", "n1", "n3"), {}).nodes == ("n1", "n2", "n3")
    assert with_options(known, False, (), {"slots": 0}).slots == 0
    with pytest.raises(OptionError, match="you are eve in this cluster already"):
        with_options(known, False, (), {"person": "bob"})
    with pytest.raises(OptionError, match="name the nodes"):
        with_options(ClusterContext("lab", "a"), True, (), {})
    with pytest.raises(OptionError, match="--port-range 5: give LOW:HIGH"):
        with_options(known, False, (), {"port_range": "5"})


WANTED = Wanted("lab", "abc")


def probe_text(**found: str) -> str:
    return "\n".join(f"{name}={value}" for name, value in {**PROBE, **found}.items())


def probe(wanted: Wanted = WANTED, **found: str) -> nodes.NodeFacts:
    return parse_probe("n1", probe_text(**found), wanted)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            {"claimed": "zzz"},
            "runs cluster 'lab' of another `adaptdl cluster up`: choose another name with --clus",
        ),
        ({"host": ""}, "does not tell the address"),
        ({"host": "10.0.0.5,DNS:node2"}, "does not tell the address"),  # gets into a certificate
        ({"python": ""}, "there is no python3: install Python 3.10 or later"),
        (
            {"version": "3.9.2"},
            "is Python 3.9.2: 3.10.12, 3.11.4, 3.12 or later is needed; install one, or give",
        ),
        ({"version": "3.11.2 old"}, "is Python 3.11.2: 3.10.12"),
        ({"version": ""}, r"is Python \?"),
        ({"free": "1024"}, "is full: 1 MiB are free, 200 MiB are needed"),
    ],
)
def test_a_node_that_cannot_be_used_says_why(found: dict[str, str], message: str) -> None:
    with pytest.raises(ProvisionError, match=f"^n1: .*{message}"):
        probe(**found)


def fake_ssh(folder: Path, monkeypatch: pytest.MonkeyPatch, login: str) -> None:
    """Put an `ssh` first on the PATH that runs `login`, and then what it is given, on this machine."""
    program = folder / "ssh"
    run = 'for line; do :; done\nsh -c "$line"\ncode=$?'
    program.write_text(f"#!/bin/sh\n{login}\n{run}\n{login}\nexit $code\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.processes
def test_a_logins_greeting_is_no_part_of_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ssh(tmp_path, monkeypatch, "printf 'hello\\r\\n'; printf 'no line'; printf 'no line' >&2")
    assert Ssh().run("n1", ["printf", r"a\r\nb"]) == "a\nb"
    assert Ssh().run("n1", ["cat"], b"\n x \n") == "\n x \n"
    for script, said in {"echo why >&2; exit 3": "why", "exit 3": "`sh` exits with 3"}.items():
        with pytest.raises(ProvisionError, match=f"^n1: {said}$"):
            Ssh().run("n1", ["sh", "-c", script])
    # a connection that breaks after the command: ssh itself says so, after all that the node has said
    (tmp_path / "ssh").write_text(
        '#!/bin/sh\nfor line; do :; done\nsh -c "$line"\necho broken >&2\nexit 255\n'
    )
    with pytest.raises(UnreachableError, match=r"^n1: ssh cannot log in: broken;"):
        Ssh().run("n1", ["true"])
    # a login that ends the shell
    fake_ssh(tmp_path, monkeypatch, "echo hello; exit 0")
    with pytest.raises(
        ProvisionError, match=r"^n1: its answer cannot be read: 'hello'; look at its ~/.bashrc"
    ):
        Ssh().run("n1", ["true"])


@pytest.mark.parametrize("answer", ["", "null", "[1]", "{}", '{"slots": null}', probe_text(free="x")])
def test_an_answer_that_is_none_is_one_line(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ssh, "run", lambda *_, **__: answer)
    for ask in (
        lambda: nodes.probe(Ssh(), "n1", WANTED),
        lambda: nodes.start_service(Ssh(), probe(), "python", False),
    ):
        with pytest.raises(ProvisionError, match=r"^n1: its answer cannot be read: .*$"):
            ask()


@pytest.mark.parametrize(
    ("version", "warned"),
    [((3, 5, 1), True), ((3, 5, 6), False), ((3, 4, 21), True), ((3, 4, 22), False), ((3, 6, 0), False)],
)
def test_versions_of_etcd_that_lose_data(version: tuple[int, ...], warned: bool) -> None:
    assert bool(etcd_warning(version)) is warned


def test_constraints_name_the_versions_of_this_environment() -> None:
    lines = wheel.constraints().splitlines()
    assert any(line.startswith("torch==") and "+" not in line for line in lines)
    assert not any(line.startswith("pytest==") for line in lines)


@pytest.mark.processes
def test_a_wheel_has_every_file_of_the_program(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    listed = subprocess.run(
        ["git", "ls-files", "adaptdl_elastic", "agent", "autoscaler", "rendezvous"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    files = {name for name in listed if not (root / name).is_symlink()}
    wanted = {name if name.startswith("adaptdl_elastic/") else f"adaptdl_elastic/{name}" for name in files}
    made = wheel.own_wheel(tmp_path)
    names = zipfile.ZipFile(made).namelist()
    assert {name for name in names if ".dist-info/" not in name} == wanted
    assert made.read_bytes() == wheel.own_wheel(tmp_path).read_bytes()


def test_commands_that_can_be_submitted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    for words, expected in {
        ("train.py", "--lr", "1"): ("script", ("train.py", "--lr", "1")),
        ("--", "python", "train.py"): ("script", ("train.py",)),
        ("python3.11", "-m", "pkg.train", "x"): ("module", ("pkg.train", "x")),
        ("--", "bash", "-c", "x"): ("exec", ("bash", "-c", "x")),
    }.items():
        assert command_of(words, tmp_path) == expected
    for words, message in {
        ("--",): "there is nothing to run",
        ("gone.py",): "there is no script gone.py in",
        (str(tmp_path / "train.py"),): "give its path relative to that",
        ("--replica", "1"): "there is no option --replica",
        ("python", "-c", "x"): "cannot be submitted",
    }.items():
        with pytest.raises(OptionError, match=message):
            command_of(words, tmp_path)


def test_options_of_submit_are_checked() -> None:
    assert [replicas_of(text) for text in ("3", "1:8")] == [(3, 3), (1, 8)]
    for text in ("0", "8:1", "x", "1:", "-1:2"):
        with pytest.raises(OptionError, match="--replicas"):
            replicas_of(text)
    assert name_of(None, "src/my train.py") == "my-train"
    with pytest.raises(OptionError, match="--name 'a/b' cannot be used"):
        name_of("a/b", "x")
    assert variables_of(["A=1=2", "B"], {"B": "b"}) == {"A": "1=2", "B": "b"}
    for text in ("C", "9=1", "ADAPTDL_ETCD_USER=x"):
        with pytest.raises(OptionError, match="--env"):
            variables_of([text], {})


def test_a_private_file_replaces_a_link_and_a_file_that_others_can_read(tmp_path: Path) -> None:
    theirs, archive = tmp_path / "theirs", tmp_path / "alice.tar"
    theirs.write_text("old")
    archive.symlink_to(theirs)
    write_whole(archive, b"password")
    assert (archive.is_symlink(), archive.read_bytes(), theirs.read_text()) == (False, b"password", "old")
    assert archive.stat().st_mode & 0o777 == 0o600


def test_a_store_that_does_not_answer_is_named_and_the_others_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [
        Place("https://h:1", "lab"),
        Place("unix:/x", "default", "alone"),
        Place("unix:/y", "default", "b"),
    ]
    store = MemoryStore()

    def open_place(where: Where, place: Place) -> MemoryStore:
        if place.job != "b":
            raise CommandError("refuses us")
        return store

    monkeypatch.setattr(Where, "places", lambda where: places)
    monkeypatch.setattr(Where, "open", open_place)
    assert ask_all(Where(), lambda _, place: place.job) == [(places[2], "b")]
    said = "adaptdl: cluster lab: refuses us\nadaptdl: alone: refuses us\n"
    assert capsys.readouterr().err == said


def test_output_is_chosen_by_rank() -> None:
    lines = ["[rank0]: a", "adaptdl-run: b", "[rank12]: c"]
    assert list(chosen(lines, "n1")) == ["[rank0]: a", "[n1]: adaptdl-run: b", "[rank12]: c"]
    assert list(chosen(lines, "n1", (12,))) == ["[rank12]: c"]


def test_output_is_chosen_by_its_time_and_shown_with_it_and_its_node() -> None:
    lines = [f"{stamp(3600 * hour)} [rank0]: \x1b[1mat {hour}" for hour in (1, 2)]
    # an agent of an older version does not know the name
    lines += ["${time} [rank1]: old", "lost"]
    assert list(chosen(lines, "n1", since=stamp(7200))) == [
        *("[rank0]: \x1b[1mat 2", "[rank1]: old", "[n1]: lost")
    ]
    assert list(chosen(lines[1:], "n1", timestamps=True, every=True, escaped=True)) == [
        "1970-01-01T02:00:00Z [n1] [rank0]: \\x1b[1mat 2",
        "-------------------- [n1] [rank1]: old",
        "-------------------- [n1]: lost",
    ]


def test_an_agent_is_told_its_job_by_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from adaptdl_elastic.agent.own_records import job_spec
    from adaptdl_elastic.agent.terminal.run_options import parse

    (tmp_path / "train.py").write_text("")
    config = ServiceConfig("lab", "abc", "n1", "10.0.0.5", "https://h:1", port_range="29500:29600")
    wanted = submission_by(
        "eve", command=(str(tmp_path / "train.py"), "--x"), min_replicas=2, max_replicas=6, gpus_per_replica=2
    )
    # only what `adaptdl submit` asks for counts of a record, whoever has made it
    unasked = {"min_nodes": 9, "checkpoint_timeout": 1e9, "rescale_timeout": 1e9, "rescale": "inplace"}
    unasked |= {"preemptible": False, "autoscale": False, "max_nodes": 1, "secret_mark": "x"}
    wanted = replace(wanted, weight=1e6, **unasked)
    file = tmp_path / "agents" / "job.spec"
    write_spec(Request(wanted, None, JobState(), most_weight=2.5), "/saved", file)
    monkeypatch.setenv("PET_ROLE", "trainer")
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    options = parse(agent_options(config, 4, file), {})
    assert (options.role, options.max_restarts) == ("trainer", 3), "the job's own variables count, too"
    assert (options.job, options.cluster, options.node_name, options.slots) == ("job", "lab", "n1", 4)
    assert (options.min_replicas, options.max_replicas, options.once) == (2, 6, True)
    assert options.port_range == (29500, 29600)
    assert options.command[1:] == ("--x",)
    file.write_text('{"v":1,"job":"job"}')
    for path, why in ((file, "owner: Field required"), (tmp_path / "gone", "No such file")):
        with pytest.raises(ValueError, match=rf"^--spec: .*{path.name}.*{why}|{why}.*{path.name}"):
            parse(agent_options(config, 4, path), {})
    spec = job_spec(options)
    assert (spec.min_replicas, spec.max_replicas, spec.min_nodes) == (2, 6, 1)
    assert (spec.gpus_per_replica, spec.weight, spec.most_weight) == (2, 1e6, 2.5)
    assert spec.max_nodes == 6, "records of earlier versions do not have it"
    assert (spec.checkpoint_timeout, spec.rescale_timeout, spec.rescale.value) == (120.0, 60.0, "auto")
    assert (spec.preemptible, spec.autoscale, spec.secret_mark) == (True, True, "")
    directory = ServiceDirectory(tmp_path)
    found = agent_environment(
        {"A": "own", "ADAPTDL_ETCD_USER": "x", "B": "own"}, {"B": "job"}, directory, "s"
    )
    assert (found["A"], found["B"], found["ADAPTDL_ETCD_USER"]) == ("own", "job", "adaptdl")
    assert found["ADAPTDL_SECRET"] == "s"


def test_the_secret_of_a_job_is_not_in_the_store_and_not_that_of_another_job(tmp_path: Path) -> None:
    directory = ServiceDirectory(tmp_path)
    with pytest.raises(ServiceConfigError, match="run adaptdl cluster up again"):
        directory.job_secret("job")
    (tmp_path / "secret").write_text("0123\n")
    secrets = {directory.job_secret(job) for job in ("job", "other")}
    assert len(secrets) == 2
    assert all(len(one) == 64 for one in secrets)
