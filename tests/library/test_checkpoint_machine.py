"""Any sequence of saves, restarts and damage: what is loaded is the newest intact checkpoint, whole."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adaptdl_elastic.checkpoint.manager import CheckpointError, CheckpointManager
from adaptdl_elastic.storage import MANIFEST, DirectoryStorage, file_name

NAMES = ("a", "b", "c")
KEEP = 2


class Checkpoints(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.truth: dict[str, dict[str, int]] = {}  # what each intact checkpoint holds
        self.ancestors: dict[str, list[str]] = {}  # of every checkpoint that was ever saved
        self.readable: set[str] = set()  # checkpoints whose manifest is intact
        self.history: list[str] = []  # what this generation goes on from and has saved
        self.mine: list[str] = []  # what this generation has saved
        self.values: dict[str, int] = {}  # of the states that this generation has asked for
        self.carried: dict[str, int] = {}  # of those that it has not
        self.counter = 0

    def teardown(self) -> None:
        self.manager.close()
        shutil.rmtree(self.folder)

    @initialize()
    def first(self) -> None:
        self.manager = self.opened()
        self.manager.open()

    @rule(name=st.sampled_from(NAMES))
    def register(self, name: str) -> None:
        if name in self.values:
            return
        file = self.manager.claim(name)
        expected = self.carried.pop(name, None)
        assert (file is None) == (expected is None)
        if file is not None:
            with file:
                assert int(file.read()) == expected
        self.counter += 1
        self.values[name] = self.counter if expected is None else expected

    @rule()
    def train(self) -> None:
        for name in self.values:
            self.counter += 1
            self.values[name] = self.counter

    @rule()
    def save(self) -> None:
        def writer(value: int):  # type: ignore[no-untyped-def]
            return lambda file: file.write(b"%d" % value), None

        job = self.manager.submit("x", 0, {n: writer(v) for n, v in self.values.items()}, lambda saved: None)
        assert self.manager.flush(30)
        assert job.result is not None
        assert job.result.error is None
        saved = job.result.id
        self.truth[saved] = {**self.carried, **self.values}
        self.ancestors[saved] = [*self.history]
        self.readable.add(saved)
        self.history.append(saved)
        self.mine.append(saved)
        kept = DirectoryStorage(self.folder).ids()
        assert {*self.mine[-KEEP:]} <= {*kept}
        assert len(self.truth.keys() & {*kept}) <= KEEP

    def opened(self, recorded: str | None = None) -> CheckpointManager:
        return CheckpointManager(DirectoryStorage(self.folder), recorded=recorded, keep=KEEP)

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        """The store has recorded any checkpoint that was ever saved, or none."""
        self.manager.close()
        kept = set(DirectoryStorage(self.folder).ids())
        self.truth = {id: content for id, content in self.truth.items() if id in kept}
        intact = max(self.truth, default=None)
        recorded = data.draw(st.sampled_from([None, *self.ancestors]))
        self.manager = self.opened(recorded)
        descends = any(recorded in self.ancestors[id] for id in kept & self.readable)
        if recorded is not None and recorded not in kept and not descends:
            with pytest.raises(CheckpointError, match=f"{recorded} is recorded .* must be shared"):
                self.manager.open()
            self.manager = self.opened()
        if intact is None and kept:
            with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
                self.manager.open()
            for damaged in kept:  # a person does as the message says
                DirectoryStorage(self.folder).remove(damaged)
            self.manager = self.opened()
        assert self.manager.open() == intact
        self.values, self.carried = {}, dict(self.truth[intact]) if intact else {}
        self.history, self.mine = [*self.ancestors[intact], intact] if intact else [], []

    @rule(data=st.data(), names=st.sets(st.sampled_from(NAMES)), saves=st.integers(0, KEEP + 1))
    def generation(self, data: st.DataObject, names: set[str], saves: int) -> None:
        """What a generation usually does, so that long lives are seen often."""
        self.restart(data)
        for name in sorted(names):
            self.register(name)
        for _ in range(saves):
            self.train()
            self.save()

    @precondition(lambda self: self.truth)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        present = [id for id in DirectoryStorage(self.folder).ids() if id in self.truth]
        if not present:
            return
        damaged = data.draw(st.sampled_from(present))
        files = [MANIFEST, *(file_name(name) for name in self.truth[damaged])]
        path = self.folder / damaged / data.draw(st.sampled_from(files))
        content = path.read_bytes()
        path.unlink()  # what is open already was verified, and is another file
        how = data.draw(st.sampled_from(["flip", "short", "long", "gone"]))
        if how == "long":
            path.write_bytes(content + b"0")
        elif how == "short":
            path.write_bytes(content[:-1])
        elif how == "flip":
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        del self.truth[damaged]
        self.readable -= {damaged} if path.name == MANIFEST else set()

    @invariant()
    def no_leftovers(self) -> None:
        names = [path.name for path in self.folder.iterdir()]
        assert not [name for name in names if name.startswith(".tmp-")]


TestCheckpoints = Checkpoints.TestCase
TestCheckpoints.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
