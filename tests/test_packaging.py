"""The wheel holds what the checkout holds, and the imports point one way."""

from __future__ import annotations

import configparser
import contextlib
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from commands import ended
from record_version import runs
from setuptools import find_packages

from adaptdl_elastic import _torch_versions
from adaptdl_elastic.autoscaler.provisioning import lock, nodes

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "adaptdl_elastic": "adaptdl_elastic",
    "adaptdl_elastic.agent": "agent",
    "adaptdl_elastic.rendezvous": "rendezvous",
    "adaptdl_elastic.autoscaler": "autoscaler",
}


def declared() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_every_package_on_disk_is_declared() -> None:
    on_disk = set()
    for name, folder in FOLDERS.items():
        on_disk.add(name)
        siblings = () if name != "adaptdl_elastic" else ("agent*", "rendezvous*", "autoscaler*")
        on_disk.update(f"{name}.{sub}" for sub in find_packages(str(ROOT / folder), exclude=siblings))
    assert set(declared()["options"]["packages"].split()) == on_disk


def test_no_version_is_claimed_whose_tests_have_not_passed() -> None:
    pythons, torches = ({run[name] for run in runs()} for name in ("python", "torch"))
    pythons = {python.rpartition(".")[0] for python in pythons}
    claims = re.findall(r"Python :: (3\.\d+)$", declared()["metadata"]["classifiers"], re.MULTILINE)
    assert claims
    assert set(claims) == pythons
    assert on_the_page("Python") == pythons
    assert on_the_page("torch") == torches
    assert lock.PYTHON in pythons
    assert declared()["options"]["python_requires"] == f">={min(pythons, key=_number)}"
    assert ".".join(map(str, nodes.OLDEST_PYTHON)) == min(pythons, key=_number)
    least = min(torches, key=_number).removesuffix(".0")
    assert least == _torch_versions.OLDEST
    assert f"torch >= {least}" in declared()["options"]["install_requires"].splitlines()


VERSIONS = ROOT / "docs" / "reference" / "versions.md"


def on_the_page(row: str) -> set[str]:
    """Return the versions that docs/reference/versions.md says to have run, of a row of its table."""
    (ran,) = re.findall(rf"^\| {row} \| (.*?) \|", VERSIONS.read_text(), re.MULTILINE)
    return set(re.findall(r"\d+(?:\.\d+)+", ran))


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_the_symlinks_name_the_folders() -> None:
    for folder in ("agent", "rendezvous", "autoscaler"):
        assert (ROOT / "adaptdl_elastic" / folder).resolve() == ROOT / folder


def installs_from_an_index(line: str) -> bool:
    """Whether a line installs adaptdl-elastic by its name, or names an extra of it as if an index had it."""
    name = r"(?<![\w./-])adaptdl[-_.]elastic(?![\w./-])"
    line = re.sub(r"--reinstall-package adaptdl-elastic\b", "", line)
    return re.search(rf"{name}\[\w|\b(pip3?|uv|pipx|poetry)\b.*\b(install|add)\b.*{name}", line) is not None


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("pip install {}-elastic", True),
        ("bin/python -m pip install -q '{}_elastic==0.1.0'", True),
        ("uv pip install {}-elastic[ray]", True),
        ("the package is optional (`{}-elastic[ray]`)", True),
        ("pip install '.[ray]'", False),
        ("pip install 'dist/{}_elastic-0.1.0-py3-none-any.whl[ray]'", False),
        ("pip install . && python -m {}_elastic.agent", False),
    ],
)
def test_a_name_that_no_index_has_is_told_from_a_file(line: str, found: bool) -> None:
    assert installs_from_an_index(line.format("adaptdl")) is found


