"""A run summed up and drawn from its events."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from import_graph import ROOT
from rich.cells import cell_len
from rich.console import Console

from adaptdl_elastic.agent.launch import complain
from adaptdl_elastic.agent.terminal import display
from adaptdl_elastic.agent.terminal.event_recorder import EventRecorder
from adaptdl_elastic.autoscaler.coordinator.decision_types import CoordinatorSettings
from adaptdl_elastic.rendezvous.run_record import Event, Run
from adaptdl_elastic.rendezvous.schema.records import Cause, Failure, Placement, Plan, Transition
from adaptdl_elastic.rendezvous.text import duration

RUN: list[Event] = [
    {"time": 100.0, "event": "started", "generation": 0, "pids": {"0": 1}},
    {"time": 101.0, "event": "generation", "generation": 0, "replicas": 1, "nodes": 1, "cause": "start",
     "reason": "first", "pause_s": None},
    {"time": 105.0, "event": "batch_size", "batch_size": 32, "gain": 1.0, "lr_factor": 1.0, "goodput": 300.0,
     "predicted_goodput": 310.0, "efficiency": 1.0},
    {"time": 107.0, "event": "metrics", "epoch": 0, "accuracy": 0.5, "loss": 2.0},
    {"time": 110.0, "event": "generation", "generation": 1, "replicas": 2, "nodes": 1, "cause": "policy",
     "reason": "goodput 300 → 450", "pause_s": 2.5},
    {"time": 111.0, "event": "batch_size", "batch_size": 64, "gain": 1.5, "lr_factor": 1.4, "goodput": 430.0,
     "predicted_goodput": 450.0, "efficiency": 0.8},
    {"time": 112.0, "event": "goodput", "goodput": 440.0, "predicted_goodput": 450.0},
    {"time": 115.0, "event": "failure", "rank": 1, "exit_code": -9, "message": "SIGKILL", "restarts_used": 1},
    {"time": 118.0, "event": "metrics", "epoch": 1, "accuracy": 0.9, "loss": 0.3},
    {"time": 119.0, "event": "epoch", "epoch": 1, "seconds": 9.0, "samples": 10},
    {"time": 120.0, "event": "exit", "exit_code": 0, "reason": "done"},
]  # fmt: skip


def run_of(events: list[Event], run: Run | None = None) -> Run:
    run = run or Run()
    for event in sorted(events, key=lambda event: float(event["time"])):
        run.add(event)
    return run


def test_a_run_says_when_and_why_each_generation_began() -> None:
    run = run_of(RUN)
    assert (run.began, run.ended) == (100.0, 120.0)
    (first, first_end), (second, second_end) = run.spans
    assert (first.time, first_end, first.pause_s) == (101.0, 110.0, None)
    assert (second.time, second_end, second.pause_s, second.cause) == (110.0, 120.0, 2.5, "policy")
    assert run.final_metrics == {"accuracy": 0.9, "loss": 0.3}
    assert run.failures == [(115.0, "replica 1: SIGKILL")]
    assert run.goodputs[-1] == (112.0, 440.0, 450.0)
    assert (run.exit_code, run.outcome) == (0, "exit code 0: done")


def test_the_summary_is_printed_for_people() -> None:
    text = io.StringIO()
    display.print_summary(Console(file=text, width=100), "job", run_of(RUN))
    for word in ("goodput 300 → 450", "2.5 s", "accuracy 0.9", "replica 1: SIGKILL", "32", "64"):
        assert word in text.getvalue()


REASON = "the throughput of two replicas predicts more goodput than that of one"


@given(
    st.integers(40, 250),
    st.sampled_from([1, 1000]),
    st.sampled_from([1, 100_000]),
    st.sampled_from(["policy", "start", "replica_lost"]),
    st.booleans(),
)
def test_the_summary_fits_the_terminal_and_keeps_words_whole(
    width: int, replicas: int, batch: int, cause: str, soft_wrap: bool
) -> None:
    change = {
        "generation": {"reason": REASON, "cause": cause, "replicas": replicas, "nodes": replicas},
        "batch_size": {"batch_size": batch, "gain": batch / 2},
    }
    events = [{**event, **change.get(event["event"], {})} for event in RUN]
    text = io.StringIO()
    console = Console(file=text, width=width, soft_wrap=soft_wrap)
    display.print_summary(console, "job", run_of(events))
    assert max(map(cell_len, text.getvalue().splitlines())) <= width
    for word in (*REASON.split(), "replicas", "batch size", str(batch), str(replicas), "2.5 s"):
        assert word in text.getvalue()


def latest(*events: Event) -> dict[str, Event]:
    return {event["event"]: event for event in events}


def shown(*events: Event, now: float = 150.0) -> list[str]:
    return [text for text, _ in display.live_cells(latest(*events), now)]


def test_the_live_line_tells_a_store_that_refuses_us_from_one_that_is_away() -> None:
    store: Event = {"time": 115.0, "event": "store", "state": "refused", "message": "wrong password"}
    assert shown(*RUN[:5])[0] == "2 replicas"
    assert shown(*RUN[:5], store)[:2] == ["2 replicas when last heard", "store refuses us (35 s)"]
    assert shown(*RUN[:5], {**store, "state": "away"})[1] == "store is away (35 s)"
    assert shown(*RUN[:5], {**store, "state": "back"})[0] == "2 replicas"
    assert shown(RUN[0], store) == ["starting", "store refuses us (35 s)"]


def test_the_live_line_does_not_show_replicas_that_are_not_there() -> None:
    lost: Event = {"time": 112.0, "event": "peers_lost", "generation": 1}
    ended: Event = {"time": 113.0, "event": "ended", "generation": 1, "outcome": "failed"}
    again: Event = {"time": 114.0, "event": "started", "generation": 2, "pids": {}}
    refused: Event = {"time": 115.0, "event": "store", "state": "refused", "message": ""}
    assert shown(*RUN[:5], lost)[0] == "others are lost: waiting for a new plan"
    assert shown(*RUN[:5], lost, ended)[0] == "no replica here"
    well = {**ended, "outcome": "done"}
    assert display.live_cells(latest(*RUN[:5], well), well["time"])[0] == ("its replicas ended well", "green")
    assert shown(*RUN[:5], ended, refused)[:2] == ["no replica here", "store refuses us (35 s)"]
    assert shown(*RUN[:5], lost, ended, again)[0] == "2 replicas"


@given(st.lists(st.sampled_from(RUN), unique_by=id))
def test_any_part_of_a_log_can_be_summed_up_and_printed(events: list[Event]) -> None:
    run = run_of(events)
    display.print_summary(Console(file=io.StringIO()), "job", run)
    assert all(generation.time <= end for generation, end in run.spans)


@pytest.mark.parametrize("events", [RUN, RUN[:2], []], ids=["whole", "just begun", "empty"])
def test_a_picture_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[Event]) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from draw_run import draw

    draw(run_of(events), tmp_path / "new" / "run.png", "job")
    assert (tmp_path / "new" / "run.png").read_bytes().startswith(b"\x89PNG")


def test_both_curves_of_goodput_are_named_though_the_first_replicas_predicted_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from draw_run import draw

    events = [event if event["time"] != 105.0 else {**event, "predicted_goodput": None} for event in RUN]
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(run_of(events), tmp_path / "run.svg", "job")
    text = (tmp_path / "run.svg").read_text()
    assert text.count(">measured<") == text.count(">predicted<") == 1


def test_an_error_message_with_brackets_is_no_markup() -> None:
    message = "rank 1 failed: [/__w/gloo/pair.cc:537] Read error [127.0.0.1]:43191"
    events = [{**e, "cause": "failure", "reason": message} if e["event"] == "generation" else e for e in RUN]
    text = io.StringIO()
    display.print_summary(Console(file=text, width=200), "[job]", run_of(events))
    assert message in text.getvalue()


def test_the_live_line_is_the_same_above_the_lines_of_a_replica() -> None:
    shown = display.Display("job", None, print)
    for event in RUN:
        shown.event(event)
    text = io.StringIO()
    Console(file=text, width=200).print(shown.line(), markup=False)
    assert "[bold]" not in text.getvalue()
    assert text.getvalue().lstrip().startswith("job")


@given(st.integers(40, 250), st.booleans())
def test_the_live_line_is_one_line_and_leaves_out_what_does_not_fit(width: int, soft_wrap: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(width))
        shown = display.Display("job", None, print)
    for event in RUN:
        shown.event(event)
    text = io.StringIO()
    Console(file=text, width=width).print(shown.line(), markup=False, soft_wrap=soft_wrap)
    (line,) = text.getvalue().splitlines()
    assert cell_len(line.rstrip()) <= width
    words = ("job", "replicas", "batch", "gain", "epoch", "accuracy", "loss", "0.3", "goodput", "430/s")
    there = [word for word in words if word in line.split()]
    assert there == list(words[: len(there)])
    assert len(there) >= (3 if width < 80 else 8 if width < 100 else 10)


class Terminal(io.StringIO):
    """An output stream that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("watched", [True, False], ids=["terminal", "file"])
