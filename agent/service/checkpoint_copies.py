"""Copy a job's newest checkpoint, and the end of its output, to this node, where no folder is shared.

Rank 0 saves in a directory of its own node. Every other node that has an agent of the job copies what the
store records, so that the job can go on from there when rank 0 moves, or its node is lost with its disk.
Replicas that are told to start from a checkpoint wait for its copy (`ADAPTDL_CHECKPOINT_WAIT`).

The nodes of a cluster form a ring by their names. Each copies output from the one before it, whose own may go
with it.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from adaptdl_elastic._whole_file import write_whole
from adaptdl_elastic.rendezvous.schema.keys import check_name
from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord
from adaptdl_elastic.rendezvous.services.service_client import ServiceClient, ServiceError
from adaptdl_elastic.rendezvous.services.service_config import ServiceDirectory
from adaptdl_elastic.storage import MANIFEST, is_id

logger = logging.getLogger(__name__)

KEPT = 3
"""Checkpoints of a job that a node keeps, as many as rank 0 does."""

WAIT_SECONDS = 60
"""Seconds that a replica waits for the copy of a checkpoint."""

SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 60.0
"""Shortest and longest pause before a copy that failed is tried again."""

MOST_OUTPUT_BYTES = 4 << 20
"""Most bytes of a copy of output. Before it would be longer, its first half goes."""

MOST_OUTPUTS = 4
"""Most copies of a job's output on a node, each of another node."""

_LOOK_SECONDS = 5.0  # between two looks at what another node has of output

_COPYING = ".copy-"  # begins the name of a directory whose copy is not complete


