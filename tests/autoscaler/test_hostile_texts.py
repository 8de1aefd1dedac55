"""Texts of other people do not reach a terminal as control sequences, nor as lines of ours."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
import os
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import click
import pytest
from click.testing import CliRunner
from import_graph import ROOT

from adaptdl_elastic import sched_hints
from adaptdl_elastic.autoscaler.cli import COMMANDS, CommandError, adaptdl
from adaptdl_elastic.protocol.hints import JobHints
from adaptdl_elastic.rendezvous.local import runtime_file
from adaptdl_elastic.rendezvous.local.runtime_file import RuntimeFile
from adaptdl_elastic.rendezvous.local.store_server import LocalServer
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus, JobCost
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    CheckpointRecord,
    DrainRequest,
    Failure,
    JobSpec,
    JobState,
    JobStatus,
    LeaderRecord,
    NodeRecord,
    Placement,
    Plan,
    Transition,
    encode,
)
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.rendezvous.text import log_to_stderr, printable

KEYS = Keys()
HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b2J\x7f\r\b\t\u202egnp\u2066\nforged line"
NAME = HOSTILE.replace("/", "")
JOBS = {"runs": JobState.RUNNING, "waits": JobState.PENDING, "over": JobState.FAILED}
R = TypeVar("R")


def poisoned(record: R) -> R:
    """The record with the hostile text in every field that takes a text and is not part of its key."""
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        for value in (HOSTILE, (HOSTILE,), {HOSTILE: HOSTILE}, {HOSTILE: 1.5}):
            if field.name in ("node", "job") or isinstance(getattr(record, field.name), (int, float)):
                continue
            try:
                changed = dataclasses.replace(record, **{field.name: value})  # type: ignore[type-var]
                encode(changed)
            except (ValueError, TypeError):
                continue
            record = changed
            break
    return record


def fill(store: Store, job: str, state: JobState) -> None:
    """Write every record that commands show of a job, as an attacker would."""
    prefix = f"{KEYS.jobs}{job}/"
    status = poisoned(JobStatus(job, "r", state, exit_code=3, started=1.0, ended=2.0, last_pause=1.0))
    status = dataclasses.replace(status, failures=(poisoned(Failure(0, 1)),))
    store.put(f"{prefix}spec", encode(poisoned(JobSpec(job, "r", created=1000.0))))
    store.put(f"{prefix}status", encode(status))
    store.put(f"{prefix}checkpoint", encode(poisoned(CheckpointRecord("c", "p"))))
    store.put(f"{prefix}hints", sched_hints.encode(poisoned(JobHints(job, 1, 1, 1, 8, 8, 8))))
    placement = poisoned(Placement(NAME, 1))
    plan = Plan(job, "r", 1, (placement,), Cause.POLICY, Transition.RESTART, "")
    store.put(f"{prefix}plan", encode(poisoned(plan)))
    store.put(f"{KEYS.nodes}host/{job}", encode(poisoned(NodeRecord("host", job, "r", "a", "h", 2))))
    store.put(f"{KEYS.nodes}{NAME}/{job}", encode(poisoned(NodeRecord(NAME, job, "r", "a", "h", 2))))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("ADAPTDL_ETCD", raising=False)
    with LocalServer() as server:
        store = server.store
        for job, state in JOBS.items():
            fill(store, job, state)
            fill(store, f"{job}{NAME}", state)
            runtime_file.write(RuntimeFile(server.endpoint, KEYS.cluster, job, os.getpid()))
        store.put(KEYS.coordinator_leader, encode(poisoned(LeaderRecord("c"))))
        store.put(KEYS.drain("host"), encode(poisoned(DrainRequest("host", "r"))))
        said = poisoned(AutoscalerStatus("ec2", 2, 2, 6.0, 1.5, jobs=(JobCost("runs", 1.5, 6.0),)))
        store.put(KEYS.autoscaler_status, encode(said))
        event = {"time": HOSTILE, "event": HOSTILE, "reason": HOSTILE, HOSTILE: [HOSTILE]}
        store.put(f"{KEYS.events}{1:013d}-abc", json.dumps(event))
        yield server


def shows_the_store(name: str) -> bool:
    """Whether a command shows what is in a store and then ends."""
    command = COMMANDS.load(name)
    assert isinstance(command, click.Command)
    options = {parameter.name for parameter in command.params}
    return {"as_json", "store_etcd"} <= options and name != "autoscale"


VIEWS = [name for name in COMMANDS.names() if shows_the_store(name)]


def assert_harmless(text: str) -> None:
    """No character of a text can change a terminal, and no line of it is a stranger's."""
    bad = {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")}
    assert bad | (set("\u202e\u2066") & set(text)) == set()
    assert not any(line.startswith("forged") for line in text.splitlines())


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("job", JOBS)
def test_a_command_escapes_every_text_of_the_store(server: LocalServer, name: str, job: str) -> None:
    command = COMMANDS.load(name)
    assert isinstance(command, click.Command)
    asked = [job] if any(one.name == "job" for one in command.params) else []
    flags = [o for one in command.params for o in one.opts if o == "--all"]
    # a terminal: click would strip some sequences for a file
    result = CliRunner().invoke(adaptdl, [name, *asked, *flags], color=True)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    text = re.sub(r"\x1b\[\d*m", "", result.output)  # colours of ours
    assert_harmless(text)
    assert r"\x1b[2J" in text, "the hostile text is shown, or this test shows nothing"


def test_the_views_are_those_that_we_know() -> None:
    assert {"ls", "queue", "history", "status", "explain", "nodes", "events"} <= set(VIEWS)


def test_an_error_that_quotes_the_store_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    CommandError(f"{NAME} belongs to another").show()
    said = capsys.readouterr().err.replace("\nforged", " forged")
    assert said.startswith("adaptdl: \\x1b[2J")
    assert_harmless(said)


def test_log_messages_are_harmless(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.root.level)
    log_to_stderr("WARNING", "ours: %(message)s")
    logging.getLogger("hostile").warning("ignored %s", HOSTILE)
    said = capsys.readouterr().err
    assert said.startswith("ours: ignored \\x1b[2J")
    assert_harmless(said.replace("\nforged", ""))


def test_letters_of_all_languages_stay() -> None:
    text = "naïve 作业 עברית \u200d 🚂 → …\nnext"
    assert printable(text) == text
    assert printable("\ud800\x00\x85\u2028") == r"\ud800\x00\x85\u2028"
    assert printable(printable(HOSTILE)) == printable(HOSTILE)


ALLOWED = {
    # the function that escapes
    ("autoscaler/cli.py", "click.echo(printable(line.replace('\\n', ' ')), err=err)"),
    # errors, some of which have a line for each of several nodes
    (
        "autoscaler/cli.py",
        "click.echo(printable(f'adaptdl: {self.format_message()}'), file=file, err=file is None)",
    ),
    ("autoscaler/cli.py", "click.echo(printable(_usage(self)), file=file, err=file is None)"),
    # the program's own output
    ("autoscaler/commands/logs.py", "click.echo(line)"),
    # a sign of ours, with a colour
    ("autoscaler/commands/doctor.py", "click.secho(f'{text:<5} ', fg=colour, nl=False)"),
}


def prints(tree: ast.AST) -> Iterator[str]:
    """Every use of a function that prints without escaping, but for JSON, which is escaped."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and ast.unparse(node) in (
            *("print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"),
            "logging.basicConfig",
        ):
            call: Any = calls.get(id(node), node)
            argument = call.args[0] if isinstance(call, ast.Call) and call.args else None
            if not (isinstance(argument, ast.Call) and ast.unparse(argument.func) == "json.dumps"):
                yield ast.unparse(call)


def test_commands_print_by_the_function_that_escapes() -> None:
    found = {
        (str(path.relative_to(ROOT)), use)
        for path in sorted((ROOT / "autoscaler").rglob("*.py"))
        for use in prints(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == ALLOWED, "print with `echo` of autoscaler/cli.py, log with `log_to_stderr`"
