"""Random schedules of what can happen to a job, an agent that carries them out, and what must hold then."""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_agent
import generations
import loop_script_path
import torch
from fake_agent import FakeAgent, Process

from adaptdl_elastic.protocol.messages import SaveCheckpoint

EPOCHS, SIZE, BATCH = 3, 240, 12
TOTAL = EPOCHS * SIZE // BATCH
MOST = 4  # up to 4 replicas divide the batch: each step has the same samples on any number of them

_TAGS = (
    "seed", "adaptdl-accumulator", "end of data loop", "agreement", "batch size", "end of epoch", "switch",
    "formed", "standing", "states", "sums", "statistics", "index", "recovered", "switched", "buffers",
)  # fmt: skip
_TROUBLE = ("crash", "form", "take", "finish")  # of a newcomer
_ACTIONS = ("kill", "rescale", "rescale", "checkpoint", "withdraw")


@dataclass(frozen=True)
class Schedule:
    """What happens, all of it chosen by the seed."""

    seed: int
    replicas: int
    immortal: int  # rank at first of one that never dies nor leaves
    settings: dict[str, Any]
    actions: list[tuple[int, str]]  # (step from which on, what)

    @classmethod
    def drawn(cls, seed: int) -> Schedule:
        choose = random.Random(seed)
        replicas = choose.randint(2, MOST)
        immortal = choose.randrange(replicas)
        mortal = [rank for rank in range(replicas) if rank != immortal]
        autoscale = choose.random() < 0.2
        settings: dict[str, Any] = {
            "epochs": EPOCHS, "size": SIZE, "batch": BATCH, "pace": choose.choice([0.0, 0.02, 0.05]),
            "evaluate": choose.random() < 0.7, "workers": int(choose.random() < 0.2),
            "autoscale": 3 * BATCH if autoscale else 0,
            "accumulate": 0 if autoscale else choose.choice([0, 0, 1, 2]),
        }  # fmt: skip
        steps = range(int(TOTAL * 0.8))
        faults = []
        for _ in range(choose.randint(0, 2)):
            what = choose.choice(["before", "after", "miss"])
            rank = choose.choice(mortal if what != "miss" else range(replicas))
            faults.append([rank, choose.choice(steps), choose.randrange(4), what])
        tears = [[choose.choice(mortal), choose.choice(_TAGS), choose.randint(1, 4)] for _ in range(2)]
        deaths = [[choose.choice(mortal), choose.choice(["give", "take"]), choose.randint(1, 2)]]
        settings |= {
            "faults": faults,
            "tears": tears[: choose.randint(0, 2)],
            "deaths": deaths[: choose.randint(0, 1)],
        }
        count = choose.randint(1, 5)
        actions = sorted((choose.choice(steps), choose.choice(_ACTIONS)) for _ in range(count))
        return cls(seed, replicas, immortal, settings, actions)


