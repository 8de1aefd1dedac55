"""Tell people of the end of their jobs: run the commands and call the URLs of `adaptdl submit --notify`.

The node whose service is the first to write the key `notified/<job>/<end>` does it. A notice is therefore
sent at most once. It is lost if that node dies in between.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import urllib3

from adaptdl_elastic.agent.service.blobs import BlobError, Blobs
from adaptdl_elastic.agent.service.private_archive import PrivateArchive, read_private
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobState
from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord, Submission
from adaptdl_elastic.rendezvous.services.admission import Request
from adaptdl_elastic.rendezvous.services.service_client import ServiceClient
from adaptdl_elastic.rendezvous.services.service_config import ServiceConfig, ServiceDirectory
from adaptdl_elastic.rendezvous.store.base import Store, StoreError

logger = logging.getLogger(__name__)

_MOST_ATTEMPTS = 5  # to get the archive that names whom to tell
_COMMAND_SECONDS = 60.0  # that a command may take
URL_SECONDS = 20.0  # that one call of a URL may take
_URL_PAUSES_SECONDS = (1.0, 5.0, 0.0)  # after each call of a URL that fails


def end_of(request: Request) -> tuple[str, str] | None:
    """Return how a job is over, and why; None if it is not, or only stopped, so that it may go on."""
    if request.run.state in (JobState.DONE, JobState.FAILED):
        return request.run.state.value, request.run.reason
    if request.cancelled_by is not None and request.run.agents == 0:
        return "cancelled", f"by {request.cancelled_by}"
    return None


def message(cluster: str, submission: Submission, end: tuple[str, str]) -> dict[str, str]:
    """Return what is sent to a URL as JSON. Chats such as Slack and Mattermost show `text`."""
    state, reason = end
    said = f"job {submission.job} of {submission.owner} on cluster {cluster} is {state}"
    return {
        "text": f"{said}: {reason}" if reason else said,
        "job": submission.job,
        "owner": submission.owner,
        "cluster": cluster,
        "state": state,
        "reason": reason,
    }


def variables_of(own: Mapping[str, str], private: PrivateArchive, said: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command: the node's, the job's variables, and the message's fields.

    A field is named in capitals: `ADAPTDL_JOB`, `ADAPTDL_STATE`, `ADAPTDL_REASON` and so on.
    """
    kept = {name: value for name, value in own.items() if not name.startswith("ADAPTDL_")}
    return {**kept, **private.variables, **{f"ADAPTDL_{name.upper()}": text for name, text in said.items()}}


class Notices:
    """The notices of one node service.

    Args:
        config: Of the service.
        directory: Of the service.
        blobs: The archives of this node.
        client: Asks other nodes for archives.
    """

    def __init__(
        self, config: ServiceConfig, directory: ServiceDirectory, blobs: Blobs, client: ServiceClient
    ) -> None:
        self._config, self._directory, self._blobs, self._client = config, directory, blobs, client
        self._keys = Keys(config.cluster)
        self._attempts: dict[str, int] = {}
        self._told: set[str] = set()

    def look(
        self, store: Store, requests: Iterable[Request], peers: Sequence[ServiceRecord]
    ) -> list[threading.Thread]:
        """Start a thread for each job that is over and of whose end no node has told; return the threads.

        Raises:
            StoreError: the store fails.
        """
        started = []
        for request in requests:
            job, end = request.submission.job, end_of(request)
            if end is None or not request.submission.notify:
                continue
            # a job that is resumed or replaced ends again
            run = "" if end[0] == "cancelled" else request.run.run  # a run may be known only afterwards
            key = self._keys.notified(job, f"{request.submission.created:f}-{end[0]}-{run}")
            if key in self._told:
                continue
            self._told.add(key)
            if store.get(key) is not None:
                continue
            thread = threading.Thread(
                target=self._tell, args=(store, key, request, peers), name=f"notify-{job}", daemon=True
            )
            thread.start()
            started.append(thread)
        return started

    def _tell(self, store: Store, key: str, request: Request, peers: Sequence[ServiceRecord]) -> None:
        submission, end = request.submission, end_of(request)
        job = submission.job
        try:
            private = self._private(submission, peers)
            claimed = store.compare_and_swap(key, self._config.node, 0)
        except (BlobError, OSError, StoreError) as error:
            self._attempts[key] = self._attempts.get(key, 0) + 1
            logger.warning("nobody is told of the end of job %s: %s", job, error)
            if self._attempts[key] < _MOST_ATTEMPTS:
                self._told.discard(key)  # the next look tries again
            return
        if claimed is None or end is None:
            return
        said = message(self._config.cluster, submission, end)
        for wanted in private.notify:
            if problem := self._send(wanted, submission.folder, private, said):
                self._note(job, f"adaptdl: --notify was not carried out: {problem}")

    def _private(self, submission: Submission, peers: Sequence[ServiceRecord]) -> PrivateArchive:
        if submission.environment is None:
            raise BlobError("its submission names no archive of notices")
        self._blobs.fetch(submission.environment, peers, self._client)
        return read_private(self._blobs.path(submission.environment), submission.owner)

    def _send(self, wanted: str, folder: str, private: PrivateArchive, said: Mapping[str, str]) -> str:
        """Carry out one `--notify`; return what went wrong, or ""."""
        if wanted.startswith(("http://", "https://")):
            return post(wanted, said, time.sleep)
        work = self._directory.work(folder)
        return run(
            wanted, variables_of(os.environ, private, said), work if work.is_dir() else self._directory.path
        )

    def _note(self, job: str, text: str) -> None:
        """Append a line to the job's output on this node, where `adaptdl logs` shows it."""
        logger.warning("job %s: %s", job, text)
        path = self._directory.log(job)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(text + "\n")
        except OSError as error:
            logger.warning("%s cannot be written: %s", path, error)


def post(url: str, said: Mapping[str, str], sleep: Callable[[float], object]) -> str:
    """Send a message to a URL, up to three times; return what went wrong, or "".

    The URL is not named in what is returned: it may hold a token.
    """
    problem = ""
    with urllib3.PoolManager(retries=False, timeout=URL_SECONDS) as pool:
        for pause in _URL_PAUSES_SECONDS:
            try:
                answer = pool.request(
                    "POST", url, body=json.dumps(said).encode(), headers={"Content-Type": "application/json"}
                )
            except urllib3.exceptions.HTTPError as error:
                problem = f"the URL does not answer ({type(error).__name__})"
            else:
                if answer.status < 400:
                    return ""
                problem = f"the URL answers with HTTP {answer.status}"
            sleep(pause)
    return problem


def run(command: str, environment: Mapping[str, str], directory: Path) -> str:
    """Run a command by the shell; return what went wrong, or ""."""
    try:
        done = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=directory,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the command has not ended after {_COMMAND_SECONDS:g} s"
    except (OSError, ValueError) as error:  # ValueError: a NUL in a variable
        return f"the command cannot be run: {error}"
    if done.returncode == 0:
        return ""
    words = " ".join((done.stderr or done.stdout).decode(errors="replace").split())[-300:]
    return f"the command exits with code {done.returncode}" + (f": {words}" if words else "")
