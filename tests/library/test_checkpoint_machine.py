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
        self.values: dict[str, int] = {}  # of the states that this generation has asked for
        self.carried: dict[str, int] = {}  # of those that it has not
        self.counter = 0

    def teardown(self) -> None:
        self.manager.close()
        shutil.rmtree(self.folder)

    @initialize()
    def first(self) -> None:
        self.manager = CheckpointManager(DirectoryStorage(self.folder), keep=KEEP)
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
        self.truth[job.result.id] = {**self.carried, **self.values}

    @rule()
    def restart(self) -> None:
        self.manager.close()
        kept = set(DirectoryStorage(self.folder).ids())
        self.truth = {id: content for id, content in self.truth.items() if id in kept}
        intact = max(self.truth, default=None)
        self.manager = CheckpointManager(DirectoryStorage(self.folder), keep=KEEP)
        if intact is None and kept:
            with pytest.raises(CheckpointError, match="is damaged"):
                self.manager.open()
            for damaged in kept:  # a person does as the message says
                DirectoryStorage(self.folder).remove(damaged)
            self.manager = CheckpointManager(DirectoryStorage(self.folder), keep=KEEP)
        assert self.manager.open() == intact
        self.values, self.carried = {}, dict(self.truth[intact]) if intact else {}

    @rule(names=st.sets(st.sampled_from(NAMES)), saves=st.integers(0, KEEP + 1))
    def generation(self, names: set[str], saves: int) -> None:
        """What a generation usually does, so that long lives are seen often."""
        self.restart()
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
        if how == "gone" and path.name != MANIFEST:
            pass
        elif how == "long":
            path.write_bytes(content + b"0")
        elif how == "short":
            path.write_bytes(content[:-1])
        else:
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        del self.truth[damaged]

    @invariant()
    def no_leftovers(self) -> None:
        names = [path.name for path in self.folder.iterdir()]
        assert not [name for name in names if name.startswith(".tmp-")]


TestCheckpoints = Checkpoints.TestCase
TestCheckpoints.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
