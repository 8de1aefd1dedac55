"""Random scripts of `loop_grammar` through whatever can happen to a job, at chosen batches."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fake_agent import FakeAgent, Process
from fresh import Script
from loop_grammar import BATCH, Spec

from adaptdl_elastic import _session
from adaptdl_elastic.protocol.channel import CAN_NOT_JOIN
from adaptdl_elastic.protocol.messages import SaveCheckpoint, Stop

MOST = 3  # replicas at a start
GROWN = 4  # replicas at most: each number up to it divides BATCH
NEVER = 10**6  # a generation
WHAT = ("grow", "grow", "shrink", "swap", "kill", "stop", "stop", "crash")

Place = tuple[int, int, int]


@dataclass(frozen=True)
class Case:
    """A script and what happens to it."""

    spec: Spec
    replicas: int
    events: tuple[tuple[Place, str], ...]

    @classmethod
    def drawn(cls, seed: int) -> Case:
        """The case of that seed."""
        spec, choose = Spec.drawn(seed), random.Random(seed + 0.5)
        places = spec.boundaries()
        chosen = sorted(choose.sample(places, min(len(places), choose.randint(1, 3))))
        drawn = [(place, choose.choice(WHAT)) for place in chosen]
        # a death in the batch that leaves its loop by `break` is a restart
        events = tuple(
            (place, "crash" if what == "kill" and spec.leaves_at(place) else what) for place, what in drawn
        )
        if any(what == "kill" for _, what in events):
            spec = spec.without_collective()
        return cls(spec, choose.randint(1, MOST), events)


class Job(FakeAgent):
    """An agent that does what a case says."""

    def __init__(self, case: Case, folder: Path) -> None:
        script = folder / "script.py"
        script.write_text(case.spec.source())
        super().__init__(
            script,
            folder,
            OUT=str(folder),
            EVENTS=json.dumps([place for place, _ in case.events]),
            ADAPTDL_CHECKPOINT_INTERVAL="0",
        )
        self._case, self._choose = case, random.Random(case.spec.seed)
        self._signs: dict[Place, set[int]] = {}  # which replicas have come to each place of an event
        self._switched: set[int] = set()  # which replicas have reported the change under way
        self._over: set[int] = set()  # which replicas have ended
        self._at_the_end = False  # whether the change under way was planned at the last batch of the epochs

    def drive(self) -> None:
        """From the start to the end of the script."""
        self._hold(-1)
        self._start(self._case.replicas)
        for place, what in self._case.events:
            self._until(lambda: False, at=place)
            if not self.running:
                return
            if not self._all_at(place):  # passed while the event before was under way
                continue
            getattr(self, f"_do_{what}")(place)
        self._until(lambda: False)

    def _start(self, replicas: int) -> None:
        host, port = self.open_store()
        self.running = [self.launch(rank, replicas, self.generation, host, port) for rank in range(replicas)]

    def _hold(self, generation: int) -> None:
        new = self.folder / "hold.new"
        new.write_text(str(generation))
        new.rename(self.folder / "hold")

    def _act(self, place: Place, generation: int) -> None:
        """Let the replicas go on from `place`, and wait at each batch for the library until `generation`."""
        self._hold(generation)
        (self.folder / f"acted-{'-'.join(map(str, place))}").touch()

    def _until(
        self,
        done: Callable[[], bool],
        at: Place | None = None,
        heard: Callable[[Process, Any], None] | None = None,
    ) -> None:
        """Until `done()`, or all running replicas are `at` that place or behind it, or have ended."""
        while not done() and self.running and not (at is not None and self._all_there(at)):
            try:
                sender, message, _ = self.messages.get(timeout=200)
            except queue.Empty:
                raise AssertionError(f"nothing happens any more:\n{self.outputs()}") from None
            if message["type"] == "at":
                self._signs.setdefault(tuple(message["place"]), set()).add(id(sender))
            if message["type"] == "gone":
                self._gone(sender)
            if heard is not None:
                heard(sender, message)

    def _all_at(self, place: Place) -> bool:
        return all(id(each) in self._signs.get(place, ()) for each in self.running)

    def _all_there(self, place: Place) -> bool:
        """Whether all running replicas wait at `place`, or at one behind it."""
        return any(self._all_at(later) for later, _ in self._case.events if later >= place)

    def _gone(self, one: Process) -> None:
        code = one.join()
        if one in self.running:
            self.running.remove(one)
            assert code in (0, 143, -signal.SIGKILL), self.outputs()
            if code == 0 and not self.running and id(one) in self._switched:
                self.running, self.pending = self.pending, []  # they have joined, and end by themselves
            elif code == 0 and not self.running:
                for each in self.pending:
                    self._end(each)
                self.pending = []
        elif one in self.pending:
            # It came too late to join, or it has ended before the reports of all others are read.
            if not (code == CAN_NOT_JOIN and self._at_the_end):
                assert code == 0, self.outputs()
                assert id(one) in self._switched, self.outputs()
            self.pending.remove(one)
        self._over.add(id(one))

    def _end(self, each: Process) -> None:
        if each.process.is_alive():
            os.kill(each.process.pid or 0, signal.SIGKILL)

    # -- events ------------------------------------------------------------------------------------

    def _change(self, place: Place, replicas: int, leave: list[int]) -> None:
        self._at_the_end = place == self._case.spec.boundaries()[-1]
        self.plan(replicas, leave)
        wanted, self._switched = [*self.running, *self.pending], set()
        leavers = [each for each in self.running if each not in self.staying]
        members = [each for each in (*self.staying, *self.pending) if each not in leavers]

        def heard(sender: Process, message: Any) -> None:
            if message["type"] == "switched":
                self._switched.add(id(sender))

        self._act(place, self.generation + 1)
        self._until(lambda: len(self._switched) == len(wanted), heard=heard)
        if len(self._switched) < len(wanted):
            return  # the script has ended before
        self.generation += 1
        self.running = [each for each in members if id(each) not in self._over]
        self.pending = []

    def _do_grow(self, place: Place) -> None:
        if len(self.running) == GROWN:
            return self._do_swap(place)
        self._change(place, min(len(self.running) + self._choose.randint(1, 2), GROWN), [])

    def _do_shrink(self, place: Place) -> None:
        if len(self.running) == 1:
            return self._do_grow(place)
        ranks = range(len(self.running))
        leave = self._choose.sample(ranks, self._choose.randint(1, len(ranks) - 1))
        self._change(place, len(ranks) - len(leave), leave)

    def _do_swap(self, place: Place) -> None:
        """One leaves and another one comes."""
        if len(self.running) == 1:
            return self._do_grow(place)
        self._change(place, len(self.running), [self._choose.randrange(len(self.running))])

    def _do_kill(self, place: Place) -> None:
        if len(self.running) == 1:
            return self._do_crash(place)
        victim = self._choose.choice(self.running)
        self._hold(self.generation + 1)
        self.running.remove(victim)
        self._end(victim)
        victim.join()
        self.plan_recovery()
        self._act(place, self.generation)
        switched = set[int]()

        def heard(sender: Process, message: Any) -> None:
            if message["type"] == "switched":
                switched.add(id(sender))

        self._until(lambda: len(switched) == len(self.running), heard=heard)

    def _do_stop(self, place: Place) -> None:
        self._choose.choice(self.running).channel.send(Stop("test"))
        stopped = len(self.running)
        self._act(place, NEVER)
        self._until(lambda: False)
        self._again(stopped)

    def _do_crash(self, place: Place) -> None:
        """All die after a checkpoint."""
        before, saved = len(self.running), list[Any]()
        self.running[0].channel.send(SaveCheckpoint(1))
        self._act(place, NEVER)

        def heard(sender: Process, message: Any) -> None:
            if message["type"] == "saved":
                saved.append(message)

        self._until(lambda: bool(saved), heard=heard)
        for each in self.running:
            self._end(each)
            each.join()
        self.running = []
        self._again(before)

    def _again(self, before: int) -> None:
        """The same command again, with another number of replicas maybe."""
        self._hold(-1)
        self.generation += 1
        self._start(self._choose.choice([before, self._choose.randint(1, MOST)]))


def carry_out(seed: int, folder: Path) -> Case:
    """One case from its start to its check."""
    case = Case.drawn(seed)
    with Job(case, folder) as job:
        try:
            job.drive()
            killed = any(what == "kill" for _, what in case.events)
            check(case.spec, folder, ("train",) if killed else ())
        except AssertionError as error:
            raise AssertionError(f"{case}\n{error}\n{case.spec.source()}\n{job.outputs()}") from error
    return case


def run_here(source: str, script: Script) -> None:
    """Run the source of a script in a session of its own, until it is stopped."""
    try:
        with contextlib.suppress(SystemExit):
            exec(compile(source, "script", "exec"), {"__name__": "__main__"})
    finally:
        torch.set_default_dtype(torch.float32)
        _session.current().close()
        script.restart()
        torch.distributed.destroy_process_group()


def check(spec: Spec, folder: Path, lost: Collection[str]) -> None:
    """What must be as plain torch has it.

    Args:
        spec: The script.
        folder: Where its results are.
        lost: Kinds of loops in which a replica has died: what it had added to accumulators there is lost.
    """
    plain: dict[str, Any] = {}
    exec(compile(spec.source(plain=True), "plain", "exec"), plain)
    torch.set_default_dtype(torch.float32)
    results = sorted(folder.glob("result-*"))
    assert results
    for path in results:
        result = torch.load(path)
        torch.testing.assert_close(result["model"], plain["module"].state_dict(), rtol=1e-9, atol=1e-12)
        assert result["lr"] == plain["optimizer"].param_groups[0]["lr"]
    found = set[str]()
    for path in folder.glob("totals-*"):
        for key, sums in json.loads(path.read_text()).items():
            found.add(key)
            if spec.loops[int(key.split()[1])].kind not in lost:
                torch.testing.assert_close(sums, plain["totals"][key], rtol=1e-9, atol=1e-12)
    assert found == set(plain["totals"])


assert all(BATCH % replicas == 0 for replicas in range(1, GROWN + 1))
