"""Wording that agents and the autoscaler share."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence

_CONTROL = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


_STAMPED = re.compile(r"(?:(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)|\$\{time\}) ")


def stamp(seconds: float) -> str:
    """Return a time, in seconds since 1970, as `2026-11-30T09:15:00Z`: such texts sort by time."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def split_stamp(line: str) -> tuple[str, str]:
    """Return the time at the beginning of a line, "" if there is none, and the rest of the line.

    Agents of an older version write `${time}` instead.
    """
    found = _STAMPED.match(line)
    return (found[1] or "", line[found.end() :]) if found else ("", line)


def weight_problem(given: float, most: float) -> list[str]:
    """Return a line for the owner of a job whose weight does not count in full; no line if it does."""
    if given <= most:
        return []
    remedy = "an administrator grants more: adaptdl cluster grant PERSON KEY.pub --most-weight"
    return [f"its weight {given:g} counts as {most:g}, the most that its owner may give; {remedy} {given:g}"]


def pluralize(number: int, what: str) -> str:
    """Return a number with its noun: `1 slot`, `2 slots`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def duration(seconds: float) -> str:
    """Format seconds for users: `0.31 s`, `42 s`, `3 min 05 s`, `2 h 04 min`."""
    if seconds < 10:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def clock(seconds: object) -> str:
    """Return local time; with its date if that is not today."""
    try:
        then = time.localtime(seconds)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, OSError):  # written by another program
        return "--:--:--"
    today = time.localtime()[:3]
    return time.strftime("%H:%M:%S" if then[:3] == today else "%Y-%m-%d %H:%M:%S", then)


def in_url(host: str) -> str:
    """Return a host name or address as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def printable(text: str) -> str:
    r"""Return a text for a terminal, with its control characters escaped as in `\x1b`; newlines stay.

    A text from another person may hold sequences that change the terminal's state, and characters that
    reverse the direction of writing.
    """
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _PrintableFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr(level: int | str, form: str) -> None:
    """Write log messages to standard error, with their control characters escaped."""
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter(form))
    logging.basicConfig(level=level, handlers=[handler])


def record_lines(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return rows as lines of at most `width` columns, for a terminal that is too narrow for a table.

    A row is shown as fields `HEAD: value`, as many on a line as fit. Its lines after the first are indented.
    Empty fields are left out. A field that is longer than a line is wrapped.
    """
    from rich.console import Console
    from rich.text import Text

    lines = []
    for row in rows:
        own: list[str] = []
        for head, cell in zip(heads, row, strict=True):
            field = Text(f"{head}: {cell}")
            if cell in ("", "-"):
                continue
            if own and Text(own[-1]).cell_len + 2 + field.cell_len <= width:
                own[-1] += f"  {field}"
            else:
                wrapped = field.wrap(Console(), max(width - 2, 2), overflow="fold")
                own += [f"{'  ' if own or i else ''}{line}".rstrip() for i, line in enumerate(wrapped)]
        lines += own
    return lines
