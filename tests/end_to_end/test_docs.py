"""Every snippet in the README and the docs is run, and every link in them leads somewhere.

A fenced block of `bash` or `python` names in its info string how it is run:

    test=make      every line is a `make` target that exists
    test=etcd      as it stands, in a directory that has the repository's examples/ and benchmarks/, with a
                   real etcd in the place of etcd0:2379, and a folder in that of /shared
    test=job       the same, while a job called `images` runs there
    test=module    a Python block, as a script
    test=<file>    this block is run by tests/…/<file>.py, which reads it from the page
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import generations
import pytest
from commands import ended
from elastic_run import ElasticRun
from etcd_server import EtcdServer

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = ("make", "etcd", "job", "module")


@dataclass(frozen=True)
class Snippet:
    page: str
    line: int
    language: str
    how: str
    text: str
    exported: bool = False  # the page has said before it that ADAPTDL_ETCD is to be exported


def snippets() -> Iterator[Snippet]:
    for page in PAGES:
        content = page.read_text()
        for match in FENCE.finditer(content):
            how = re.search(r"test=(\S+)", match[2])
            line = content.count("\n", 0, match.start()) + 1
            exported = "export ADAPTDL_ETCD=" in content[: match.start()]
            yield Snippet(page.name, line, match[1], how[1] if how else "", match[3], exported)


def of(how: str) -> list[pytest.param]:
    return [pytest.param(s, id=f"{s.page}:{s.line}") for s in snippets() if s.how == how]


def run(snippet: Snippet, directory: Path, endpoint: str, timeout: float = 560) -> str:
    """Run a block as a user would, from a directory like a clone; returns what it printed."""
    for name in ("examples", "benchmarks"):
        if not (directory / name).exists():
            (directory / name).symlink_to(ROOT / name)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(directory),
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("ADAPTDL_ETCD", None)
    if snippet.exported:
        environment["ADAPTDL_ETCD"] = endpoint
    text = snippet.text.replace("etcd0:2379", endpoint).replace("/shared", str(directory))
    done = ended(["bash", "-euo", "pipefail", "-c", text], directory, env=environment, timeout=timeout)
    assert done.returncode == 0, f"{snippet.page}:{snippet.line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_snippet_says_how_it_is_tested() -> None:
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for snippet in snippets():
        if snippet.language in ("bash", "sh", "python", "console"):
            assert snippet.how in RUN or snippet.how in tests, f"{snippet.page}:{snippet.line}"


VARIABLE = re.compile(r"\bADAPTDL_[A-Z_]*[A-Z]\b")


def test_every_variable_that_is_read_is_on_a_page_and_the_other_way_round() -> None:
    folders = [ROOT / name for name in ("adaptdl_elastic", "agent", "autoscaler", "rendezvous")]
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    read = {name for path in sources for name in VARIABLE.findall(path.read_text())}
    told = {name for page in PAGES for name in VARIABLE.findall(page.read_text())}
    assert "ADAPTDL_LOGLEVEL" in read
    assert read == told


def test_every_relative_link_to_a_file_of_the_repository_leads_somewhere() -> None:
    """Links between pages of docs/ are followed by mkdocs (tests/test_site.py)."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            there = (page.parent / target).resolve()
            within = page.is_relative_to(ROOT / "docs") and there.is_relative_to(ROOT / "docs")
            if not target.startswith("http") and not within:
                assert there.exists(), f"{page.name}: {target}"


@pytest.mark.processes
@pytest.mark.parametrize("snippet", of("make"))
def test_make_targets_exist(snippet: Snippet) -> None:
    for line in snippet.text.splitlines():
        target = line.split("#")[0].split()
        assert target[0] == "make"
        subprocess.run(["make", "-n", *target[1:]], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("snippet", of("module"))
def test_a_module_snippet_runs_as_a_script(snippet: Snippet, tmp_path: Path) -> None:
    """In a process that was forked from one with torch, which imports in the order of the tests."""
    script = tmp_path / "snippet.py"
    script.write_text(snippet.text)
    ended = generations.run_alone(script, tmp_path)
    assert ended.code == 0, f"{snippet.page}:{snippet.line}\n{ended.output}"


@pytest.mark.slow
@pytest.mark.etcd
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
@pytest.mark.parametrize("snippet", of("etcd"))
def test_an_etcd_snippet_runs_with_an_etcd(snippet: Snippet, tmp_path: Path) -> None:
    with EtcdServer() as server:
        run(snippet, tmp_path, server.endpoint)


@pytest.mark.slow
@pytest.mark.etcd
@pytest.mark.timeout(600)
@pytest.mark.exhaustive
@pytest.mark.parametrize("snippet", of("job"))
def test_a_job_snippet_runs_while_a_job_runs(snippet: Snippet, tmp_path: Path) -> None:
    with EtcdServer() as server:
        command = ["--nnodes=1:8", "--nproc-per-node=1:2", f"--rdzv-endpoint={server.endpoint}"]
        command += ["--rdzv-id=images", str(ROOT / "examples" / "image_classification.py"), "--epochs=1000"]
        with ElasticRun(command, tmp_path) as job:
            job.wait_for_event("metrics")
            run(snippet, tmp_path, server.endpoint)
            assert job.wait() == 143, job.text()  # the last command stops it
