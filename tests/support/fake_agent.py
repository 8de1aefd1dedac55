"""An agent reduced to what a change in place needs of one: stores, channels, processes."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.connection
import os
import queue
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import generations
import loop_script_path
import psutil
import pytest
import torch.distributed

from adaptdl_elastic.protocol.channel import Channel
from adaptdl_elastic.protocol.messages import (
    ChangePlan,
    Event,
    RecoveryPlan,
    ReplicaMessage,
    WithdrawPlan,
    to_dict,
)

dist: Any = torch.distributed
SIGN = "sign: "
"""What the events of tests' scripts begin with, which `signs.sign` writes."""

PATIENCE = 200.0  # seconds: the first process may have to import torch on a busy machine


class Process:
    """One replica and the line to it."""

    def __init__(self, job: FakeAgent, rank: int, environment: dict[str, str]) -> None:
        self.rank: int | None = rank
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.output = job.folder / f"output-{len(job.all)}"
        self.process = generations.CONTEXT.Process(
            target=_main, args=(str(job.script), environment, str(self.output), theirs)
        )
        self.process.start()
        theirs.close()
        job.all.append(self)
        threading.Thread(target=self._read, args=(job,), daemon=True).start()

    def _read(self, job: FakeAgent) -> None:
        for message in self.channel.reports():
            job.messages.put((self, _plain(message), time.monotonic()))
        job.messages.put((self, {"type": "gone"}, time.monotonic()))

    def join(self, timeout: float = PATIENCE) -> int:
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"rank {self.rank} still runs:\n{self.text()}"
        return int(self.process.exitcode)

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else ""


