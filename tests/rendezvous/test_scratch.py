"""Directories of those that were killed go; those that are worked with, and the newest, stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from adaptdl_elastic.rendezvous.local.scratch_directory import Scratch, sweep

KILLED = """
import os, pathlib, signal, sys
from adaptdl_elastic.rendezvous.local.scratch_directory import Scratch
(Scratch("x-", pathlib.Path(sys.argv[1])).path / "data").write_text("left")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_files_of_a_killed_process_are_swept_and_held_ones_are_not(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    mine = Scratch("x-", tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "x-link").symlink_to(tmp_path / "other")
    sweep("x-", tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["other", "x-link", mine.path.name])
    assert not left.exists()
    mine.close()
    assert not mine.path.exists()


def test_the_young_and_the_newest_stay(tmp_path: Path) -> None:
    for age in range(5):
        made = Scratch("x-", tmp_path)
        made.close(keep=True)
        os.utime(made.path, (1000.0 - age, 1000.0 - age))
    sweep("x-", tmp_path, keep=1, older_than=10.0, clock=lambda: 1012.0)
    assert sorted(p.stat().st_mtime for p in tmp_path.iterdir()) == [1000.0]
    sweep("x-", tmp_path, older_than=10.0, clock=lambda: 1005.0)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_directory_that_is_kept_is_free_for_the_next(tmp_path: Path) -> None:
    made = Scratch("x-", tmp_path)
    made.close(keep=True)
    assert made.path.is_dir()
    sweep("x-", tmp_path)
    assert not made.path.exists()
