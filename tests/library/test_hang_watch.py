"""Of replicas that wait for each other, the one that hangs is named, with its Python stack, and killed."""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from elastic_run import ElasticRun
from hypothesis import given
from hypothesis import strategies as st

from adaptdl_elastic import _frames
from adaptdl_elastic.torch._runtime import hang_watch
from adaptdl_elastic.torch._runtime.hang_watch import (
    PATIENCE,
    Answer,
    HangWatch,
    describe,
    hanging,
    left_before,
)
from adaptdl_elastic.torch._runtime.step_clock import Stage

SCRIPT = str(Path(__file__).parents[1] / "support" / "lag_script.py")


def at(*place: int, still: float = 30.0, waits: bool = False) -> Answer:
    return Answer(place, still, waits, "somewhere", "host", "")


WAITING = at(0, 1, 64, Stage.GRADIENTS, waits=True)
ENDING = at(1, 1, 1 << 62, 0, waits=True)


@pytest.mark.parametrize(
    ("others", "second", "found"),
    [
        *((WAITING, at(0, 1, 64, stage), [1]) for stage in (Stage.DATA, Stage.BODY)),
        *((WAITING, at(*place), [1]) for place in ((0, 1, 32, Stage.STEP), (0, 0, 900, 0))),
        # a collective of its own is no excuse
        (WAITING, at(0, 1, 64, Stage.BODY, waits=True), [1]),
        # at the same place it is the one that does not wait; where all wait for each other it is unknown
        (ENDING, at(1, 1, 1 << 62, 0), [1]),
        (ENDING, ENDING, []),
        # it moves on
        (WAITING, at(0, 1, 8, 2, still=3), []),
    ],
)
def test_the_replica_furthest_behind_hangs(others: Answer, second: Answer, found: list[int]) -> None:
    assert hanging({0: others, 1: second, 2: others}, 3, 20) == found


def test_a_replica_in_a_loop_that_others_have_left_is_told_how_to_leave_it() -> None:
    """A newcomer's `islice(loader, 20)` counts from 0: it stays in the loop when the others leave it."""
    behind = at(1, 1, 1 << 62, 0, 0, waits=True)
    waiting = at(1, 1, 64, 1, Stage.GRADIENTS, waits=True)
    answers = {0: behind, 1: waiting, 2: behind}
    assert hanging(answers, 3, 20) == [1]
    assert left_before(1, answers) == [0, 2]
    assert left_before(1, {**answers, 0: at(2, 1, 8, 0, 2)}) == [0, 2]  # as far as the next epoch
    assert "current_index" in describe(1, waiting, [0, 2])
    for other in (at(1, 1, 64, 1, Stage.BODY, waits=True), at(1, 1, 64, 1, Stage.STEP, waits=True)):
        assert left_before(1, {**answers, 1: other}) == []  # it may hang for another reason
    assert left_before(1, {0: waiting, 1: waiting, 2: waiting}) == []
    assert left_before(1, {0: behind, 2: behind}) == []


def test_a_replica_that_does_not_answer_hangs() -> None:
    assert hanging({0: at(0, 1, 64, 3, waits=True), 2: at(0, 1, 64, 3, waits=True)}, 3, 20) == [1]
    assert "does not answer" in describe(1, None)


@given(data=st.data(), replicas=st.integers(2, 6))
def test_a_replica_that_hangs_anywhere_is_found(data: st.DataObject, replicas: int) -> None:
    """One replica stops in any stage; the others go on until they need it: in the next gradients."""
    guilty = data.draw(st.integers(0, replicas - 1))
    stage = data.draw(st.sampled_from([Stage.DATA, Stage.BODY, Stage.STEP]))
    further = stage is Stage.STEP  # its gradients are sent, so the others come to the next step
    answers = {r: at(0, 1, 8 + 8 * further, Stage.GRADIENTS, waits=True) for r in range(replicas)}
    answers[guilty] = at(0, 1, 8, stage)
    assert hanging(answers, replicas, 20) == [guilty]


