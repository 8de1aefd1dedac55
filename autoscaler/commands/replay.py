"""The command `adaptdl replay FILE`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import click

from adaptdl_elastic import _program
from adaptdl_elastic.autoscaler.cli import CommandError, echo
from adaptdl_elastic.rendezvous import decision_record
from adaptdl_elastic.rendezvous.text import clock

_CORES = {
    "agent": "adaptdl_elastic.agent.runtime.decision_recorder",
    "coordinator": "adaptdl_elastic.autoscaler.coordinator.decision_recorder",
}
_MOST_CHANGES, _MOST_TEXT = 20, 160  # lines of one event, characters of one value


class DifferenceError(Exception):
    """Raised if something else is decided now than was decided then; each argument is a line."""


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def replay(file: Path) -> None:
    """Decide again what is recorded in FILE, and stop where something else is decided now.

    An agent and a coordinator write FILE beside their logs when a job fails, or `adaptdl doctor JOB` asks.
    """
    try:
        for line in replayed(file):
            echo(line)
    except DifferenceError as different:
        for line in different.args:
            echo(line)
        raise CommandError(f"{file}: this is decided differently now") from None
    except decision_record.RecordError as error:
        raise CommandError(f"{file}: {error}") from None
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}") from None


def replayed(file: Path) -> Iterator[str]:
    """Yield lines about each event of a record: its time, the event, what changes, and what is decided.

    Raises:
        DifferenceError: something else is decided now, or the state differs.
        RecordError: the file is no whole record of decisions.
        OSError: it cannot be read.
    """
    lines = decision_record.read(file)
    header = next(lines)
    if header["decisions"] not in _CORES:
        raise decision_record.RecordError(f"is a record of an unknown part, {header['decisions']!r}")
    again = importlib.import_module(_CORES[header["decisions"]]).again
    if header["version"] != (mine := _program.version()):
        yield f"version {header['version']} wrote this, and this is {mine}: decisions may differ"
    state: Mapping[str, Any] | None = None
    number = 0
    for what, value, *then in lines:
        if what == "begin":
            if state is not None:
                _compare({name: state[name] for name in value}, decision_record.encode(value), "state")
            state = value
            continue
        number += 1
        when, *event = value
        yield f"{clock(header['wall'] + when - header['now'])} {number}: {', '.join(map(_brief, event))}"
        try:
            after, decided = again(state, *value)
        except Exception as error:
            if then == [None]:
                yield f"  raises {error!r}, as then"
                return
            raise DifferenceError(f"  now:  raises {error!r}", f"  then: {_brief(then[0])}") from None
        yield from [f"  {line}" for line in differences(state, after)][:_MOST_CHANGES]
        yield from (f"  -> {_brief(action)}" for action in decided["actions"])
        _compare(decided, then[0], "decided")
        state = after
    yield f"{number} decisions, the same as then"


def _compare(now: Any, then: Any, what: str) -> None:
    plain = decision_record.hide(decision_record.encode(now))
    if plain != then:
        told = [f"  {line}" for line in differences(then, plain, what)][:_MOST_CHANGES]
        raise DifferenceError("then → now:", *told)


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each part of a value that differs from that of another value."""
    if type(before) is type(after):
        parts: Mapping[Any, Any] | None = None
        if is_dataclass(after):
            parts = {
                f".{one.name}": (getattr(before, one.name), getattr(after, one.name)) for one in fields(after)
            }
        elif isinstance(after, list | tuple) and len(before) == len(after):
            parts = {f"[{at}]": pair for at, pair in enumerate(zip(before, after, strict=True))}
        elif isinstance(after, Mapping):
            parts = {f".{at}": (before.get(at), after.get(at)) for at in {**before, **after}}
        if parts is not None:
            for at, pair in parts.items():
                if pair[0] is not pair[1] and pair[0] != pair[1]:
                    yield from differences(pair[0], pair[1], f"{path}{at}")
            return
    if before != after:
        yield f"{path.lstrip('.')}: {_brief(before)} → {_brief(after)}"


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]}…"
