"""Settings that tags of a group say, which hold instead of the autoscaler's command line. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from adaptdl_elastic.autoscaler.scaling.economics import ScalingSettings

NUMBERS = (
    *(
        "hour_value",
        "low",
        "high",
        "shrink_after",
        "idle_after",
        "max_hourly_cost",
        "boot_timeout",
    ),
    *("min_nodes", "max_nodes"),
)
"""Settings that are one number."""

WHOLE = ("min_nodes", "max_nodes")
"""Those of them that are whole."""

_MONEY = ("max_hourly_cost", "max_job_costs")

BY_JOB = ("max_job_costs", "deadlines")
"""Settings that have a number for each job, as `NAME/JOB` or `NAME/*`."""


def changed(base: ScalingSettings, values: Mapping[str, float]) -> ScalingSettings:
    """Return the settings with other values.

    Args:
        base: the settings of the command line.
        values: name of the setting, for settings by job with `/JOB` or `/*`, and its value.

    Raises:
        ValueError: a name is unknown, a value is out of its range, or two do not fit together.
    """
    fields: dict[str, object] = {}
    by_job = {name: dict(getattr(base, name)) for name in BY_JOB}
    for key, value in values.items():
        name, slash, job = key.partition("/")
        if not math.isfinite(value):
            raise ValueError(f"{key} {value:g}: needs a finite number")
        if name in by_job and job:
            by_job[name][job] = value
        elif name in NUMBERS and not slash:
            if name in WHOLE and value != int(value):
                raise ValueError(f"--{name.replace('_', '-')} {value:g}: needs a whole number")
            fields[name] = int(value) if name in WHOLE else value
        else:
            raise ValueError(f"there is no setting {key!r}")
    return replace(base, **fields, **by_job)  # type: ignore[arg-type]


def usable(
    base: ScalingSettings, values: Mapping[str, float]
) -> tuple[ScalingSettings, dict[str, float], list[str]]:
    """Return the settings with those of the other values that fit, these values, and why others do not.

    One value that does not fit the command line must not cancel the limits of what may be spent.

    Args:
        base: the settings of the command line.
        values: as for `changed`.
    """
    taken: dict[str, float] = {}
    left, errors = dict(values), dict[str, str]()
    try:
        return changed(base, values), left, []
    except ValueError:
        while True:  # a value may fit only beside another one, e.g. a least number beside the largest
            before = len(taken)
            for key in sorted(left, key=lambda key: (key.partition("/")[0] not in _MONEY, key)):
                try:
                    changed(base, {**taken, key: left[key]})
                except ValueError as error:
                    errors[key] = str(error)
                else:
                    taken[key] = left.pop(key)
            if len(taken) == before:
                return changed(base, taken), taken, [errors[key] for key in left]
