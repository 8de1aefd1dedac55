"""Report a job's scheduling hints, by which the coordinator decides its number of replicas.

`JobHints` is the versioned schema that the coordinator reads. `SCHED_HINTS` and `PERF_PARAMS` list AdaptDL's
names for parts of it, for scripts that call `post_sched_hints`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from adaptdl_elastic import _session
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


def _number(value: Any) -> Any:
    """Convert a NumPy number to a Python number."""
    if not hasattr(value, "item"):
        raise TypeError(f"hints are numbers, lists of numbers and names, got {value!r}")
    return value.item()


def post_sched_hints(sched_hints: Mapping[str, Any], job_key: str | None = None) -> bool:
    """Report hints of the script in place of those that the library has measured. Rank 0's are taken.

    Args:
        sched_hints: Hints by AdaptDL's names. Hints that are not given keep the library's values.
        job_key: Ignored; AdaptDL's function has this argument. A job can report only for itself.

    Returns:
        Whether the hints were sent to an agent.

    Raises:
        ValueError: a name is unknown.
        MalformedHintsError: a value is not valid.
        TypeError: a value has the wrong type.
    """
    session = _session.current()
    hints = asdict(session.metrics.hints()) | from_adaptdl(sched_hints)
    if session.rank != 0:
        return False
    text = encode(decode(json.dumps(hints, default=_number)))
    return session.send(Hints(json.loads(text)))
