"""A search over trials that are played: what is started, recorded, pruned and taken up again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from adaptdl_elastic.autoscaler.cli import adaptdl
from adaptdl_elastic.autoscaler.sweep.search import COMPLETE, FAILED, PRUNED, Search
from adaptdl_elastic.autoscaler.sweep.study_file import StudyFile
from adaptdl_elastic.autoscaler.sweep.trial_process import metric_values, parse_events


@dataclass
class PlayedTrial:
    number: int
    reports: dict[int, float] = field(default_factory=dict)
    prune_above: float = float("inf")

    def report(self, value: float, step: int) -> None:
        assert step not in self.reports, "each step once"
        self.reports[step] = value

    def should_prune(self) -> bool:
        return self.reports[max(self.reports)] > self.prune_above


@dataclass
class PlayedStudy:
    left: list[tuple[Any, int]] = field(default_factory=list)
    ends: dict[int, tuple[float | None, str]] = field(default_factory=dict)
    asked: list[PlayedTrial] = field(default_factory=list)
    prune_above: float = float("inf")

    def interrupted(self) -> Sequence[tuple[Any, int]]:
        return self.left

    def wants_more(self, trials: int) -> bool:
        return len(self.left) + len(self.asked) < trials

    def ask(self) -> PlayedTrial:
        self.asked.append(PlayedTrial(len(self.left) + len(self.asked), prune_above=self.prune_above))
        return self.asked[-1]

    def tell(self, trial: Any, value: float | None, state: str) -> None:
        assert trial.number not in self.ends
        self.ends[trial.number] = (value, state)


class PlayedJob:
    """Reports one value at each look; ends with a code after the last, or with 143 when it is stopped."""

    def __init__(self, values: list[float], code: int = 0) -> None:
        self.values, self.code, self.stopped = list(values), code, False

    def ended(self) -> int | None:
        return (143 if self.stopped else self.code) if not self.values or self.stopped else None

    def reported(self) -> list[float]:
        found, self.values = self.values[:1], self.values[1:]
        return [] if self.stopped else found

    def stop(self) -> None:
        self.stopped = True


class Played:
    """A search over jobs that are given by their trial's number."""

    def __init__(self, study: PlayedStudy, jobs: dict[int, PlayedJob], command: Any = None) -> None:
        self.jobs, self.most, self.lines, self.looks, self.stop_at = jobs, 0, list[str](), 0, 10**9
        self.study, self.live = study, set[int]()
        start: Callable[[int, list[str]], PlayedJob] = self.start
        self.search = Search(
            study, command or (lambda trial: ["train.py", trial.number]), start, "loss",
            self.lines.append, lambda: self.looks >= self.stop_at,
        )  # fmt: skip

    def start(self, number: int, words: list[str]) -> PlayedJob:
        assert words == ["train.py", str(number)]
        self.live.add(number)
        self.most = max(self.most, len(self.live - set(self.study.ends)))
        return self.jobs[number]

    def wait(self) -> None:
        self.looks += 1
        assert self.looks < 1000


def test_the_last_value_counts_and_no_more_run_at_a_time_than_asked_for() -> None:
    study = PlayedStudy()
    played = Played(study, {n: PlayedJob([3.0, 2.0, 1.0 + n]) for n in range(5)})
    played.search.run(5, 2, played.wait)
    assert study.ends == {n: (1.0 + n, COMPLETE) for n in range(5)}
    assert study.asked[0].reports == {0: 3.0, 1: 2.0, 2: 1.0}
    assert played.most == 2


def test_the_other_trials_go_on_when_one_fails_reports_nothing_or_diverges() -> None:
    study = PlayedStudy()
    jobs = [PlayedJob([1.0], code=1), PlayedJob([]), PlayedJob([1.0, float("nan")]), PlayedJob([0.5])]
    played = Played(study, dict(enumerate(jobs)))
    played.search.run(4, 1, played.wait)
    assert [study.ends[n][1] for n in range(4)] == [FAILED, FAILED, FAILED, COMPLETE]
    assert any("trial 0 failed with exit code 1" in line for line in played.lines)
    assert any("trial 1 reported no loss: call adl.report(loss=...)" in line for line in played.lines)
    assert any("trial 2 ended with loss nan" in line for line in played.lines)


