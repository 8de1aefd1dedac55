"""Define the versioned report of a job about itself, by which its number of replicas is decided.

`JobHints` is what the coordinator reads. `SCHED_HINTS` and `PERF_PARAMS` are AdaptDL's names for the parts
that AdaptDL had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
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
"""AdaptDL's names of the parts of a report."""


# Larger numbers in a report are errors, and computing with them could overflow.
MANY = 10**9
"""Largest count that can be reported."""

_Count = Annotated[int, Field(ge=0, le=MANY)]
_Positive = Annotated[int, Field(ge=1, le=MANY)]
_Seconds = Annotated[float, Field(ge=0, le=1e9)]
MOST = 1e30
"""Largest squared norm that can be reported."""

_Amount = Annotated[float, Field(ge=0, le=MOST)]  # samples, squared norms
_Rate = Annotated[float, Field(ge=0, le=1e12)]  # samples per second
_Gamma = Annotated[float, Field(ge=1, le=1e3)]
_Theta = tuple[_Seconds, _Seconds, _Seconds, _Seconds, _Seconds, _Seconds, _Gamma]
_Measured = tuple[_Positive, _Seconds, Annotated[float, Field(ge=0, le=1e12)]]
_ReportedName = Annotated[str, Field(max_length=100)]
MOST_CONFIGURATIONS = 10_000
"""Largest number of configurations whose step times are in one report."""

MOST_NAMED = 32
"""Most nodes of a placement whose step times are told from those of other nodes."""

_NodeName = Annotated[str, Field(max_length=128)]

TIMES_KEPT = 4 * 3600.0
"""Seconds after which a node's time is forgotten: what slowed the node may be over, so jobs try it again."""

_SHORTEST = 1e-12  # shortest possible time of a forward and backward pass, in seconds


@dataclass(frozen=True, config=_CONFIG)
class ProfileEntry:
    """Hold the mean step times at one configuration, in seconds."""

    nodes: _Positive
    replicas: _Positive
    atomic_bsz: _Positive
    accum_step_time: _Seconds  # a forward and backward pass without synchronisation; 0: not measured
    optim_step_time: _Seconds  # a forward and backward pass with gradient synchronisation and step
    accum_count: _Count = 0  # number of measurements behind each of the two times
    optim_count: _Count = 0
    # names of the nodes, and the generation of the last measurement; (): one node, or too many to name
    on: Annotated[tuple[_NodeName, ...], Field(max_length=MOST_NAMED)] = ()
    generation: int = -1


@dataclass(frozen=True, config=_CONFIG)
class Straggler:
    """Describe a replica that the others wait for in every step."""

    rank: _Count
    host: str
    part: str  # slow part of its steps: data, compute or communication
    ratio: _Amount  # its busy time per step over that of the others


@dataclass(frozen=True, config=_CONFIG)
class TypeProfile:
    """Hold a job's measurements on nodes of a type that it does not run on now."""

    node_type: str
    profile: Annotated[tuple[ProfileEntry, ...], Field(max_length=MOST_CONFIGURATIONS)] = ()
    perf_params: _Theta | None = None
    max_profiled_replicas: _Count = 1
    local_bsz_bounds: tuple[_Positive, _Positive] | None = None  # None: as on the present type
    memory_limit: _Positive | None = None

    def __post_init__(self) -> None:
        _check_type(self.local_bsz_bounds, self.perf_params)