def test_texts_of_other_nodes_are_shown_without_control_characters(
    watched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\x9b2J\x7f\u202egnp"
    stream = Terminal() if watched else io.StringIO()
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(sys, "stdout", Terminal() if watched else io.StringIO())
    shown = display.Display("job", True, complain)
    for event in RUN:
        texts = {key: hostile for key, value in event.items() if isinstance(value, str) and key != "event"}
        shown.event({**event, **texts, **({hostile: 1.0} if event["event"] == "metrics" else {})})
    shown.say(hostile)
    line = io.StringIO()
    Console(file=line, width=200).print(shown.line(), markup=False)
    shown.finish(1, hostile, None)
    complain(hostile)
    for text in (stream.getvalue(), line.getvalue()):
        assert r"\x1b]0;owned\x07\x1b[2J\x9b2J\x7f\u202egnp" in text
        assert not re.search("\x1b\\]|\x1b\\[2J|[\x07\x7f-\x9f\u202e]", text)


def test_a_run_without_history_keeps_no_measurement() -> None:
    run = run_of(RUN, Run(history=False))
    assert (run.samples, run.goodputs, run.metrics) == ([], [], [])
    assert run.final_metrics == {"accuracy": 0.9, "loss": 0.3}
    assert len(run.generations) == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.314, "0.31 s"), (7.25, "7.2 s"), (42, "42 s"), (185, "3 min 05 s"), (7440, "2 h 04 min")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def plan(generation: int, replicas: int = 2) -> Plan:
    placements = (Placement("here", replicas),)
    return Plan("job", "run", generation, placements, Cause.POLICY, Transition.RESTART, "why")


