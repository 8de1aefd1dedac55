"""The commands `adaptdl logs` and `wait`: what a submitted job's replicas have written, and how it ends."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import Any
from urllib.parse import quote

import click

from adaptdl_elastic.autoscaler.cli import CommandError, echo
from adaptdl_elastic.autoscaler.commands.cluster_setup import (
    client_of,
    cluster_option,
    complete_job,
    open_cluster,
)
from adaptdl_elastic.autoscaler.commands.copy import JobFiles
from adaptdl_elastic.autoscaler.commands.job_requests import find
from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord
from adaptdl_elastic.rendezvous.services import context as contexts
from adaptdl_elastic.rendezvous.services import submitted
from adaptdl_elastic.rendezvous.services.admission import Verdict
from adaptdl_elastic.rendezvous.services.service_client import (
    ServiceClient,
    ServiceError,
    ServiceRefusedError,
)
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader, Submitted
from adaptdl_elastic.rendezvous.store.base import StoreAuthError, StoreError
from adaptdl_elastic.rendezvous.text import printable, split_stamp, stamp

_WAIT_SECONDS = 5
"""Seconds for which a node keeps a request for output that is not there yet."""

_STOPPED_EXIT_CODE = 143  # for a job that was stopped or cancelled
_LOOK_SECONDS = 1.0  # between two looks at the job's state
_LAST_LOOK_SECONDS = 0.1  # between two reads of the output of processes that are about to end
_RETRY_SECONDS = 2.0  # until a node that does not answer is asked again
_NODES_AT_A_TIME = 16  # most nodes that are asked for their last output at the same time

_AGO = re.compile(r"(\d+)([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_NO_TIME = "-" * len(stamp(0))

Choose = Callable[[Sequence[str], str], Iterator[str]]
_RANK = re.compile(r"\[rank(\d+)\]: ")


def _moment(_: click.Context, option: click.Parameter, text: str | None) -> str:
    """Return the time that `--since` names as a stamp; "": none."""
    ago = _AGO.fullmatch(text or "")
    try:
        if ago or not text:
            return stamp(time.time() - int(ago[1]) * _SECONDS[ago[2]]) if ago else ""
        # Python 3.10 does not read a Z
        return stamp(datetime.fromisoformat(re.sub("Z$", "+00:00", text)).timestamp())
    except (ValueError, OverflowError, OSError):
        raise click.BadParameter(f"{text}: write 10m, 2h or 1d, or a time as 2026-11-30T09:15") from None


@click.command()
@click.argument("job", required=False, shell_complete=complete_job)
@click.option("-f", "--follow", is_flag=True, help="Continue to show output until the job has ended.")
@click.option("--rank", type=click.IntRange(min=0), multiple=True, help="Only show this replica; repeatable.")
@click.option("--since", metavar="TIME", callback=_moment, help="10m, 2h or 1d ago, or 2026-11-30T09:15.")
@click.option("--timestamps", is_flag=True, help="Begin each line with its time (UTC).")
@click.option("--all", "every", is_flag=True, help="Also of nodes that have gone; each line with its node.")
@cluster_option
def logs(name: str | None, job: str | None, follow: bool, rank: tuple[int, ...], **shown: Any) -> None:
    """Show the output of JOB's replicas on all nodes. The default is the job that you submitted last.

    With --follow, exit as `adaptdl wait` does. Times are by the clock of the node that has written a line;
    --since shows lines without one, too. Of a node that has gone another one keeps the end, at most 4 MiB.
    """
    context = contexts.choose(name)
    reader, store, _ = open_cluster(context)
    client = client_of(context)
    with store:
        found = reader.read(None)
        job = job or _newest(found, context.person)
        owner = find(found, context, job).submission.owner
        if not found.services:
            raise CommandError("no node service is registered: adaptdl cluster status")
        choose = partial(chosen, ranks=rank, escaped=owner != context.person, **shown)
        followers = Followers(client, job, choose, follow, shown["every"])
        followers.start(found)
        said, code = _watch(reader, job, followers) if follow else ("", 0)
        followers.finish()
    if said:
        echo(f"adaptdl: {said}", err=True)
    click.get_current_context().exit(code)


@click.command()
@click.argument("job", shell_complete=complete_job)
@cluster_option
def wait(name: str | None, job: str) -> None:
    """Wait until a submitted JOB has ended, and say how.

    Exit with 0 if it is done, with its exit code if it has failed, with 143 if it was stopped or cancelled.
    """
    context = contexts.choose(name)
    reader, store, _ = open_cluster(context)
    with store:
        find(reader.read(None), context, job)
        said, code = _watch(reader, job)
    echo(said)
    click.get_current_context().exit(code)


def _newest(found: Submitted, person: str) -> str:
    own = [one.submission.job for one in found.requests if one.submission.owner == person]
    if not own:
        raise CommandError("you have submitted no job: adaptdl submit SCRIPT, or name another person's job")
    return own[-1]


def _watch(reader: SubmissionReader, job: str, followers: Followers | None = None) -> tuple[str, int]:
    """Wait until the job is over; return how it ended, and an exit code.

    Meanwhile follow its new nodes, if there are `followers`, and say why the job waits.
    """
    waits = ""
    while True:
        try:
            found = reader.read(None)
        except StoreAuthError:
            raise
        except StoreError as error:  # a store that is away says nothing about the job
            echo(f"adaptdl: {error}; asking again", err=True)
            (time.sleep if followers is None else followers.wait)(_LOOK_SECONDS)
            continue
        if followers is not None:
            followers.start(found)
        request = found.find(job)
        if request is None:
            raise CommandError(f"the submission of {job} is not in the store any more: adaptdl ls --all")
        if request.run.ended or (request.over and not request.run.agents):
            state, why = submitted.state_of(request, found)
            code = request.run.exit_code if state in ("done", "failed") else _STOPPED_EXIT_CODE
            return f"{job} is {state}: {why}", code
        verdict = found.verdicts().get(job, Verdict(True))
        problem = "" if request.run.agents else submitted.why_not_started(found, job)
        reason = problem if verdict.admitted else verdict.reason
        if reason != waits:
            waits = reason
            if reason:
                echo(f"adaptdl: {job} waits: {reason}", err=True)
        (time.sleep if followers is None else followers.wait)(_LOOK_SECONDS)


class Followers:
    """One thread per node that prints the node's output of a job, line by line.

    Args:
        client: Asks the nodes.
        job: Name of the job.
        choose: Returns those of a node's lines that are shown, as `chosen`.
        to_the_end: Whether to show also the output that is written later, until the processes have ended.
        gone: Whether to show also what is kept of nodes that have gone.
    """

    def __init__(
        self, client: ServiceClient, job: str, choose: Choose, to_the_end: bool, gone: bool = False
    ) -> None:
        self._client, self._job, self._choose, self._to_the_end = client, job, choose, to_the_end
        self._gone = gone
        self._services: dict[str, ServiceRecord] = {}
        self._offsets: dict[str, int] = {}  # of what is printed, by node
        self._silent: set[str] = set()  # nodes of which was said that they do not answer
        self._over = threading.Event()
        self._refusal = ""
        self._refused = threading.Event()
        self._printing = threading.Lock()

    def start(self, found: Submitted) -> None:
        """Follow every node that is not followed yet."""
        self._services.update(found.services)
        for node in found.services:
            if node not in self._offsets:
                self._offsets[node] = 0
                if self._to_the_end:
                    threading.Thread(target=self._follow, args=(node,), name=node, daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Wait; CommandError if a node refuses to show the output."""
        if self._refused.wait(seconds):
            raise CommandError(self._refusal)

    def finish(self) -> None:
        """Print the output that exists, and the last output of processes that are about to end.

        Requests that nodes keep until there is more output are not waited for.
        """
        self._over.set()
        with ThreadPoolExecutor(max_workers=_NODES_AT_A_TIME) as pool:
            list(pool.map(self._end, list(self._offsets)))
        self.wait(0)
        self._end_gone()

    def _end_gone(self) -> None:
        """Print what others have kept of the output of nodes that do not answer, or say that they have it."""
        asked = {node: one for node, one in self._services.items() if node not in self._silent}
        found = JobFiles(self._client, asked, self._job, "logs").everywhere("of")
        kept = sorted((one.changed, one.path, keeper) for keeper in found for one in found[keeper])
        newest = {path: keeper for _, path, keeper in kept if path.endswith("/output.log")}
        for path, keeper in newest.items():
            node, data = path.partition("/")[0], bytearray()
            if self._offsets.get(node):
                continue
            if not self._gone:
                echo(f"adaptdl: {node} has gone; what {keeper} has of its output: --all", err=True)
                continue
            try:
                where = f"/v1/files/{self._job}/logs/{quote(f'of/{path}', safe='')}"
                self._client.download(asked[keeper], where, data.extend)
            except ServiceError as error:
                self._tell(node, error)
            self._print(node, data.decode(errors="replace"))

    def _print(self, node: str, text: str) -> None:
        for line in self._choose(text.splitlines(), node):
            click.echo(line)

    def _follow(self, node: str) -> None:
        """Print what a node has, until the job is over."""
        while not self._over.is_set() and not self._refused.is_set():
            try:
                self._show(node, _WAIT_SECONDS)
            except ServiceRefusedError as error:
                if error.status != 404:
                    self._refuse(error)
                    return
                self._over.wait(_LOOK_SECONDS)  # the node has not read the submission yet
            except ServiceError as error:
                self._tell(node, error)
                self._over.wait(_RETRY_SECONDS)

    def _end(self, node: str) -> None:
        """Print what a node still has."""
        try:
            while True:
                more, running = self._show(node, 0)
                if not more and not (self._to_the_end and running):
                    return
                if not more:
                    time.sleep(_LAST_LOOK_SECONDS)
        except ServiceRefusedError as error:
            if error.status != 404:
                self._refuse(error)
        except ServiceError as error:
            self._tell(node, error)

    def _show(self, node: str, seconds: float) -> tuple[bool, bool]:
        """Print what a node has beyond what is printed; wait for it so many seconds.

        Returns:
            Whether there was more, and whether the job has an agent there.

        Raises:
            ServiceError: the node does not answer, or refuses.
        """
        after = self._offsets[node]
        where = f"/v1/logs/{self._job}"
        answer = self._client.get_json(self._services[node], where, after=after, wait=seconds)
        self._silent.discard(node)
        with self._printing:
            if self._offsets[node] == after:  # else `_end` has printed it meanwhile
                self._offsets[node] = int(answer["offset"])
                self._print(node, str(answer["text"]))
        return bool(answer["text"]), bool(answer["running"])

    def _refuse(self, error: ServiceRefusedError) -> None:
        self._refusal = str(error)
        self._refused.set()

    def _tell(self, node: str, error: ServiceError) -> None:
        """Say once that a node does not answer."""
        if node not in self._silent:
            self._silent.add(node)
            echo(f"adaptdl: {error}; what it has of the output is not shown", err=True)


def chosen(
    lines: Sequence[str],
    node: str,
    ranks: Sequence[int] = (),
    *,
    since: str = "",
    timestamps: bool = False,
    every: bool = False,
    escaped: bool = False,
) -> Iterator[str]:
    """Return those of a node's lines that are shown.

    Args:
        lines: The lines.
        node: The node. A line that no replica has written begins with its name.
        ranks: Ranks of the replicas whose lines are shown; empty: all lines.
        since: Lines of an earlier time are left out.
        timestamps: Whether a line begins with its time.
        every: Whether all lines begin with the node's name.
        escaped: Whether control characters are escaped.
    """
    for line in lines:
        written, text = split_stamp(line)
        match = _RANK.match(text)
        if (ranks and (match is None or int(match[1]) not in ranks)) or "" < written < since:
            continue
        mark = f"[{node}]: " if match is None else f"[{node}] " if every else ""
        shown = f"{written or _NO_TIME} {mark}{text}" if timestamps else mark + text
        yield printable(shown) if escaped else shown
