"""`adaptdl report`: what it computes from an event log, and what it says about logs that it cannot use."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from adaptdl_elastic.autoscaler.cli import adaptdl
from adaptdl_elastic.autoscaler.diagnostics import run_report
from adaptdl_elastic.goodput import GoodputFunction
from adaptdl_elastic.rendezvous.run_record import Run, read_run

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
              "atomic_bsz": 64, "accumulation_steps": 0, "predicted_goodput": 130.0}  # fmt: skip
    found = [start, first, change, grown]
    found += [sample(10.0 + 2 * place, noise, **other) for place, noise in enumerate(noises)]
    return [*found, {"time": 10.0 + 2 * len(noises), "event": "exit", "code": 0, "reason": "done"}]


def reported(events: list[dict[str, Any]], price: float | None = None) -> run_report.Report:
    run = Run()
    for event in events:
        run.add(event)
    return run_report.report(run, price)


def written(folder: Path, events: list[dict[str, Any]]) -> Path:
    path = folder / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def ask(*arguments: str | Path) -> Result:
    return CliRunner().invoke(adaptdl, ["report", *map(str, arguments)])


def test_the_critical_batch_size_is_that_of_the_logged_statistics() -> None:
    found = reported(log([100.0] * 10 + [300.0] * 10))
    assert [round(one.critical_batch_size) for one in found.periods] == [100] * 5 + [300] * 5
    assert found.periods[0].lowest == found.periods[0].highest == pytest.approx(100)
    mixed = reported(log([90.0, 100.0, 110.0] * 10))
    assert (mixed.periods[0].lowest, mixed.periods[0].highest) == pytest.approx((90, 110))


def test_the_range_is_a_standard_error_of_the_squared_gradient() -> None:
    [period, *_] = reported(log([100.0] * 20, grad_error=0.25, estimator="gradients of replicas")).periods
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
    found = reported(events)
    [period, *_] = found.periods
    # 100 and at least 400, of which no sample is left out
    assert period.critical_batch_size == pytest.approx(250)
    assert period.highest == float("inf")
    assert len(found.samples) == 20
    nothing = reported(log([100.0] * 20, **half))
    assert [one.critical_batch_size for one in nothing.periods] == pytest.approx([400.0] * 10)
    assert nothing.alternatives
    assert not nothing.missing
    unknown = reported(log([100.0] * 20, grad_params=(0.0, 3.0)))
    assert "in the noise" in unknown.missing[0]
    assert ask(written(tmp_path, events), "--html", tmp_path / "a.html").exit_code == 0


def test_another_size_takes_the_progress_at_its_own_best_goodput() -> None:
    found = reported(log([500.0] * 20), price=3.0)
    own = float(GoodputFunction(CURVE, (1.0, 500 / INIT), INIT)(1, 1, 64, 0))
    for one in found.alternatives:
        model = GoodputFunction(CURVE, (1.0, 500 / INIT), INIT)
        best, atomic, accumulated = model.optimize(one.replicas, one.replicas, MOST, (8, 256), False)
        assert one.seconds == pytest.approx(40.0 * own / best)
        assert one.batch_size == pytest.approx(atomic * (accumulated + 1) * one.replicas)
        assert one.samples == pytest.approx(40.0 * own / model.efficiency(one.batch_size))
        assert one.cost == pytest.approx(3.0 * one.replicas * one.seconds / 3600)
        assert one.tried == (one.replicas <= 2)
    assert [one.replicas for one in found.alternatives] == [1, 2, 4, 8, 16]


def test_a_prediction_that_was_too_high_is_scaled_to_what_was_measured() -> None:
    right = reported(log([500.0] * 20))
    half = log([500.0] * 20)
    for event in half:
        if event["event"] == "goodput":
            event["predicted_goodput"] *= 2
    wrong = reported(half)
    assert wrong.calibration == pytest.approx(0.5)
    assert wrong.alternatives[0].seconds == pytest.approx(2 * right.alternatives[0].seconds)


def test_the_time_is_divided_into_start_changes_and_training() -> None:
    events = log([100.0] * 20)
    events.insert(4, {"time": 9.0, "event": "generation", "generation": 2, "replicas": 1, "pause_s": 1.5})
    found = reported(events)
    assert (found.seconds, found.starting, found.pauses, found.training) == (50.0, 4.0, 2.0, 44.0)
    assert found.replicas == (1, 2, 1)


@pytest.mark.parametrize(
    ("noise", "advice"),
    [
        (256.0, "initial batch size: 128 (not tried) instead of 32, because the noise allowed 256"),
        (8.0, "initial batch size: 8 (not tried) instead of 32, because samples beyond 8 were wasted"),
        (40.0, "initial batch size: keep 32"),
        (74.0, "initial batch size: keep 32"),  # half of it is no other power of two
    ],
)
def test_the_initial_batch_size_of_the_next_run_follows_the_noise_at_the_beginning(
    noise: float, advice: str
) -> None:
    found = reported(log([noise] * 20))
    assert found.advice[0].startswith(advice)


def test_replicas_are_recommended_while_each_doubling_is_worth_it() -> None:
    little = reported(log([20.0] * 20))  # hardly any noise: larger batches help nobody
    assert any(line.startswith("replicas: 1,") for line in little.advice)
    much = reported(log([10_000.0] * 20))
    assert any(line.startswith(("replicas: 2,", "replicas: 4,")) for line in much.advice)


def test_a_size_that_was_not_tried_is_marked(tmp_path: Path) -> None:
    # two replicas are worth it, four by the curve alone
    path = written(tmp_path, log([10_000.0] * 20))
    text = ask(path, "--html", tmp_path / "page.html").output
    [advice] = [line for line in text.splitlines() if line.startswith("  replicas: ")]
    assert advice.startswith("  replicas: 2, since the same progress takes ")
    assert advice.endswith(" on 4 (not tried)")
    assert advice.count("not tried") == 1
    assert text.count("replica hours (not tried)") == 3
    assert "<td>2</td>" in (page := (tmp_path / "page.html").read_text())
    assert "<td>4 (not tried)</td>" in page
    only = reported(log([10_000.0] * 20, replicas=3, max_profiled_replicas=3))
    assert [one.replicas for one in only.alternatives if one.tried] == [3]
    assert only.advice[-1].startswith("replicas: 3, since the same progress takes ")
    # 1.5 times the replicas need not give 1.5 times the goodput
    both = reported(log([10_000.0] * 20, replicas=2, max_profiled_replicas=3))
    assert both.advice[-1].startswith("replicas: 3, since")
    used = [*log([256.0] * 20)[:-1], chosen(49, 128, 10.0)]
    assert reported(used).advice[0].startswith("initial batch size: 128 instead of 32")


def test_no_batch_size_comes_from_a_gradient_of_zero(tmp_path: Path) -> None:
    path = written(tmp_path, log([100.0] * 20, grad_params=(0.0, 3.0), grad_error=0.25))
    text = ask(path, "--html", tmp_path / "page.html").output
    assert "initial batch size: keep 32; no gradient was found in the noise at first (|G|² is 0)\n" in text
    assert "largest batch size" not in text
    found = run_report.report(read_run(path))
    assert {one.batch_size for one in found.alternatives} == {None}
    assert "<td>–</td>" in (tmp_path / "page.html").read_text()
    # samples without a gradient take no part in the mean size
    some = log([100.0] * 20)
    without = [dict(event, grad_params=(0.0, 3.0)) if event["time"] > 30 else event for event in some]
    sizes = [one.batch_size for one in reported(some).alternatives]
    assert [one.batch_size for one in reported(without).alternatives] == pytest.approx(sizes)


@pytest.mark.parametrize("constant", [0.0, 0.01])
def test_a_size_is_kept_where_the_time_of_a_step_is_proportional_to_it(constant: float) -> None:
    curve = (constant, 0.001, 0.0, 0.0, 0.0, 0.0, 1.0)
    advice = reported(log([1_700.0] * 20, perf_params=curve, max_batch_size=None)).advice
    if constant:
        assert advice[0].startswith("initial batch size: 1024 (not tried) instead of 32")
        assert any(line.startswith("batch size: let it grow") for line in advice)
    else:
        assert advice[0].startswith(
            "initial batch size: keep 32, because the time of a step is proportional to the batch"
        )
        assert not any(line.startswith("batch size: let it grow") for line in advice)


def test_the_learning_rate_of_the_next_run_is_that_of_the_scaling_rule() -> None:
    events = log([256.0] * 20)
    # the square-root rule gave 2 at four times the initial size
    used = [*events[:2], {**chosen(5, 128, 10.0), "lr_factor": 2.0}, *events[4:]]
    assert reported(used).advice[1] == "learning rate: × 2.00 (the scaling rule gave × 2.00 at 128)"
    less = [*events[:2], {**chosen(5, 64, 10.0), "lr_factor": 2.0**0.5}, *events[4:]]
    assert reported(less).advice[1] == "learning rate: × 2.00 (the scaling rule gave × 1.41 at 64)"
    fixed = [*events[:2], *events[4:]]
    assert "the scaling rule was not used in this run" in reported(fixed).advice[1]
    kept = reported(log([40.0] * 20)).advice
    assert not any(line.startswith("learning rate") for line in kept)


def chosen(time: float, batch: int, goodput: float, replicas: int = 1) -> dict[str, Any]:
    """Return the event of a batch size that was chosen, with what was measured of it."""
    return {"time": time, "event": "batch_size", "batch_size": batch, "atomic_bsz": batch // replicas,
            "accumulation_steps": 0, "lr_factor": 1.5, "goodput": goodput}  # fmt: skip


def test_a_change_has_its_gain_over_the_size_before_it_and_why_it_was_made(tmp_path: Path) -> None:
    model = GoodputFunction(CURVE, (1.0, 100.0 / INIT), INIT)
    start, *_, end = log([])
    events = [
        start, chosen(1, 32, 100.0), sample(2, 100.0, 32, goodput=110.0), sample(3, 100.0, 32, goodput=90.0),
        chosen(4, 1024, 69.0), sample(5, 100.0, 1024, goodput=70.0), sample(6, 100.0, 1024, goodput=71.0),
        {"time": 6.5, "event": "metrics", "goodput": "good"},
        chosen(7, 64, 105.0), chosen(8, 1024, 70.0), chosen(9, 1024, 140.0, replicas=2), end,
    ]  # fmt: skip
    first, large, back, again, wider = reported(events).changes
    assert (first.predicted, first.measured, first.why) == (None, None, "first measured")
    worse = model(1, 1, 1024, 0) / model(1, 1, 32, 0)
    assert worse < 0.9
    assert large.predicted == pytest.approx(worse)
    assert (large.measured, large.why) == (pytest.approx(0.7), "not tried in this run")
    assert back.predicted == pytest.approx(model(1, 1, 64, 0) / model(1, 1, 1024, 0))
    assert (back.measured, back.why) == (pytest.approx(1.5), "predicted to be better")
    assert again.why == "may be better than predicted"
    assert (wider.predicted, wider.measured) == (None, pytest.approx(2.0))
    assert wider.why == "2 replicas instead of 1"
    text = ask(written(tmp_path, events), "--html", tmp_path / "page.html").output
    assert f"goodput × 0.70 (predicted {worse:.2f})  not tried in this run" in text
    assert (
        "<td>0.70</td>" + f"<td>{worse:.2f}</td><td>not tried in this run</td>"
        in (tmp_path / "page.html").read_text()
    )


@pytest.mark.parametrize("killed", [False, True])
def test_the_command_reports_on_the_last_of_several_runs(tmp_path: Path, killed: bool) -> None:
    first = log([100.0] * 10)[: -1 if killed else None]
    second = [{**event, "time": event["time"] + 1000.0} for event in log([300.0] * 10)]
    done = ask(written(tmp_path, [*first, *second]), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["seconds"] == 30.0
    assert {round(one["critical_batch_size"]) for one in found["periods"]} == {300}


def test_generations_that_follow_each_other_are_one_run(tmp_path: Path) -> None:
    events = log([100.0] * 10)
    again = {"time": 9.0, "event": "started", "generation": 2, "pids": {}}
    done = ask(written(tmp_path, [*events[:4], again, *events[4:]]), "--json")
    assert json.loads(done.output)["seconds"] == 30.0


def test_the_readable_part_of_a_cut_log_is_reported(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("size", [0.001, 3.0, 379_100.0, 9e8, 1e15])
def test_the_numbers_of_a_picture_fit_beside_it(tmp_path: Path, size: float) -> None:
    path = written(tmp_path, log([size, 10 * size] * 10, goodput=size, predicted_goodput=size))
    assert ask(path, "--html", tmp_path / "page.html").exit_code == 0
    page = (tmp_path / "page.html").read_text()
    numbers = re.findall(r'<text x="([0-9.]+)" y="([0-9.]+)" text-anchor="end">([^<]+)</text>', page)
    assert len(numbers) == 2 * (5 + 1)  # five beside each picture, the last one below it
    # a digit of the font of 12 px is at most 7.5 px wide and 9 px high
    assert not [text for right, down, text in numbers if 7.5 * len(text) > float(right) or float(down) < 9]
    assert "e+05" not in page


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


GENERATION, BATCH_SIZE, SAMPLE = 1, 2, 4  # places in `log`
MISSING = object()
NAN = float("nan")
WRONG: list[Any] = [
    *(NAN, math.inf, 1e308, -1e308, 10**400, 1e-320, -1, 0, 1e15),
    *(True, "x", "\ud800", None, [], [1], {}),
]


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (SAMPLE, "nodes", 0),
        (SAMPLE, "init_batch_size", 0),
        (SAMPLE, "grad_params", (NAN, 1.0)),
        (SAMPLE, "grad_params", (1.0, None)),
        (SAMPLE, "batch_size", 10**30),
        (SAMPLE, "max_batch_size", INIT - 1),
        (SAMPLE, "local_bsz_bounds", []),
        (SAMPLE, "local_bsz_bounds", [9, 8]),
        (SAMPLE, "perf_params", (0.0, 0.0, *CURVE[2:])),
        (SAMPLE, "perf_params", (*CURVE[:6], 0.0)),
        (SAMPLE, "predicted_goodput", "x"),
        (SAMPLE, "replicas", MISSING),
        (SAMPLE, "estimator", "\ud800"),
        (GENERATION, "replicas", MISSING),
        (GENERATION, "pause_s", "x"),
        (GENERATION, "time", NAN),
        (BATCH_SIZE, "batch_size", MISSING),
        (BATCH_SIZE, "atomic_bsz", "x"),
        (BATCH_SIZE, "accumulation_steps", -1),
        (BATCH_SIZE, "lr_factor", []),
        (BATCH_SIZE, "goodput", {}),
    ],
)
def test_an_event_with_an_impossible_value_is_left_out_and_counted_at_the_end(
    tmp_path: Path, place: int, name: str, value: Any
) -> None:
    events = log([100.0] * 3)
    whole = ask(path := written(tmp_path, events), "--json").stdout
    wrong = {key: known for key, known in {**events[place], name: value}.items() if known is not MISSING}
    written(tmp_path, [*events[:-1], wrong, events[-1]])
    left_out = f"{path}: left out line 8, no event of adaptdl-run (a log that was cut there?)\n"
    assert ask(path).output.endswith(f"\n{left_out}")
    found = ask(path, "--json")
    assert (found.stdout, found.stderr) == (whole, left_out)


def damaged(choose: random.Random) -> bytes:
    """Return a log with one to three kinds of damage."""
    events = log([100.0, 300.0] * 6, grad_error=0.25)
    events = [*events[:5], chosen(11, 128, 10.0), *events[5:9], chosen(19, 256, 20.0, 2), *events[9:]]
    for _ in range(choose.randint(0, 2)):
        event = choose.choice(events)
        name = choose.choice(list(event))
        if choose.random() < 0.3 and len(event) > 1:
            del event[name]
        elif isinstance(event[name], list | tuple) and choose.random() < 0.5:
            event[name] = [choose.choice([one, *WRONG]) for one in event[name]]
        else:
            event[name] = choose.choice(WRONG)
    if choose.random() < 0.3:
        choose.shuffle(events)
    text = bytearray("".join(json.dumps(event) + "\n" for event in events).encode())
    for _ in range(choose.choice([0, 0, 1, 5])):
        text[choose.randrange(len(text))] = choose.choice(b'0123456789-.,e":{}[] \n\xff')
    if choose.random() < 0.3:
        at = choose.randrange(len(text))
        del text[at : at + choose.choice([1, 100, len(text)])]
    return bytes(text)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_damaged_log_gives_a_report_or_one_line(tmp_path: Path) -> None:
    choose = random.Random(0)
    for _ in range(60):
        (tmp_path / "log").write_bytes(damaged(choose))
        done = ask(tmp_path / "log", "--html", tmp_path / "page.html", "--price", "2")
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        assert done.exit_code == 0 or done.output.count("\n") == 1
        assert "nan" not in done.output.lower().replace("inan", "")


def test_a_log_that_is_not_there_gets_one_line_with_the_remedy(tmp_path: Path) -> None:
    done = ask(tmp_path / "none")
    assert done.exit_code == 1
    assert done.output.count("\n") == 1
    assert "start a job with adaptdl-run --event-log FILE" in done.output


def test_the_report_says_which_figures_are_not_known(tmp_path: Path) -> None:
    events = log([100.0] * 5, perf_params=None, grad_params=None)
    done = ask(written(tmp_path, events))
    assert done.exit_code == 0
    assert "not known: no critical batch size" in done.output
    assert "not known: no other sizes" in done.output