class World:
    """Sessions that send control messages to each other at once, and a clock that is moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replicas: int, timeout: str = "") -> None:
        monkeypatch.setenv("ADAPTDL_HANG_TIMEOUT", timeout)
        self.now = 1000.0
        self.deaf: set[int] = set()
        self.problems: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        self.sent: dict[int, list[Any]] = {rank: [] for rank in range(replicas)}
        self.listeners: list[dict[str, Any]] = [{} for _ in range(replicas)]
        self.clocks = [
            SimpleNamespace(stage=Stage.GRADIENTS, changed=1000.0, passes=1) for _ in range(replicas)
        ]
        place = SimpleNamespace(finished=0, entered=1, index=64, looping=True)
        monkeypatch.setattr(hang_watch, "script_position", lambda: place)
        self.flags = SimpleNamespace(loops_over=False, between=False, saving=False)  # of rank 0's consensus
        self.watches = [self._watch(rank, replicas) for rank in range(replicas)]

    def _watch(self, rank: int, replicas: int) -> HangWatch:
        def deliver(to: int, message: Any) -> None:
            kind, number, body = message
            if to not in self.deaf:
                self.listeners[to][kind](rank, number, body)

        def problem(about: str, text: str | None, every_time: bool) -> None:
            self.problems.pop(about, None)
            if text is not None:
                self.problems[about] = text

        session: Any = SimpleNamespace(
            rank=rank, replicas=replicas, generation=0, step=5, last_step_time=1.0,
            recovery=SimpleNamespace(waiting=False),
            reducer=SimpleNamespace(send_control=deliver),
            metrics=SimpleNamespace(report_problem=problem),
            emit=lambda event, **fields: self.events.append({"event": event, **fields}),
            send=self.sent[rank].append,
            consensus=self.flags,
        )  # fmt: skip
        self.flags.listen = lambda kind, call: self.listeners[rank].__setitem__(kind, call)
        self.flags.polls, self.flags.poll_soon = [], lambda: None
        return HangWatch(session, self.clocks[rank], now=lambda: self.now)  # type: ignore[arg-type]

    def later(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.now += 1
            self.watches[0].poll()


def test_a_hang_is_named_once_and_withdrawn_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 3)
    world.clocks[2].stage = Stage.DATA
    world.later(PATIENCE - 1)
    assert world.problems == {}
    world.later(3)
    assert list(world.problems) == ["the progress of replica 2"]
    assert "waiting for data" in world.problems["the progress of replica 2"]
    assert "test_hang_watch.py" in world.events[0]["stack"]
    world.later(30)
    assert len(world.events) == 1
    assert world.sent[2] == []  # without --hang-timeout nobody is killed
    for clock in world.clocks:
        clock.changed = world.now
    world.later(1)
    assert world.problems == {}


def test_a_replica_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 3)
    world.deaf.add(1)
    world.later(PATIENCE + 8)
    assert list(world.problems) == ["the progress of replica 1"]
    assert PATIENCE + 8 <= 30


@pytest.mark.parametrize("flag", ["loops_over", "between", "saving"])
def test_no_replica_is_hung_after_the_epochs_in_a_switch_or_while_rank_0_saves(
    monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    world = World(monkeypatch, 3, timeout="30")
    world.clocks[0].stage = Stage.BODY
    setattr(world.flags, flag, True)
    world.later(100)
    assert world.problems == {}
    assert world.sent[0] == []
    setattr(world.flags, flag, False)
    world.later(100)
    assert list(world.problems) == ["the progress of replica 0"]


def test_of_two_backward_passes_in_a_batch_the_earlier_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replica 2 has averaged the first one's gradients; the others wait for those of the second one."""
    world = World(monkeypatch, 3)
    for clock in world.clocks[:2]:
        clock.passes = 2
    world.clocks[2].stage = Stage.STEP
    world.later(PATIENCE + 8)
    assert list(world.problems) == ["the progress of replica 2"]


def test_with_a_time_limit_it_asks_its_agent_to_kill_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 3, timeout="30")
    world.clocks[0].stage = Stage.BODY
    world.later(16)
    assert list(world.problems) == ["the progress of replica 0"]  # after half of the limit
    assert world.sent[0] == []
    world.later(20)
    (message,) = world.sent[0]
    assert "replica 0" in message.reason
    assert world.sent[1] == world.sent[2] == []


def test_the_stack_of_the_main_thread_is_read_in_another_one() -> None:
    found: list[tuple[str, list[str]]] = []
    thread = threading.Thread(target=lambda: found.append(_frames.main_thread_stack()))
    thread.start()
    thread.join()
    stack, files = found[0]
    assert "test_the_stack_of_the_main_thread" in stack
    assert "in " in _frames.innermost(stack)
    below = f'  File "{threading.__file__}", line 359, in wait\n'
    assert f'"{__file__}"' in _frames.innermost(f'  File "{__file__}", line 1, in train\n{below}')
    assert files


SECONDS = float(os.environ.get("ADAPTDL_CHAOS_SECONDS", "0"))
FIRST = int(os.environ.get("ADAPTDL_CHAOS_SEED", "1"))
RIGHT = 0.95
"""Least fraction of hangs in which the right replica is named in time."""
SOON = 30.0
"""Seconds from the start of a job within which its hang is to be named."""

PLACES = ("forward", "data", "collective", "stopped", "lock", "step", "evaluation")


def inject(directory: Path, where: str, rank: int, step: int) -> tuple[list[int], float]:
    """Let a replica of three hang; return the ranks that were named, and the seconds until then."""
    settings = {"hang": where, "rank": rank, "step": step, "samples": 24 * 12}
    arguments = ["--standalone", "--nproc-per-node=3", "--no-autoscale", "--hang-timeout=20", SCRIPT]
    with ElasticRun(arguments, directory, {"LAG": json.dumps(settings)}) as job:
        job.wait_for_event("started")
        begun = time.monotonic()
        named = job.wait_for(lambda e: e["event"] in ("hang", "replica_lost", "failure"))
        if where != "stopped":
            assert named["stack"], named
        return [named["rank"]], time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_hangs_of_real_replicas_name_the_right_one(tmp_path: Path, number: int) -> None:
    chance = random.Random(number)
    where = PLACES[number * 3 % len(PLACES)]
    rank = chance.randrange(3)
    named, _ = inject(tmp_path, where, rank, chance.randrange(3, 9))
    assert named == [rank], where


@pytest.mark.slow
@pytest.mark.skipif(not SECONDS, reason="make chaos")
def test_more_hangs(tmp_path: Path) -> None:
    """Hangs in every place, on every rank: how often the right replica is named first, and how soon."""
    until, right, waits = time.monotonic() + SECONDS, [], []
    for number in itertools.count(FIRST):
        if time.monotonic() > until and len(right) >= 2 * len(PLACES):
            break
        chance, folder = random.Random(number), tmp_path / str(number)
        folder.mkdir()
        where, rank = PLACES[number % len(PLACES)], chance.randrange(3)
        named, seconds = inject(folder, where, rank, chance.randrange(3, 9))
        right.append(named == [rank] and seconds <= SOON)
        waits.append(seconds)
        print(f"{number}: {where} on rank {rank}: named {named} after {seconds:.0f} s")
    print(f"{sum(right)} of {len(right)} hangs named right within {SOON:g} s; {max(waits):.0f} s at most")
    assert sum(right) >= RIGHT * len(right)