class Chaos(FakeAgent):
    """An agent that does what the real ones do: a plan for whoever lives, whatever happens."""

    def __init__(self, schedule: Schedule, folder: Path) -> None:
        settings = fake_agent.settings(**schedule.settings)
        super().__init__(loop_script_path.CHAOS, folder, LOOP=settings, OUT=str(folder))
        self._schedule, self._choose = schedule, random.Random(-schedule.seed)
        self._todo = list(schedule.actions)
        self._switched: list[Process] | None = None  # of a planned change, or a recovery, under way
        self._planned = False  # it is a planned change
        self._base = 0  # generation of those who run; others may have been planned and withdrawn since
        self._leavers: list[Process] = []  # in it
        self.happened: Counter[str] = Counter()

    def drive(self) -> None:
        """From the start to the end of the script."""
        self.start(self._schedule.replicas)
        self._immortal = self.running[self._schedule.immortal]
        ended: set[int] = set()
        while any(id(each) not in ended for each in self.running):
            try:
                sender, message, _ = self.messages.get(timeout=fake_agent.PATIENCE)
            except queue.Empty:
                raise AssertionError(f"nothing happens any more:\n{self.outputs()}") from None
            kind = message["type"]
            if kind == "gone":
                ended.add(id(sender))
                self._gone(sender)
            elif kind == "switched":
                self._has_switched(sender, message["generation"])
            elif kind == "peer_lost" and message["generation"] >= self._base:
                self._recover("peer_lost")
            elif kind == "at":
                self._act(message["step"])
        for each in self.pending:
            self._end(each)

    def _end(self, each: Process) -> None:
        if each.process.is_alive():
            os.kill(each.process.pid or 0, signal.SIGKILL)

    def _gone(self, one: Process) -> None:
        code = one.join()
        if one in self.pending:
            self.happened["newcomer"] += 1
            if self._switched:  # somebody has gone over, and waits for it
                self._recover("died")
            else:
                self._withdraw()
        elif one in self.running:
            assert code in (0, -signal.SIGKILL), self.outputs()
            if code and one is self._immortal:
                raise AssertionError(f"the one who must not die has:\n{self.outputs()}")
            if code:
                self._recover("died")
            elif one in self._leavers:
                self.running.remove(one)
                self._leavers.remove(one)

    def _has_switched(self, one: Process, generation: int) -> None:
        planned = self.generation + 1 if self._planned else self.generation
        if self._switched is None or generation != planned:
            return
        self._switched.append(one)
        if all(each in self._switched for each in (*self.running, *self.pending)):
            if self._planned:
                self.happened["changed"] += 1
                self._go_over()
            self._switched, self._planned = None, False

    def _go_over(self) -> None:
        """The planned generation counts."""
        self.generation += 1
        self._base = self.generation
        self.running = [each for each in self.running if each not in self._leavers]
        self.running += [each for each in self.pending if each in (self._switched or ())]
        self._leavers, self.pending, self._planned = [], [], False

    def _withdraw(self) -> None:
        self.happened["withdrawn"] += 1
        for each in self.pending:
            self._end(each)
        self.withdraw()
        self.pending, self._leavers, self._switched, self._planned = [], [], None, False

    def _recover(self, why: str) -> None:
        """Somebody is dead, or somebody has lost the others."""
        self.happened[why] += 1
        if self._planned:
            for each in self.pending:
                if each not in (self._switched or ()):
                    self._end(each)
            self._leavers = [each for each in self._leavers if each in (self._switched or ())]
            if self._switched:
                self._go_over()
            else:
                self._withdraw()
        self.running = [each for each in self.running if each.process.exitcode is None]
        self.plan_recovery()
        self._base = self.generation
        self._switched, self._planned = [], False

    def _act(self, step: int) -> None:
        """Do the next thing that is due."""
        if not self._todo:
            (self.folder / "hurry").touch()
        elif step >= self._todo[0][0]:
            what = self._todo[0][1]
            if what == "rescale" and self._switched is not None:
                return  # one after the other
            self._todo.pop(0)
            getattr(self, f"_do_{what}")()

    def _do_kill(self) -> None:
        mortal = [each for each in self.running if each is not self._immortal]
        for each in self._choose.sample(mortal, self._choose.randint(0, len(mortal))):
            self._end(each)

    def _do_checkpoint(self) -> None:
        self._choose.choice(self.running).channel.send(SaveCheckpoint(1))

    def _do_withdraw(self) -> None:
        if self._planned and not self._switched:
            self._withdraw()

    def _do_rescale(self) -> None:
        """To another number of replicas, or the same; some leave, and others come, or both."""
        mortal = [rank for rank, each in enumerate(self.running) if each is not self._immortal]
        leave = self._choose.sample(mortal, self._choose.randint(0, len(mortal)))
        staying = len(self.running) - len(leave)
        replicas = self._choose.randint(staying, MOST)
        if not leave and replicas == staying:
            return
        trouble = self._choose.random() < 0.3 and replicas > staying
        self._switched, self._planned = [], True
        self.plan(replicas, leave, **({"TROUBLE": self._choose.choice(_TROUBLE)} if trouble else {}))
        self._leavers = [each for each in self.running if each not in self.staying]