def test_nothing_installs_a_name_that_no_index_has() -> None:
    """A stranger could register the name: their code would run where a user does what a page says."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not in a checkout of git")
    # setup.cfg is where extras of this package refer to each other
    names = {name for name in listed.stdout.decode().split("\0") if name} - {"setup.cfg"}
    found = []
    for path in (ROOT / name for name in sorted(names)):
        with contextlib.suppress(UnicodeDecodeError, IsADirectoryError, FileNotFoundError):
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [f"{path.relative_to(ROOT)}: {line}" for line in lines if installs_from_an_index(line)]
    assert len(names) > 100
    assert found == []


def test_the_cluster_for_ray_installs_the_wheel_of_this_version() -> None:
    wheel = f"adaptdl_elastic-{declared()['metadata']['version']}-py3-none-any.whl"
    text = (ROOT / "examples" / "ray_aws.yaml").read_text(encoding="utf-8")
    assert f"/home/ray/{wheel}: dist/{wheel}\n" in text
    assert f"pip install '/home/ray/{wheel}[ray]'\n" in text


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    helped = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert sorted(line.split()[0] for line in helped.stdout.splitlines()) == sorted(phony.split())


def test_ci_takes_no_arguments(tmp_path: Path) -> None:
    (tmp_path / "make").write_text("#!/bin/sh\nexit 77\n")
    (tmp_path / "make").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(ROOT / ".ci" / "run"), "quick"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (2, ".ci/run: takes no arguments, and got: quick\n")


@pytest.mark.parametrize("module", ["adaptdl_elastic", "adaptdl_elastic.rendezvous.torchrun"])
def test_importing_it_does_not_import_torch(module: str) -> None:
    names = "adaptdl_elastic.env, adaptdl_elastic.goodput"
    code = f"import sys, {module}; {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_importing_the_library_gives_all_its_modules_and_changes_nothing_global() -> None:
    """A fork server imports it long before a script does."""
    code = (
        "import logging, multiprocessing, signal, sys, threading\n"
        "before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]\n"
        "import adaptdl_elastic, adaptdl_elastic.torch as adl\n"
        "[getattr(adl, name) for name in adl.__all__]\n"
        "names = 'checkpoint collective env goodput reducer sched_hints utils'.split()\n"
        "assert set(names) <= set(dir(adaptdl_elastic))\n"
        "for name in names:\n"
        "    assert getattr(adaptdl_elastic, name) is sys.modules['adaptdl_elastic.' + name]\n"
        "assert not hasattr(adaptdl_elastic, 'envs')\n"
        "assert adaptdl_elastic._session._current is None\n"
        "assert before == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]\n"
        "assert threading.active_count() == 1\n"
        "assert not logging.getLogger().handlers + logging.getLogger('adaptdl_elastic').handlers\n"
        "assert multiprocessing.get_start_method(allow_none=True) is None\n"
        "assert adaptdl_elastic.env.num_replicas() == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make dist` makes: the wheel is built from the source distribution."""
    there = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--outdir", str(there), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (there / "source").mkdir()
    subprocess.run(["tar", "-xzf", next(there.glob("*.tar.gz")), "-C", there / "source"], check=True)
    return there


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_distributions_have_everything(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for package, folder in FOLDERS.items():
        for source in (ROOT / folder).rglob("*.py"):
            relative = source.relative_to(ROOT / folder)
            if relative.parts[0] in ("agent", "rendezvous", "autoscaler"):
                continue
            assert f"{package.replace('.', '/')}/{relative}" in names
    assert "adaptdl_elastic/py.typed" in names
    assert "adaptdl_elastic/autoscaler/diagnostics/report.html.jinja" in names
    for page in (ROOT / "autoscaler" / "web" / "static").iterdir():
        assert f"adaptdl_elastic/autoscaler/web/static/{page.name}" in names
    (unpacked,) = (dist / "source").iterdir()
    for name in (
        "Makefile",
        "mkdocs.yml",
        "constraints.txt",
        ".ci/run",
        "docs/index.md",
        "tests/conftest.py",
    ):
        assert (unpacked / name).is_file(), name
    for page in (ROOT / "docs").rglob("*.md"):
        assert (unpacked / page.relative_to(ROOT)).is_file(), page


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_wheel_in_an_empty_environment_runs_the_job_of_the_page(dist: Path, tmp_path: Path) -> None:
    """The dependencies are borrowed.

    A directory named in a .pth file is searched, but .pth files in it are not read: this checkout's editable
    install stays invisible.
    """
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "venv" / "lib" / version / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (file,) = dist.glob("*.whl")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(file)]
    subprocess.run(install, check=True)
    (unpacked,) = (dist / "source").iterdir()
    (tmp_path / "examples").symlink_to(unpacked / "examples")
    page = (unpacked / "docs" / "start" / "install.md").read_text()
    (job,) = re.findall(r"^```bash test=test_packaging\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for command in (
        *("python -m adaptdl_elastic", "adaptdl-run --help", "adaptdl --help"),
        "python -c 'import adaptdl_elastic.torch as a, sys; sys.exit(\"venv\" not in a.__file__)'",
        "python -c 'from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as r\n"
        'import torch.distributed.run, sys\nsys.exit("adaptdl-etcd" not in r._registry)\'',
        job,
    ):
        environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
        environment["PATH"] = f"{python.parent}:{os.environ['PATH']}"
        ran = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, (command, ran.stdout, ran.stderr)
    _install_as_the_page_says(file, tmp_path)


def _install_as_the_page_says(wheel: Path, folder: Path) -> None:
    """several-nodes.md, but for downloading the dependencies: those of this environment are borrowed."""
    page = (ROOT / "docs" / "howto" / "several-nodes.md").read_text()
    (block,) = re.findall(r"^```bash test=test_packaging\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert "pip install .\n" in block
    text = block.replace("/opt/adaptdl", f"{folder}/opt").replace("install .\n", f"install {wheel}\n")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))},
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTHONPATH": sysconfig.get_path("purelib"),
    }
    text += "test $(command -v adaptdl-run) = $(dirname $(command -v adaptdl))/adaptdl-run\n"
    text += f"test $(command -v adaptdl) = {folder}/opt/bin/adaptdl\n"
    done = ended(["bash", "-euo", "pipefail", "-c", text], folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
