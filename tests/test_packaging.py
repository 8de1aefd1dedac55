"""The wheel holds what the checkout holds, and the imports point one way."""

from __future__ import annotations

import configparser
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from setuptools import find_packages

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


def test_the_symlinks_name_the_folders() -> None:
    for folder in ("agent", "rendezvous", "autoscaler"):
        assert (ROOT / "adaptdl_elastic" / folder).resolve() == ROOT / folder


@pytest.mark.parametrize("module", ["adaptdl_elastic", "adaptdl_elastic.rendezvous.torchrun"])
def test_importing_it_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
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
@pytest.mark.timeout(300)
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
    # The clean environment sees this one's torch and the rest, but not this checkout.
    venv.create(tmp_path / "venv", with_pip=False)
    target = tmp_path / "venv" / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True)
    for script in ("adaptdl-run", "adaptdl"):
        run = subprocess.run(
            [sys.executable, str(target / "bin" / script), "--help"],
            env={"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
