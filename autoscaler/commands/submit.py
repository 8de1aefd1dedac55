"""The commands `adaptdl submit`, `cancel` and `resume`."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from adaptdl_elastic.autoscaler.cli import (
    CommandError,
    Finite,
    OptionError,
    Where,
    echo,
    json_option,
    store_options,
)
from adaptdl_elastic.autoscaler.commands import job_array, job_requests
from adaptdl_elastic.autoscaler.commands.cluster_setup import (
    client_of,
    cluster_option,
    complete_job,
    open_cluster,
    told,
)
from adaptdl_elastic.autoscaler.provisioning import bundle as bundles
from adaptdl_elastic.autoscaler.provisioning.bundle import Bundle
from adaptdl_elastic.protocol.environment import ETCD
from adaptdl_elastic.rendezvous.schema.keys import Keys, check_name
from adaptdl_elastic.rendezvous.schema.records import HEAVIEST, MOST_SLOTS
from adaptdl_elastic.rendezvous.schema.submissions import MOST_PRIORITY, ServiceRecord, Submission
from adaptdl_elastic.rendezvous.services import context as contexts
from adaptdl_elastic.rendezvous.services.admission import JobState, Request
from adaptdl_elastic.rendezvous.services.context import ClusterContext
from adaptdl_elastic.rendezvous.services.service_client import ServiceClient, ServiceError
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader, Submitted
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.rendezvous.text import pluralize, weight_problem

_COPIES = 2
"""Number of nodes on which an archive is put: one may be lost before other nodes have fetched it."""

LEAVE_SECONDS = 30.0
"""Seconds that agents of a job that has ended may take to leave before it is replaced."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENT]...")
@click.option("--replicas", default="1", show_default=True, metavar="MIN:MAX", help="Replicas of the job.")
@click.option(
    "--gpus-per-replica",
    type=click.IntRange(min=1, max=MOST_SLOTS),
    default=1,
    show_default=True,
    help="Neighbouring GPUs of each replica.",
)
@click.option("--name", "job", metavar="NAME", help="Name of the job. [default: that of the script]")
@click.option(
    "--priority",
    type=click.IntRange(-MOST_PRIORITY, MOST_PRIORITY),
    default=0,
    show_default=True,
    help="Waiting jobs with a higher priority begin first.",
)
@click.option(
    "--weight",
    type=Finite(0, HEAVIEST, min_open=True),
    default=1.0,
    help="Weight of its speed beside others.",
)
@click.option("--after", multiple=True, metavar="JOB", help="Begin when JOB is done; repeatable.")
@click.option(
    "--retry",
    "max_restarts",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    help="Restart the job after a failure, at most N times.",
)
@click.option(
    "--array",
    multiple=True,
    metavar="NAME=VALUE,...",
    help="Submit one job for each value, which replaces {NAME} or is appended as --NAME=VALUE; "
    "if repeated, one for each combination.",
)
@click.option(
    "--env",
    "variables",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Environment variable of the job; without VALUE, that of this shell. It is not kept in the store.",
)
@click.option(
    "--workdir",
    type=click.Path(path_type=Path),
    default=Path(),
    metavar="DIR",
    help="Folder to copy to the nodes, without files that .gitignore names. [default: this directory]",
)
@click.option(
    "--max-size",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Limit of --workdir, in MiB.",
)
@click.option(
    "--checkpoint-path",
    default="",
    metavar="DIR",
    help="Folder or s3:// URL that all nodes can use. [default: a folder on each node]",
)
@click.option(
    "--replace", "replaces", is_flag=True, help="Continue your ended job of this name, with these files."
)
@click.option("--python", default="", metavar="PATH", help="Interpreter on the nodes whose packages it uses.")
@click.option(
    "--requirements",
    default="",
    metavar="FILE",
    help="Packages to install on the nodes. [default: requirements.txt, uv.lock or pyproject.toml]",
)
@click.option(
    "--node", "nodes", multiple=True, metavar="NODE", help="Only run there; repeatable: on any of them."
)
@click.option("--has", multiple=True, metavar="PATH", help="Only run on nodes where PATH exists; repeatable.")
@click.option("--dry-run", is_flag=True, help="Only say what would happen.")
@json_option
@cluster_option
def submit(
    name: str | None,
    command: tuple[str, ...],
    replicas: str,
    job: str | None,
    array: tuple[str, ...],
    variables: tuple[str, ...],
    workdir: Path,
    max_size: int,
    replaces: bool,
    dry_run: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Run SCRIPT, or any command after `--`, on the cluster. The working directory is copied to the nodes."""
    context, workdir = contexts.choose(name), workdir.expanduser()
    mode, words = command_of(command, workdir)
    least, most = replicas_of(replicas)
    path = asked["checkpoint_path"]
    if path and "://" not in path and not path.startswith("/"):
        raise OptionError(f"--checkpoint-path {path}: give an absolute path, nodes have other directories")
    named = Path(asked["requirements"] or "none")
    within = not named.is_absolute() and ".." not in named.parts and (workdir / named).is_file()
    if str(named) != "none" and not within:
        raise OptionError(f"--requirements {named}: there is no such file in {workdir}")
    if relative := next(
        (one for one in (*asked["has"], asked["python"] or "/") if not one.startswith("/")), None
    ):
        raise OptionError(
            f"--has and --python {relative}: give an absolute path, nodes have other directories"
        )
    try:
        stem = name_of(job, words[0] if mode != "module" else words[0].rpartition(".")[2])
        members = job_array.expand(stem, words, array)
    except job_array.ArrayError as error:
        raise OptionError(str(error)) from None
    now = time.time()
    drafts = [
        Submission(
            job=member.name,
            owner=context.person,
            mode=mode,  # type: ignore[arg-type]
            command=member.command,
            bundle="0" * 64,
            min_replicas=least,
            max_replicas=most,
            max_nodes=most,
            created=now + number * 1e-3,  # those of an array begin in the order of its values
            **asked,
        )
        for number, member in enumerate(members)
    ]
    given, client = variables_of(variables, os.environ), client_of(context)
    reader, store, keys = open_cluster(context)
    with store, tempfile.TemporaryDirectory(prefix="adaptdl-submit-") as folder:
        found = reader.read(None)
        fixed = replaces or job is not None
        drafts = [_replacing(one, reader) if replaces else _named(one, found, fixed) for one in drafts]
        _check_after(drafts[0], found)
        if unknown := set(drafts[0].nodes) - set(found.services):
            known = ", ".join(sorted(found.services)) or "none"
            raise OptionError(f"--node {min(unknown)}: no such node is registered; registered are {known}")
        weight = asked["weight"]
        told = weight_problem(weight, job_requests.most_weight(client, found)) if weight > 1 else []
        private = (contexts.config_directory(), Path.home() / ".ssh")
        packed = bundles.pack(workdir, Path(folder) / "bundle", context.person, max_size << 20, private)
        if dry_run:
            _tell(drafts, packed, found, told, as_json, dry_run=True)
            return
        archives = [packed]
        environment = None
        if given:
            archives.append(bundles.pack_private(given, context.person, Path(folder) / "variables"))
            environment = archives[1].digest
        _send(client, found.services, archives)
        drafts = [
            _write(
                store,
                keys,
                context,
                replace(draft, bundle=packed.digest, environment=environment),
                found.find(draft.job) if replaces else None,
                fixed,
            )
            for draft in drafts
        ]
        _tell(drafts, packed, reader.read(None), told, as_json, dry_run=False)


def command_of(command: Sequence[str], workdir: Path) -> tuple[str, tuple[str, ...]]:
    """Return how the command is run, and its words without the interpreter.

    Raises:
        OptionError: there is nothing to run.
    """
    words = list(command)
    if words and words[0] == "--":
        words.pop(0)
    named_python = bool(words) and re.fullmatch(r"python(3(\.\d+)?)?", words[0]) is not None
    if named_python:
        words.pop(0)
    if not words:
        raise OptionError("there is nothing to run: give a script, or a command after --")
    if named_python and words[0] == "-m" and len(words) > 1:
        return "module", tuple(words[1:])
    if not (named_python or words[0].endswith(".py")):
        if words[0].startswith("-"):
            raise OptionError(f"there is no option {words[0]}; options of the script stand behind the script")
        return "exec", tuple(words)
    if words[0].startswith("-"):
        raise OptionError(f"python {words[0]} cannot be submitted: give a script or -m MODULE")
    if not (workdir / words[0]).is_file() or Path(words[0]).is_absolute():
        raise OptionError(
            f"there is no script {words[0]} in {workdir.absolute()}: give its path relative to that"
        )
    return "script", tuple(words)


def replicas_of(text: str) -> tuple[int, int]:
    """Return the bounds in `N` or `MIN:MAX`."""
    match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise OptionError(f"--replicas {text}: give N or MIN:MAX with 1 <= MIN <= MAX, as in 1:8")
    return low, high


def name_of(given: str | None, command: str) -> str:
    """Return the job's name as given, or made of its command."""
    if given is None:
        return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(command).stem).strip("-._") or "job"
    try:
        return check_name("--name", given)
    except ValueError as error:
        raise OptionError(str(error)) from None


