"""Files that decide something: each reader gets the whole truth, nothing, or an error that names a remedy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from submitted_jobs import submission_by

from adaptdl_elastic._whole_file import write_whole
from adaptdl_elastic.agent.service.agents import write_spec
from adaptdl_elastic.agent.service.known_jobs import KnownJobs, LostListError
from adaptdl_elastic.protocol import uncaught_error
from adaptdl_elastic.rendezvous.local import runtime_file
from adaptdl_elastic.rendezvous.local.runtime_file import RuntimeFile
from adaptdl_elastic.rendezvous.schema.records import MalformedRecordError, decode
from adaptdl_elastic.rendezvous.schema.submissions import Submission
from adaptdl_elastic.rendezvous.services import service_config, signatures
from adaptdl_elastic.rendezvous.services.admission import JobState, Request
from adaptdl_elastic.rendezvous.services.signatures import Person, SignatureError
from adaptdl_elastic.rendezvous.services.submitted import Submitted

PEOPLE = {"alice": Person("alice", "ssh-ed25519 AAAA")}
JOB = Submitted({}, (Request(submission_by("alice"), None, JobState()),), {})
PROCESS = RuntimeFile("unix:/x", "default", "job", os.getpid())


def known(path: Path) -> Any:
    return KnownJobs(path, "n1").check(Submitted({}, (), {}), {}) and KnownJobs(path, "n1").needed_archives()


def remember(path: Path) -> None:
    path.write_text("{}")
    KnownJobs(path, "n1").check(JOB, PEOPLE)


ERROR = uncaught_error.UncaughtError("ValueError at x.py:1", "ValueError", 1.0, False)
CONFIG = service_config.ServiceConfig("lab", "id", "n1", "h", "h:1")

# name of the file: how it is written, how it is read
FILES: dict[str, tuple[Callable[[Path], object], Callable[[Path], Any]]] = {
    "jobs.json": (remember, known),
    "job.spec": (
        lambda path: write_spec(JOB.requests[0], "/saved", path),
        lambda path: decode(Submission, path.read_text()),
    ),
    "service.json": (
        lambda path: write_whole(path, service_config.encode_config(CONFIG)),
        lambda path: service_config.ServiceDirectory(path.parent).read_config(),
    ),
    "people.json": (
        lambda path: write_whole(path, signatures.encode_people(PEOPLE)),
        lambda path: signatures.decode_people(path.read_text()),
    ),
    "job.json": (
        lambda path: runtime_file.write(PROCESS, path.parent),
        lambda path: runtime_file.find("job", path.parent),
    ),
    uncaught_error.RECORD: (
        lambda path: uncaught_error.write(ERROR, path.parent),
        lambda path: uncaught_error.read(path.parent),
    ),
}
ERRORS = (LostListError, MalformedRecordError, service_config.ServiceConfigError, SignatureError)


@pytest.mark.parametrize("name", FILES)
def test_a_cut_file_is_nothing_or_an_error_and_never_another_decision(tmp_path: Path, name: str) -> None:
    write, read = FILES[name]
    tmp_path.chmod(0o700)
    path = tmp_path / name
    write(path)
    whole, truth = path.read_bytes(), read(path)
    assert truth
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        try:
            assert read(path) in (None, truth), whole[:end]
        except ERRORS:
            continue
