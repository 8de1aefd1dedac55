"""The commands `adaptdl cp` and `tensorboard`: files that a submitted job has left on its nodes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import quote

import click

from adaptdl_elastic import _own_python
from adaptdl_elastic.autoscaler.cli import CommandError, OptionError, echo
from adaptdl_elastic.autoscaler.commands.cluster_setup import (
    client_of,
    cluster_option,
    complete_job,
    open_cluster,
)
from adaptdl_elastic.autoscaler.commands.job_requests import find
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import Plan
from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord
from adaptdl_elastic.rendezvous.services import context as contexts
from adaptdl_elastic.rendezvous.services.context import ClusterContext
from adaptdl_elastic.rendezvous.services.service_client import (
    ServiceClient,
    ServiceError,
    ServiceRefusedError,
)
from adaptdl_elastic.rendezvous.store.base import Store, read_record
from adaptdl_elastic.rendezvous.text import printable

_LOOK_SECONDS = 10.0  # between two looks for new events
_STATES = 3  # of a file that changes while it is fetched
_EVENTS = "tfevents"  # in the names of TensorBoard's files


@dataclass(frozen=True)
class RemoteFile:
    """A file on a node, by its path below what was asked for; "": it is that itself."""

    path: str
    size: int
    changed: int  # nanoseconds since 1970
    executable: bool

    def __post_init__(self) -> None:
        path = PurePosixPath(self.path)
        if path.is_absolute() or ".." in path.parts or "\0" in self.path or self.size < 0:
            raise ValueError(f"it lists a file {printable(self.path)} of {self.size} bytes")


class JobFiles:
    """The files of one job on the nodes of a cluster.

    Args:
        client: Asks the nodes.
        services: The nodes.
        job: Name of the job.
        kind: "work", "checkpoints" or "logs".
    """

    def __init__(
        self, client: ServiceClient, services: Mapping[str, ServiceRecord], job: str, kind: str
    ) -> None:
        self._client, self._services, self._route = client, services, f"/v1/files/{job}/{kind}"
        self.silent: dict[str, str] = {}
        """Why nodes could not be asked, by node."""
        self.left_out: dict[str, int] = {}
        """How many links and others that are no files each node has there."""

    def everywhere(self, path: str) -> dict[str, list[RemoteFile]]:
        """Return what each node has at a path, without nodes that have no file there."""
        self.silent.clear()
        with ThreadPoolExecutor(max_workers=16) as pool:
            said = pool.map(lambda node: self._on(node, path), self._services)
            found = dict(zip(self._services, said, strict=True))
        return {node: files for node, files in found.items() if files}

    def _on(self, node: str, path: str) -> list[RemoteFile]:
        try:
            where = f"{self._route}?path={_quoted(path)}"
            said = self._client.get_json(self._services[node], where)
            self.left_out[node] = int(said["left_out"])
            return [
                RemoteFile(str(name), int(size), int(changed), bool(may))
                for name, size, changed, may in said["files"]
            ]
        except (KeyError, TypeError, ValueError) as error:
            self.silent[node] = f"{node} answers with something else than a list of files: {error}"
        except ServiceError as error:
            # a node of an older version serves no files
            if getattr(error, "status", 0) != 404 or "does not serve" in str(error):
                self.silent[node] = str(error)
        return []

    def fetch(
        self,
        nodes: Sequence[str],
        path: str,
        file: RemoteFile,
        target: Path,
        moved: Callable[[int], None] = lambda size: None,
    ) -> None:
        """Fetch a file unless it is there already; go on with one that was fetched in part.

        Args:
            nodes: The nodes that have it. Another one is asked if one does not answer.
            path: The path that was listed.
            file: The file.
            target: Where it is written.
            moved: Called with the number of bytes that have come.

        Raises:
            ServiceError: no node sends it.
            ChangedError: it has changed since it was listed.
            OSError: it cannot be written.
        """
        there = target.stat() if target.is_file() else None
        if there and (there.st_size, there.st_mtime_ns) == (file.size, file.changed):
            return moved(file.size)
        target.parent.mkdir(parents=True, exist_ok=True)
        # of another state of the file nothing can be used
        mark = hashlib.sha256(f"{target.name}\0{file.size}\0{file.changed}".encode(errors="replace"))
        part = target.with_name(f".adaptdl-{mark.hexdigest()[:16]}.part")
        with part.open("ab") as out:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if out.tell() > file.size:
                out.seek(out.truncate(0))
            moved(out.tell())
            for node in nodes:
                try:
                    self._fetch(node, str(PurePosixPath(path, file.path)), file, out, moved)
                    break
                except ChangedError:
                    part.unlink()
                    raise
                except ServiceError:
                    if node == nodes[-1]:
                        raise
        part.chmod(0o755 if file.executable else 0o644)
        os.utime(part, ns=(file.changed, file.changed))
        part.replace(target)

    def _fetch(
        self, node: str, path: str, file: RemoteFile, out: IO[bytes], moved: Callable[[int], None]
    ) -> None:
        def write(data: bytes) -> None:
            if out.tell() + len(data) > file.size:
                raise ServiceError(f"{node} sends more of {printable(path)} than it has listed")
            moved(out.write(data))

        where = f"{self._route}/{_quoted(path)}?after={out.tell()}&size={file.size}&changed={file.changed}"
        try:
            self._client.download(self._services[node], where, write)
        except ServiceRefusedError as error:
            raise ChangedError(str(error)) if error.status == 409 else error from None
        if out.tell() != file.size:
            raise ServiceError(f"{node} has sent {out.tell()} of {file.size} bytes of {printable(path)}")

    def append(self, node: str, path: str, size: int, target: Path) -> None:
        """Fetch what a file that only grows has more than before, up to `size`."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab") as out:
            left = size - out.tell()
            where = f"{self._route}/{_quoted(path)}?after={out.tell()}&size={size}"
            self._client.download(self._services[node], where, lambda data: out.write(data[:left]))


