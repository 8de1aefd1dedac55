"""`adaptdl report`: what it computes from an event log, and what it says about logs that it cannot use."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from adaptdl_elastic.autoscaler.cli import adaptdl
from adaptdl_elastic.autoscaler.diagnostics import run_report
from adaptdl_elastic.goodput import GoodputFunction

CURVE = (0.01, 0.0001, 0.002, 0.0001, 0.001, 0.00001, 2.0)  # seconds; a replica more costs little
INIT, MOST = 32, 1024


def sample(time: float, noise: float, batch: int = 64, **other: Any) -> dict[str, Any]:
    """Return an event of a job on one replica whose critical batch size is `noise` samples."""
    gradient = (1.0, noise / INIT)
    goodput = float(GoodputFunction(CURVE, gradient, INIT)(1, 1, batch, 0))
    return {
        "time": time, "event": "goodput", "goodput": goodput, "predicted_goodput": goodput,
        "throughput": 1.0, "efficiency": 0.5, "batch_size": batch, "step": 1, "epoch": 0, "replicas": 1,
        "nodes": 1, "init_batch_size": INIT, "max_batch_size": MOST, "local_bsz_bounds": [8, 256],
        "gradient_accumulation": False, "grad_params": gradient, "perf_params": CURVE, "lr_factor": 1.5,
        "max_profiled_replicas": 2, "progress": None, "samples_done": 1.0, **other,
    }  # fmt: skip


def log(noises: list[float], **other: Any) -> list[dict[str, Any]]:
    start = {"time": 0.0, "event": "started", "generation": 0, "pids": {}}
    first = {"time": 4.0, "event": "generation", "generation": 0, "replicas": 1, "pause_s": None}
    grown = {"time": 8.0, "event": "generation", "generation": 1, "replicas": 2, "pause_s": 0.5}
    change = {"time": 6.0, "event": "batch_size", "batch_size": 64, "lr_factor": 1.5, "goodput": 100.0,
              "predicted_goodput": 130.0}  # fmt: skip
    found = [start, first, change, grown]
    found += [sample(10.0 + 2 * place, noise, **other) for place, noise in enumerate(noises)]
    return [*found, {"time": 10.0 + 2 * len(noises), "event": "exit", "code": 0, "reason": "done"}]


def written(folder: Path, events: list[dict[str, Any]]) -> Path:
    path = folder / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def ask(*arguments: str | Path) -> Result:
    return CliRunner().invoke(adaptdl, ["report", *map(str, arguments)])


def test_the_critical_batch_size_is_that_of_the_logged_statistics() -> None:
    found = run_report.report(log([100.0] * 10 + [300.0] * 10))
    assert [round(one.critical_batch_size) for one in found.periods] == [100] * 5 + [300] * 5
    assert found.periods[0].lowest == found.periods[0].highest == pytest.approx(100)
    mixed = run_report.report(log([90.0, 100.0, 110.0] * 10))
    assert (mixed.periods[0].lowest, mixed.periods[0].highest) == pytest.approx((90, 110))


def test_the_range_is_a_standard_error_of_the_squared_gradient() -> None:
    [period, *_] = run_report.report(
        log([100.0] * 20, grad_error=0.25, estimator="gradients of replicas")
    ).periods
    assert period.standard_error
    assert (period.lowest, period.highest) == pytest.approx((100 / 1.25, 100 / 0.75))


def test_a_range_without_an_upper_end(tmp_path: Path) -> None:
    path = written(tmp_path, log([100.0] * 20, grad_error=2.0, estimator="gradients of replicas"))
    text = ask(path).output
    assert "(one standard error either way)" in text
    assert "(33 – ?)" in text
    assert "noise measured from: gradients of replicas" in text
    periods = json.loads(ask(path, "--json").output)["periods"]
    assert {one["highest"] for one in periods} == {None}
    assert ask(path, "--html", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    assert "one standard error of the squared gradient either way" in page
    assert "inf" not in page.partition("<body>")[2].replace("information", "")


def test_a_gradient_that_vanishes_in_the_noise_counts_as_one_of_a_standard_error(tmp_path: Path) -> None:
    half = {"grad_params": (0.0, 100.0 / INIT), "grad_error": 0.25}
    events = log([100.0] * 20, grad_error=0.25)
    events[4:-1] = [{**e, **half} if place % 2 else e for place, e in enumerate(events[4:-1])]
    found = run_report.report(events)
    [period, *_] = found.periods
    # 100 and at least 400, of which no sample is left out
    assert period.critical_batch_size == pytest.approx(250)
    assert period.highest == float("inf")
    assert len(found.samples) == 20
    nothing = run_report.report(log([100.0] * 20, **half))
    assert [one.critical_batch_size for one in nothing.periods] == pytest.approx([400.0] * 10)
    assert nothing.alternatives
    assert not nothing.missing
    unknown = run_report.report(log([100.0] * 20, grad_params=(0.0, 3.0)))
    assert "in the noise" in unknown.missing[0]
    assert ask(written(tmp_path, events), "--html", tmp_path / "a.html").exit_code == 0


def test_another_size_takes_the_progress_at_its_own_best_goodput() -> None:
    found = run_report.report(log([500.0] * 20), price=3.0)
    own = float(GoodputFunction(CURVE, (1.0, 500 / INIT), INIT)(1, 1, 64, 0))
    for one in found.alternatives:
        model = GoodputFunction(CURVE, (1.0, 500 / INIT), INIT)
        best, atomic, accumulated = model.optimize(one.replicas, one.replicas, MOST, (8, 256), False)
        assert one.seconds == pytest.approx(40.0 * own / best)
        assert one.batch_size == pytest.approx(atomic * (accumulated + 1) * one.replicas)
        assert one.samples == pytest.approx(40.0 * own / model.efficiency(one.batch_size))
        assert one.cost == pytest.approx(3.0 * one.replicas * one.seconds / 3600)
        assert one.extrapolated == (one.replicas > 4)
    assert [one.replicas for one in found.alternatives] == [1, 2, 4, 8, 16]


def test_a_prediction_that_was_too_high_is_scaled_to_what_was_measured() -> None:
    right = run_report.report(log([500.0] * 20))
    half = log([500.0] * 20)
    for event in half:
        if event["event"] == "goodput":
            event["predicted_goodput"] *= 2
    wrong = run_report.report(half)
    assert wrong.calibration == pytest.approx(0.5)
    assert wrong.alternatives[0].seconds == pytest.approx(2 * right.alternatives[0].seconds)


def test_the_time_is_divided_into_start_changes_and_training() -> None:
    found = run_report.report(log([100.0] * 20))
    assert (found.seconds, found.starting, found.pauses, found.training) == (50.0, 4.0, 0.5, 45.5)
    assert found.replicas == (1, 2)


@pytest.mark.parametrize(
    ("noise", "advice"),
    [
        (256.0, "initial batch size: 128 instead of 32, because the noise allowed 256"),
        (8.0, "initial batch size: 8 instead of 32, because samples beyond the critical batch size of 8"),
        (40.0, "initial batch size: keep 32"),
        (74.0, "initial batch size: keep 32"),  # half of it is no other power of two
    ],
)
def test_the_initial_batch_size_of_the_next_run_follows_the_noise_at_the_beginning(
    noise: float, advice: str
) -> None:
    found = run_report.report(log([noise] * 20))
    assert found.advice[0].startswith(advice)


def test_replicas_are_recommended_while_each_doubling_is_worth_it() -> None:
    little = run_report.report(log([20.0] * 20))  # hardly any noise: larger batches help nobody
    assert any(line.startswith("replicas: 1,") for line in little.advice)
    much = run_report.report(log([10_000.0] * 20))
    assert any(line.startswith(("replicas: 2,", "replicas: 4,")) for line in much.advice)


def test_the_command_reports_on_the_last_of_several_runs(tmp_path: Path) -> None:
    second = [{**event, "time": event["time"] + 1000.0} for event in log([300.0] * 10)]
    done = ask(written(tmp_path, [*log([100.0] * 10), *second]), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["seconds"] == 30.0
    assert {round(one["critical_batch_size"]) for one in found["periods"]} == {300}


def test_a_run_that_was_killed_is_not_merged_with_the_next_one_in_its_log(tmp_path: Path) -> None:
    second = [{**event, "time": event["time"] + 1000.0} for event in log([300.0] * 10)]
    done = ask(written(tmp_path, [*log([100.0] * 10)[:-1], *second]), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["seconds"] == 30.0
    assert {round(one["critical_batch_size"]) for one in found["periods"]} == {300}


def test_generations_that_follow_each_other_are_one_run(tmp_path: Path) -> None:
    events = log([100.0] * 10)
    again = {"time": 9.0, "event": "started", "generation": 2, "pids": {}}
    done = ask(written(tmp_path, [*events[:4], again, *events[4:]]), "--json")
    assert json.loads(done.output)["seconds"] == 30.0


def test_what_can_be_read_of_a_log_that_was_cut_in_the_middle_is_reported(tmp_path: Path) -> None:
    whole = ask(path := written(tmp_path, log([100.0] * 10)), "--json").stdout
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:6], '{"time": 11, "ev' + lines[6], *lines[6:]]) + "\n")
    done = ask(path, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout) == json.loads(whole)
    assert done.stderr == f"{path}: left out line 7, no event of adaptdl-run (a log that was cut there?)\n"


class _Page(HTMLParser):
    """Collects what a page needs from elsewhere, and checks that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.needs: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.needs += [str(value) for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "line", "polyline", "polygon"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "polyline", "polygon"):
            assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = ask(written(tmp_path, log([100.0, 150.0] * 10)), "--html", page, "--price", "2")
    assert done.exit_code == 0, done.output
    parser = _Page()
    parser.feed(page.read_text())
    assert parser.open == []
    assert parser.needs == []
    assert parser.seen.count("svg") == 2
    assert parser.seen.count("table") == 3
    assert "cost" in done.output


