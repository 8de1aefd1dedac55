"""Lock files for machines of a cloud: the same on whatever machine they are made, and as pip takes them."""

from __future__ import annotations

import hashlib
import importlib.metadata as metadata
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
import venv
from pathlib import Path

import pytest

from adaptdl_elastic.autoscaler.provisioning import lock
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError

ROOT = Path(__file__).resolve().parents[2]
TORCH = metadata.version("torch").partition("+")[0]

# What Python says on a Mac with an M1. pip and uv ask it for the markers and for the tags of wheels.
MAC = """
import os, platform, sys, sysconfig, types
sysconfig.get_config_vars()["MACOSX_DEPLOYMENT_TARGET"] = "11.0"  # read while Linux has its name
uname = os.uname_result(("Darwin", "mac", "23.5.0", "Darwin Kernel Version 23.5.0", "arm64"))
os.uname = lambda: uname
platform.system = lambda: "Darwin"
platform.machine = lambda: "arm64"
platform.release = lambda: uname.release
platform.version = lambda: uname.version
platform.mac_ver = lambda *given: ("14.5", ("", "", ""), "arm64")
sys.platform = "darwin"
settings = types.ModuleType("_scproxy")
settings._get_proxies = settings._get_proxy_settings = dict
sys.modules["_scproxy"] = settings
"""


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "adaptdl_elastic-1-py3-none-any.whl", tmp_path / "python_etcd-2-py3-none-any.whl"]
    for path in found:
        path.write_text(path.name)
    return found


def test_every_file_beside_the_lock_has_its_hash_and_nothing_is_built(wheels: list[Path]) -> None:
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels]
    assert lock.locked(reversed(wheels), "click==8.1 \\\n    --hash=sha256:ab12\n").splitlines() == [
        "--only-binary=:all:",
        f"./{wheels[0].name} --hash=sha256:{digests[0]}",
        f"./{wheels[1].name} --hash=sha256:{digests[1]}",
        "click==8.1 \\",
        "    --hash=sha256:ab12",
    ]


def test_pack_without_uv_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProvisionError, match=r"^no lock file can be made without uv: pip install uv$"):
        lock.pack(tmp_path / "package.tar.gz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "said",
    [
        "error: No solution found\n  cause: Because a==1 and\n  you want a==2, no.\n\nhint: another\n",
        "  × No solution found:\n  ╰─▶ Because a==1 and\n      you want a==2, no.\n\n      hint: another\n",
    ],
    ids=["uv 0.13", "uv 0.9"],
)
def test_an_error_of_uv_is_one_line(said: str) -> None:
    assert lock.in_one_line(said) == "No solution found: Because a==1 and you want a==2, no."


@pytest.mark.processes
def test_uv_gets_pip_s_indexes_but_no_local_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://file/simple\n"
        "extra-index-url = file:///here\n  https://a/simple\n  http://b/simple\nfind-links = /wheels\n"
    )
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    extra = "https://a/simple http://b/simple"
    assert lock.indexes() == {"UV_INDEX_URL": "https://file/simple", "UV_EXTRA_INDEX_URL": extra}
    monkeypatch.setenv("PIP_INDEX_URL", "https://variable/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///here")
    assert lock.indexes() == {"UV_INDEX_URL": "https://variable/simple", "UV_EXTRA_INDEX_URL": ""}