def variables_of(given: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in `NAME=VALUE`, or `NAME` of this shell."""
    found = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise OptionError(f"--env {name}: is no name of a variable")
        if name.startswith(ETCD):
            raise OptionError(f"--env {name}: a job does not get access to the store")
        if not sign and name not in environ:
            raise OptionError(f"--env {name}: this shell has no such variable; give {name}=VALUE")
        found[name] = value if sign else environ[name]
    return found


def _named(draft: Submission, found: Submitted, fixed: bool) -> Submission:
    """Return the draft with a name that no job has yet."""
    taken = {one.submission.job: one for one in found.requests}
    if draft.job not in taken:
        return draft
    if fixed:
        raise CommandError(
            f"there is a job {draft.job} already: choose another --name, or --replace it once it has ended"
        )
    number = 2
    while f"{draft.job}-{number}" in taken:
        number += 1
    return replace(draft, job=f"{draft.job}-{number}")


def _replacing(draft: Submission, reader: SubmissionReader) -> Submission:
    """Return the draft as it replaces the job of its name, once the agents of that job have left."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while (old := reader.read(None).find(draft.job)) and old.over and old.run.agents:
        if time.monotonic() > deadline:
            raise CommandError(f"agents of {draft.job} are still there: adaptdl cluster status says where")
        time.sleep(LEAVE_SECONDS / 100)
    if old is None:
        raise CommandError(f"there is no job {draft.job} to replace: leave --replace away, or give --name")
    first = old.submission
    if first.owner != draft.owner:
        raise CommandError(f"{draft.job} belongs to {first.owner}: choose another --name, without --replace")
    if not old.over:
        raise CommandError(
            f"{draft.job} has not ended: adaptdl stop {draft.job} or adaptdl wait {draft.job} first"
        )
    job_requests.check_kept(old)
    later = max(draft.created, first.created + 1e-3)
    return replace(draft, created=later, replaces=first.created, follows=old.run.run)


def _check_after(draft: Submission, found: Submitted) -> None:
    for job in draft.after:
        if job == draft.job:
            raise CommandError(f"--after {job}: a job cannot wait for itself; name another one")
        if found.find(job) is None:
            known = ", ".join(one.submission.job for one in found.requests[-5:])
            raise CommandError(
                f"--after {job}: no such job was submitted; the last ones are: {known or 'none'}"
            )


def _send(client: ServiceClient, services: Mapping[str, ServiceRecord], archives: Sequence[Bundle]) -> None:
    """Put each archive on two nodes, or on the only one."""
    if not services:
        raise CommandError("no node service is registered: adaptdl cluster status, adaptdl cluster up")
    for archive in archives:
        placed = 0
        problems = []
        for _, service in sorted(services.items()):
            try:
                if not client.has_blob(service, archive.digest):
                    with archive.path.open("rb") as file:
                        client.put_blob(service, archive.digest, file, archive.size)
                placed += 1
            except ServiceError as error:
                problems.append(str(error))
            if placed == _COPIES:
                break
        if not placed:
            raise CommandError(f"no node takes the working directory: {'; '.join(problems)}")


def _write(
    store: Store, keys: Keys, context: ClusterContext, draft: Submission, old: Request | None, fixed: bool
) -> Submission:
    """Write the submission under its name; under another name if that one has been taken meanwhile."""
    stem, number, revision = draft.job, 2, 0 if old is None else old.revision
    while True:
        signed = job_requests.signed(context, draft)
        if store.compare_and_swap(keys.submission(draft.job), signed, revision) is not None:
            return draft
        if fixed:
            raise CommandError(f"another command has just submitted a job {draft.job}: adaptdl ls --all")
        draft = replace(draft, job=f"{stem}-{number}")
        number += 1


def _tell(
    drafts: Sequence[Submission],
    packed: Bundle,
    found: Submitted,
    told: Sequence[str],
    as_json: bool,
    dry_run: bool,
) -> None:
    mine = {draft.job for draft in drafts}
    requests = [one for one in found.requests if one.submission.job not in mine]
    last = max((one.revision for one in requests), default=0) + 1
    requests += [Request(draft, None, JobState(), revision=last) for draft in drafts]
    verdicts = replace(found, requests=tuple(requests)).verdicts()
    if as_json:
        answers: list[dict[str, Any]] = [
            {
                "job": draft.job,
                "command": list(draft.command),
                "starts": verdicts[draft.job].admitted,
                "reason": verdicts[draft.job].reason,
                "replicas": [draft.min_replicas, draft.max_replicas],
                "files": packed.files,
                "bytes": packed.size,
                "submitted": not dry_run,
                "warnings": list(told),
            }
            for draft in drafts
        ]
        click.echo(json.dumps(answers[0] if len(answers) == 1 else answers, indent=2))
        return
    size = f"{pluralize(packed.files, 'file')}, {max(1, packed.size >> 10)} KiB"
    for draft in drafts:
        verdict = verdicts[draft.job]
        if dry_run:
            when = "would begin now" if verdict.admitted else f"would wait: {verdict.reason}"
            most = min(draft.max_replicas, found.slots // draft.gpus_per_replica)
            echo(f"{draft.job} {when}; at most {pluralize(most, 'replica')} of {draft.max_replicas}; {size}")
        else:
            waits = "" if verdict.admitted else f"; it waits: {verdict.reason}"
            echo(f"submitted {draft.job} ({size}){waits}")
        for text in told:
            echo(f"{draft.job}: {text}")
    if not dry_run:
        echo(f"adaptdl logs -f {drafts[0].job}" if len(drafts) == 1 else "adaptdl ls", err=True)


@click.command()
@click.argument("job", shell_complete=complete_job)
@cluster_option
def cancel(name: str | None, job: str) -> None:
    """End a submitted JOB, or remove it from the queue. Its checkpoints are kept."""
    _ask(name, job, job_requests.cancel)


@click.command()
@click.argument("job", shell_complete=complete_job)
@store_options
@told
def resume(where: Where, job: str) -> None:
    """Continue a JOB that was stopped or has failed, from its checkpoint."""
    place = where.locate(job)
    if place.context is not None:
        _ask(place.cluster, job, job_requests.resume)
    else:
        with where.open(place) as store:
            echo(job_requests.resume_started(store, Keys(place.cluster), job))


def _ask(name: str | None, job: str, request: Callable[..., str]) -> None:
    """Make a request about a job of a cluster, and print the answer."""
    context = contexts.choose(name)
    _, store, keys = open_cluster(context)
    with store:
        echo(request(store, keys, context, client_of(context), job))