def test_a_pause_lasts_from_the_last_step_to_the_first() -> None:
    written: list[Event] = []
    recorder = EventRecorder(written.append)
    recorder.started(plan(0), {0: 10, 1: 11}, None)
    recorder.hello()
    for when in (5.0, 5.1, 6.0):
        recorder.step(when)
    recorder.ended()
    recorder.started(plan(1), {0: 12, 1: 13}, 6.25)  # another node saw a later step
    recorder.hello()
    recorder.step(9.0)
    generations = [e for e in written if e["event"] == "generation"]
    assert [(e["time"], e["pause_s"]) for e in generations] == [(5.0, None), (9.0, 2.75)]
    assert [e["pids"] for e in written if e["event"] == "started"][1] == {"0": 12, "1": 13}


def test_an_agent_that_joins_others_again_reports_no_pause() -> None:
    written: list[Event] = []
    recorder = EventRecorder(written.append)
    recorder.started(plan(0), {0: 10}, None)
    recorder.hello()
    recorder.step(5.0)
    grown = replace(plan(1), transition=Transition.INPLACE)
    recorder.started(grown, {0: 10, 1: 11}, None)  # here they go on
    recorder.hello()
    recorder.step(6.0)
    recorder.ended()
    recorder.started(replace(grown, generation=3), {0: 12}, 5.5)
    recorder.hello()
    recorder.step(90.0)
    pauses = [e["pause_s"] for e in written if e["event"] == "generation"]
    assert pauses == [None, 1.0, None]


def test_a_script_is_given_time_to_say_that_it_uses_the_library() -> None:
    """As long as the coordinator gives it; one that has said so once is never taken for another."""
    now, written = [100.0], list[Event]()
    recorder = EventRecorder(written.append, lambda: now[0])
    recorder.started(plan(0), {0: 10}, None)
    assert recorder.due() == 100.0 + CoordinatorSettings().hello_grace
    recorder.hello()
    assert recorder.due() is None
    now[0] = 200.0
    recorder.step(199.0)
    recorder.started(plan(1), {0: 11}, None)
    assert recorder.due() is None
    assert [e["time"] for e in written if e["event"] == "generation"] == [199.0]


def test_a_script_without_the_library_begins_when_it_starts() -> None:
    written: list[Event] = []
    recorder = EventRecorder(written.append)
    recorder.started(plan(0), {0: 10}, None)
    assert recorder.due() is not None
    recorder.flush()
    assert [e["event"] for e in written] == ["started", "generation"]
    assert recorder.due() is None


def test_a_failure_says_how_many_restarts_are_used() -> None:
    written: list[Event] = []
    EventRecorder(written.append).failure(Failure(1, -9, "SIGKILL"), 2, 3)
    assert {**written[0], "time": 0} == {
        "time": 0, "event": "failure", "rank": 1, "exit_code": -9, "message": "SIGKILL",
        "restarts_used": 2, "max_restarts": 3,
    }  # fmt: skip