class ChangedError(ServiceError):
    """A file has changed since it was listed."""


def _quoted(path: str) -> str:
    # names need not be UTF-8
    return quote(path, safe="", errors="surrogateescape")


@click.command()
@click.argument("source", metavar="JOB[:PATH]")
@click.argument("target", metavar="DEST", type=click.Path(path_type=Path))
@click.option("--checkpoints", "kind", flag_value="checkpoints", help="PATH is in the folder of checkpoints.")
@click.option("--logs", "kind", flag_value="logs", help="PATH is in the folder of logs.")
@click.option("--from", "node", metavar="NODE", help="The node. [default: where rank 0 was last]")
@cluster_option
def cp(name: str | None, source: str, target: Path, kind: str | None, node: str | None) -> None:
    """Copy files of a submitted job from its nodes to this machine.

    PATH is a file or a folder in the job's working directory; without it everything there is copied. The
    content of a folder is written into DEST. Repeat the command to go on with one that was interrupted: what
    is here already is not fetched again.
    """
    job, _, path = source.partition(":")
    context = contexts.choose(name)
    reader, store, keys = open_cluster(context)
    with store:
        found = reader.read(None)
        find(found, context, job)
        first = _rank_0(store, keys, job)
    if node is not None and node not in found.services:
        known = ", ".join(sorted(found.services)) or "none"
        raise OptionError(f"--from {node}: no such service is registered; registered are {known}")
    files = JobFiles(client_of(context), found.services, job, kind or "work")
    listed = files.everywhere(path)
    chosen = _choose(listed, node or first, must=node is not None)
    if chosen is None or (node is None and first in files.silent):
        silent = "".join(f"; {why}" for why in files.silent.values())
        several = f"; {', '.join(sorted(listed))} has it (--from)" if listed else ""
        raise CommandError(f"{source} is not on {node or first or 'any node'}{several}{silent}")
    mine = listed[chosen]
    if files.left_out[chosen]:
        echo(f"adaptdl: {files.left_out[chosen]} links and other entries are left out", err=True)
    single = mine[0].path == ""
    if single and target.is_dir():
        target /= PurePosixPath(path).name
    _fetch_all(files, mine, chosen, listed, path, target, kind == "checkpoints")
    size = sum(one.size for one in mine)
    echo(f"{len(mine)} files, {size / 1e6:.1f} MB, from {chosen} in {target}")
    for other, theirs in sorted(listed.items()):
        more = {one.path for one in theirs} - {one.path for one in mine}
        if more and kind != "checkpoints":
            echo(f"{other} has {len(more)} other files there: --from {other}")


def _rank_0(store: Store, keys: Keys, job: str) -> str:
    """Return the node where rank 0 is, or was last; "" if that is not known."""
    plan = read_record(Plan, store.get(keys.job(job, "plan")))
    places = () if plan is None else plan.placements or plan.leaving
    return places[0].node if places else ""


