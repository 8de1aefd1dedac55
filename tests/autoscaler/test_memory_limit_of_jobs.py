"""Jobs with the same script share the largest batch that fits into memory."""

from __future__ import annotations

from typing import Any

import pytest

from adaptdl_elastic.autoscaler.coordinator.job_models import Report, curve_of, informed
from adaptdl_elastic.sched_hints import JobHints


def hints(job: str, **changes: Any) -> JobHints:
    fields: dict[str, Any] = {
        "generation": 0,
        "nodes": 1,
        "replicas": 1,
        "init_batch_size": 32,
        "batch_size": 32,
        "atomic_bsz": 32,
        "max_batch_size": 512,
        "grad_params": (1.0, 1.0),
        "perf_params": (0.1, 0.01, 0.1, 0.1, 0.1, 0.1, 1.5),
        **changes,
    }
    return JobHints(job=job, **fields)


@pytest.mark.parametrize(
    ("own", "limit", "bounds", "accumulates"),
    [
        ({}, None, None, False),
        ({}, 64, (1, 64), False),
        ({}, 8, (1, 8), True),  # the initial batch on one replica does not fit
        ({"local_bsz_bounds": (16, 128)}, 64, (16, 64), False),
        ({"local_bsz_bounds": (16, 32)}, 64, (16, 32), False),
    ],
)
def test_the_smallest_limit_counts(
    own: dict[str, Any], limit: int | None, bounds: tuple[int, int] | None, accumulates: bool
) -> None:
    mine = hints("mine", **own)
    others = [hints("large", memory_limit=None if limit is None else 256), hints("small", memory_limit=limit)]
    known = curve_of([Report(one.job, one, 0.0) for one in (mine, *others)])
    found = informed("mine", mine, known)
    assert found is not None
    assert (found.local_bsz_bounds, found.gradient_accumulation) == (bounds, accumulates)
