"""Copy a job's newest checkpoint to this node, where no folder is shared.

Rank 0 saves in a directory of its own node. Every other node that has an agent of the job copies what the
store records, so that the job can go on from there when rank 0 moves, or its node is lost with its disk.
Replicas that are told to start from a checkpoint wait for its copy (`ADAPTDL_CHECKPOINT_WAIT`).
"""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord
from adaptdl_elastic.rendezvous.services.service_client import ServiceClient, ServiceError
from adaptdl_elastic.rendezvous.services.service_config import ServiceDirectory
from adaptdl_elastic.storage import MANIFEST, is_id

logger = logging.getLogger(__name__)

KEPT = 3
"""Checkpoints of a job that a node keeps, as many as rank 0 does."""

WAIT_SECONDS = 60
"""Seconds that a replica waits for the copy of a checkpoint."""

_COPYING = ".copy-"  # begins the name of a directory whose copy is not complete


class CheckpointCopies:
    """The copies on one node; one thread makes them."""

    def __init__(self, directory: ServiceDirectory, client: ServiceClient) -> None:
        self._directory, self._client = directory, client
        self._thread: threading.Thread | None = None

    def look(self, newest: Mapping[str, str], peers: Sequence[ServiceRecord]) -> None:
        """Begin to copy what is missing, unless a copy is under way.

        Args:
            newest: The newest checkpoint of each job that has an agent here.
            peers: The other nodes.
        """
        missing = {job: one for job, one in newest.items() if is_id(one) and not self._has(job, one)}
        if not missing or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(
            target=self._copy_all, args=(missing, peers), name="copies", daemon=True
        )
        self._thread.start()

    def _has(self, job: str, checkpoint_id: str) -> bool:
        return (self._directory.checkpoints(job) / checkpoint_id / MANIFEST).exists()

    def _copy_all(self, missing: Mapping[str, str], peers: Sequence[ServiceRecord]) -> None:
        for job, checkpoint_id in missing.items():
            problems = []
            for peer in peers:
                try:
                    copy(self._client, peer, self._directory.checkpoints(job), job, checkpoint_id)
                    break
                except (ServiceError, OSError) as error:
                    problems.append(str(error))
            else:
                logger.info(
                    "checkpoint %s of %s is not copied yet: %s", checkpoint_id, job, "; ".join(problems)
                )


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
