"""A job trains one version of its code: other text neither joins it nor ends it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import JOB, LONG, TRAIN, Cluster
from elastic_run import ElasticRun

from adaptdl_elastic.agent.core.states import AgentIdentity
from adaptdl_elastic.agent.runtime.code_version import CodeVersion
from adaptdl_elastic.agent.terminal.run_options import parse
from adaptdl_elastic.protocol import uncaught_error
from adaptdl_elastic.rendezvous.schema.records import JobSpec

ELASTIC = ("--standalone", "--no-autoscale", "--nproc-per-node=1:2", f"--rdzv-id={JOB}")
CHANGES = {"changed": "\nprint('other text')\n", "half-saved": "\ndef f(:\n"}


def edit(path: Path, change: str) -> None:
    path.write_text(path.read_text() + CHANGES[change])


def unlike_a_file(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_elsewhere(path: Path) -> None:
    path.rename(moved := path.with_suffix(".moved"))
    path.symlink_to(moved)


def project(directory: Path) -> Path:
    """Return a script with a module beside it, and one that it writes itself."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "beside.py").write_text("SIZE = 1\n")
    made = "Path(__file__).with_name('made.py').write_text(f'T = {time.time()}')"
    script = directory / "train.py"
    head = f"from pathlib import Path\nimport time\n{made}\nimport beside, made\n"
    script.write_text(head + Path(TRAIN).read_text())
    return script


def version(script: Path, told: list[str], code: str = "", on_demand: bool = False) -> CodeVersion:
    options = parse(["--standalone", str(script)], {})
    me = AgentIdentity("n", "a", JobSpec(JOB, "run", code=code), on_demand=on_demand)
    return CodeVersion(options, me, told.append, lambda text: None)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["train.py", "beside.py"])
def test_a_file_that_differs_is_told_of_until_it_is_as_before(tmp_path: Path, name: str, change: str) -> None:
    script, told = project(tmp_path / "code"), list[str]()
    code = version(script, told)
    code.starts()
    code.trained([str(script), str(script.with_name("beside.py")), "/elsewhere.py"], time.time() + 1)
    assert (set(code.files), code.refusal()) == ({"train.py", "beside.py"}, "")
    before = script.with_name(name).read_text()
    edit(script.with_name(name), change)
    assert f"{name} has changed since training began; `adaptdl stop {JOB}`, and" in code.refusal()
    script.with_name(name).write_text(before)
    assert (code.refusal(), told) == ("", [name, ""])


@pytest.mark.parametrize("gone", [Path.unlink, os.utime, unlike_a_file, link_elsewhere])
def test_a_file_that_is_away_or_has_the_same_text_does_not_differ(
    tmp_path: Path, gone: Callable[[Path], object]
) -> None:
    script, told = project(tmp_path / "code"), list[str]()
    by_link = tmp_path / "run.py"
    by_link.symlink_to(script)
    code = version(by_link, told)
    code.starts()
    code.trained([str(by_link), str(script.with_name("beside.py"))], time.time() + 1)
    assert set(code.files) == {"train.py", "beside.py"}
    for name in code.files:
        gone(script.with_name(name))
    assert (code.refusal(), told) == ("", [])


def test_files_written_after_the_start_and_copies_of_services_do_not_count(tmp_path: Path) -> None:
    script = project(tmp_path / "code")
    code = version(script, [])
    code.starts()
    code.trained([str(script.with_name("beside.py"))], since=time.time() - 100)
    assert set(code.files) == {"train.py"}
    for kept in (version(script, [], code="s3://x"), version(script, [], on_demand=True)):
        kept.starts()
        kept.trained([str(script.with_name("beside.py"))], time.time() + 1)
        assert not kept.files


class Proxy:
    """An entry of `sys.modules` that fails whatever it is asked for."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)


def test_odd_entries_of_sys_modules_raise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "odd", Proxy())  # type: ignore[arg-type]
    assert __file__ in uncaught_error.loaded_files()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_changed_code_stops_growth_and_restarts_and_nothing_else(tmp_path: Path) -> None:
    script = project(tmp_path / "code")
    with ElasticRun([*ELASTIC, "--checkpoint-interval=0.2", str(script), *LONG], tmp_path) as run:
        run.wait_for_event("epoch")
        before = script.read_text()
        edit(script, "half-saved")
        run.adaptdl("scale", JOB, "--replicas", "2")
        run.wait_until_adaptdl_says("train.py has changed", "nodes")
        seen = len(run.events)
        run.wait_for_event("epoch", after=seen)
        assert run.of("failure") == []
        assert max(event["replicas"] for event in run.of("generation")) == 1
        assert run.text().count("train.py has changed since training began") == 1, run.text()
        script.write_text(before)
        run.wait_for_event("generation", replicas=2)
        edit(script.with_name("beside.py"), "changed")
        for pid in (pid for event in run.of("started")[-1:] for pid in event["pids"].values()):
            os.kill(pid, signal.SIGKILL)
        assert run.wait() == 1, run.text()
        assert "beside.py has changed since training began" in run.text().splitlines()[-1]


@pytest.mark.exhaustive
@pytest.mark.etcd
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_copy_joins_from_another_directory_and_another_text_does_not(
    cluster: Cluster, tmp_path: Path
) -> None:
    script, copy = project(tmp_path / "code"), tmp_path / "copy" / "train.py"
    shutil.copytree(script.parent, copy.parent)
    first = cluster.start("first", str(script), *LONG)
    first.wait_for_event("epoch")
    second = cluster.start("second", str(copy), *LONG)
    cluster.scale(2, first)
    third = cluster.directory / "third" / "train.py"
    shutil.copytree(copy.parent, third.parent)
    edit(third.with_name("beside.py"), "changed")
    late = cluster.start("third", str(third), *LONG)
    cluster.wait_for_node("third", like="first")
    cluster.ask("scale", JOB, "--replicas", "3")
    cluster.wait_until_told("beside.py has changed", "nodes")
    assert "beside.py has changed since training began" in late.text()
    cluster.finish(first, second)
    assert max(event["replicas"] for event in first.of("generation")) == 2
