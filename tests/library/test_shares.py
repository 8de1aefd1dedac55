"""Unequal shares of a batch: who takes what, when they change, and that nothing else changes with them."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elastic_run import ElasticRun
from fake_agent import FakeAgent
from hypothesis import given
from hypothesis import strategies as st

from adaptdl_elastic.torch._data.sampler import ElasticBatchSampler, ElasticSampler
from adaptdl_elastic.torch._gradient.comm_hook import Recording
from adaptdl_elastic.torch._gradient.measurement import of_replicas
from adaptdl_elastic.torch._runtime.step_clock import StepParts
from adaptdl_elastic.torch._tuning.lag import Report
from adaptdl_elastic.torch._tuning.shares import AGREEING, STEPS, ShareChooser, allocate, choose
from adaptdl_elastic.torch._tuning.step_times import Key, StepTimes

SCRIPT = str(Path(__file__).parents[1] / "support" / "shares_script.py")

weights = st.lists(st.integers(1, STEPS), min_size=1, max_size=6).map(tuple)


@given(samples=st.integers(0, 500), shares=weights, least=st.integers(1, 4), room=st.integers(0, 40))
def test_an_allocation_is_whole_within_its_limits_and_near_the_shares(
    samples: int, shares: tuple[int, ...], least: int, room: int
) -> None:
    equal = -(-samples // len(shares))
    most = equal + room
    found = allocate(samples, shares, least, most)
    assert sum(found) == samples
    assert max(found) <= most
    assert min(found) >= min(least, samples // len(shares))
    for own, share in zip(allocate(samples, shares, 0), shares, strict=True):
        assert abs(own - samples * share / sum(shares)) < len(shares)


def test_the_allocation_of_speeds_1_and_04() -> None:
    assert allocate(64, (1000, 400)) == (46, 18)
    assert allocate(64, (1000, 400), most=40) == (40, 24)
    assert allocate(64, (1000, 1), least=4) == (60, 4)
    assert allocate(3, (1000, 1, 1)) == (1, 1, 1)


def reports(samples: tuple[int, ...], per_sample: tuple[float, ...]) -> dict[int, Report]:
    """Reports of replicas that take so many samples, and need so long for each."""
    pairs = enumerate(zip(samples, per_sample, strict=True))
    return {r: Report("host", StepParts(0.0, n * t, 0.0, 0.0), n) for r, (n, t) in pairs}


def settle(chooser: ShareChooser, samples: tuple[int, ...], per_sample: tuple[float, ...]) -> Any:
    for _ in range(AGREEING):
        chooser.take(reports(samples, per_sample), 1, None)
    return chooser.suggestion


def test_shares_follow_the_speeds() -> None:
    shares = settle(ShareChooser(), (32, 32), (0.01, 0.025))
    assert allocate(64, shares) == (46, 18)


@pytest.mark.parametrize("slower", [1.0, 1.1, 1.14])
def test_speeds_that_nearly_agree_change_nothing(slower: float) -> None:
    assert settle(ShareChooser(), (32, 32), (0.01, 0.01 * slower)) is None


def test_shares_that_fit_stay_and_go_back_when_the_speeds_agree_again() -> None:
    assert settle(ShareChooser(), (46, 18), (0.01, 0.025)) is None
    assert settle(ShareChooser(), (46, 18), (0.01, 0.027)) is None
    again = settle(ShareChooser(), (46, 18), (0.01, 0.01))
    assert allocate(64, again) == (32, 32)


def test_one_report_is_not_enough_and_bounds_are_part_of_the_price() -> None:
    chooser = ShareChooser()
    chooser.take(reports((32, 32), (0.01, 0.025)), 1, None)
    assert chooser.suggestion is None
    chooser.take(reports((32, 32), (0.01, 0.01)), 1, None)
    chooser.take(reports((32, 32), (0.01, 0.025)), 1, None)
    assert chooser.suggestion is None
    bound = ShareChooser()
    for _ in range(AGREEING):
        bound.take(reports((32, 32), (0.01, 0.025)), 1, 33)
    assert bound.suggestion is None  # nothing to gain within the bounds


def test_a_noisy_machine_does_not_move_the_shares() -> None:
    """Medians of seven steps that vary by 15 %: no change in 2000 reports."""
    random, chooser = np.random.default_rng(1), ShareChooser()
    for _ in range(2000):
        own = np.median(0.01 * random.lognormal(0, 0.15, (7, 3)), axis=0)
        chooser.take(reports((16, 16, 16), tuple(own)), 1, None)
        assert chooser.suggestion is None


def test_a_replica_without_samples_decides_nothing() -> None:
    assert choose(reports((64, 0), (0.01, 0.01))) is None


stays = st.lists(st.tuples(weights, st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=6)


@given(size=st.integers(1, 120), stays=stays, shuffle=st.booleans(), accumulation=st.integers(0, 2))
def test_every_sample_is_handed_out_once_whatever_the_shares(
    size: int, stays: list[tuple[tuple[int, ...], int, int]], shuffle: bool, accumulation: int
) -> None:
    """A pass over changing numbers of replicas and changing shares, each for some windows."""
    sampler = ElasticSampler(range(size), shuffle, seed=3)
    batches = ElasticBatchSampler(sampler, drop_last=False)
    batches.accumulation = accumulation
    seen: Counter[int] = Counter()
    position, stay = 0, 0
    while position < size:
        shares, local, count = stays[stay % len(stays)]
        stay += 1
        batches.local, sampler.num_replicas = local, len(shares)
        batches.counts = lambda chunk, _, shares=shares: allocate(chunk, shares)
        sampler.set_epoch(0, position)
        windows = list(batches.plan())[:count]
        for rank in range(len(shares)):
            sampler.rank = rank
            mine, place = iter(batches), position
            for chunk in (chunk for window in windows for chunk in window):
                taken = allocate(chunk, shares)[rank]
                batch = next(mine) if taken else []
                assert len(batch) == taken
                seen.update(batch)
                place += chunk
        position = place
    assert seen == Counter(range(size))


def test_noise_statistics_are_unbiased_for_unequal_batches() -> None:
    """The mean over many steps against the closed form: |G|² + S/N and S/N, which shares do not change."""
    random = np.random.default_rng(0)
    counts, steps, dimensions = (13, 2, 1), 40_000, 4
    total = sum(counts)
    true, deviation = np.array([0.3, -0.2, 0.1, 0.0]), 1.5
    fractions = np.array(counts) / total
    # the gradient of a replica is the mean of its samples: normal, with the variance of one over their number
    own = [true + deviation / np.sqrt(n) * random.standard_normal((steps, dimensions)) for n in counts]
    mean = sum(p * g for p, g in zip(fractions, own, strict=True))
    squares = sum(((p * g) ** 2).sum(1) for p, g in zip(fractions, own, strict=True))

    class Done:
        def wait(self, *limit: Any) -> None:
            pass

    recording = Recording(
        own=[torch.zeros(steps)],
        average=[torch.from_numpy((mean**2).sum(1))],
        reduced=torch.from_numpy(squares),
        work=Done(),
    )
    norms, variances = of_replicas([recording], float((fractions**2).sum())).numpy()
    noise = dimensions * deviation**2 / total
    for found, expected in ((norms, true @ true + noise), (variances, noise)):
        error = found.std() / np.sqrt(steps)
        assert abs(found.mean() - expected) < 4 * error
        assert error < 0.01 * expected
    # with the weights of equal batches the same gradients give another variance
    equal = of_replicas([recording], 1 / 3)[1].numpy()
    assert abs(equal.mean() - noise) > 20 * equal.std() / np.sqrt(steps)


def test_equal_batches_give_the_formula_for_equal_batches() -> None:
    class Done:
        def wait(self, *limit: Any) -> None:
            pass

    parts = torch.tensor([[3.0], [5.0]], dtype=torch.float64)  # two replicas, one parameter
    recording = Recording(
        own=[parts[:1]], average=[parts.mean(0) ** 2], reduced=((parts / 2) ** 2).sum(0), work=Done()
    )
    mean, variance = of_replicas([recording], 1 / 2)
    assert (float(mean), float(variance)) == (16.0, pytest.approx(parts.var(0).item() / 2))


def test_step_times_with_other_shares_are_forgotten() -> None:
    times, before, now = StepTimes(), Key(1, 1, 32), Key(1, 2, 16)
    for step in range(20):
        times.add(before, 0.1, 0.1 * step, False)
    for step in range(20):
        times.add(now, 0.2, 2 + 0.2 * step, False)
    times.forget(1, 2)
    assert {span.key for span in times.spans()} == {before}
    for step in range(20):
        times.add(now, 0.08, 6 + 0.08 * step, False)
    found = {entry.replicas: entry.optim_step_time for entry in times.entries()}
    assert found == {1: pytest.approx(0.1, rel=0.1), 2: pytest.approx(0.08)}


def finish(directory: Path, replicas: int, **settings: Any) -> tuple[list[dict[str, Any]], list[set[float]]]:
    """The steps of a job, in the order of time, and the weights that each replica ended with."""
    arguments = ["--standalone", f"--nproc-per-node={replicas}", "--no-autoscale", SCRIPT]
    variables = {"SHARES": json.dumps(settings), "OUT": str(directory)}
    with ElasticRun(arguments, directory, variables) as job:
        assert job.wait() == 0, job.text()
    lines = [line for file in directory.glob("steps-*") for line in file.read_text().splitlines()]
    rows = sorted((json.loads(line) for line in lines), key=lambda row: float(row["time"]))
    files = [json.loads(file.read_text()) for file in directory.glob("weights-*")]
    return rows, [{round(value, 9) for value in one} for one in files]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_slow_replica_takes_less_and_every_sample_counts_once_also_after_a_restart(tmp_path: Path) -> None:
    # steps of 0.26 and 0.64 s are long beside what a busy machine adds to both
    rows, found = finish(tmp_path, 2, samples=64 * 40, seconds=0.008, die=30)
    assert found, "no replica came to its end"
    assert all(one == {-1.0} for one in found)  # each sample moved its weight by 1, once
    together = [row["took"] for row in rows if row["rank"] == 1 and row["size"] == 2]
    assert together[0] == 32
    assert min(together[:30]) < 24, together


@pytest.mark.slow
def test_without_share_by_speed_shares_stay_equal(tmp_path: Path) -> None:
    rows, found = finish(tmp_path, 2, samples=64 * 25, share=False)
    assert all(one == {-1.0} for one in found)
    assert {row["took"] for row in rows} == {32}


DYING = """
import json, os, signal, time, torch
import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session
from adaptdl_elastic.torch.scaling_rules import LinearScale
adl.init_process_group("gloo")
torch.manual_seed(0)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(600, dtype=torch.float64))
    def forward(self, index):
        return self.w[index]
