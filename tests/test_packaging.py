"""The wheel holds what the checkout holds, and the imports point one way."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from setuptools import find_packages

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


def test_no_version_is_claimed_that_is_not_in_the_matrix() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"^MATRIX := (.+)$", makefile, re.MULTILINE)
    assert found
    pythons, torches = zip(*(pair.split("-") for pair in found[1].split()), strict=True)
    claims = re.findall(r"Python :: (3\.\d+)$", declared()["metadata"]["classifiers"], re.MULTILINE)
    assert claims
    assert set(claims) <= set(pythons)
    assert declared()["options"]["python_requires"] == f">={min(pythons, key=_number)}"
    least = min(torches, key=_number).removesuffix(".0")
    assert f"torch >= {least}" in declared()["options"]["install_requires"].splitlines()


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_the_symlinks_name_the_folders() -> None:
    for folder in ("agent", "rendezvous", "autoscaler"):
        assert (ROOT / "adaptdl_elastic" / folder).resolve() == ROOT / folder


@pytest.mark.parametrize("module", ["adaptdl_elastic", "adaptdl_elastic.rendezvous.torchrun"])
def test_importing_it_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_library_s_modules_need_no_import_of_their_own() -> None:
    code = (
        "import sys, adaptdl_elastic, adaptdl_elastic.torch\n"
        "names = 'checkpoint collective env goodput reducer sched_hints utils'.split()\n"
        "assert set(names) <= set(dir(adaptdl_elastic))\n"
        "for name in names:\n"
        "    assert getattr(adaptdl_elastic, name) is sys.modules['adaptdl_elastic.' + name]\n"
        "assert adaptdl_elastic.env.num_replicas() == 1\n"
        "assert not hasattr(adaptdl_elastic, 'envs')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_naming_the_environment_does_not_import_torch() -> None:
    code = (
        "import sys, adaptdl_elastic\n"
        "adaptdl_elastic.env, adaptdl_elastic.goodput\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_importing_the_library_changes_nothing_global() -> None:
    code = (
        "import logging, multiprocessing, signal\n"
        "before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]\n"
        "import adaptdl_elastic.torch, adaptdl_elastic.checkpoint, adaptdl_elastic.collective\n"
        "assert before == [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]\n"
        "assert not logging.getLogger().handlers\n"
        "assert multiprocessing.get_start_method(allow_none=True) is None\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_in_a_clean_environment_has_everything(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for package, folder in FOLDERS.items():
        for source in (ROOT / folder).rglob("*.py"):
            relative = source.relative_to(ROOT / folder)
            if relative.parts[0] in ("agent", "rendezvous", "autoscaler"):
                continue
            assert f"{package.replace('.', '/')}/{relative}" in names
    assert "adaptdl_elastic/py.typed" in names
    for page in (ROOT / "autoscaler" / "web" / "static").iterdir():
        assert f"adaptdl_elastic/autoscaler/web/static/{page.name}" in names
    # A clean environment that borrows the dependencies of this one. A directory named in a .pth file is
    # searched, but .pth files in it are not read: this checkout's editable install stays invisible.
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = (
        tmp_path
        / "venv"
        / "lib"
        / f"python{sys.version_info.major}.{sys.version_info.minor}"
        / "site-packages"
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", str(wheel)]
    subprocess.run(install, check=True)
    for arguments in (
        ["-m", "adaptdl_elastic.agent", "--help"],
        ["-m", "adaptdl_elastic.autoscaler", "--help"],
        ["-c", "from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as r\n"
               "import torch.distributed.run, sys\nsys.exit('adaptdl-etcd' not in r._registry)"],
        ["-c", "import adaptdl_elastic.torch as a, sys; sys.exit('venv' not in a.__file__)"],
    ):  # fmt: skip
        run = subprocess.run(
            [str(python), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, (arguments, run.stderr)
    for script in ("adaptdl-run", "adaptdl"):
        assert (tmp_path / "venv" / "bin" / script).exists()
    _install_as_the_page_says(wheel, tmp_path)


def _install_as_the_page_says(wheel: Path, folder: Path) -> None:
    """docs/bare-metal.md, but for downloading the dependencies: those of this environment are borrowed."""
    page = (ROOT / "docs" / "bare-metal.md").read_text()
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
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
