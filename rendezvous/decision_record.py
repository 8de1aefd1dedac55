"""Keep the last decisions of a pure core in memory, and write them to a file that can be decided again.

The file is JSON, line by line: a header, and for each of up to two segments the state at its beginning and
its calls, each with what was decided. Fields that no decision reads are left out (`_LEFT_OUT`), and secrets
in texts are replaced by `HIDDEN`. Reading makes only values of classes in `_MODULES`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from adaptdl_elastic import _program
from adaptdl_elastic._whole_file import open_regular, write_whole

logger = logging.getLogger(__name__)

HIDDEN = "***"
"""Text in the place of a secret."""

FILE = "decisions-{}.jsonl"
"""Name of the file beside the logs, by the core: agent or coordinator."""

_PATIENCE = 5.0  # seconds that a process that ends waits for a file that is being written
_PACKAGE = "adaptdl_elastic."
_MODULES = frozenset(
    {"agent.core.states", "goodput", "protocol.hints", "protocol.messages", "autoscaler.cluster_view"}
    | {"autoscaler.held_facts", "rendezvous.schema.held"}
    | {f"autoscaler.coordinator.{name}" for name in ("decision_types", "job_health", "job_models")}
    | {"autoscaler.coordinator.job_phase", "autoscaler.coordinator.survivors"}
    | {"autoscaler.policy.learning", "autoscaler.policy.policy_types"}
    | {"rendezvous.schema.autoscaler_status", "rendezvous.schema.records"}
)
_LEFT_OUT = frozenset(
    {"JobSpec.command", "JobSpec.code", "JobSpec.secret_mark", "JobSpec.checkpoint_path", "MasterRecord.code"}
    | {"CheckpointRecord.path", "LeaderRecord.settings", "LeaderRecord.metrics", "LeaderRecord.decisions"}
    | {"NodeRecord.decisions"}
)
_NAME = r"[\w-]*(?:token|secret|passw|credential|signature|api[_-]?key|access[_-]?key)[\w-]*['\"]?"
_NAMED_SECRET = re.compile(rf"(?i)({_NAME}\s*[=:]\s*['\"]?|--{_NAME}\s+)[^\s'\"]+")
_LOGIN = re.compile(r"://[^\s@]+@")
_BEARER = re.compile(r"(?i)(bearer\s+)\S+")
_SHORTEST_SECRET = 6  # characters of a variable's value that is looked for
_WORD = re.compile(r"[^\s'\"=,;()\[\]{}<>]{8,}")
_NUMBER = re.compile(r"\d+")


class RecordError(ValueError):
    """Raised if a file is no whole record of decisions."""


class Recorder:
    """Keeps the last calls of a core, as references to frozen values: to keep one costs next to nothing.

    A segment ends after `most_calls` calls, or when those after the first hold `most_parts` records of the
    store. `write` writes to `path`; None: it writes nothing.
    """

    most_calls, most_parts, segments = 1000, 2000, 2

    def __init__(self, core: str, path: Path | None) -> None:
        self._core, self.path = core, path
        self._kept: deque[tuple[Any, list[list[Any]]]] = deque(maxlen=self.segments)
        self._parts = 0
        self._writing: threading.Thread | None = None

    @property
    def place(self) -> str:
        """Where the file is written, for a person in another directory."""
        return str(self.path and self.path.absolute())

    @property
    def begins(self) -> bool:
        """Whether the next call begins a segment."""
        full = not self._kept or len(self._kept[-1][1]) >= self.most_calls
        return full or self._parts >= self.most_parts

    def add(self, state: Mapping[str, Any], inputs: tuple[Any, ...], parts: int = 1) -> list[Any]:
        """Keep a call; return [inputs, None], where the caller puts what was decided in the place of None."""
        if self.begins:
            self._kept.append((state, []))
            self._parts = -parts
        self._parts += parts
        self._kept[-1][1].append(call := [inputs, None])
        return call

    def lines(self) -> Iterator[str]:
        """Return the lines of the file, for what is kept now."""
        kept = [(state, list(calls)) for state, calls in self._kept]
        now = {"wall": time.time(), "now": time.monotonic()}
        number = {"lines": sum(1 + len(calls) for _, calls in kept)}
        return _lines({"decisions": self._core, "version": _program.version(), **now, **number}, kept)

    def write(self) -> None:
        """Write the file in a thread; an error is one line in the log."""
        path, lines, before = self.path, self.lines(), self._writing
        if path is None:
            return

        def work() -> None:
            try:
                if before is not None:
                    before.join()
                write_whole(path, "\n".join([*lines, ""]))
            except Exception as error:  # whatever it is, the work goes on
                logger.warning("the last decisions cannot be written to %s: %s", path, error)

        thread = threading.Thread(target=work, name="decisions", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # a process may have so many threads and no more
            logger.warning("the last decisions cannot be written to %s: %s", path, error)
        else:
            self._writing = thread

    def close(self, write: bool = False) -> None:
        """Write the file if `write`, and wait a little for a file that is being written."""
        if write:
            self.write()
        if self._writing is not None:
            self._writing.join(_PATIENCE)


def _lines(header: Mapping[str, Any], kept: list[tuple[Any, list[list[Any]]]]) -> Iterator[str]:
    names: set[str] = set()  # words that are whole values, as names of nodes and jobs are
    named = (value for name, value in os.environ.items() if re.fullmatch(_NAME, name, re.IGNORECASE))
    words = {value for value in named if len(value) >= _SHORTEST_SECRET}
    found = []
    for state, calls in kept:
        found.append(["begin", encode(state, names, words)])
        found += [["call", *(encode(part, names, words) for part in call)] for call in calls]
    secrets = {form for word in words - names for form in (word, _NUMBER.sub("#", word))}
    yield json.dumps(header)
    yield from (json.dumps(hide(line, secrets), separators=(",", ":")) for line in found)


def hide(plain: Any, secrets: Collection[str] = ()) -> Any:
    """Return what `encode` made without logins in URLs, values named as secrets, and words in `secrets`."""
    if isinstance(plain, str):
        text = _NAMED_SECRET.sub(rf"\1{HIDDEN}", _LOGIN.sub(f"://{HIDDEN}@", plain))
        text = _BEARER.sub(rf"\1{HIDDEN}", text)
        for secret in (one for one in secrets if not _WORD.fullmatch(one)):
            text = text.replace(secret, HIDDEN)
        return _WORD.sub(lambda word: HIDDEN if word[0] in secrets else word[0], text)
    if isinstance(plain, list):
        return [hide(item, secrets) for item in plain]
    if isinstance(plain, dict):
        return {name: item if name == "~" else hide(item, secrets) for name, item in plain.items()}
    return plain


def encode(value: Any, names: set[str] | None = None, words: set[str] | None = None) -> Any:
    """Return a frozen value as what JSON can express.

    Args:
        value: The value.
        names: Is given the texts in it that are one word.
        words: Is given the words of commands, which may be secrets.

    Raises:
        TypeError: a class is not one that decisions have.
    """
    if isinstance(value, Enum):
        return {"~": _name_of(type(value)), "value": value.value}
    if value is None or isinstance(value, str | int | float):
        if names is not None and isinstance(value, str):
            names.add(value)
        return value
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [encode(item, names, words) for item in value]
    if isinstance(value, frozenset):
        return {"~": "set", "value": sorted((encode(item, names, words) for item in value), key=json.dumps)}
    if isinstance(value, Mapping):
        if all(type(name) is str and name != "~" for name in value):
            return {name: encode(item, names, words) for name, item in value.items()}
        return {"~": "map", "value": [encode(pair, names, words) for pair in value.items()]}
    kind, found = type(value), {"~": _name_of(type(value))}
    for name in kind._fields if hasattr(value, "_fields") else kind.__dataclass_fields__:
        part = getattr(value, name)
        if f"{kind.__name__}.{name}" not in _LEFT_OUT:
            found[name] = encode(part, names, words)
            continue
        found[name] = encode(type(part)())
        if name == "command" and words is not None:
            words.update(word for text in part for word in _WORD.findall(text) if _NUMBER.search(word))
    return found


def _name_of(kind: type) -> str:
    module = kind.__module__.removeprefix(_PACKAGE)
    if module not in _MODULES:
        raise TypeError(f"{kind.__module__}.{kind.__name__} has no place in a record of decisions")
    return f"{module}:{kind.__name__}"


def decode(plain: Any) -> Any:
    """Return the value that was encoded as `plain`.

    Raises:
        RecordError: `plain` names a class that no decision has, or its fields are not those of the class.
    """
    if isinstance(plain, list):
        return tuple(map(decode, plain))
    if not isinstance(plain, dict):
        return plain
    fields = {name: decode(part) for name, part in plain.items() if name != "~"}
    name = plain.get("~")
    try:
        match name:
            case None:
                return fields
            case "set":
                return frozenset(fields["value"])
            case "map":
                return dict(fields["value"])
        kind = _kind(name)
        return kind(fields["value"]) if issubclass(kind, Enum) else kind(**fields)
    except (TypeError, ValueError, KeyError) as error:
        raise RecordError(f"{name}: {error}") from None


def _kind(name: Any) -> Any:
    module, _, what = str(name).partition(":")
    kind = getattr(importlib.import_module(_PACKAGE + module), what, None) if module in _MODULES else None
    own = isinstance(kind, type) and kind.__module__ == _PACKAGE + module
    if not own or not (dataclasses.is_dataclass(kind) or issubclass(kind, Enum | tuple)):  # type: ignore
        raise RecordError("no decision has this class")
    return kind


def read(path: Path) -> Iterator[Any]:
    """Yield the header of a file, then ("begin", state) or ("call", inputs, what was decided, as encoded).

    Raises:
        RecordError: it is no whole record of decisions.
        OSError: it cannot be read.
    """
    with open_regular(path) as file:
        try:
            header = json.loads(file.readline())
            if not {"decisions", "version"} <= header.keys() or header["wall"] + header["now"] < 0:
                raise ValueError
            yield header
            number = 0
            for line in file:
                what, value, *done = json.loads(line)
                call = what == "call" and isinstance(value[0], float) and len(done) == 1
                if not call and not (what == "begin" and isinstance(value, dict)):
                    raise ValueError
                yield what, decode(value), *done
                number += 1
            if number != header["lines"]:
                raise ValueError
        except RecordError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise RecordError("is no record of decisions, or not the whole of one") from None