class FakeAgent:
    """A job whose generations change in place."""

    def __init__(self, script: Path, folder: Path, **environment: str) -> None:
        self.script, self.folder, self.environment = script, folder, environment
        self.environment.setdefault("ADAPTDL_CHECKPOINT_PATH", str(folder / "checkpoints"))
        self.all: list[Process] = []
        self.running: list[Process] = []
        self.messages: queue.Queue[tuple[Process, dict[str, Any], float]] = queue.Queue()
        self.stores: list[Any] = []
        self.generation = 0
        self.pending: list[Process] = []
        self.staying: list[Process] = []  # when the planned generation begins

    def __enter__(self) -> FakeAgent:
        return self

    def __exit__(self, *error: object) -> None:
        for each in self.all:
            if each.process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(each.process.pid or 0, signal.SIGKILL)
                each.process.join(30)
            each.channel.close()
        # each has five descriptors, of which an ordinary user's process may have 1,024
        self.stores.clear()

    def start(self, replicas: int) -> None:
        host, port = self.open_store()
        self.running = [self.launch(rank, replicas, 0, host, port) for rank in range(replicas)]

    def first_to_end(self) -> Process:
        """Whichever of the running replicas ends first."""
        by_sentinel = {each.process.sentinel: each for each in self.running}
        ended = multiprocessing.connection.wait(list(by_sentinel), PATIENCE)
        assert ended, f"all of them still run:\n{self.outputs()}"
        return next(by_sentinel[one] for one in ended if isinstance(one, int))

    def open_store(self) -> tuple[str, int]:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.stores.append(store)
        return "127.0.0.1", store.port

    def variables(self, rank: int, replicas: int, generation: int, host: str, port: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(replicas),
            "ADAPTDL_REPLICA_RANK": str(rank),
            "ADAPTDL_NUM_REPLICAS": str(replicas),
            "ADAPTDL_NUM_NODES": "1",
            "ADAPTDL_NUM_RESTARTS": str(generation),
            "TORCHELASTIC_RESTART_COUNT": str(generation),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "ADAPTDL_SECRET": "secret",
        }

    def launch(self, rank: int, replicas: int, generation: int, host: str, port: int, **more: str) -> Process:
        given = self.variables(rank, replicas, generation, host, port)
        return Process(self, rank, {**self.environment, **given, **more})

    def plan(self, replicas: int, leave: Sequence[int] = (), **more: str) -> None:
        """Begin generation g + 1 with so many replicas, without these: survivors first, in their order."""
        generation, old = self.generation + 1, self.running
        host, port = self.open_store()
        self.staying = [each for rank, each in enumerate(old) if rank not in leave][:replicas]
        ranks = [self.staying.index(each) if each in self.staying else None for each in old]
        newcomers = list(range(len(self.staying), replicas))
        self.pending = [
            self.launch(rank, replicas, generation, host, port, ADAPTDL_JOIN="1", **more)
            for rank in newcomers
        ]
        for rank, each in zip(ranks, old, strict=True):
            environ = {} if rank is None else self.variables(rank, replicas, generation, host, port)
            each.channel.send(
                ChangePlan(generation, replicas, 1, tuple(ranks), tuple(newcomers), host, port, environ)
            )

    def withdraw(self) -> None:
        self.generation += 1
        for each in self.running:
            each.channel.send(WithdrawPlan(self.generation, "x"))

    def wait_for(self, kind: str, count: int = 1, timeout: float = PATIENCE) -> list[Process]:
        """Until so many replicas have sent a message of that kind."""
        deadline, found = time.monotonic() + timeout, []
        while len(found) < count:
            try:
                sender, message, _ = self.messages.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                raise AssertionError(f"{len(found)} of {count} {kind!r}:\n{self.outputs()}") from None
            if message["type"] == kind:
                found.append(sender)
        return found

    def wait_for_event(self, name: str) -> dict[str, Any]:
        """Until a replica has sent an event of that name; the message."""
        deadline = time.monotonic() + PATIENCE  # of all messages together: some come every two seconds
        while True:
            try:
                message = self.messages.get(timeout=max(deadline - time.monotonic(), 0.01))[1]
            except queue.Empty:
                raise AssertionError(f"no event {name}:\n{self.outputs()}") from None
            if message["type"] == "event" and message["event"] == name:
                return message

    def wait_for_file(self, name: str) -> None:
        """Until a replica has made a file of that name, as a sign."""
        deadline = time.monotonic() + PATIENCE
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, self.outputs()
            time.sleep(0.01)

    def wait_for_all(self, counts: dict[str, int]) -> Counter[str]:
        """Until so many messages of each kind have come, in any order; how many of every kind came."""
        deadline, heard = time.monotonic() + PATIENCE, Counter[str]()
        while any(heard[kind] < count for kind, count in counts.items()):
            try:
                heard[self.messages.get(timeout=max(deadline - time.monotonic(), 0.01))[1]["type"]] += 1
            except queue.Empty:
                raise AssertionError(f"only {dict(heard)} of {counts}:\n{self.outputs()}") from None
        return heard

    def outputs(self) -> str:
        """What all have printed, with where those hang that have not ended."""
        for each in self.all:
            if each.process.is_alive():
                os.kill(each.process.pid or 0, signal.SIGUSR1)
                each.process.join(0.5)
        return "\n".join(f"--- {each.rank}: {each.process.exitcode}\n{each.text()}" for each in self.all)

    def drain(self) -> None:
        """Forget whatever has been said."""
        with contextlib.suppress(queue.Empty):
            while True:
                self.messages.get_nowait()

    def rescale(self, replicas: int, leave: Sequence[int] = ()) -> None:
        """A change in place, to its end."""
        self.plan(replicas, leave)
        leavers = [each for each in self.running if each not in self.staying]
        self.wait_for("switched", len(self.running) + len(self.pending))
        self.generation += 1
        self.running = self.staying + self.pending
        self.pending = []
        for each in leavers:
            assert each.join() == 0, each.text()

    def kill(self, *ranks: int) -> list[Process]:
        """SIGKILL to these; the others are what is left."""
        for rank in ranks:
            os.kill(self.running[rank].process.pid or 0, signal.SIGKILL)
        left = [each for rank, each in enumerate(self.running) if rank not in ranks]
        for rank in ranks:
            self.running[rank].process.join(60)
        self.running = left
        return left

    def plan_recovery(
        self, told: Sequence[int] | None = None, before: Callable[[], None] = lambda: None
    ) -> None:
        """Tell those who live to go on as generation g + 1.

        Args:
            told: Ranks that are told; None: all.
            before: Called when the store of the generation is open, and nobody has been told yet.
        """
        self.generation += 1
        host, port = self.open_store()
        before()
        replicas = len(self.running)
        for rank, each in enumerate(self.running):
            if told is not None and rank not in told:
                continue
            environ = self.variables(rank, replicas, self.generation, host, port)
            each.channel.send(RecoveryPlan(self.generation, rank, replicas, 1, host, port, environ))

    def recover(self, *ranks: int) -> Counter[str]:
        """These die, and the others go on; the kinds of messages that came meanwhile."""
        self.kill(*ranks)
        return self.survive()

    def survive(self) -> Counter[str]:
        """Let those who live go on; the kinds of messages that came until they had."""
        self.plan_recovery()
        return self.wait_for_all({"switched": len(self.running)})

    def bury(self, rank: int) -> None:
        """This one kills itself."""
        assert self.running[rank].join() == -signal.SIGKILL, self.outputs()
        del self.running[rank]

    def wander(self, choose: random.Random, most: int, times: int = 6) -> None:
        """Deaths and changes of size, up to so many replicas, as `choose` has it."""
        for _ in range(times):
            count = len(self.running)
            if count > 1 and choose.random() < 0.6:
                self.recover(*choose.sample(range(count), choose.randint(1, count - 1)))
            else:
                self.rescale(choose.choice([n for n in range(1, most + 1) if n != count]))
            self.drain()

    def forsake(self, rank: int) -> None:
        """This one stops itself, and is killed when all is over."""
        process = psutil.Process(self.running[rank].process.pid)
        while process.status() != psutil.STATUS_STOPPED:
            assert self.running[rank].process.is_alive(), self.outputs()
            time.sleep(0.01)  # nobody tells but the process itself
        del self.running[rank]

    def finish(self, timeout: float = PATIENCE) -> None:
        (self.folder / "hurry").touch()
        for each in self.running:
            each.process.join(timeout)
            assert each.process.exitcode == 0, self.outputs()


