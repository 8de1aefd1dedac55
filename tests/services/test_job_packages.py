"""Packages that a job names are installed once on a node, over those of the program. Real pip, no index."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from package_index import stub_wheel
from polling import until

from adaptdl_elastic.agent.service import environments, job_packages
from adaptdl_elastic.agent.service.job_packages import NOTHING, PackagesError, python_with
from adaptdl_elastic.rendezvous.services.service_config import ServiceDirectory

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes]
SHOW = "import thing, numpy, sys; print(thing.NUMBER, numpy.__file__.startswith(sys.prefix))"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServiceDirectory:
    """A node for which the only packages of an index are two versions of `thing`."""
    for number in ("1", "2"):
        wheel = stub_wheel(tmp_path, "thing", number, files={"thing.py": f"NUMBER = {number}\n"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return ServiceDirectory(tmp_path / "node")


def job(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def shown(python: str) -> str:
    return subprocess.run([python, "-c", SHOW], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.essential
def test_packages_are_installed_once_for_a_content_over_those_that_are_there(
    node: ServiceDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = job(tmp_path / "one", requirements_txt="# mine\nthing==1\nnumpy\n")
    second = job(tmp_path / "two", requirements_txt="# mine\nthing==1\nnumpy\n")
    with ThreadPoolExecutor() as pool:
        made = set(pool.map(lambda work: python_with(node, work, "", "", sys.executable), (first, second)))
    (python,) = made
    assert shown(python) == "1 False"
    assert [path.name for path in first.iterdir()] == ["requirements.txt"]
    with monkeypatch.context() as broken:
        broken.setenv("PIP_FIND_LINKS", "/nowhere")
        assert python_with(node, first, "", "", sys.executable) == python
        # one that was not finished does not count
        (Path(python).parents[1] / "made").unlink()
        with pytest.raises(PackagesError):
            python_with(node, first, "", "", sys.executable)
    assert python_with(node, first, "", "", sys.executable) != python


@pytest.mark.essential
def test_a_file_that_is_named_comes_before_the_usual_ones(node: ServiceDirectory, tmp_path: Path) -> None:
    project = '[project]\nname = "x"\nversion = "1"\ndependencies = ["thing>=2"]\n'
    work = job(tmp_path / "work", pyproject_toml=project, other_txt="thing<2\n")
    assert shown(python_with(node, work, "", "", sys.executable)) == "2 False"
    assert shown(python_with(node, work, "other.txt", "", sys.executable)) == "1 False"
    assert python_with(node, job(tmp_path / "none"), "", "", "python") == "python"
    assert python_with(node, work, NOTHING, "", "python") == "python"


def test_a_file_beside_the_requirements_makes_the_environment_one_of_the_directory(
    node: ServiceDirectory, tmp_path: Path
) -> None:
    folder = tmp_path / "simple" / "thing"
    for text in ("thing-1-py3-none-any.whl", "-r other.txt", "thing @ file:///x"):
        work = job(tmp_path / "work", requirements_txt=text, other_txt="thing==1\n")
        (work / "thing-1-py3-none-any.whl").write_bytes((folder / "thing-1-py3-none-any.whl").read_bytes())
        if "@" not in text:
            made = {python_with(node, work, "", content, sys.executable) for content in ("a", "b")}
            assert len(made) == 2, text
            assert {shown(one) for one in made} == {"1 False"}


@pytest.mark.essential
@pytest.mark.parametrize("text", ["absent-package\n", "thing==7\n", "-r nowhere.txt\n"])
def test_a_failed_installation_is_reported_in_the_installers_words(
    node: ServiceDirectory, tmp_path: Path, text: str
) -> None:
    with pytest.raises(PackagesError, match=r"its packages cannot be installed: .*(No matching|nowhere)"):
        python_with(node, job(tmp_path / "work", requirements_txt=text), "", "", sys.executable)
    assert not list(node.environments.glob("*"))


def test_an_installation_that_hangs_is_ended_with_all_its_processes(
    node: ServiceDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = job(tmp_path / "work", requirements_txt="./hangs\n")
    hangs = job(
        work / "hangs",
        pyproject_toml='[build-system]\nrequires = []\nbuild-backend = "b"\nbackend-path = ["."]\n',
    )
    (hangs / "b.py").write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    monkeypatch.setattr(job_packages, "INSTALL_SECONDS", 20.0)
    with pytest.raises(PackagesError, match="were not installed within 20 s"):
        python_with(node, work, "", "", sys.executable)
    until("it lives on", lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())))


def test_an_environment_stays_while_a_job_may_start_in_it(node: ServiceDirectory, tmp_path: Path) -> None:
    node.path.mkdir()
    (node.path / "service.json").touch()
    python = python_with(node, job(tmp_path / "w", requirements_txt="thing==1\n"), "", "", sys.executable)
    later = environments.FRESH_SECONDS + 1e10
    environments.sweep(node, (), later, [python])
    assert Path(python).exists()
    environments.sweep(node, (), later)
    assert not Path(python).exists()


def test_the_packages_of_an_interpreter_that_is_there_come_first(
    node: ServiceDirectory, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", theirs], check=True)
    (site,) = theirs.glob("lib/python*/site-packages")
    (site / "thing.py").write_text("NUMBER = 7\n")
    base = str(theirs / "bin" / "python")
    work = job(tmp_path / "work")
    python = python_with(node, work, "", "", sys.executable, base=base)
    assert shown(python) == "7 False"
    subprocess.run([python, "-c", "import adaptdl_elastic, click"], check=True)
    newer = job(tmp_path / "newer", requirements_txt="thing==2\n")
    assert shown(python_with(node, newer, "", "", sys.executable, base=base)) == "2 False"
    (tmp_path / "other").write_text("#!/bin/sh\necho 3 1\n")
    (tmp_path / "other").chmod(0o755)
    for absent in (str(tmp_path / "absent"), str(tmp_path / "other")):
        with pytest.raises(PackagesError, match="its packages cannot be installed"):
            python_with(node, work, "", "", sys.executable, base=absent)
