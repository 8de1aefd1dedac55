"""What a script draws outside of data loops is what an undisturbed run draws there, after any change."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loop_events
import numpy as np
import pytest
import torch
from draw_shapes import Place, Shape
from fresh import Script
from loop_cases import Job, run_here

import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint

# with these there are all kinds of loops in all kinds of scripts, and among replicas each event in them
ALONE = (0, 4, 5, 7, 8)
TOGETHER = (40, 44, 45, 46, 47, 48)

STREAMS = ("torch", "numpy", "python", "array", "text", "tensors", "many", "sets")

Draws = dict[tuple[Any, ...], list[list[float]]]
"""What was drawn, by place: each time that a process came to it."""


def drawn(folder: Path) -> Draws:
    found: Draws = {}
    for path in sorted(folder.glob("draws-*")):
        for line in path.read_text().splitlines():
            place, values = json.loads(line)
            found.setdefault(tuple(place), []).append(values)
    return found


@pytest.mark.parametrize("seed", ALONE)
def test_a_resumed_script_draws_what_an_undisturbed_one_draws(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    shape, script = Shape.drawn(seed), Script(monkeypatch, ADAPTDL_CHECKPOINT_INTERVAL="0")
    choose = random.Random(seed)
    stops = [choose.choice(shape.boundaries()) for _ in range(2)]

    def here(epoch: int, number: int, unit: int) -> None:
        loader = adl.current_dataloader()
        assert loader is not None
        place = (epoch, number, loader.current_index * unit)
        if place in stops and adl.batch_counts():
            stops.remove(place)
            loop_events.stop_at_the_next_boundary(epoch, number, unit)

    for name, events in (("calm", None), ("stopped", here)):
        (tmp_path / name).mkdir()
        script.set(ADAPTDL_CHECKPOINT_PATH=str(tmp_path / name / "checkpoints"))
        monkeypatch.setattr(loop_events, "OUT", tmp_path / name)
        monkeypatch.setattr(loop_events, "here", events or (lambda *place: None))
        for _ in range(3 if events else 1):
            run_here(shape.source(own=True), script)
    check(shape, drawn(tmp_path / "stopped"), drawn(tmp_path / "calm"))
    assert kept_once(tmp_path / "stopped") == (0 if shape.epochless else shape.all_epochs)


class Steady(Job):
    """A job that is resumed on as many replicas as before."""

    def _again(self, before: int) -> None:
        self._hold(-1)
        self.generation += 1
        self._start(before)


@pytest.mark.processes
@pytest.mark.parametrize("seed", TOGETHER)
def test_replicas_and_newcomers_draw_what_an_undisturbed_script_draws(tmp_path: Path, seed: int) -> None:
    shape, choose = Shape.drawn(seed), random.Random(seed)
    places = shape.boundaries()
    event: Place = choose.choice(places[:-1] or places)
    what = choose.choice(["grow", "grow", "swap", "stop", "crash"])
    case: Any = SimpleNamespace(spec=shape, replicas=2, events=((event, what),))
    with Steady(case, tmp_path) as job:
        job.drive()
        plain: dict[str, Any] = {}
        exec(compile(shape.source(plain=True), "plain", "exec"), plain)
        try:
            check(shape, drawn(tmp_path), {place: [values] for place, values in plain["drawn"]})
            # a checkpoint from before the call lets it be made again
            again = kept_once(tmp_path) - (0 if shape.epochless else shape.all_epochs)
            assert again == 0 or (again == 1 and what == "crash")
        except AssertionError as error:
            raise AssertionError(f"{what} at {event}\n{error}\n{job.outputs()}") from error


def kept_once(folder: Path) -> int:
    """How many results of `once_per_epoch` there were, each with its epoch."""
    return len({line for path in folder.glob("once-*") for line in path.read_text().splitlines()})


def check(shape: Shape, found: Draws, expected: Draws) -> None:
    wrong = []
    for place, values in expected.items():
        for number, name in enumerate(STREAMS):
            seen = {one[number] for one in found[place]}
            if seen != {values[0][number]}:
                wrong.append(f"{place}: {name} {seen} instead of {values[0][number]}")
    assert set(found) == set(expected)
    assert not wrong, "\n".join([*wrong, shape.source()])


def test_a_resumed_epoch_keeps_what_a_function_returned_once(script: Script) -> None:
    """The function has a data loop of its own, draws, and depends on weights that have changed since."""
    calls, trained, weight, after = list[int](), list[list[int]](), [1], list[float]()

    def hardest() -> dict[str, Any]:
        calls.append(weight[0])
        read = [int(one) for batch in adl.AdaptiveDataLoader(range(4), batch_size=2) for one in batch]
        torch.rand(len(calls))
        return {"read": np.array(read), "hard": {weight[0]}}

    def epochs(stop: int | None) -> None:
        torch.manual_seed(1)
        for _ in adl.remaining_epochs_until(2):
            kept = adl.once_per_epoch(hardest)
            assert kept["read"].tolist() == [0, 1, 2, 3]
            after.append(torch.rand(()).item())
            for batch in adl.AdaptiveDataLoader(range(6), batch_size=2):
                trained.append([*batch.tolist(), *kept["hard"]])
                weight[0] += 1
                if len(trained) == stop:
                    checkpoint.save_all_states()
                    return

    epochs(stop=5)
    script.restart()
    weight[0] = 100
    epochs(stop=None)
    assert calls == [1, 4]
    assert trained == [[0, 1, 1], [2, 3, 1], [4, 5, 1], [0, 1, 4], [2, 3, 4], [2, 3, 4], [4, 5, 4]]
    assert after[2] == after[1]


def test_once_per_epoch_is_refused_where_it_would_be_called_again(script: Script) -> None:
    with pytest.raises(RuntimeError, match="in an epoch loop"):
        adl.once_per_epoch(dict)
    for _ in adl.remaining_epochs_until(1):
        for _ in adl.AdaptiveDataLoader(range(4), batch_size=2):
            with pytest.raises(RuntimeError, match="outside of data loops"):
                adl.once_per_epoch(dict)
