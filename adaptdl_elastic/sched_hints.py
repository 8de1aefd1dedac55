"""What a job reports about itself, so that others can decide its size.

`JobHints` is the versioned schema that the coordinator reads; `SCHED_HINTS` and `PERF_PARAMS` are
AdaptDL's names for the parts of it that AdaptDL had, kept for scripts that call `post_sched_hints`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

VERSION = 1
_CONFIG = ConfigDict(extra="ignore", allow_inf_nan=False)

PERF_PARAMS = MappingProxyType(
    dict.fromkeys(("alpha_c", "beta_c", "alpha_n", "beta_n", "alpha_r", "beta_r", "gamma"))
)
"""Names of the parameters θ of the throughput model (Pollux, OSDI'21, section 3.2)."""

SCHED_HINTS = MappingProxyType(
    dict.fromkeys(
        (
            "initBatchSize",
            "localBszBounds",
            "maxBatchSize",
            "maxProfiledReplicas",
            "gradientAccumulation",
            "gradParams",
            "perfParams",
        )
    )
)
"""AdaptDL's names of what a job reports."""


@dataclass(frozen=True, config=_CONFIG)
class ProfileEntry:
    """Mean step times at one configuration, in seconds."""

    nodes: int
    replicas: int
    atomic_bsz: int
    accum_step_time: float  # a forward and backward pass without synchronisation; 0: not measured
    optim_step_time: float  # a forward and backward pass with gradient synchronisation and step
    accum_count: int = 0  # how many of each were measured
    optim_count: int = 0


@dataclass(frozen=True, config=_CONFIG)
class JobHints:
    """A job's report. Sizes are in samples, times in seconds, rates in samples per second."""

    job: str
    generation: int
    nodes: int
    replicas: int
    init_batch_size: int
    batch_size: int  # in use now, global
    atomic_bsz: int
    accumulation_steps: int = 0
    max_batch_size: int | None = None  # None: autoscale_batch_size was never called
    local_bsz_bounds: tuple[int, int] | None = None
    gradient_accumulation: bool = False
    max_profiled_replicas: int = 1
    grad_params: tuple[float, float] | None = None  # |G|² and tr Σ at init_batch_size
    perf_params: tuple[float, float, float, float, float, float, float] | None = None  # PERF_PARAMS' order
    profile: tuple[ProfileEntry, ...] = ()
    gain: float = 1.0
    lr_factor: float = 1.0
    throughput: float | None = None  # measured
    goodput: float | None = None  # measured: throughput × efficiency
    predicted_goodput: float | None = None  # by the model, for this configuration
    efficiency: float | None = None
    epoch: int = 0
    epochs: int | None = None  # remaining_epochs_until's argument
    progress: float | None = None  # fraction of the whole job that is done, where epochs are declared
    samples_done: float | None = None  # in samples at init_batch_size, since the job's start
    remaining_samples: float | None = None  # the same, to the declared end
    step: int = 0
    inplace: bool = False  # whether this script and backend could rescale in place
    inplace_reason: str = ""  # why not
    time: float = 0.0


_ADAPTER: TypeAdapter[JobHints] = TypeAdapter(JobHints)


class MalformedHintsError(ValueError):
    """A report that does not fit the schema."""


def encode(hints: JobHints) -> str:
    """Hints as versioned JSON."""
    return f'{{"v":{VERSION},{_ADAPTER.dump_json(hints).decode()[1:]}'


def decode(text: str | bytes) -> JobHints:
    """The hints that `text` holds; MalformedHintsError says what is wrong with it."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "hints"
        raise MalformedHintsError(f"{where}: {first['msg']}") from None


_FIELDS = {
    "initBatchSize": "init_batch_size",
    "localBszBounds": "local_bsz_bounds",
    "maxBatchSize": "max_batch_size",
    "maxProfiledReplicas": "max_profiled_replicas",
    "gradientAccumulation": "gradient_accumulation",
    "gradParams": "grad_params",
    "perfParams": "perf_params",
}


def from_adaptdl(sched_hints: Mapping[str, Any]) -> dict[str, Any]:
    """AdaptDL's hints by the names of `JobHints`' fields; None values are left out.

    Raises ValueError for a name that is not one of SCHED_HINTS (or, in perfParams, PERF_PARAMS), TypeError
    for what is no dictionary.
    """
    if not isinstance(sched_hints, Mapping):
        raise TypeError(f"hints are a dictionary of {', '.join(SCHED_HINTS)}; got {sched_hints!r}")
    fields: dict[str, Any] = {}
    for name, value in sched_hints.items():
        if name not in _FIELDS:
            raise ValueError(f"no such hint: {name!r}; there are {', '.join(SCHED_HINTS)}")
        if value is not None:
            fields[_FIELDS[name]] = _PARTS[name](value) if name in _PARTS else value
    return fields


def _perf_params(value: Any) -> tuple[float, ...]:
    if not isinstance(value, Mapping):
        return tuple(value)
    if set(value) != set(PERF_PARAMS):
        raise ValueError(
            f"perfParams needs exactly {', '.join(PERF_PARAMS)}, got {', '.join(map(str, value))}"
        )
    return tuple(value[name] for name in PERF_PARAMS)


def _grad_params(value: Any) -> tuple[float, ...]:
    if not isinstance(value, Mapping):
        return tuple(value)
    if not {"var"} < set(value) <= {"norm", "sqr", "var"} or len(value) != 2:
        raise ValueError(f"gradParams needs norm and var, got {', '.join(map(str, value))}")
    return (value["norm"] if "norm" in value else value["sqr"], value["var"])


_PARTS: dict[str, Callable[[Any], Any]] = {
    "perfParams": _perf_params,
    "gradParams": _grad_params,
    "localBszBounds": tuple,
}


def post_sched_hints(sched_hints: Mapping[str, Any], job_key: str | None = None) -> bool:
    """Report hints of one's own, with AdaptDL's names, in place of the library's; whether an agent listens.

    What is not given stays what the library has measured. `job_key` is accepted for AdaptDL's sake: a
    job can report for itself only. Raises ValueError for an unknown name, MalformedHintsError for a
    value that does not fit.
    """
    from dataclasses import asdict

    from adaptdl_elastic import _session

    session = _session.current()
    hints = asdict(session.metrics.hints()) | from_adaptdl(sched_hints)
    if session.rank != 0:
        return False
    text = encode(decode(json.dumps(hints)))
    return session.send({"type": "hints", "hints": json.loads(text)})