net = Model()
optimizer = torch.optim.SGD(net.parameters(), lr=12.0)
model = adl.AdaptiveDataParallel(net, optimizer, scaling_rule=LinearScale())
loader = adl.AdaptiveDataLoader(range(600), batch_size=12, shuffle=True)
control, shares = _session.current().consensus, loader._elastic.unequal
control.handlers["shares"] = shares._change
taken = []
for _ in adl.remaining_epochs_until(1):
    for index in loader:
        if len(taken) == 3 and adl.rank() == 0:
            control.request({"kind": "shares", "shares": [3, 1, 2]})
        if 3 <= len(taken) and shares.shares is None and adl.world_size() == 3:
            while not control.round_open:
                time.sleep(0.001)
        taken.append([adl.world_size(), len(index)])
        if adl.world_size() == 3 and len(taken) == 10:
            began = os.environ["OUT"] + "/began"
            if adl.rank() < 2:
                with open(began, "w") as file:
                    file.write("x")
            else:
                heard = ""
                while len(heard) < 2:
                    with open(began) as file:
                        heard += file.read()
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(index).mean().backward()
        optimizer.step()
with open(f"{os.environ['OUT']}/{adl.rank()}", "w") as file:
    json.dump([taken, net.w.tolist()], file)
"""


@pytest.mark.processes
def test_a_death_with_unequal_shares_repeats_the_step_in_equal_ones(tmp_path: Path) -> None:
    """The loss of a batch is the mean of w[i]: a step moves w[i] of each of its samples by -1."""
    script = tmp_path / "script.py"
    script.write_text(DYING)
    os.mkfifo(tmp_path / "began")
    with FakeAgent(script, tmp_path, OUT=str(tmp_path), ADAPTDL_CHECKPOINT_INTERVAL="0") as job:
        job.start(3)
        job.bury(2)
        job.plan_recovery()
        job.wait_for_all({"switched": 2})
        job.finish()
    for rank, share in enumerate((6, 2)):
        taken, weights = json.loads((tmp_path / str(rank)).read_text())
        assert taken[:3] == [[3, 4]] * 3
        # the step that the death broke off, in which all three were
        assert taken[9] == [3, share]
        assert taken[10:] == [[2, 6]] * (50 - 9)
        assert weights == pytest.approx([-1.0] * 600)
