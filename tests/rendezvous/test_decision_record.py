"""The file of the last decisions: what is kept, hidden, written, and refused when it is read."""

from __future__ import annotations

import json
import logging
import math
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from adaptdl_elastic.agent.core import states
from adaptdl_elastic.agent.runtime.decision_recorder import DecisionRecorder
from adaptdl_elastic.autoscaler.cli import adaptdl
from adaptdl_elastic.goodput import PerfParams
from adaptdl_elastic.rendezvous import decision_record
from adaptdl_elastic.rendezvous.schema.held import Left, LeftEnd
from adaptdl_elastic.rendezvous.schema.records import (
    CheckpointRecord,
    Failure,
    JobSpec,
    JobState,
    JobStatus,
    MasterRecord,
    Outcome,
    Placement,
)

SPEC = JobSpec("demo", "r1", command=("train.py", "--hf", "abcdefgh12"), checkpoint_path="s3://k:v@b/c")
ME = states.AgentIdentity("n0", "a0", SPEC)


def recorded(folder: Path, calls: int = 3) -> Path:
    """A file with decisions of an agent."""
    recorder = DecisionRecorder(folder)
    state = states.State(ME)
    for now in range(calls):
        left = Left("n1", "a1", now, (LeftEnd(now, Outcome.DONE),))
        state, _ = recorder.decide(state, states.LeftSeen(left), float(now))
    recorder.close(write=True)
    (file,) = folder.iterdir()
    return file


def replay(file: Path) -> tuple[int, str]:
    done = CliRunner().invoke(adaptdl, ["replay", str(file)])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    "value",
    [
        (1, 2.5, None, True, "text"),
        {("a", 1): Outcome.FAILED, ("b", 2): Outcome.DONE},
        {"~": 1, "other": (2,)},
        frozenset({3, 1}),
        frozenset({("run", 4)}),
        math.inf,
        -math.inf,
        PerfParams(1, 2, 3, 4, 5, 6, 7),
        Placement("n", 2, slots=(0, 3)),
        JobStatus("j", "r", JobState.FAILED, failures=(Failure(0, -9, "killed", step=3),)),
        states.LocalGeneration(2, (states.Replica(0, 1),), states.Joining(math.inf, frozenset({1}))),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back(value: Any) -> None:
    assert decision_record.decode(json.loads(json.dumps(decision_record.encode(value)))) == value


def test_fields_that_no_decision_reads_are_left_out() -> None:
    values = (SPEC, CheckpointRecord("c", "s3://k:v@b"), MasterRecord(0, "h", 1, code={"a": "b"}))
    text = json.dumps(decision_record.encode(values))
    assert "train.py" not in text
    assert "s3:" not in text
    assert decision_record.decode(json.loads(text))[1] == CheckpointRecord("c", "")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no https://me:pw@host/x", "no https://***@host/x"),
        ("--api-key abc is wrong", "--api-key *** is wrong"),
        ("AWS_SECRET_ACCESS_KEY=abc", "AWS_SECRET_ACCESS_KEY=***"),
        ("'password': 'abc'", "'password': '***'"),
        ("?X-Amz-Signature=0f&a", "?X-Amz-Signature=***"),
        ("unrecognized arguments: --hf abcdefgh12", "unrecognized arguments: --hf ***"),
        ("2 replicas on n0: the goodput 300 → 450", "2 replicas on n0: the goodput 300 → 450"),
    ],
)
def test_secrets_in_texts_are_hidden(text: str, shown: str) -> None:
    assert decision_record.hide(text, {"abcdefgh12"}) == shown


def test_words_of_a_command_and_of_the_environment_are_hidden_and_names_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "environ-77")
    recorder = DecisionRecorder(tmp_path)
    text = "bad abcdefgh12, environ-77 on node-0001"
    me = states.AgentIdentity("node-0001", "a0", JobSpec("j", "r", command=("abcdefgh12", "node-0001")))
    recorder.decide(states.State(me), states.Unfit(text), 1.0)
    found = "\n".join(recorder.lines())
    assert "bad ***, *** on node-0001" in found
    assert "abcdefgh" not in found
    assert "environ-77" not in found


