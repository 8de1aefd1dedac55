"""Options that pages and docstrings name, against the parsers of `adaptdl-run` and `adaptdl`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
from import_graph import ROOT, product

from adaptdl_elastic.agent.terminal.run_parser import parser
from adaptdl_elastic.autoscaler.cli import adaptdl

# of etcd; Slurm; useradd, pip, aws, mypy, systemctl and build; examples, benchmarks and the self-test;
# providers of `adaptdl autoscale`; every program; node services; gone, as decisions.md says
OTHERS = """advertise-client-urls auto-compaction-mode auto-compaction-retention cert-file client-cert-auth
data-dir enable-v2 initial-advertise-peer-urls initial-cluster interactive key-file listen-client-urls
listen-peer-urls peer-cert-file prefix trusted-ca-file account comment cpus-per-task gpus-per-node gres
job-name kill-on-bad-exit no-kill no-requeue nodes ntasks ntasks-per-node open-mode output overlap requeue
signal time export create-home home-dir index-url no-create-home recursive require-hashes shell strict system
target user wheel epochs keep limit lr parallel policy runs seed storage trace traces trials batch-file
partition queue-url sbatch-option help spec local notify"""
COMMAND = re.compile(r"(?<![\w./-])adaptdl(?:-run)?(?: +[^\s`\"'();|&]+)+")


def commands(command: click.Command, path: str = "adaptdl") -> Iterator[tuple[str, set[str]]]:
    """Yield the options of a command and of its subcommands, by the words that select it."""
    yield path, {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    context = click.Context(command)
    for name in command.list_commands(context) if isinstance(command, click.Group) else ():
        yield from commands(command.get_command(context, name), f"{path} {name}")


def named(text: str) -> set[str]:
    found = {word.rstrip("-") for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
    return found - {f"--{word}" for word in OTHERS.split()}


def test_every_option_that_a_page_or_a_docstring_names_exists() -> None:
    table = {**dict(commands(adaptdl)), "adaptdl-run": set(parser().options)}
    known, shown, missing = set[str]().union(*table.values()), 0, list[tuple[Path, str]]()
    files = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *(module.path for module in product().values())]
    for page in set(files) - {ROOT / "CHANGELOG.md"}:
        whole = page.read_text()
        text = whole if page.suffix == ".md" else "\n".join(re.findall('"""(.*?)"""', whole, re.S))
        missing += [(page, option) for option in named(text) - known]
        for line in COMMAND.findall(text.replace("\\\n", " ")):
            path = max((path for path in table if f"{line} ".startswith(f"{path} ")), key=len)
            options = named(re.split(r" -- |\.py\b", line)[0]) - {"--etcd", "--cluster"}
            shown += len(options)
            missing += [(page, f"{line}: {option}") for option in options - table[path]]
    assert missing == []
    assert shown > 60