def _plain(message: ReplicaMessage) -> dict[str, Any]:
    """As data; a sign of a test's script has the type that the script gave it."""
    if isinstance(message, Event) and message.event.startswith(SIGN):
        return {"type": message.event.removeprefix(SIGN), **message.fields}
    return to_dict(message)


def _main(script: str, environment: dict[str, str], output: str, line: socket.socket) -> None:
    environment["ADAPTDL_AGENT_FD"] = str(line.detach())
    generations.main(script, environment, output)


@contextlib.contextmanager
def running(
    script: Path, folder: Path, replicas: int, variables: Mapping[str, str] | None = None, **given: Any
) -> Iterator[FakeAgent]:
    """Start `script`, which writes into `folder`, with these settings on so many replicas."""
    with FakeAgent(script, folder, LOOP=settings(**given), OUT=str(folder), **(variables or {})) as job:
        job.start(replicas)
        yield job


@contextlib.contextmanager
def starter(
    folder: Path, word: str | None, script: Path = loop_script_path.PATH, **defaults: Any
) -> Iterator[Callable[..., FakeAgent]]:
    """A function that starts `script` and waits until every replica has said `word`, if that is given."""
    with contextlib.ExitStack() as jobs:

        def start(replicas: int, **given: Any) -> FakeAgent:
            job = jobs.enter_context(running(script, folder, replicas, **{**defaults, **given}))
            if word is not None:
                job.wait_for(word, replicas)
            return job

        yield start


def starts(word: str | None, script: Path = loop_script_path.PATH, **defaults: Any) -> Any:
    """Return a fixture that is such a function, for the folder of the test."""

    @pytest.fixture
    def start(tmp_path: Path) -> Iterator[Callable[..., FakeAgent]]:
        with starter(tmp_path, word, script, **defaults) as function:
            yield function

    return start


def settings(**given: Any) -> str:
    return json.dumps(given)
