"""The command `adaptdl`: its subcommands, how it finds a store, and how it prints errors.

The module of a subcommand is imported only when the command is used, so that `adaptdl --help` and `adaptdl
ls` do not wait for numpy or boto3.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
from click.core import ParameterSource

from adaptdl_elastic import __version__
from adaptdl_elastic._explained import see
from adaptdl_elastic.extensions import ExtensionError, ExtensionPoint
from adaptdl_elastic.protocol.environment import CLUSTER, ETCD, STORE_OPTIONS, option_of
from adaptdl_elastic.rendezvous.text import printable

if TYPE_CHECKING:
    from adaptdl_elastic.rendezvous.services.context import ClusterContext
    from adaptdl_elastic.rendezvous.store.base import Store
    from adaptdl_elastic.rendezvous.store.store_options import StoreOptions

_HERE = "adaptdl_elastic.autoscaler"
_OWN: dict[str, tuple[str, str]] = {
    "submit": (f"{_HERE}.commands.submit:submit", "Run a job on the cluster, from this directory."),
    "ls": (f"{_HERE}.commands.job_lists:ls", "List the jobs that run, with size and progress."),
    "queue": (f"{_HERE}.commands.job_lists:queue", "List the jobs that wait, and why."),
    "history": (f"{_HERE}.commands.job_lists:history", "List the jobs that have ended, and how."),
    "status": (f"{_HERE}.commands.jobs:status", "Show one job in detail."),
    "logs": (f"{_HERE}.commands.logs:logs", "Show the output of a submitted job."),
    "wait": (f"{_HERE}.commands.logs:wait", "Wait until a submitted job has ended, and exit as it did."),
    "cp": (f"{_HERE}.commands.copy:cp", "Copy files of a submitted job to this machine."),
    "tensorboard": (f"{_HERE}.commands.copy:tensorboard", "Show the curves of submitted jobs as they grow."),
    "explain": (f"{_HERE}.commands.explain:explain", "Explain why a job has its number of replicas."),
    "scale": (f"{_HERE}.commands.jobs:scale", "Set a job's number of replicas, or make it automatic."),
    "checkpoint": (f"{_HERE}.commands.jobs:checkpoint", "Save a job's state now."),
    "stop": (f"{_HERE}.commands.jobs:stop", "Save a job's state and stop it; it can be resumed."),
    "resume": (f"{_HERE}.commands.submit:resume", "Continue a submitted job that was stopped or has failed."),
    "cancel": (f"{_HERE}.commands.submit:cancel", "End a submitted job, or remove it from the queue."),
    "cluster": (f"{_HERE}.commands.cluster_setup:cluster", "Run jobs on machines of your own, over ssh."),
    "coordinator": (f"{_HERE}.commands.cluster:coordinator", "Decide which job gets how many replicas."),
    "events": (f"{_HERE}.commands.cluster:events", "List the coordinator's latest decisions."),
    "web": (f"{_HERE}.web.command:web", "Show the cluster on a live web page."),
    "doctor": (f"{_HERE}.commands.doctor:doctor", "Check this machine and etcd, and suggest remedies."),
    "nodes": (f"{_HERE}.commands.cluster:nodes", "List the nodes, and the jobs that use them."),
    "drain": (f"{_HERE}.commands.cluster:drain", "Move all replicas off a node."),
    "cloud": (f"{_HERE}.commands.cloud:cloud", "Prepare and delete machines on EC2."),
    "autoscale": (f"{_HERE}.commands.autoscale:autoscale", "Add and remove machines on EC2 as jobs need."),
    "report": (f"{_HERE}.commands.report:report", "Analyse a run, and suggest settings for the next."),
    "replay": (f"{_HERE}.commands.replay:replay", "Decide again what was recorded of a job's decisions."),
}
HEADINGS = {
    "Jobs": "submit ls queue history status logs wait cp tensorboard explain scale checkpoint stop resume "
    "cancel",
    "Cluster": "cluster coordinator events web doctor",
    "Nodes": "nodes drain",
    "Cloud": "cloud autoscale",
    "Reports": "report replay",
}
"""The headings of `adaptdl --help`, and the subcommands below each."""

COMMANDS = ExtensionPoint(
    "command", "adaptdl_elastic.commands", {name: target for name, (target, _) in _OWN.items()}
)
"""The subcommands of `adaptdl`. Another package adds one by an entry point to a `click.Command`."""

F = TypeVar("F", bound=Callable[..., Any])


def echo(line: str, err: bool = False) -> None:
    """Print a line, parts of which may come from other people, without newlines and control characters."""
    click.echo(printable(line.replace("\n", " ")), err=err)


class CommandError(click.ClickException):
    """An error with one line that says what is wrong and what to do; exit code 1."""

    def format_message(self) -> str:
        """Return the message, with the place where it is explained."""
        return self.message + see(self.message)

    def show(self, file: Any = None) -> None:
        """Print the line."""
        click.echo(printable(f"adaptdl: {self.format_message()}"), file=file, err=file is None)


class NothingRunsError(CommandError):
    """No store was given, and no job runs on this machine."""


class OptionError(click.UsageError):
    """An error in the given options, as one line; exit code 2, as for errors that click finds."""

    def __init__(self, message: str) -> None:
        super().__init__(message, click.get_current_context(silent=True))

    def show(self, file: Any = None) -> None:
        """Print the line."""
        click.echo(printable(_usage(self)), file=file, err=file is None)


def _usage(error: click.UsageError) -> str:
    path = error.ctx.command_path if error.ctx else "adaptdl"
    text = error.format_message().rstrip(".")
    return f"{path}: {text}" + (" See" if text.endswith("?") else "; see") + f" {path} --help"


def refuse(names: Collection[str], why: str) -> None:
    """Raise OptionError if one of these parameters was given, since it would have no effect."""
    context = click.get_current_context(silent=True)
    if context is None:
        return
    for parameter in context.command.params:
        typed = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if typed and parameter.name in names:
            raise OptionError(f"{parameter.opts[0]} {why}")


class Finite(click.FloatRange):
    """A number within bounds that is neither infinite nor NaN (click's bounds accept NaN)."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; raise a usage error if the value is no finite number."""
        number = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return super().convert(value, param, ctx)


def _short_help(name: str) -> str:
    """Return one line for the list of commands, without importing the command."""
    return _OWN[name][1] if name in _OWN else f"From the package {COMMANDS.origin(name)}."


class _LazyGroup(click.Group):
    """A group that loads each subcommand when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return COMMANDS.names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        try:
            command = COMMANDS.load(cmd_name)
        except ModuleNotFoundError as error:
            raise CommandError(
                f"{cmd_name} needs the module {error.name!r}, which is not installed"
            ) from error
        except ExtensionError as error:
            raise CommandError(str(error)) from error
        if not isinstance(command, click.Command):
            raise CommandError(f"the command {cmd_name!r} of {COMMANDS.origin(cmd_name)} is no click.Command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in COMMANDS or name.startswith("-") or ctx.resilient_parsing:
            found, command, rest = super().resolve_command(ctx, args)
            # `adaptdl --etcd HOST ls` is `adaptdl ls --etcd HOST`
            for option, value in ctx.params.items():
                # `adaptdl --cluster NAME cluster status`: the subcommands of `cluster` take no etcd
                at = int(option == "cluster" and isinstance(command, click.Group))
                rest[at:at] = [] if value is None else [f"--{option}={value}"]
            return found, command, rest
        close = difflib.get_close_matches(name, COMMANDS.names(), 1)
        raise OptionError(f"there is no command {name!r}" + (f" (did you mean {close[0]}?)" if close else ""))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        others = [name for name in COMMANDS.names() if name not in _OWN]
        for heading, names in {**HEADINGS, "From other packages": " ".join(others)}.items():
            if names:
                with formatter.section(heading):
                    formatter.write_dl([(f"{name:<11}", _short_help(name)) for name in names.split()])


@click.group(
    cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.option("--etcd", metavar="HOST:PORT", help="The cluster's etcd; may also follow the command.")
@click.option("--cluster", metavar="NAME", help="The cluster's name; may also follow the command.")
@click.version_option(__version__, message="adaptdl-elastic %(version)s")
def adaptdl(**moved: str | None) -> None:
    """See and control elastic PyTorch jobs. `adaptdl-run SCRIPT` starts one.

    --etcd HOST:PORT or ADAPTDL_ETCD selects the cluster. Without either, commands are about the
    cluster that `adaptdl cluster up` made, and the jobs that you started on this machine.
    """


@dataclass(frozen=True)
class Place:
    """A store and a cluster in it.

    Attributes:
        endpoint: of the store.
        cluster: name of the cluster.
        job: name of the standalone job whose store it is; "": it is an etcd.
        context: what this machine knows of the cluster, if `adaptdl cluster up` made it.
    """

    endpoint: str
    cluster: str
    job: str = ""
    context: ClusterContext | None = None


@dataclass(frozen=True)
class Where:
    """The store and the cluster that the command line and the environment select."""

    etcd: str | None = None
    api: Literal["auto", "v2", "v3"] = "auto"
    cluster: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None

    def places(self, job: str | None = None) -> list[Place]:
        """Return every store that a command is about: the given etcd, or those of standalone jobs.

        Args:
            job: only the store of the standalone job of this name.

        Raises:
            CommandError: there is none.
        """
        endpoint = self.etcd or os.environ.get(ETCD)
        cluster = self.cluster or os.environ.get(CLUSTER)
        if endpoint:
            refuse(("standalone_job",), "is for standalone jobs: leave it away where an etcd is given")
            return [Place(endpoint, cluster or "default")]
        from adaptdl_elastic.rendezvous.local import runtime_file
        from adaptdl_elastic.rendezvous.services import context as contexts

        try:
            known = [contexts.choose(name) for name in contexts.names() if cluster in (None, name)]
            notes = sorted(runtime_file.read_all(), key=lambda note: note.job)
        except (runtime_file.RuntimeFileError, contexts.ContextError) as error:
            raise CommandError(str(error)) from error
        of_clusters = [Place(one.endpoint, one.name, context=one) for one in known if one.endpoint]
        if cluster is not None and of_clusters:
            refuse(("standalone_job",), f"is for standalone jobs: leave it away for the cluster {cluster}")
            return of_clusters
        first = {
            n.endpoint: n for n in reversed(notes) if job in (None, n.job)
        }  # a search's trials share a store
        found = [Place(n.endpoint, cluster or n.cluster, n.job) for n in notes if first.get(n.endpoint) is n]
        if found or of_clusters:
            return of_clusters + found
        if notes:
            names = ", ".join(note.job for note in notes)
            raise CommandError(f"no job {job!r} runs standalone on this machine; those that do: {names}")
        raise NothingRunsError(
            "no standalone job runs on this machine, and no etcd was given: start a job with adaptdl-run "
            "SCRIPT, or to see a cluster give --etcd HOST:PORT or set ADAPTDL_ETCD"
        )

    def locate(self, job: str | None = None) -> Place:
        """Return the one store that a command is about; CommandError if there is none, or more than one."""
        found = self.places(job)
        standalone = [place for place in found if place.job]
        clusters = [place for place in found if not place.job]
        if len(standalone) > 1 or (standalone and clusters and job is None):
            names = ", ".join(place.job for place in standalone)
            count = (
                "a standalone job runs" if len(standalone) == 1 else f"{len(standalone)} standalone jobs run"
            )
            raise CommandError(f"{count} on this machine: {names}; {_which_job(clusters)}")
        if not standalone and len(clusters) > 1:
            names = ", ".join(place.cluster for place in clusters)
            raise CommandError(f"this machine knows the clusters {names}: say which with --cluster NAME")
        return (standalone or clusters)[0]

    def options(self, place: Place) -> StoreOptions:
        """Return time-out and credentials for a store; a standalone job's store takes no credentials."""
        from adaptdl_elastic.rendezvous.store.local_socket import is_local
        from adaptdl_elastic.rendezvous.store.store_options import StoreOptions, variable

        if place.context is not None:
            return place.context.store_options()
        if is_local(place.endpoint):
            return StoreOptions.from_environment({}, timeout=os.environ.get(variable("timeout")) or None)
        return StoreOptions.from_environment(ca=self.ca, cert=self.cert, key=self.key, user=self.user)

    def open(self, place: Place) -> Store:
        """Connect to one of `places`; CommandError if that fails."""
        from adaptdl_elastic.rendezvous.store.base import StoreAuthError, StoreError
        from adaptdl_elastic.rendezvous.store.connect import connect
        from adaptdl_elastic.rendezvous.store.local_socket import is_local

        try:
            return connect(place.endpoint, api=self.api, options=self.options(place))
        except StoreAuthError as error:
            if is_local(place.endpoint):
                raise CommandError(str(error)) from error
            raise CommandError(f"the store refuses us: {error}") from error
        except StoreError as error:
            raise CommandError(str(error)) from error


def _which_job(clusters: Collection[Place] = ()) -> str:
    """Return the end of an error message: the option that selects the store."""
    if clusters:
        return f"say --cluster {next(iter(clusters)).cluster} if the cluster is meant"
    context = click.get_current_context(silent=True)
    chooses = context is not None and any(one.name == "standalone_job" for one in context.command.params)
    return "say which with --job NAME" if chooses else "give --etcd HOST:PORT of an etcd"


def standalone_job_option(command: F) -> F:
    """Add `--job`, as the parameter `standalone_job`: which of several standalone jobs is meant."""
    text = "Name of the standalone job, if several run on this machine."
    return click.option("--job", "standalone_job", metavar="NAME", default=None, help=text)(command)


_STORE_OPTIONS: dict[str, Callable[[Any], Any]] = {}
for _variable, (_kind, _text) in STORE_OPTIONS.items():
    _name = _variable.removeprefix("ADAPTDL_").removeprefix("ETCD_").lower()
    _STORE_OPTIONS[_name] = click.option(
        *(option_of(_variable), f"store_{_name}"),
        *(("--rdzv-endpoint",) if _name == "etcd" else ()),
        metavar=_kind,
        envvar=_variable,
        show_envvar=True,
        help=f"The {_text}.",
    )
_STORE_OPTIONS["api"] = click.option(
    *("--etcd-api", "store_api"),
    type=click.Choice(["auto", "v2", "v3"]),
    default="auto",
    show_default=True,
    help="The API of etcd to use.",
)


def store_options(command: F) -> F:
    """Add the options that select the store; the command gets them as the parameter `where`."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        where = Where(**{name: kwargs.pop(f"store_{name}") for name in _STORE_OPTIONS})
        return command(*args, where=where, **kwargs)

    wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
    wrapped.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    for option in reversed(_STORE_OPTIONS.values()):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


def json_option(command: F) -> F:
    """Add `--json`, as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")(command)


def main() -> None:
    """Run the command line; print errors as one line, without a traceback."""
    try:
        code = adaptdl.main(prog_name="adaptdl", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.UsageError as error:
        # this is no mistake, but a question
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            error.show()
            sys.exit(error.exit_code)
        echo(_usage(error), err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `adaptdl ls | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        from adaptdl_elastic.rendezvous.store.base import StoreAuthError, StoreError

        if not isinstance(error, StoreError):
            raise
        refused = "the store refuses us: " if isinstance(error, StoreAuthError) else ""
        echo(f"adaptdl: {refused}{error}", err=True)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)
