"""Kill -9 a saving process at every single point of a save, and look at what is left each time.

Run as a program with a directory; prints one JSON object per kill: {"point", "before", "after"}, the value
in the newest checkpoint before the save and after the kill. A process of its own, because it forks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from adaptdl_elastic import storage
from adaptdl_elastic.checkpoint.manager import CheckpointManager
from adaptdl_elastic.storage import DirectoryStorage

AUDITED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class Countdown:
    """Kills this process at the n-th time that it is asked whether it is time."""

    def __init__(self, point: int, below: str) -> None:
        self.left, self.below = point, below

    def tick(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event in AUDITED and self.below in str(args[0]):
            self.tick()


def arm(point: int, below: str) -> Countdown:
    """From now on: before each call that changes the directory, around fsync, in the middle of a write."""
    countdown = Countdown(point, below)
    fsync, write = os.fsync, storage.write_all

    def slow_fsync(fd: int) -> None:
        countdown.tick()
        fsync(fd)
        countdown.tick()

    def torn_write(file: Any, view: memoryview) -> None:
        write(file, view[: len(view) // 2])
        file.flush()
        countdown.tick()
        write(file, view[len(view) // 2 :])

    os.fsync, storage.write_all = slow_fsync, torn_write
    sys.addaudithook(countdown.audit)
    return countdown


def save(path: str, value: int, point: int) -> None:
    manager = CheckpointManager(DirectoryStorage(path), keep=2)
    manager.open()
    for name in ("a", "b"):
        file = manager.claim(name)
        assert file is not None
        file.close()
    content = b"%d" % value
    countdown = arm(point, path)
    manager.submit("stop", value, {n: (lambda f: f.write(content), None) for n in ("a", "b")}, lambda s: None)
    manager.flush()
    countdown.left = -1


def load(path: str) -> int:
    manager = CheckpointManager(DirectoryStorage(path))
    manager.open()
    values = set()
    for name in ("a", "b"):
        file = manager.claim(name)
        assert file is not None, f"{name} is missing"
        with file:
            values.add(int(file.read()))
    assert len(values) == 1, f"states of different checkpoints: {values}"
    return values.pop()


def main(path: str) -> None:
    first = CheckpointManager(DirectoryStorage(path))
    first.submit("stop", 0, {n: (lambda f: f.write(b"0"), None) for n in ("a", "b")}, lambda s: None)
    first.flush()
    value, killed, point = 0, True, 0
    while killed:
        before, value = load(path), value + 1
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            save(path, value, point)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        assert killed or status == 0, status
        print(json.dumps({"point": point, "before": before, "saved": value, "after": load(path)}))
        point += 1


if __name__ == "__main__":
    main(sys.argv[1])
