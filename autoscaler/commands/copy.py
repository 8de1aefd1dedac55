"""The commands `adaptdl cp` and `tensorboard`: files that a submitted job has left on its nodes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
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
from adaptdl_elastic.rendezvous.services.service_client import (
    ServiceClient,
    ServiceError,
    ServiceRefusedError,
)
from adaptdl_elastic.rendezvous.store.base import Store, read_record

_LOOK_SECONDS = 10.0  # between two looks for new events
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
        if path.is_absolute() or ".." in path.parts or self.size < 0:
            raise ServiceError(f"a node lists a file {self.path!r} of {self.size} bytes: nothing is fetched")


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
        self.silent: list[str] = []
        """What nodes said that did not answer, or refused."""

    def everywhere(self, path: str) -> dict[str, list[RemoteFile]]:
        """Return what each node has at a path, without nodes that have nothing there."""
        with ThreadPoolExecutor(max_workers=16) as pool:
            said = pool.map(lambda node: self._on(node, path), self._services)
            found = dict(zip(self._services, said, strict=True))
        return {node: files for node, files in found.items() if files}

    def _on(self, node: str, path: str) -> list[RemoteFile]:
        try:
            where = f"{self._route}?path={quote(path, safe='')}"
            said = self._client.get_json(self._services[node], where)
        except ServiceError as error:
            if getattr(error, "status", 0) != 404:
                self.silent.append(str(error))
            return []
        if said["left_out"]:
            echo(f"adaptdl: {node}: {said['left_out']} links and other entries are left out", err=True)
        return [RemoteFile(*one) for one in said["files"]]

    def fetch(self, nodes: Sequence[str], path: str, file: RemoteFile, target: Path) -> None:
        """Fetch a file unless it is there already; go on with one that was fetched in part.

        Args:
            nodes: The nodes that have it. Another one is asked if one does not answer.
            path: The path that was listed.
            file: The file.
            target: Where it is written.
        """
        if target.is_file() and (target.stat().st_size, target.stat().st_mtime_ns) == (
            file.size,
            file.changed,
        ):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # of another state of the file nothing can be used
        part = target.with_name(f".{target.name}.{file.size}-{file.changed}.part")
        for node in nodes:
            try:
                self._fetch(node, str(PurePosixPath(path, file.path)), file.size, part)
                break
            except ServiceRefusedError:
                raise
            except ServiceError:
                if node == nodes[-1]:
                    raise
        part.chmod(0o755 if file.executable else 0o644)
        os.utime(part, ns=(file.changed, file.changed))
        part.replace(target)

    def _fetch(self, node: str, path: str, size: int, part: Path) -> None:
        with part.open("ab") as out:
            where = f"{self._route}/{quote(path, safe='')}?after={out.tell()}&size={size}"
            self._client.download(self._services[node], where, out.write)
            if out.tell() != size:
                raise ServiceRefusedError(f"{node}: {path} has changed meanwhile: try again", 409)

    def append(self, node: str, path: str, target: Path) -> None:
        """Fetch what a file that only grows has more than before."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("ab") as out:
            where = f"{self._route}/{quote(path, safe='')}?after={out.tell()}"
            self._client.download(self._services[node], where, out.write)


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
    if chosen is None:
        silent = f"; not every node answers: {'; '.join(files.silent)}" if files.silent else ""
        several = f": it is on {', '.join(sorted(listed))}, choose one by --from" if listed else ""
        raise CommandError(f"{source} is not on {node or first or 'any node'}{several}{silent}")
    mine = listed[chosen]
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
                files.fetch([node, *others], path, file, place)
            except OSError as error:
                raise CommandError(
                    f"{place} cannot be written: {error.strerror}; the same command goes on from there"
                ) from None
            except ServiceError as error:
                raise CommandError(f"{error}; the same command goes on from there") from None
            bar.update(file.size)


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
    with store, tempfile.TemporaryDirectory(prefix="adaptdl-events-") as place:
        folder = Path(place)
        options = f"--logdir={folder}", "--host=127.0.0.1", f"--port={port}"
        client = client_of(context)
        for job in jobs:
            find(reader.read(None), context, job)
        shown = subprocess.Popen(_own_python.module("tensorboard.main", *options))
        try:
            while shown.poll() is None:
                found = reader.read(None)
                own = [one.submission.job for one in found.requests if one.submission.owner == context.person]
                for job in jobs or own:
                    _update(JobFiles(client, found.services, job, "work"), folder / job)
                time.sleep(_LOOK_SECONDS)
        finally:
            shown.terminate()
    click.get_current_context().exit(shown.wait())


def _update(files: JobFiles, folder: Path) -> None:
    """Fetch what TensorBoard's files of a job have more than those here."""
    for node, listed in files.everywhere("").items():
        for file in listed:
            # the archive of the job may have some, too: every node has those
            target = folder / file.path
            if _EVENTS in PurePosixPath(file.path).name and file.size > _size(target):
                try:
                    files.append(node, file.path, target)
                except ServiceError as error:
                    echo(f"adaptdl: {error}; tried again", err=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
