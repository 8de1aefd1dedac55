"""What a job reports about itself, so that others can decide its size.

`JobHints` is the versioned schema that the coordinator reads; `SCHED_HINTS` and `PERF_PARAMS` are
AdaptDL's names for the parts of it that AdaptDL had, kept for scripts that call `post_sched_hints`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from adaptdl_elastic import _session
from adaptdl_elastic._checks import integer
from adaptdl_elastic.protocol.hints import (
    MOST,
    PERF_PARAMS,
    SCHED_HINTS,
    VERSION,
    JobHints,
    MalformedHintsError,
    ProfileEntry,
    decode,
    encode,
    from_adaptdl,
)
from adaptdl_elastic.protocol.messages import Hints

__all__ = [
    "MOST",
    "PERF_PARAMS",
    "SCHED_HINTS",
    "VERSION",
    "JobHints",
    "MalformedHintsError",
    "ProfileEntry",
    "decode",
    "encode",
    "from_adaptdl",
    "post_sched_hints",
]


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    number = integer(value)
    if number is None and hasattr(value, "item"):
        return value.item()
    if number is None:
        raise TypeError(f"hints are numbers, lists of numbers and names, got {value!r}")
    return number


def post_sched_hints(sched_hints: Mapping[str, Any], job_key: str | None = None) -> bool:
    """Report hints of one's own, with AdaptDL's names, in place of the library's; whether an agent listens.

    What is not given stays what the library has measured. `job_key` is accepted for AdaptDL's sake: a
    job can report for itself only.

    Raises:
        ValueError: for an unknown name.
        MalformedHintsError, TypeError: for a value that does not fit.
    """
    session = _session.current()
    hints = asdict(session.metrics.hints()) | from_adaptdl(sched_hints)
    if session.rank != 0:
        return False
    text = encode(decode(json.dumps(hints, default=_plain)))
    return session.send(Hints(json.loads(text)))