@dataclass(frozen=True, config=_CONFIG)
class JobHints:
    """Hold a job's report. Sizes are in samples, times in seconds, rates in samples per second.

    Raises:
        pydantic.ValidationError: a value is impossible. (`decode` reports it as one line.)
    """

    job: str
    generation: int
    nodes: _Positive
    replicas: _Positive
    init_batch_size: _Count
    batch_size: _Count  # global batch size in use
    atomic_bsz: _Count
    accumulation_steps: _Count = 0
    max_batch_size: _Positive | None = None  # None: autoscale_batch_size was never called
    local_bsz_bounds: tuple[_Positive, _Positive] | None = None
    gradient_accumulation: bool = False
    memory_limit: _Positive | None = None  # largest batch of one replica that fits into memory, once known
    max_profiled_replicas: _Count = 1
    gradient_bytes: _Amount | None = None  # that a step averages over all replicas; None: not known
    state_bytes: _Amount | None = None  # that a replica gets when it joins: parameters, optimizer's state
    grad_params: tuple[_Amount, _Amount] | None = None  # (|G|², tr Σ) at init_batch_size
    grad_error: _Amount | None = None  # standard error of |G|², in its unit; None: not known
    estimator: str = ""  # how the gradient statistics are measured
    perf_params: _Theta | None = None  # in the order of PERF_PARAMS
    profile: Annotated[tuple[ProfileEntry, ...], Field(max_length=MOST_CONFIGURATIONS)] = ()
    node_type: str = ""  # of the nodes that the job runs on; step times, θ and memory limit are of this type
    elsewhere: Annotated[tuple[TypeProfile, ...], Field(max_length=100)] = ()  # measurements on other types
    # by node: samples of a pass, the seconds that a replica computes for it there without waiting for others,
    # and when that was measured
    node_times: Annotated[dict[str, _Measured], Field(max_length=10_000)] = field(default_factory=dict)
    gain: _Amount = 1.0
    lr_factor: _Amount = 1.0
    throughput: _Rate | None = None  # measured
    goodput: _Rate | None = None  # measured: throughput × efficiency
    predicted_goodput: _Rate | None = None  # by the goodput model, for this configuration
    efficiency: _Amount | None = None
    epoch: _Count = 0
    epochs: _Count | None = None  # argument of remaining_epochs_until
    progress: _Amount | None = None  # fraction of the whole job that is done, if epochs are declared
    samples_done: _Amount | None = None  # since the job's start, in samples at init_batch_size
    remaining_samples: _Amount | None = None  # to the declared end, in the same unit
    step: _Count = 0
    outside_epochs: bool = False  # models are trained outside of remaining_epochs_until
    inplace: bool = False  # whether this script and backend could rescale in place
    inplace_reason: str = ""  # why not, if inplace is False
    # current problems, each with what the user can do about it
    warnings: Annotated[tuple[str, ...], Field(max_length=100)] = ()
    stragglers: Annotated[tuple[Straggler, ...], Field(max_length=10_000)] = ()
    # numbers that the script last reported (loss, accuracy, …), added by the agent of rank 0
    reported: Annotated[dict[_ReportedName, float], Field(max_length=100)] = field(default_factory=dict)
    time: float = 0.0

    def __post_init__(self) -> None:
        _check_type(self.local_bsz_bounds, self.perf_params)
        if self.max_batch_size is not None and self.max_batch_size < self.init_batch_size:
            raise ValueError(
                f"max_batch_size: {self.max_batch_size} is less than init_batch_size {self.init_batch_size}"
            )


def _check_type(bounds: tuple[int, int] | None, perf_params: tuple[float, ...] | None) -> None:
    """Raise ValueError if batch-size bounds or throughput parameters of a type of node are impossible."""
    low, high = bounds or (1, 1)
    if low > high:
        raise ValueError(f"local_bsz_bounds: {low} is more than {high}")
    if perf_params is not None and sum(perf_params[:2]) < _SHORTEST:
        raise ValueError("perf_params: steps that take no time at all (alpha_c, beta_c)")


_ADAPTER: TypeAdapter[JobHints] = TypeAdapter(JobHints)


class MalformedHintsError(ValueError):
    """Raised if a report does not fit the schema."""


def encode(hints: JobHints) -> str:
    """Return a report as versioned JSON."""
    return f'{{"v":{VERSION},{_ADAPTER.dump_json(hints).decode()[1:]}'


def decode(text: str | bytes) -> JobHints:
    """Return the report that `text` holds; MalformedHintsError says what is wrong with it."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":
            raise MalformedHintsError(first["msg"].removeprefix("Value error, ")) from None
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
    """Return AdaptDL's hints under the names of `JobHints`' fields, without None values.

    Raises:
        ValueError: a name is not one of SCHED_HINTS (or, in perfParams, PERF_PARAMS).
        TypeError: the hints are no dictionary.
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


def _numbers(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name}={value!r}: give a list of numbers")
    return tuple(value)


def _perf_params(value: Any) -> tuple[float, ...]:
    if not isinstance(value, Mapping):
        return _numbers("perfParams", value)
    if set(value) != set(PERF_PARAMS):
        raise ValueError(
            f"perfParams needs exactly {', '.join(PERF_PARAMS)}, got {', '.join(map(str, value))}"
        )
    return tuple(value[name] for name in PERF_PARAMS)


def _grad_params(value: Any) -> tuple[float, ...]:
    if not isinstance(value, Mapping):
        return _numbers("gradParams", value)
    if not {"var"} < set(value) <= {"norm", "sqr", "var"} or len(value) != 2:
        raise ValueError(f"gradParams needs norm and var, got {', '.join(map(str, value))}")
    return (value["norm"] if "norm" in value else value["sqr"], value["var"])


_PARTS: dict[str, Callable[[Any], Any]] = {
    "perfParams": _perf_params,
    "gradParams": _grad_params,
    "localBszBounds": partial(_numbers, "localBszBounds"),
}