def test_a_pruned_trial_is_stopped_once_and_keeps_its_value() -> None:
    study = PlayedStudy(prune_above=5.0)
    played = Played(study, {0: PlayedJob([4.0, 6.0, 7.0, 8.0]), 1: PlayedJob([1.0])})
    played.search.run(2, 1, played.wait)
    assert study.ends == {0: (6.0, PRUNED), 1: (1.0, COMPLETE)}


def test_an_interrupted_search_leaves_its_trials_for_the_next_one() -> None:
    study = PlayedStudy()
    played = Played(study, {0: PlayedJob([4.0, 3.0, 2.0]), 1: PlayedJob([4.0, 3.0, 2.0])})
    played.stop_at = 1
    played.search.run(5, 2, played.wait)
    assert study.ends == {}
    assert len(study.asked) == 2

    left = PlayedTrial(0, {0: 4.0})
    again = PlayedStudy(left=[(left, 1)])
    played = Played(again, {0: PlayedJob([4.0, 3.0, 2.0])})  # the log has the value of the first search, too
    played.search.run(1, 1, played.wait)
    assert left.reports == {0: 4.0, 1: 3.0, 2: 2.0}
    assert again.ends == {0: (2.0, COMPLETE)}


def test_an_error_in_the_studys_own_code_fails_that_trial_only() -> None:
    def command(trial: PlayedTrial) -> list[object]:
        if trial.number == 0:
            raise KeyError("lr")
        return ["train.py", trial.number]

    study = PlayedStudy()
    played = Played(study, {1: PlayedJob([1.0])}, command)
    played.search.run(2, 1, played.wait)
    assert study.ends == {0: (None, FAILED), 1: (1.0, COMPLETE)}
    assert "trial 0 command(trial) raised KeyError: 'lr'" in played.lines


@pytest.mark.parametrize(
    ("line", "values"),
    [
        (b'{"time": 1, "event": "metrics", "epoch": 0, "loss": 0.5}', [0.5]),
        (
            b'{"time": 1, "event": "metrics", "epoch": 0, "loss": "nan"}',
            [pytest.approx(float("nan"), nan_ok=True)],
        ),
        (b'{"time": 1, "event": "metrics", "epoch": 0, "accuracy": 0.5}', []),
        (b'{"time": 1, "event": "goodput", "loss": 0.5}', []),
        (b'{"time": 1, "event": "metrics", "loss": "high"}', []),
        (b'{"time": 1, "event": "met', []),
        (b"[1]", []),
    ],
)
def test_values_are_read_from_the_event_log(line: bytes, values: list[Any]) -> None:
    assert metric_values(parse_events(line + b"\n"), "loss") == values


@dataclass
class EndedStudy:
    """A study whose trials have ended, as the command reads it."""

    ends: tuple[str, ...]

    @property
    def best_trial(self) -> Any:
        return SimpleNamespace(number=0, params={"rate": 0.1}, value=0.5)

    def get_trials(self, deepcopy: bool) -> list[Any]:
        return [SimpleNamespace(state=SimpleNamespace(name=end)) for end in self.ends]


def run_sweep(folder: Path, monkeypatch: pytest.MonkeyPatch, *ends: str) -> Result:
    """Run the command on a study whose trials end so at once."""
    found = StudyFile("rates", lambda trial: [], EndedStudy(ends))
    monkeypatch.setattr("adaptdl_elastic.autoscaler.sweep.study_file.read", lambda path, maximize: found)
    monkeypatch.setattr(Search, "run", lambda *_: None)
    return CliRunner().invoke(adaptdl, ["sweep", __file__, "--folder", str(folder)], prog_name="adaptdl")


def test_a_search_without_a_complete_trial_fails_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ends in ((FAILED, PRUNED), ()):
        result = run_sweep(tmp_path, monkeypatch, *ends)
        assert result.exit_code == 1
        last = result.output.splitlines()[-1]
        assert last.startswith("adaptdl: no trial of the study is complete, so none is the best; see ")
    assert run_sweep(tmp_path, monkeypatch, FAILED, COMPLETE).exit_code == 0


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "odd" / "rates" / "lock").mkdir(parents=True)
    for folder, why in (("file/in", "Not a directory"), ("odd", "Is a directory")):
        result = run_sweep(tmp_path / folder, monkeypatch, COMPLETE)
        assert result.exit_code == 2
        assert result.output.startswith(f"adaptdl sweep: --folder: {tmp_path}")
        assert f"{why}; give a directory where you may write" in result.output
        assert result.output.count("\n") == 1
