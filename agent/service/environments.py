"""Find the environment of a version of this program on a node, and remove those that nothing uses.

`adaptdl cluster up` makes them (`autoscaler.provisioning.nodes`): one for each version, over one with the
packages that it needs. Its file `made` has the version. The service makes others over them, with the packages
of jobs (`job_packages`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Container, Iterable
from pathlib import Path

import psutil

from adaptdl_elastic.rendezvous.services.service_config import ServiceDirectory

FRESH_SECONDS = 3600.0
"""Seconds for which an environment stays that nothing uses yet."""


def python_of(directory: ServiceDirectory, version: str) -> str | None:
    """Return the interpreter of the environment with a version of this program; None: there is none."""
    found = (made for made in directory.environments.glob("*/made") if made.read_text() == version)
    return next((str(made.parent / "bin" / "python") for made in found), None)


def sweep(
    directory: ServiceDirectory, versions: Container[str], now: float, kept: Iterable[str] = ()
) -> None:
    """Remove the environments that no process here uses, and no job.

    Args:
        directory: Of the service.
        versions: The versions of all agents of the cluster.
        now: Seconds since the epoch.
        kept: Interpreters of jobs that have no process yet.
    """
    users = [
        *kept,
        (directory.path / "service.json").read_text(),
        os.path.realpath(directory.path / "current"),
    ]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            users.append(" ".join(process.cmdline()))
    made = sorted(directory.environments.glob("*/made"))
    # each comes behind what lies over it
    made.sort(key=lambda note: not note.parent.name.startswith("job-"))

    def unused(note: Path) -> bool:
        where = str(note.parent)
        fresh = now - note.stat().st_mtime < FRESH_SECONDS
        return not (fresh or note.read_text() in versions or any(where in text for text in users))

    for left in directory.environments.glob("job-*"):  # by an installation that was broken off
        if not (left / "made").exists() and now - left.stat().st_mtime > 2 * FRESH_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    for note in made:
        if unused(note):
            note.unlink()  # what is left if this is interrupted does not count as an environment
            shutil.rmtree(note.parent, ignore_errors=True)
        else:
            users += [path.read_text() for path in note.parent.glob("lib/python*/site-packages/below*.pth")]
