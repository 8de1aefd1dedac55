"""`adaptdl cloud`: what a user's machine prepares for machines of a cloud, and how it takes them down."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from adaptdl_elastic.autoscaler.cli import CommandError, OptionError, echo
from adaptdl_elastic.autoscaler.commands.tables import show_table
from adaptdl_elastic.autoscaler.provisioning import bundle, lock
from adaptdl_elastic.autoscaler.provisioning.ssh import ProvisionError
from adaptdl_elastic.rendezvous.schema.submissions import STACK_OWNER

if TYPE_CHECKING:
    from adaptdl_elastic.autoscaler.providers.ec2.stacks import Stack, Stacks

_NODES_SECONDS = 300.0  # that nodes have to save and leave: the template's hook waits 120 s
_DELETE_SECONDS = 1800.0  # that CloudFormation has to delete a stack


@click.group()
def cloud() -> None:
    """Prepare machines on EC2, and delete them (docs/howto/ec2.md)."""


@cloud.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--python", default="3.12", show_default=True, help="Version of Python on the machines.")
def pack(file: Path, python: str) -> None:
    """Write this program, and lock files of its dependencies, to FILE (.tar.gz).

    Machines install exactly these files: versions and hashes are fixed here. Versions are those of this
    environment.
    """
    if not file.absolute().parent.is_dir():
        raise CommandError(f"there is no directory {file.absolute().parent}")
    try:
        lock.pack(file, python)
    except ProvisionError as error:
        raise CommandError(str(error)) from error


_region = click.option("--region", help="AWS region. [default: as boto3 finds it]")
_profile = click.option("--profile", help="AWS profile. [default: as boto3 finds it]")


@cloud.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("name", metavar="STACK")
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARG]...]")
@click.option(
    "--set", "values", multiple=True, metavar="KEY=VALUE", help="A parameter of the template; repeatable."
)
@click.option(
    "--bucket",
    metavar="NAME",
    help="For code and checkpoints. [default: the account's own, made if absent]",
)
@_region
@_profile
def up(
    name: str,
    directory: Path | None,
    command: tuple[str, ...],
    values: tuple[str, ...],
    bucket: str | None,
    region: str | None,
    profile: str | None,
) -> None:
    """Create a stack on EC2 that trains with SCRIPT of DIRECTORY, or change it.

    Without DIRECTORY only parameters change. A run that is under way keeps its code.
    """
    from adaptdl_elastic.autoscaler.providers.base import ProviderError
    from adaptdl_elastic.autoscaler.providers.ec2.stack_up import StackUp

    if directory is not None and not (command and (directory / command[0]).is_file()):
        raise OptionError(f"give a script of {directory} and its arguments, for example train.py --epochs 90")
    given = dict(text.partition("=")[::2] for text in values)
    if {"", "Bucket", "Code", "Package"} & given.keys() or not all("=" in text for text in values):
        raise OptionError("--set: give KEY=VALUE, for example MaxNodes=8 (Bucket, Code and Package are set)")
    try:
        stack = StackUp(region, profile, echo)
        code = None if not directory else partial(bundle.pack, directory, owner=STACK_OWNER, command=command)
        outputs = stack.up(name, given, bucket, code, lock.pack)
    except (ProviderError, ProvisionError) as error:
        raise CommandError(str(error)) from error
    echo(f"{name} is up; its checkpoints: {outputs['Checkpoints']}")
    echo(f"on its head: aws ssm start-session --target {outputs['HeadInstance']}")
    echo(f"to end it: adaptdl cloud down {name}")


@cloud.command()
@click.argument("names", nargs=-1, metavar="[STACK]...")
@click.option("--all", "every", is_flag=True, help="All stacks of this program in the account.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_region
@_profile
def down(
    names: tuple[str, ...],
    every: bool,
    yes: bool,
    region: str | None,
    profile: str | None,
) -> None:
    """Delete stacks on EC2 with their machines, after a list of what they cost. Checkpoints stay.

    Jobs that run are saved first, within the two minutes of their nodes' hooks.
    """
    from adaptdl_elastic.autoscaler.providers.base import ProviderError
    from adaptdl_elastic.autoscaler.providers.ec2.stacks import Stacks

    if bool(names) == every:
        raise OptionError("give names of stacks, or --all")
    try:
        stacks = Stacks(region, profile)
        chosen = _choose(stacks.find(), names, stacks.region)
    except ProviderError as error:
        raise CommandError(str(error)) from error
    if not chosen:
        echo(f"no stack of ours in {stacks.region}: nothing to take down there (--region looks elsewhere)")
        return
    _show(chosen, stacks.region)
    if not yes:
        click.confirm("Delete these, and end what runs on them? Checkpoints stay.", abort=True)
    failed = [trouble for stack in chosen if (trouble := _take_down(stacks, stack))]
    for trouble in failed:
        echo(f"adaptdl: {trouble}", err=True)
    sys.exit(1 if failed else 0)


def _choose(found: Sequence[Stack], names: Sequence[str], region: str) -> list[Stack]:
    """Return the named stacks, or all; CommandError if a name is none of ours."""
    unknown = sorted(set(names) - {stack.name for stack in found})
    if unknown:
        ours = ", ".join(stack.name for stack in found) or "none"
        raise CommandError(f"no stack {unknown[0]!r} of ours in {region}; ours there: {ours}")
    return [stack for stack in found if not names or stack.name in names]


def _show(stacks: Sequence[Stack], region: str) -> None:
    """Print the stacks with their machines and what an hour of them costs."""
    rows = []
    for stack in stacks:
        kinds = Counter(f"{one.type}{' spot' if one.spot else ''}" for one in stack.machines)
        machines = ", ".join(f"{count} × {kind}" for kind, count in sorted(kinds.items())) or "none"
        rows.append((stack.name, stack.status, f"{stack.hourly_cost:.2f}", machines))
    show_table(("STACK", "STATUS", "PER HOUR", "MACHINES"), rows)
    total = sum(stack.hourly_cost for stack in stacks)
    unknown = ", ".join(sorted({one.type for stack in stacks for one in stack.machines if one.price is None}))
    more = f"; {unknown} come to that: AWS's price list cannot be read" if unknown else ""
    echo(f"in {region}, together {total:.2f} per hour{more}")


def _take_down(stacks: Stacks, stack: Stack) -> str:
    """Take one stack down; return what went wrong, or ""."""
    from adaptdl_elastic.autoscaler.providers.base import ProviderError

    if stack.protected:
        return f"stack {stack.name} has termination protection, and is left as it is: switch that off first"
    try:
        echo(f"{stack.name}: its nodes save and leave")
        if not stacks.empty(stack, _NODES_SECONDS):
            echo(f"{stack.name}: nodes are still leaving after {_NODES_SECONDS:.0f} s; going on")
        echo(f"{stack.name}: CloudFormation deletes it")
        stacks.delete(stack, _DELETE_SECONDS)
    except ProviderError as error:
        return str(error)
    kept = f"; checkpoints are in {stack.checkpoints}" if stack.checkpoints else ""
    echo(f"{stack.name}: deleted{kept}")
    return ""
