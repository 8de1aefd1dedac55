"""Expand `adaptdl submit --array NAME=VALUE,...` into the jobs of the array. Pure.

Each combination of values is one job. A value replaces `{NAME}` in the command. If the command has no
`{NAME}`, the option `--NAME=VALUE` is appended to it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOST_JOBS = 256
"""Largest number of jobs of one array."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_LONGEST_NAME = 120  # characters of a job's name that is made of values; a number may be appended


class ArrayError(ValueError):
    """An array cannot be expanded; the message says why."""


@dataclass(frozen=True)
class Member:
    """One job of an array: its name, and the words of its command."""

    name: str
    command: tuple[str, ...]


def expand(stem: str, command: Sequence[str], given: Sequence[str]) -> list[Member]:
    """Return the jobs of an array; without `--array` the only job.

    Args:
        stem: Beginning of the names of the jobs.
        command: The words of the command.
        given: The texts `NAME=VALUE,VALUE...`, one for each `--array`.

    Raises:
        ArrayError: a text is no list of values, or there are too many jobs.
    """
    axes = [_axis(text) for text in given]
    names = [name for name, _ in axes]
    for name in names:
        if names.count(name) > 1:
            raise ArrayError(f"--array {name}=…: is given twice; give all its values in one, separated by ,")
    number = 1
    for _, values in axes:
        number *= len(values)
    if number > MOST_JOBS:
        raise ArrayError(f"--array: these are {number} jobs, and {MOST_JOBS} may be submitted at once")
    every = [
        list(zip(names, chosen, strict=True)) for chosen in itertools.product(*(values for _, values in axes))
    ]
    return [
        Member(name, _filled(command, pairs))
        for name, pairs in zip(_distinct(stem, every), every, strict=True)
    ]


def _axis(text: str) -> tuple[str, list[str]]:
    name, sign, listed = text.partition("=")
    values = listed.split(",")
    if not sign or not _NAME.fullmatch(name) or not all(values):
        raise ArrayError(f"--array {text}: give NAME=VALUE,VALUE,... as in lr=1e-3,1e-2")
    if len(set(values)) < len(values):
        raise ArrayError(f"--array {text}: a value stands there twice")
    return name, values


def _filled(command: Sequence[str], pairs: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    places = {f"{{{name}}}": value for name, value in pairs}
    known = re.compile("|".join(map(re.escape, places))) if places else None
    used: set[str] = set()

    def put(match: re.Match[str]) -> str:
        used.add(match[0])
        return places[match[0]]

    # one pass: a value that holds {NAME} itself is left as it is
    words = [known.sub(put, word) if known else word for word in command]
    return (*words, *(f"--{name}={value}" for name, value in pairs if f"{{{name}}}" not in used))


def _distinct(stem: str, every: Sequence[Sequence[tuple[str, str]]]) -> Iterator[str]:
    """Yield a name for each combination: the stem and the values, with a number where two are the same."""
    taken: set[str] = set()
    for pairs in every:
        parts = [stem, *(f"{name}-{_name_part(value)}" for name, value in pairs)]
        wanted = name = "-".join(parts)[:_LONGEST_NAME].rstrip("-._")
        number = 2
        while name in taken:
            name, number = f"{wanted}-{number}", number + 1
        taken.add(name)
        yield name


def _name_part(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("-._") or "x"