def pack(folder: Path, python: str | Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `adaptdl cloud pack` in a folder."""
    command = [python, "-m", "adaptdl_elastic.autoscaler", "cloud", "pack", *options, "package.tar.gz"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def packed(folder: Path, python: str | Path = sys.executable, *options: str) -> dict[str, str]:
    """Run `adaptdl cloud pack` in a folder; unpack it there, and return the lock files."""
    done = pack(folder, python, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    subprocess.run(["tar", "-xzf", "package.tar.gz"], cwd=folder, check=True)
    return {name: (folder / name).read_text() for name in (lock.HEAD, lock.NODE)}


def names(text: str) -> set[str]:
    """Return the names in a lock file. Each line must have a version, or be a wheel, and have a hash."""
    only_binary, *lines = text.replace("\\\n", " ").splitlines()
    assert only_binary == "--only-binary=:all:"
    found = [
        re.fullmatch(r"(?:\./)?([\w-]+)(?:==|-)[\w.]+(?:-py3-none-any\.whl)?(?: +--hash=sha256:\w{64})+", one)
        for one in lines
    ]
    assert None not in found, lines[found.index(None)]
    return {match[1].replace("_", "-") for match in found if match}


@pytest.fixture(scope="module")
def registry() -> str:
    """The index of packages, or a skip where it cannot be reached."""
    address = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
    try:
        with urllib.request.urlopen(f"{address.rstrip('/')}/python-etcd/", timeout=20):
            return address
    except (urllib.error.URLError, TimeoutError) as error:
        pytest.skip(f"{address} cannot be reached: {error}")


@pytest.fixture(scope="module")
def mac(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that looks like a Mac's, whose torch is the one without a name of a build."""
    folder = tmp_path_factory.mktemp("mac") / "venv"
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/*/site-packages")
    (site / "looks_like_a_mac.py").write_text(MAC)
    places = [*(path for path in sys.path if path.endswith("site-packages")), str(ROOT)]
    (site / "places.pth").write_text("\n".join([*places, "import looks_like_a_mac", ""]))
    (site / f"torch-{TORCH}.dist-info").mkdir()
    metadata_file = site / f"torch-{TORCH}.dist-info" / "METADATA"
    metadata_file.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {TORCH}\n")
    python = folder / "bin" / "python"
    code = (
        "import platform, sys, importlib.metadata as m; from pip._vendor.packaging import markers, tags\n"
        "print(*(markers.default_environment()[n] for n in ('sys_platform', 'platform_machine')))\n"
        "print(next(tags.platform_tags()), m.version('torch'))"
    )
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == f"darwin arm64\nmacosx_14_0_arm64 {TORCH}\n"
    return python


@pytest.fixture(scope="module")
def package(
    registry: str, mac: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """A folder with a package that a Mac made, and its lock files."""
    folder = tmp_path_factory.mktemp("package")
    return folder, packed(folder, mac)


@pytest.mark.processes
@pytest.mark.slow
def test_nodes_get_what_torch_needs_on_linux_and_the_head_no_torch(
    package: tuple[Path, dict[str, str]],
) -> None:
    head, node = names(package[1][lock.HEAD]), names(package[1][lock.NODE])
    assert head >= {"adaptdl-elastic", "python-etcd", "dnspython", "boto3", "scipy"}
    added = node - head
    assert {"torch", "triton", "nvidia-cudnn-cu13"} <= added
    assert not {name for name in head if name.startswith(("torch", "triton", "nvidia"))} - {"nvidia-ml-py"}
    assert f"torch=={TORCH} \\\n" in package[1][lock.NODE]


@pytest.mark.processes
@pytest.mark.slow
def test_pip_installs_a_head_from_the_package(package: tuple[Path, dict[str, str]]) -> None:
    folder, _ = package
    # pip, unlike uv, takes a platform for no more than its name: all whose wheels run on Ubuntu 24.04
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)]
    options = ["--no-deps", "--require-hashes", "-r", lock.HEAD]
    options += ["--dry-run", "--ignore-installed", "--target=none", f"--python-version={lock.PYTHON}"]
    options += [*platforms, "--platform=manylinux2014_x86_64", "--quiet", "--report=report.json"]
    command = [sys.executable, "-m", "pip", "install", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    installed = json.loads((folder / "report.json").read_text())["install"]
    found = {one["metadata"]["name"].lower().replace("_", "-") for one in installed}
    assert found == names((folder / lock.HEAD).read_text())
    assert {one["download_info"]["url"].rpartition(".")[2] for one in installed} == {"whl"}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.exhaustive
def test_this_machine_makes_the_same_lock_files_as_a_mac(
    package: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    assert packed(tmp_path) == package[1]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.exhaustive
def test_machines_may_have_another_python(registry: str, tmp_path: Path) -> None:
    assert "torch" in names(packed(tmp_path, sys.executable, "--python", "3.13")[lock.NODE])


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.exhaustive
def test_requirements_that_cannot_be_resolved_are_one_line(registry: str, tmp_path: Path) -> None:
    done = pack(tmp_path, sys.executable, "--python", "3.7")
    assert done.returncode == 1
    assert re.fullmatch(
        "adaptdl: no lock file can be made: No solution found when resolving .*: Because .*\n", done.stderr
    )
    assert not list(tmp_path.iterdir())
