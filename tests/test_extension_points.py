"""Extension points: a part of another distribution is found, used, and told about where it cannot be used."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from click.testing import CliRunner
from commands import ended
from elastic_run import environment
from other_package import write_distribution

from adaptdl_elastic.autoscaler.cli import Place, Where, adaptdl
from adaptdl_elastic.autoscaler.providers.base import ProviderError, ProviderOptionError
from adaptdl_elastic.autoscaler.providers.registry import ProviderRequest, make_provider
from adaptdl_elastic.rendezvous.local.store_server import LocalServer
from adaptdl_elastic.rendezvous.store.connect import connect
from adaptdl_elastic.rendezvous.store.local_socket import SCHEME
from adaptdl_elastic.rendezvous.store.memory import MemoryStore
from adaptdl_elastic.rendezvous.store.store_options import StoreOptionError

MODULE = """
import os
import click
from adaptdl_elastic.autoscaler.providers.base import Capacity, Provider

class ToyProvider(Provider):
    name = "toy"
    def __init__(self, options):
        self.options = options
    def capacity(self):
        return Capacity(warnings=(self.options["zone"].replace("\\n", "+"),))
    def request(self, pool, desired): ...
    def release(self, instance, replace=False): ...

def make(request):
    return ToyProvider(request.known("zone"))

def no_provider(*request):
    return "a word"

def store(endpoint, options):
    from adaptdl_elastic.rendezvous.store.local_socket import LocalStore
    return LocalStore(os.environ["TOY_SOCKET"], options.timeout)

@click.command()
def hello():
    click.echo("hello from outside")

nothing = 3
"""
ENTRIES = """
[adaptdl_elastic.providers]
toy = toy_extension:make
useless = toy_extension:no_provider
broken = toy_extension_that_is_not_there:make
ec2 = toy_extension:make

[adaptdl_elastic.stores]
toy = toy_extension:store
useless = toy_extension:no_provider

[adaptdl_elastic.commands]
hello = toy_extension:hello
nothing = toy_extension:nothing
ls = toy_extension:hello
"""


@pytest.fixture(autouse=True)
def toy_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution of somebody else's: a module and its entry points."""
    (tmp_path / "toy_extension.py").write_text(dedent(MODULE))
    write_distribution(tmp_path, "toy-extension", ENTRIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy_extension", raising=False)


def test_options_of_a_provider_of_another_package_are_given_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Where, "locate", lambda self, job: Place("unix:/x", "test"))
    monkeypatch.setattr(Where, "open", lambda self, place: MemoryStore())
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    words = "autoscale --provider toy --dry-run -o zone=a --zone b --zone=--c"
    done = CliRunner().invoke(adaptdl, words.split())
    assert (done.exit_code, "a+b+--c" in done.output) == (0, True)


@pytest.mark.parametrize(
    ("name", "options", "error", "line"),
    [
        ("toy", {"zonne": "x"}, ProviderOptionError, "no option 'zonne' (-o); there are: zone"),
        ("tpu", {}, ProviderOptionError, "no provider 'tpu'; there are: ec2, slurm, broken, toy, useless"),
        ("useless", {}, ProviderError, "'useless' gives 'a word', which is no Provider"),
        ("broken", {}, ProviderOptionError, "'broken' of toy-extension cannot be imported"),
        ("ec2", {"zone": "x"}, ProviderOptionError, "there are: groups, region, profile, queue_url"),
    ],
)
def test_a_provider_that_cannot_be_used_is_one_clear_line(
    name: str, options: dict[str, str], error: type[Exception], line: str
) -> None:
    with pytest.raises(error) as caught:
        make_provider(name, ProviderRequest(options))
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_command_of_another_package_runs_and_is_listed() -> None:
    done = CliRunner().invoke(adaptdl, ["hello"])
    assert (done.exit_code, done.output) == (0, "hello from outside\n")
    listed = CliRunner().invoke(adaptdl, ["--help"]).output
    assert "hello        From the package toy-extension." in listed


def test_a_command_of_ours_cannot_be_replaced() -> None:
    assert "hello from outside" not in CliRunner().invoke(adaptdl, ["ls", "--help"]).output


def test_an_entry_point_that_is_no_command_is_one_clear_line() -> None:
    done = CliRunner().invoke(adaptdl, ["nothing"])
    assert done.exit_code == 1
    assert "the command 'nothing' of toy-extension is no click.Command" in done.output


@pytest.mark.processes
def test_a_job_runs_on_a_store_of_another_package(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained')")
    command = ["adaptdl-run", "--rdzv-endpoint", "toy://127.0.0.1:1", "--nnodes=1:2", "train.py"]
    with LocalServer() as server:
        place = {"TOY_SOCKET": server.endpoint.removeprefix(SCHEME), "PYTHONPATH": str(tmp_path)}
        done = ended(command, tmp_path, env={**environment(), **place})
        assert (done.returncode, "trained" in done.stdout) == (0, True), done.stderr
        assert [item for item in server.store.range("/adaptdl/v1/default/jobs/").items if "/spec" in item.key]


@pytest.mark.parametrize(
    ("endpoint", "line"),
    [
        ("useless://here:1", "the store 'useless' of toy-extension gives 'a word', no Store"),
        ("tay://here:1", "is not of the form HOST:PORT or https://HOST:PORT"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_clear_line(endpoint: str, line: str) -> None:
    with pytest.raises(StoreOptionError, match=line):
        connect(endpoint)
