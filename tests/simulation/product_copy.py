"""Copy the product with its tests, to change the copy and see whether tests notice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("adaptdl_elastic", "agent", "autoscaler", "rendezvous")


def copy_folders(names: Iterable[str], place: Path) -> None:
    """Copy folders of the checkout into a place, without compiled files."""
    for name in names:
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, place / name, symlinks=True, ignore=skipped)


def copy_to(place: Path) -> Path:
    """Copy the product and its tests, without what was built, and return the copy."""
    copy_folders((*PACKAGES, "tests", "docs", "examples", "benchmarks"), place)
    for name in ("pyproject.toml", "setup.cfg", "README.md", "Makefile"):
        shutil.copy(ROOT / name, place)
    return place


def run_tests(copy: Path, arguments: list[str], seconds: float) -> int:
    """Return pytest's exit code on a copy; -1: it did not end in time."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    paths = f"{copy}:{ROOT / 'tests' / 'support'}"
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return subprocess.run(
            command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, timeout=seconds, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return -1
