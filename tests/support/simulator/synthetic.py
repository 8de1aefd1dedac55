"""Synthetic workloads for users without traces: made-up applications and realistic arrivals."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adaptdl_elastic.goodput import GoodputFunction, GradParams, PerfParams
from simulator.workload import Submission

HOURLY = (1, 1, 2, 3, 3, 2, 1, 1)
"""Relative rate of submissions in the eight hours of a working day."""

_KINDS = {
    # α_c, β_c, α_n, β_n, α_r, β_r, γ; initial batch, growth of it, samples an epoch, epochs, noise scale
    "small": (PerfParams(0.02, 6e-4, 0.08, 1e-3, 0.02, 1e-4, 1.4), 128, 32, 50_000, 30, (4.0, 80.0)),
    "medium": (PerfParams(0.10, 6e-3, 0.25, 5e-3, 0.06, 1e-3, 1.8), 32, 32, 40_000, 40, (2.0, 40.0)),
    "large": (PerfParams(0.15, 1e-2, 0.30, 4e-3, 0.08, 1e-3, 2.0), 64, 64, 400_000, 20, (8.0, 300.0)),
}
# part of the jobs of each kind: many short jobs, few long ones
_SHARE = {"small": 0.72, "medium": 0.22, "large": 0.06}


def generate_workload(jobs: int, hours: float, seed: int = 0) -> tuple[Submission, ...]:
    """Generate `jobs` submissions over `hours` hours, of the applications of `write_applications`."""
    if jobs < 1 or hours <= 0:
        raise ValueError(f"need at least one job and a positive time, got {jobs} jobs in {hours} hours")
    rng = np.random.default_rng(seed)
    rates = np.array(HOURLY, dtype=float)
    slot = rng.choice(len(rates), size=jobs, p=rates / rates.sum())
    times = np.sort((slot + rng.random(jobs)) * hours * 3600 / len(rates)).round()
    kinds = rng.choice(list(_SHARE), size=jobs, p=list(_SHARE.values()))
    found = []
    for i, (when, kind) in enumerate(zip(times, kinds, strict=True)):
        replicas = int(2 ** rng.integers(0, 4))
        batch = _KINDS[kind][1] * replicas
        found.append(Submission(f"{kind}-{i}", float(when), str(kind), replicas, batch))
    return tuple(found)


def write_applications(folder: Path, nodes: int = 16, slots: int = 4) -> None:
    """Write the traces of the made-up applications below `folder`, in the layout of `read_application`."""
    for name, (theta, init, growth, samples, epochs, noise) in _KINDS.items():
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        function = GoodputFunction(theta, GradParams(1.0, 1.0), init)
        low, high = max(init // 4, 1), init
        sizes = sorted({round(float(x)) for x in np.geomspace(low, high, 5)})
        _write(
            target / "placements.csv",
            ("placement", "local_bsz", "step_time", "sync_time"),
            [
                (str(r) if n == 1 else str(slots) * n, b, *_times(function, n, r, b))
                for n, r in [(1, r) for r in range(1, slots + 1)] + [(n, n * slots) for n in (2, 3, 4)]
                for b in sizes
                if r <= 9
            ],
        )
        _write(
            target / "scalability.csv",
            ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time"),
            [
                (n, r, b, *_times(function, n, r, b))
                for n in range(2, max(nodes, 4) + 1)
                for r in sorted({n, n * slots})
                for b in sizes
            ],
        )
        steps = samples / init
        for scale in 2 ** np.arange(int(np.log2(growth)) + 1):
            rows = []
            for epoch in range(epochs):
                grown = noise[0] * (noise[1] / noise[0]) ** (epoch / max(epochs - 1, 1))
                rows.append(((epoch + 1) * steps, int((epoch + 1) * steps), 0.0, 1.0, grown))
            _write(
                target / f"validation-{init * int(scale)}.csv",
                ("progress", "iteration", "metric", "grad_sqr", "grad_var"),
                rows,
            )


def _times(function: GoodputFunction, nodes: int, replicas: int, local_bsz: int) -> tuple[float, float]:
    step = replicas * local_bsz / function.throughput(nodes, replicas, local_bsz, 0)
    alone = local_bsz / function.throughput(1, 1, local_bsz, 0)
    return step, max(step - alone, 0.0)


def _write(path: Path, header: tuple[str, ...], rows: Sequence[tuple[object, ...]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
