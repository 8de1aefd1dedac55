"""How a script that is stopped for a change ends, and how one that ends by itself: on real processes."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import EPOCHS, LONG, SCRIPTS
from elastic_run import ElasticRun

ANSWERS, SWALLOWS = str(SCRIPTS / "answers.py"), str(SCRIPTS / "swallows.py")
pytestmark = [pytest.mark.exhaustive, pytest.mark.etcd, pytest.mark.timeout(600)]


class Script:
    """A run of `answers.py`, and what its replicas write to the FIFO `ready`."""

    def __init__(self, run: ElasticRun, directory: Path, fifo: int) -> None:
        self.run, self._directory, self._fifo = run, directory, fifo
        self._lines = list[str]()

    def wait_for(self, word: str, generation: int, replicas: int) -> None:
        """Until all replicas of a generation have written that word."""
        seen = set[str]()
        while len(seen) < replicas:
            line = self._next_line()
            at, _, rank_and_size = line.removeprefix(f"{word} ").partition(" ")
            if line.startswith(word) and int(at) == generation:
                rank, size = rank_and_size.split()
                assert int(size) == replicas, line
                seen.add(rank)

    def _next_line(self) -> str:
        while not self._lines:
            if select.select([self._fifo], [], [], 0.5)[0]:
                self._lines += os.read(self._fifo, 4096).decode().splitlines()  # writes of a line are atomic
            else:
                assert self.run.process.poll() is None, self.run.text()
        return self._lines.pop(0)

    def scale(self, replicas: int) -> None:
        done = self.run.adaptdl("scale", "job", "--replicas", str(replicas))
        assert done.returncode == 0, done.stdout + done.stderr

    def touch(self, name: str) -> None:
        (self._directory / name).touch()


@contextmanager
def answering(directory: Path, *arguments: str, options: tuple[str, ...] = ()) -> Iterator[Script]:
    ready = directory / "ready"
    if not ready.exists():
        os.mkfifo(ready)
    # opened for both directions: no replica waits for a reader, and the end of one is not end-of-file
    fifo = os.open(ready, os.O_RDWR)
    ours = ("--standalone", "--nproc-per-node=1:2", "--no-autoscale", "--rdzv-id=job", *options)
    try:
        with ElasticRun([*ours, ANSWERS, *arguments], directory) as run:
            yield Script(run, directory, fifo)
    finally:
        os.close(fifo)


def test_a_script_that_is_stopped_to_grow_or_to_shrink_goes_on_whatever_its_exit_code(tmp_path: Path) -> None:
    with answering(tmp_path, "0,0,1,130,143,deaf,0", options=("--checkpoint-timeout=3",)) as script:
        script.wait_for("ready", 0, 1)
        for generation in range(1, 7):
            replicas = 1 + generation % 2
            script.scale(replicas)
            script.wait_for("ready", generation, replicas)
        script.touch("hurry")
        assert script.run.wait() == 0
        assert [e["cause"] for e in script.run.of("generation")] == ["start", *["manual"] * 6]
        assert not script.run.of("failure")


def test_a_job_that_is_stopped_is_not_done(tmp_path: Path) -> None:
    with answering(tmp_path, "0") as script:
        script.wait_for("ready", 0, 1)
        assert script.run.adaptdl("stop", "job").returncode == 0
        assert script.run.wait() == 143
        assert script.run.of("exit")[0]["reason"] == "stopped as asked"


UNSAVED = """
import errno, os
import adaptdl_elastic.torch as adl
from adaptdl_elastic import checkpoint

class Full(checkpoint.State):
    def save(self, file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

adl.init_process_group("gloo")
full = Full("full")
for epoch in adl.remaining_epochs_until(10**6):
    for batch in adl.AdaptiveDataLoader(range(1000), batch_size=4):
        pass
"""


def test_a_stop_that_cannot_save_says_so_and_fails(tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(UNSAVED)
    with ElasticRun(["--standalone", "--rdzv-id=job", "--no-autoscale", "full.py"], tmp_path) as run:
        run.wait_for_event("epoch")
        stopped = run.adaptdl("stop", "job", "--wait")
        assert run.wait() == 143
        reason = run.of("exit")[0]["reason"]
        assert reason.startswith("stopped as asked; no checkpoint is saved: cannot save a checkpoint to")
        assert reason.endswith("No space left on device")
        assert (stopped.returncode, reason in stopped.stderr) == (1, True)


def test_a_script_that_was_at_its_end_before_the_signal_is_done(tmp_path: Path) -> None:
    with answering(tmp_path, "0", "lingers") as script:
        script.wait_for("ready", 0, 1)
        script.touch("hurry")
        script.wait_for("lingers", 0, 1)
        script.scale(2)
        assert script.run.wait() == 0
        assert len(script.run.of("started")) == 1


def test_a_script_with_the_library_that_swallows_the_exit_goes_on(tmp_path: Path) -> None:
    options = ("--standalone", "--nproc-per-node=1:2", "--no-autoscale", "--rdzv-id=job", "--rescale=restart")
    with ElasticRun([*options, SWALLOWS, *LONG], tmp_path) as run:
        run.wait_for_event("epoch", epoch=0)
        assert run.adaptdl("scale", "job", "--replicas", "2").returncode == 0
        run.wait_for_event("generation", replicas=2)
        (tmp_path / "hurry").touch()
        assert run.wait() == 0
        assert "exit code 143 is swallowed" in run.text()
        assert [e["epoch"] for e in run.of("epoch")] == list(range(EPOCHS))