class CheckpointCopies:
    """The copies on one node; one thread makes them."""

    def __init__(
        self,
        directory: ServiceDirectory,
        client: ServiceClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._client, self._clock = directory, client, clock
        self.thread: threading.Thread | None = None
        self._again: dict[str, tuple[float, float]] = {}  # job → when it is tried again, and the next pause
        self.problems: dict[str, str] = {}
        """Why the newest checkpoint of a job cannot be copied to this node, by job."""

    def look(self, newest: Mapping[str, str], peers: Sequence[ServiceRecord]) -> None:
        """Begin to copy what is missing, unless a copy is under way.

        Args:
            newest: The newest checkpoint of each job that has an agent here.
            peers: The other nodes.
        """
        for job in self._again.keys() - newest.keys():
            self._succeeded(job)
        due = {job for job in newest if self._clock() >= self._again.get(job, (0.0, 0.0))[0]}
        missing = {job: newest[job] for job in due if is_id(newest[job]) and not self._has(job, newest[job])}
        if not missing or (self.thread is not None and self.thread.is_alive()):
            return
        self.thread = threading.Thread(
            target=self._copy_all, args=(missing, peers), name="copies", daemon=True
        )
        self.thread.start()

    def _has(self, job: str, checkpoint_id: str) -> bool:
        return (self._directory.checkpoints(job) / checkpoint_id / MANIFEST).exists()

    def _copy_all(self, missing: Mapping[str, str], peers: Sequence[ServiceRecord]) -> None:
        for job, checkpoint_id in missing.items():
            problems = []
            for peer in peers:
                try:
                    copy(self._client, peer, self._directory.checkpoints(job), job, checkpoint_id)
                    self._succeeded(job)
                    break
                except ServiceError as error:  # other nodes may have it, or this one later
                    problems.append(str(error))
                except OSError as error:
                    why = f"its checkpoints are not copied to this node: {error.strerror}"
                    self.problems[job] = why
                    pause = self._again.get(job, (0.0, SHORTEST_PAUSE_SECONDS))[1]
                    self._again[job] = self._clock() + pause, min(2 * pause, LONGEST_PAUSE_SECONDS)
                    logger.warning("job %s: %s; tried again in %g s", job, why, pause)
                    break
            else:
                self._succeeded(job)
                logger.info(
                    "checkpoint %s of %s is not copied yet: %s", checkpoint_id, job, "; ".join(problems)
                )

    def _succeeded(self, job: str) -> None:
        self._again.pop(job, None)
        self.problems.pop(job, None)


class OutputCopies:
    """The copies of output that one node makes.

    Args:
        directory: Of the service.
        client: Asks the other node.
    """

    def __init__(self, directory: ServiceDirectory, client: ServiceClient) -> None:
        self._directory, self._client = directory, client
        self._running = set[str]()  # on the other node at the last look
        # up to where the output of a job on a node is copied; not known after a start
        self._ends: dict[tuple[str, str], int] = {}

    def run(self, stopping: threading.Event, node: str, peers: Callable[[], Sequence[ServiceRecord]]) -> None:
        """Copy from the node before this one until `stopping` is set."""
        while not stopping.wait(_LOOK_SECONDS):
            for peer in sorted(peers(), key=lambda one: (one.node < node, one.node))[-1:]:
                self.look(peer)

    def look(self, peer: ServiceRecord) -> None:
        """Copy what jobs have written on a node since the last look, also of those that have ended since."""
        try:
            running = set(self._client.get_json(peer, "/v1/status")["agents"])
            looked, self._running = running | self._running, running
            for job in sorted(looked):
                self._copy(peer, check_name("job", job))
        except (ServiceError, OSError, LookupError, TypeError, ValueError) as error:
            # what is copied already stays
            logger.info("the output on %s is not copied: %s; tried again", peer.node, error)

    def _copy(self, peer: ServiceRecord, job: str) -> None:
        log = self._directory.log(job, of=check_name("node", peer.node))
        end, data = self._ends.pop((peer.node, job), 0), b""
        asked = {"after": end} if end and log.exists() else {"tail": MOST_OUTPUT_BYTES // 2}
        before = log.stat().st_size if "after" in asked else 0
        while (said := self._client.get_json(peer, f"/v1/logs/{job}", **asked))["text"]:
            data += str(said["text"]).encode()
            asked = {"after": (end := int(said["offset"]))}
            if len(data) > MOST_OUTPUT_BYTES:
                # a job that writes faster than it is read: the next look begins near the end
                end = 0
                break
        if before and before + len(data) <= MOST_OUTPUT_BYTES:
            with log.open("ab") as file:
                file.write(data)
        elif data:
            log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = (log.read_bytes() if before else b"") + data
            write_whole(log, content[-MOST_OUTPUT_BYTES // 2 :])
            copies = sorted(log.parent.parent.glob(f"*/{log.name}"), key=lambda one: one.stat().st_mtime)
            for oldest in copies[:-MOST_OUTPUTS]:
                shutil.rmtree(oldest.parent, ignore_errors=True)
        self._ends[peer.node, job] = end


def copy(client: ServiceClient, peer: ServiceRecord, root: Path, job: str, checkpoint_id: str) -> None:
    """Copy one checkpoint from a node into a directory of checkpoints, and remove the oldest there.

    Raises:
        ServiceError: the node does not have it, or does not answer.
        OSError: it cannot be written.
    """
    target = f"/v1/checkpoints/{job}/{checkpoint_id}"
    files = [str(name) for name in client.get_json(peer, target)["files"]]
    temporary = root / f"{_COPYING}{checkpoint_id}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700, parents=True)
    try:
        for name in files:
            with (temporary / Path(name).name).open("wb") as file:
                client.download(peer, f"{target}/{quote(name)}", file.write)
        temporary.rename(root / checkpoint_id)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in sorted(path for path in root.iterdir() if is_id(path.name))[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)


def files_of(root: Path, checkpoint_id: str) -> list[str]:
    """Return the names of a checkpoint's files, or none if the checkpoint is not there."""
    folder = root / checkpoint_id
    if not is_id(checkpoint_id) or not (folder / MANIFEST).exists():
        return []
    return sorted(path.name for path in folder.iterdir() if path.is_file())
