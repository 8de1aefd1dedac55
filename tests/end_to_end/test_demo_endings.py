"""What a demo says where it did not show what it should: one line, and no dump of what it has seen."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from elastic_run import ROOT

EXAMPLES = str(ROOT / "examples")


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def row(job: str, state: str = "running", **fields: Any) -> dict[str, Any]:
    usual = {"job": job, "state": state, "replicas": 1, "epoch": 7, "epochs": 30, "step": 100, "reason": ""}
    return {**usual, **fields}


class Desk:
    """A site whose `adaptdl ls` prints these rows, one list after another, the last one for ever."""

    what = "a desk"
    up_options = ()

    def __init__(self, *looks: list[dict[str, Any]]) -> None:
        self._looks = list(looks)

    def start(self, person: str, command: Sequence[str]) -> Finished:
        return Finished(json.dumps(self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]))


class Finished:
    """A process that has printed a text and ended well."""

    returncode = 0

    def __init__(self, said: str) -> None:
        self._said = said

    def communicate(self, timeout: float) -> tuple[str, None]:
        return self._said, None


class Time:
    """A clock that only goes on when someone sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def story(*looks: list[dict[str, Any]]) -> tuple[Any, Time]:
    from team_demo import Story

    time = Time()
    return Story(Desk(*looks), time, time.sleep), time


def never(jobs: object) -> bool:
    return False


def steps(last: int) -> Iterator[list[dict[str, Any]]]:
    return ([row("digits", step=step)] for step in range(last))


def test_the_team_demo_gives_up_when_nothing_has_moved_and_says_how_far_each_job_is() -> None:
    from demo_ending import UnmetError
    from team_demo import PATIENCE

    late = row("late", "queued", epoch=None, reason="needs 2 slots")
    told, time = story([row("small", "done", epoch=10, epochs=10), row("digits"), late])
    with pytest.raises(UnmetError) as refused:
        told.wait("every job to be done", never)
    assert str(refused.value) == (
        "expected every job to be done; for 180 s small is done at epoch 10/10, "
        "digits is running at epoch 7/30, late waits (needs 2 slots)"
    )
    assert PATIENCE < time.now < PATIENCE + 5


def test_the_team_demo_goes_on_waiting_while_a_job_trains() -> None:
    from team_demo import LOOK_SECONDS, PATIENCE

    looks = int(1.5 * PATIENCE / LOOK_SECONDS)
    told, time = story(*steps(looks), [row("digits", "done")])
    told.wait("the end", lambda jobs: jobs["digits"]["state"] == "done")
    assert time.now > PATIENCE


def test_the_team_demo_ends_within_ten_minutes_whatever_moves() -> None:
    from demo_ending import UnmetError
    from team_demo import LIMIT

    told, time = story(*steps(1000))
    with pytest.raises(UnmetError, match=r"expected the end within 540 s; digits is running at epoch 7/30"):
        told.wait("the end", never)
    assert LIMIT < time.now < 600


def test_the_team_demo_does_not_wait_for_a_job_that_has_failed() -> None:
    from demo_ending import UnmetError

    told, time = story([row("digits", "failed")])
    with pytest.raises(UnmetError, match="expected the end; digits is failed at epoch 7/30"):
        told.wait("the end", never)
    assert time.now == 0


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


@pytest.mark.processes
def test_a_demo_whose_run_fails_says_so_in_its_last_line(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, f"{EXAMPLES}/demo.py", "--no-such-option"],
        env={"PATH": "/usr/bin:/bin", "ADAPTDL_DEMO_DIR": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    out = tmp_path / ".demo"
    line = f"demo: expected the run to end well; its exit code is 2; logs are in {out}"
    assert run.stderr.splitlines()[-1] == line, run.stderr
    assert "demo.py" not in run.stderr