def test_a_line_that_was_cut_short_at_the_end_is_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, log([100.0] * 10)[:-1])
    path.write_text(path.read_text() + '{"time": 99, "ev')
    done = ask(path)
    assert done.exit_code == 0
    assert "still running, or killed" in done.output


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the log is empty; has the job begun to train?"),
        ('{"time": 1.0, "event": "started"}\nnonsense\n{}\n', "line 2 is no event of adaptdl-run"),
        ('{"time": 1.0, "event": "started"}\n', "the job has reported nothing yet"),
        ('{"time": 1.0, "event": "goodput", "goodput": 3.0}\n', "an older version has written this log"),
    ],
)
def test_a_log_that_cannot_be_used_gets_one_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    done = ask(path)
    assert done.exit_code == 1
    assert why in done.output
    assert done.output.count("\n") == 1


def test_a_log_of_a_script_without_an_agent_says_how_to_get_one(tmp_path: Path) -> None:
    told = ask(written(tmp_path, [{"time": 1.0, "event": "batch_size", "batch_size": 32}]))
    assert told.exit_code != 0
    assert "adaptdl-run --standalone --event-log" in told.output


@pytest.mark.parametrize(
    "wrong", [{"nodes": 0}, {"init_batch_size": 0}, {"grad_params": (float("nan"), 1.0)}]
)
def test_a_sample_with_impossible_values_is_left_out(tmp_path: Path, wrong: dict[str, Any]) -> None:
    events = log([100.0] * 3)
    path = written(tmp_path, [*events[:-1], sample(20.0, 100.0, **wrong), events[-1]])
    assert len(run_report.samples_of(run_report.read_events(path))) == 3
    assert ask(path).exit_code == 0


def test_a_log_that_is_not_there_gets_one_line_with_the_remedy(tmp_path: Path) -> None:
    done = ask(tmp_path / "none")
    assert done.exit_code == 1
    assert done.output.count("\n") == 1
    assert "start a job with adaptdl-run --event-log FILE" in done.output


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    events = log([100.0] * 5, perf_params=None, grad_params=None)
    done = ask(written(tmp_path, events))
    assert done.exit_code == 0
    assert "not known: no critical batch size" in done.output
    assert "not known: no other sizes" in done.output
