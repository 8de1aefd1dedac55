"""Parse settings of the autoscaler as a person writes them: options, and tags of groups. Pure."""

from __future__ import annotations

import re
from datetime import datetime

from adaptdl_elastic.rendezvous.schema.keys import check_name

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PART = r"(\d+\.?\d*|\.\d+)([smhd])"
_SETTABLE = {
    "hour-value": "hour_value",
    "max-hourly-cost": "max_hourly_cost",
    "max-job-cost": "max_job_costs",
    "deadline": "deadlines",
    "min-nodes": "min_nodes",
    "max-nodes": "max_nodes",
    "utilisation": "low",
    "shrink-after": "shrink_after",
    "idle-minutes": "idle_after",
    "boot-timeout": "boot_timeout",
}


def parse_deadline(text: str, now: float) -> tuple[str, float]:
    """Parse `JOB=2h30m`, `2h` (every job) or an ISO time; return (job, seconds since the epoch)."""
    bad = ValueError(f"--deadline {text!r}: give [JOB=]2h30m, or [JOB=]2026-11-22T06:00:00+00:00")
    job, equals, when = text.rpartition("=")
    if equals and not job:
        raise bad
    job = job if equals else "*"
    if re.fullmatch(f"({_PART})+", when):
        return job, now + sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, when))
    try:
        return job, datetime.fromisoformat(when.replace("Z", "+00:00")).timestamp()
    except ValueError:
        raise bad from None


def parse_job_cost(text: str) -> tuple[str, float]:
    """Parse `JOB=50`, or `50` for every job; return (job or "*", amount)."""
    job, equals, amount = text.rpartition("=")
    try:
        if equals and not job:
            raise ValueError
        return job if equals else "*", float(amount)
    except ValueError:
        raise ValueError(f"--max-job-cost {text!r}: give [JOB=]AMOUNT, e.g. 50 or train=50") from None


def parse_band(text: str) -> tuple[float, float]:
    """Parse `0.85:1`."""
    low, _, high = text.partition(":")
    try:
        return float(low), float(high)
    except ValueError:
        raise ValueError(f"--utilisation {text!r}: give LOW:HIGH, e.g. 0.85:1") from None


def parse_change(text: str, now: float) -> dict[str, float | None]:
    """Parse `KEY=VALUE` of a tag; return names of settings with their values.

    Args:
        text: the text.
        now: seconds since the epoch, from which durations count.

    Raises:
        ValueError: there is no such key, or the value cannot be read.
    """
    option, equals, value = text.partition("=")
    if not equals or option not in _SETTABLE:
        raise ValueError(f"{text!r}: give KEY=VALUE, where KEY is {', '.join(_SETTABLE)}")
    name = _SETTABLE[option]
    if option in ("deadline", "max-job-cost"):
        job, _, amount = value.rpartition("=")
        try:
            check_name("job", job or "all")
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None
        if not amount:
            return {f"{name}/{job or '*'}": None}
        job, number = parse_deadline(value, now) if option == "deadline" else parse_job_cost(value)
        return {f"{name}/{job}": number}
    if option == "utilisation":
        return dict(zip(("low", "high"), parse_band(value) if value else (None, None), strict=True))
    try:
        return {name: float(value) * (60 if option == "idle-minutes" else 1) if value else None}
    except ValueError:
        raise ValueError(f"{text!r}: {value!r} is no number") from None