def _choose(listed: Mapping[str, object], wanted: str, must: bool) -> str | None:
    """Return the node to fetch from: the wanted one, else the only one; None if there is none."""
    if wanted in listed or must:
        return wanted if wanted in listed else None
    return next(iter(listed)) if len(listed) == 1 else None


def _fetch_all(
    files: JobFiles,
    wanted: Sequence[RemoteFile],
    node: str,
    listed: Mapping[str, Sequence[RemoteFile]],
    path: str,
    target: Path,
    copied: bool,
) -> None:
    """Fetch files; `copied`: other nodes that have one of the same name and size have the same one."""
    total = sum(one.size for one in wanted)
    with click.progressbar(length=total, label="fetching", file=sys.stderr) as bar:
        for file in wanted:
            others = [
                other
                for other, theirs in listed.items()
                if copied
                and other != node
                and any((one.path, one.size) == (file.path, file.size) for one in theirs)
            ]
            place = target / file.path if file.path else target
            try:
                _fetch_newest(files, [node, *others], path, file, place, bar.update)
            except BlockingIOError:
                raise CommandError(f"{place} is being written by another adaptdl cp") from None
            except (OSError, ValueError) as error:
                why = getattr(error, "strerror", None) or error
                raise CommandError(
                    f"{place} cannot be written: {why}; the same command goes on from there"
                ) from None
            except ServiceError as error:
                raise CommandError(f"{error}; the same command goes on from there") from None


def _fetch_newest(
    files: JobFiles,
    nodes: Sequence[str],
    path: str,
    file: RemoteFile,
    place: Path,
    moved: Callable[[int], None],
) -> None:
    """Fetch a file; if it changes meanwhile, its new state."""
    for _ in range(_STATES):
        try:
            return files.fetch(nodes, path, file, place, moved)
        except ChangedError:
            listed = files.everywhere(str(PurePosixPath(path, file.path)))
            found = next(iter(listed.get(nodes[0], ())), None)
            if found is None:
                raise
            file = replace(found, path=file.path)
    raise ServiceError(f"{printable(str(place))} changes all the time on {nodes[0]}")


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=complete_job)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=6006, show_default=True, help="0: any free one."
)
@cluster_option
def tensorboard(name: str | None, jobs: tuple[str, ...], port: int) -> None:
    """Show the curves of submitted jobs in TensorBoard on this machine, as they grow.

    The default are all jobs of yours. TensorBoard listens on this machine only.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise CommandError("TensorBoard is not installed here: pip install tensorboard")
    context = contexts.choose(name)
    reader, store, _ = open_cluster(context)
    if port == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    events = tempfile.TemporaryDirectory(prefix="adaptdl-events-")
    with store, events as place, _note(context).open("a") as note:
        # the page has a link while this lock is held
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _note(context).write_text(f"http://127.0.0.1:{port}/")
        folder = Path(place)
        options = f"--logdir={folder}", "--host=127.0.0.1", f"--port={port}"
        client = client_of(context)
        for job in jobs:
            find(reader.read(None), context, job)
        told = set[str]()
        shown = subprocess.Popen(_own_python.module("tensorboard.main", *options))
        try:
            while shown.poll() is None:
                found = reader.read(None)
                own = [one.submission.job for one in found.requests if one.submission.owner == context.person]
                for job in jobs or own:
                    update_events(JobFiles(client, found.services, job, "work"), folder / job, told)
                time.sleep(_LOOK_SECONDS)
        finally:
            shown.terminate()
    click.get_current_context().exit(shown.wait())


def tensorboard_url(context: ClusterContext) -> str:
    """Return where `adaptdl tensorboard` serves on this machine; "" if it does not run."""
    try:
        with _note(context).open() as note:
            fcntl.flock(note, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _note(context).read_text()
    except OSError:
        pass
    return ""


def _note(context: ClusterContext) -> Path:
    return context.directory / "tensorboard"


def update_events(files: JobFiles, folder: Path, told: set[str]) -> None:
    """Fetch what TensorBoard's files of a job have more than those here; say each problem once."""
    problems = list[str]()
    for node, listed in files.everywhere("").items():
        for file in listed:
            # the archive of the job may have some, too: every node has those
            target = folder / file.path
            if _EVENTS in PurePosixPath(file.path).name and file.size > _size(target):
                try:
                    files.append(node, file.path, file.size, target)
                except ServiceError as error:
                    problems.append(str(error))
    for problem in {*problems, *files.silent.values()} - told:
        echo(f"adaptdl: {problem}; tried again", err=True)
        told.add(problem)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