def check(schedule: Schedule, folder: Path, replicas: int, undisturbed: dict[str, Any]) -> None:
    """What must hold however often replicas have come, gone and died."""
    results = [torch.load(folder / f"result-{rank}") for rank in range(replicas)]
    for result in results[1:]:
        assert str(result) == str(results[0])
        torch.testing.assert_close(result["w"], results[0]["w"], rtol=0, atol=0)
        torch.testing.assert_close(result["net"], results[0]["net"], rtol=0, atol=0)
    steps = attempts(folder)
    if schedule.settings["autoscale"]:
        in_one_pass(steps)
        return
    assert [*steps] == [*range(TOTAL)]
    for epoch in range(EPOCHS):
        seen = Counter(s for step in steps.values() if step["epoch"] == epoch for s in step["samples"])
        assert seen == Counter(range(SIZE)), f"epoch {epoch}"
    for result in results:
        torch.testing.assert_close(-result["w"] * BATCH / EPOCHS, torch.ones(SIZE, dtype=torch.float64))
        for key in ("steps", "scheduler", "scaler"):
            assert result[key] == undisturbed[key], key
        for key in ("net", "optimizer"):
            torch.testing.assert_close(result[key], undisturbed[key], rtol=1e-9, atol=1e-12)
    for number, step in steps.items():
        expected = undisturbed["curve"][number]
        assert sorted(step["samples"]) == sorted(expected["samples"]), f"step {number}"
        torch.testing.assert_close(step["loss"], expected["loss"], rtol=1e-9, atol=1e-12)


def attempts(folder: Path) -> dict[int, dict[str, Any]]:
    """What was seen by the attempt of each step that counts: the last one, by all who took part in it."""
    lines = [line for line in generations.records(folder) if line["loop"] == "train"]
    last: dict[int, int] = {}
    for line in lines:
        last[line["step"]] = max(line["generation"], last.get(line["step"], 0))
    steps: dict[int, dict[str, Any]] = {}
    for number, generation in sorted(last.items()):
        parts = [line for line in lines if (line["step"], line["generation"]) == (number, generation)]
        samples = [sample for line in parts for sample in line["samples"]]
        steps[number] = {
            "epoch": parts[0]["epoch"],
            "index": min(line["index"] for line in parts),
            "samples": samples,
            "loss": sum(line["loss"] for line in parts) / len(samples),
        }
    return steps


def in_one_pass(steps: dict[int, dict[str, Any]]) -> None:
    """With autoscaling no sample comes twice before all others have come."""
    seen = Counter(
        (step["epoch"], step["index"] // SIZE, sample)
        for step in steps.values()
        for sample in step["samples"]
    )
    assert max(seen.values()) == 1, [place for place, count in seen.items() if count > 1]


def undisturbed(folder: Path) -> dict[str, Any]:
    """What becomes of the script when nothing happens to it."""
    with fake_agent.running(loop_script_path.CHAOS, folder, 1, epochs=EPOCHS, size=SIZE, batch=BATCH) as job:
        job.finish()
    result: dict[str, Any] = torch.load(folder / "result-0")
    return {**result, "curve": attempts(folder)}


def carry_out(seed: int, folder: Path, expected: dict[str, Any]) -> Counter[str]:
    """One schedule from its start to its check; how often what happened."""
    schedule = Schedule.drawn(seed)
    (folder / "schedule").write_text(json.dumps(schedule.__dict__))
    began = time.monotonic()
    with Chaos(schedule, folder) as job:
        job.drive()
        try:
            check(schedule, folder, len(job.running), expected)
        except AssertionError as error:
            raise AssertionError(f"{schedule}\n{error}\n{job.outputs()}") from error
        return job.happened + Counter(seconds=round(time.monotonic() - began))