def test_a_file_is_the_users_alone_and_says_what_changes(tmp_path: Path) -> None:
    file = recorded(tmp_path)
    assert (file.name, stat.S_IMODE(file.stat().st_mode)) == ("decisions-agent.jsonl", 0o600)
    code, said = replay(file)
    assert code == 0, said
    assert "state.left.n1.up_to: 1 → 2" in said
    assert said.endswith("3 decisions, the same as then\n")


def test_between_one_and_two_segments_are_kept_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_record.Recorder, "most_calls", 10)
    code, said = replay(recorded(tmp_path, 37))
    assert (code, said.splitlines()[-1]) == (0, "17 decisions, the same as then")


def test_a_planted_difference_is_found(tmp_path: Path) -> None:
    file = recorded(tmp_path)
    lines = file.read_text().splitlines(keepends=True)
    call = json.loads(lines[3])
    call[2]["actions"] = [decision_record.encode(states.Kill((0,), "planted"))]
    file.write_text("".join([*lines[:3], json.dumps(call) + "\n", *lines[4:]]))
    code, said = replay(file)
    assert code == 1
    assert "planted" in said
    assert "this is decided differently now" in said
    assert " 3: " not in said, "it stops there"


def test_a_state_that_was_changed_beside_the_core_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision_record.Recorder, "most_calls", 1)
    recorder = DecisionRecorder(tmp_path)
    recorder.decide(states.State(ME), states.Tick(), 1.0)
    recorder.decide(states.State(ME, acted=7), states.Tick(), 2.0)
    recorder.close(write=True)
    code, said = replay(tmp_path / "decisions-agent.jsonl")
    assert (code, "state.state.acted: 7 → -1" in said) == (1, True), said


def test_an_error_of_the_core_is_kept_and_comes_again(tmp_path: Path) -> None:
    recorder = DecisionRecorder(tmp_path)
    with pytest.raises(AttributeError):
        recorder.decide(states.State(ME), states.PlanSeen(None), 1.0)  # type: ignore[arg-type]
    recorder.close(write=True)
    code, said = replay(tmp_path / "decisions-agent.jsonl")
    assert (code, "as then" in said) == (0, True), said


def test_another_version_is_named_and_replayed(tmp_path: Path) -> None:
    file = recorded(tmp_path)
    header, rest = file.read_text().split("\n", 1)
    file.write_text(json.dumps({**json.loads(header), "version": "0.0.9"}) + "\n" + rest)
    code, said = replay(file)
    assert (code, "version 0.0.9 wrote this" in said) == (0, True)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: "hello\n",
        lambda text: "[1]\n",
        lambda text: '{"decisions": "agent"}\n',
        lambda text: text[: len(text) // 2],
        lambda text: text.rpartition("\n")[0].rpartition("\n")[0],
        lambda text: text.replace('"decisions": "agent"', '"decisions": "other"'),
        lambda text: text.replace("agent.core.states:State", "os:system"),
        lambda text: text.replace("agent.core.states:State", "agent.core.states:replace"),
        lambda text: text.replace("agent.core.states:State", "agent.core.states:Mapping"),
        lambda text: text.replace("agent.core.states:State", "agent.taking_part:LaunchError"),
        lambda text: text.replace('"acted"', '"unknown"'),
        lambda text: text.replace('["call",[0.0', '["call",["x"'),
        lambda text: text.replace('["begin"', '["else"'),
        lambda text: text.split("\n")[0] + "\n" + "[" * 100_000,
    ],
)
def test_a_foreign_or_cut_file_is_one_line(spoil: Any, tmp_path: Path) -> None:
    file = recorded(tmp_path)
    file.write_text(spoil(file.read_text()))
    code, said = replay(file)
    assert code == 1
    assert f"{file}: " in said.splitlines()[-1]


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = DecisionRecorder(tmp_path / "not there")
    recorder.decide(states.State(ME), states.Tick(), 1.0)
    with caplog.at_level(logging.WARNING):
        recorder.close(write=True)
    assert ["cannot be written" in record.message for record in caplog.records] == [True]
