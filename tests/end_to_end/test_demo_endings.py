"""What a demo says where it did not show what it should: one line, and no dump of what it has seen."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import ended
from elastic_run import ROOT

EXAMPLES = str(ROOT / "examples")


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def test_an_unmet_expectation_is_one_line_with_the_folder_of_the_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from demo_ending import UnmetError, conclude

    def demo() -> int:
        raise UnmetError("expected `ls` to succeed; it said: first\nsecond\nlast")

    assert conclude("team-demo", tmp_path, demo) == 1
    line = f"team-demo: expected `ls` to succeed; it said: first ... last; logs are in {tmp_path}\n"
    assert capsys.readouterr().err == line
    assert not list(tmp_path.iterdir())


def test_any_other_error_is_one_line_too_and_its_traceback_goes_to_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from demo_ending import conclude

    def demo() -> int:
        raise AssertionError("as root on node1:\n" + "x" * 5000)

    assert conclude("cluster-demo", tmp_path, demo) == 1
    said = capsys.readouterr().err
    assert said.startswith("cluster-demo: AssertionError: as root on node1: ... xxx")
    assert said.endswith(f"; logs are in {tmp_path}\n")
    assert said.count("\n") == 1
    assert len(said) < 600
    assert "in demo\n" in (tmp_path / "traceback.txt").read_text()


@pytest.mark.exhaustive
@pytest.mark.processes
def test_a_demo_whose_run_fails_says_so_in_its_last_line(tmp_path: Path) -> None:
    run = ended(
        [sys.executable, f"{EXAMPLES}/demo.py", "--no-such-option"],
        env={"PATH": "/usr/bin:/bin", "ADAPTDL_DEMO_DIR": str(tmp_path), "HOME": str(tmp_path)},
    )
    assert run.returncode == 1
    out = tmp_path / ".demo"
    line = f"demo: expected the run to end well; its exit code is 2; logs are in {out}"
    assert run.stderr.splitlines()[-1] == line, run.stderr
    assert "demo.py" not in run.stderr
