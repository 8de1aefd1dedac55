"""A trial's job whose process is played: what is reported, saved and resumed."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from adaptdl_elastic.tune import trial_job
from adaptdl_elastic.tune.job_process import JobProcess, parse_events
from adaptdl_elastic.tune.trial_job import TrialFailedError, TrialJob


def metrics(time: float = 1.0, **values: Any) -> dict[str, Any]:
    return {"time": time, "event": "metrics", "epoch": 0, **values}


def checkpoint(number: int = 2, taken: float = 1.0) -> dict[str, Any]:
    return {"time": 9.0, "event": "checkpoint", "id": id_of(number), "taken": taken}


def id_of(number: int) -> str:
    return f"{number:08}-g00000-0a"


class PlayedProcess:
    """A job that logs what it was given, a batch of events per look, and ends with `code` after the last."""

    def __init__(
        self, job: str, command: list[str], folder: Path, options: list[str], environment: Any
    ) -> None:
        self.job, self.checkpoints, self.log = job, folder / job, folder / f"{job}.log"
        folder.mkdir(exist_ok=True)
        self.log.write_text("one\n\ntwo\nthree\nRuntimeError: no\n")
        self.found = sorted(path.name for path in self.checkpoints.glob("*"))
        self.checkpoints.mkdir(exist_ok=True)
        for number in range(1, 4):
            (self.checkpoints / id_of(number)).mkdir(exist_ok=True)
        (self.checkpoints / "finished.json").touch()
        self.batches: list[list[dict[str, Any]]] = []
        self.code, self.stops = 0, 0

    def events(self) -> list[dict[str, Any]]:
        return self.batches.pop(0) if self.batches else []

    def ended(self) -> int | None:
        return None if self.batches else self.code

    def stop(self) -> None:
        self.stops += 1

    def wait(self) -> int:
        return self.code


Played = list[PlayedProcess]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    """Every process that was started; the first one logs the batches that the test gives it by `play`."""
    started: list[PlayedProcess] = []

    def start(*given: Any) -> PlayedProcess:
        started.append(PlayedProcess(*given))
        return started[-1]

    monkeypatch.setattr(trial_job, "JobProcess", start)
    monkeypatch.setattr(trial_job, "LOOK_EVERY", 0.0)
    return started


def job_of(folder: Path, played: Played, *batches: list[dict[str, Any]], code: int = 0) -> TrialJob:
    job = TrialJob("t", folder, ["train.py"], [], "unix:/nowhere")
    folder.mkdir(exist_ok=True)
    job.start()
    played[-1].batches, played[-1].code = list(batches), code
    return job


def test_reports_come_one_by_one_with_the_size_at_that_moment(tmp_path: Path, played: Played) -> None:
    size = {"time": 1.0, "event": "generation", "replicas": 2}
    job = job_of(tmp_path, played, [metrics(loss=3.0)], [size, metrics(loss="nan"), metrics(loss=1.0)])
    assert job.next() == {"epoch": 0, "loss": 3.0}
    found = job.next()
    assert found is not None
    assert found["replicas"] == 2
    assert found["loss"] != found["loss"]
    assert job.next() == {"epoch": 0, "loss": 1.0, "replicas": 2}
    assert job.next() is None


def test_a_job_that_fails_is_one_line_with_the_end_of_its_log(tmp_path: Path, played: Played) -> None:
    job = job_of(tmp_path, played, [metrics(loss=3.0)], code=1)
    assert job.next() is not None
    with pytest.raises(
        TrialFailedError, match=r"^t failed with exit code 1: two \| three \| RuntimeError: no$"
    ):
        job.next()


def test_a_saved_state_has_the_earlier_reports_that_were_not_taken(
    tmp_path: Path, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report behind the checkpoint is made again by the job that goes on."""
    behind = [metrics(loss=2.0), checkpoint(), metrics(2.0, loss=1.0)]
    job = job_of(tmp_path / "a", played, [metrics(loss=3.0)], [], behind, [])
    monkeypatch.setattr(trial_job, "ask_for_checkpoint", lambda *_: "")
    assert job.next() == {"epoch": 0, "loss": 3.0}
    job.save(tmp_path / "saved")
    assert [one["loss"] for one in json.loads((tmp_path / "saved" / "reports.json").read_text())] == [2.0]
    other = job_of(tmp_path / "b", played)
    other.resume(tmp_path / "saved")
    assert played[-2].stops == 1, "what ran before is stopped"
    assert other.next() == {"epoch": 0, "loss": 2.0}
    assert other.next() is None
    assert played[-1].found == [id_of(2)], "only the newest checkpoint, and no note that the job is done"


def test_a_report_that_is_made_while_the_state_is_written_is_behind_it(
    tmp_path: Path, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A periodic checkpoint of before a returned report is passed over; the one that was asked for counts."""
    late = [metrics(4.0, loss=2.0), metrics(6.0, loss=1.0), checkpoint(3, taken=5.0)]
    job = job_of(tmp_path, played, [metrics(2.0, loss=3.0)], [], [checkpoint(2, taken=1.5)], late, [])
    monkeypatch.setattr(trial_job, "ask_for_checkpoint", lambda *_: "")
    assert job.next() == {"epoch": 0, "loss": 3.0}
    job.save(tmp_path / "saved")
    assert [one["loss"] for one in json.loads((tmp_path / "saved" / "reports.json").read_text())] == [2.0]
    assert [place.name for place in (tmp_path / "saved" / "checkpoints").iterdir()] == [id_of(3)]


def test_a_job_that_ends_while_it_is_asked_for_its_state_is_saved_as_it_ended(
    tmp_path: Path, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, played, [], [], [metrics(loss=2.0)])
    monkeypatch.setattr(trial_job, "ask_for_checkpoint", lambda *_: "t-0 has already ended: done")
    job.save(tmp_path / "saved")
    assert len(json.loads((tmp_path / "saved" / "reports.json").read_text())) == 1


def test_a_job_that_cannot_save_its_state_is_one_line(
    tmp_path: Path, played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, played, *([[]] * 1000))
    monkeypatch.setattr(trial_job, "ask_for_checkpoint", lambda *_: "adaptdl: the store does not answer")
    monkeypatch.setattr(trial_job, "SAVE_SECONDS", 0.0)
    with pytest.raises(TrialFailedError, match="t cannot save its state: adaptdl: the store does not answer"):
        job.save(tmp_path / "saved")


@pytest.mark.parametrize("line", [b'{"time": 1, "event": "met', b"[1]", b'{"time": 1}'])
def test_a_line_of_the_event_log_that_is_no_event_is_left_out(line: bytes) -> None:
    assert parse_events(line + b'\n{"event": "metrics", "loss": "nan"}\n') == [
        {"event": "metrics", "loss": "nan"}
    ]


@pytest.mark.processes
def test_a_job_ends_with_the_thread_that_started_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    started: list[JobProcess] = []

    def start() -> None:
        started.append(JobProcess("a", [str(script)], tmp_path, ["--standalone"]))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    # the signal comes before the agent handles it, or after; without one the code is 0
    assert started[0].wait() in (-signal.SIGTERM, 128 + signal.SIGTERM)
