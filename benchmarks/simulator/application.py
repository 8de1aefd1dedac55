"""Measured behaviour of an application: step times, gradient statistics and epochs, for replay.

An application is a folder with three kinds of files, the layout of the Pollux (OSDI'21) artifact's traces:
`placements.csv` (placement, local_bsz, step_time, sync_time), `scalability.csv` (num_nodes, num_replicas,
local_bsz, step_time, sync_time), and one `validation-<batch>.csv` per batch size (progress, iteration,
metric, grad_sqr, grad_var; one row per epoch).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

EPOCHS = {"bert": 2, "cifar10": 100, "ncf": 10, "imagenet": 90, "deepspeech2": 80, "yolov3": 50}
"""Number of epochs that these applications train for; other applications train for all measured ones."""

MAX_LOCAL_BSZ = {"yolov3": 8}  # overrides the measured maximum, with which the model runs out of memory
# applications that run on one GPU, with the batch size used when the policy may choose it
SINGLE = {"ncf": 32768}

_MOST_NODES = 16  # largest number of nodes in the scalability measurements


@dataclass
class Application:
    """True behaviour of one application. Times are in seconds, progress in steps of the initial batch."""

    name: str
    epochs: int
    init_batch_size: int
    max_batch_size: int
    min_local_bsz: int
    max_local_bsz: int
    max_replicas: int
    fixed_batch_size: int | None
    placements: dict[tuple[int, ...], tuple[Array, Array, Array]]  # local_bsz, step time, sync time
    points: Array  # (P, 3): nodes, replicas, local_bsz
    times: Array  # (P, 2): step time, sync time
    batch_sizes: Array  # (B,), ascending
    progress: Array  # (B, E)
    grads: Array  # (B, E, 2): |G|², tr Σ
    # (S, 3): the part of `points` that is from scalability.csv
    scaling_points: Array = field(default_factory=lambda: np.zeros((0, 3)))
    # by node type, the same application with step times and batch sizes of that type
    types: dict[str, Application] = field(default_factory=dict)
    ends: Array = field(init=False)  # (epochs,): progress at the end of each epoch
    _interpolator: Any = field(init=False, default=None, repr=False)
    _throughputs: dict[tuple[tuple[int, ...], int], tuple[float, float]] = field(
        init=False, default_factory=dict, repr=False
    )
    _stats: dict[tuple[int, int], tuple[float, float]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.ends = self.progress.min(axis=0)[: self.epochs]

    def on(self, node_type: str) -> Application:
        """Return the application on nodes of a type, or of several, whose names a plus sign joins.

        Replicas of one job work in step. So on nodes of several types every step takes as long as on the
        slowest of them. A type without measurements of its own is as fast as that of this object.
        """
        if node_type not in self.types and "+" in node_type:
            several = [self.on(name) for name in node_type.split("+")]
            self.types[node_type] = max(several, key=lambda app: float(np.median(app.times[:, 0])))
        return self.types.get(node_type, self)

    @property
    def total_progress(self) -> float:
        """Number of steps of the initial batch in all epochs."""
        return float(self.ends[-1])

    def throughput(self, placement: Iterable[int], local_bsz: int) -> tuple[float, float]:
        """Return (step time, the part of it spent in synchronisation), in seconds.

        Measured placements are interpolated in the batch size. Others are interpolated among all measurements
        by their number of nodes and replicas.

        Args:
            placement: Number of replicas on each node.
            local_bsz: Batch size of a replica.
        """
        parts = tuple(n for n in placement if n)
        key = (min(parts[i:] + parts[:i] for i in range(len(parts))), local_bsz)
        if key not in self._throughputs:
            self._throughputs[key] = self._measure(*key)
        return self._throughputs[key]

    def _measure(self, parts: tuple[int, ...], local_bsz: int) -> tuple[float, float]:
        measured = self.placements.get(parts)
        if measured is not None and measured[0][0] <= local_bsz <= measured[0][-1]:
            sizes, step, sync = measured
            return float(np.interp(local_bsz, sizes, step)), float(np.interp(local_bsz, sizes, sync))
        if self._interpolator is None:
            from scipy.interpolate import LinearNDInterpolator

            self._interpolator = LinearNDInterpolator(self.points, self.times)
        nodes = min(len(parts), _MOST_NODES)
        step_time, sync_time = self._interpolator((nodes, sum(parts), local_bsz))
        # outside the measured range: use the nearest measurement on a logarithmic scale
        if np.isnan(step_time):
            near = np.log(self.points) - np.log([nodes, sum(parts), local_bsz])
            step_time, sync_time = self.times[int(np.argmin((near**2).sum(axis=1)))]
        return float(step_time), float(sync_time)

    def grad_stats(self, batch_size: int, epoch: int) -> tuple[float, float]:
        """Return (|G|², tr Σ) during `epoch`, interpolated between the measured batch sizes."""
        key = batch_size, epoch
        if key not in self._stats:
            sizes = self.batch_sizes
            size = min(max(batch_size, sizes[0]), sizes[-1])
            high = min(max(int(np.searchsorted(sizes, size)), 1), len(sizes) - 1) if len(sizes) > 1 else 0
            low = max(high - 1, 0)
            part = (size - sizes[low]) / (sizes[high] - sizes[low]) if high > low else 0.0
            row = (1 - part) * self.grads[low, epoch] + part * self.grads[high, epoch]
            self._stats[key] = float(row[0]), float(row[1])
        return self._stats[key]


def read_application(folder: Path, node_type: str = "") -> Application:
    """Read the application measured in `folder`.

    Args:
        folder: The folder with the traces.
        node_type: Read the step times in `placements-<node_type>.csv` and `scalability-<node_type>.csv`.
    """
    suffix = f"-{node_type}.csv" if node_type else ".csv"
    times = "step_time", "sync_time"
    placements = _read(folder / f"placements{suffix}", ("placement", "local_bsz", *times))
    scaling = _read(folder / f"scalability{suffix}", ("num_nodes", "num_replicas", "local_bsz", *times))
    files = {int(file.stem.removeprefix("validation-")): file for file in folder.glob("validation-*.csv")}
    sizes = sorted(files)
    tables = [_read(files[size], ("progress", "grad_sqr", "grad_var")) for size in sizes]
    length = min(len(table) for table in tables)
    stacked = np.stack([table[:length] for table in tables])
    by_placement, triples = _placements(placements)
    name = folder.name
    local = placements[:, 1]
    return Application(
        name=name,
        epochs=min(EPOCHS.get(name, length), length),
        init_batch_size=sizes[0],
        max_batch_size=sizes[-1],
        min_local_bsz=int(local.min()),
        max_local_bsz=min(int(local.max()), MAX_LOCAL_BSZ.get(name, int(local.max()))),
        max_replicas=1 if name in SINGLE else 64,
        fixed_batch_size=SINGLE.get(name),
        placements=by_placement,
        points=np.concatenate([triples[:, :3], scaling[:, :3]]),
        times=np.concatenate([triples[:, 3:], scaling[:, 3:]]),
        scaling_points=scaling[:, :3],
        batch_sizes=np.array(sizes, dtype=float),
        progress=stacked[:, :, 0],
        grads=stacked[:, :, 1:],
    )


def _placements(rows: Array) -> tuple[dict[tuple[int, ...], tuple[Array, Array, Array]], Array]:
    """Group measurements by placement, and average them by (nodes, replicas, local_bsz), in that order."""
    by_placement: dict[tuple[int, ...], list[Array]] = {}
    by_triple: dict[tuple[int, int, float], list[Array]] = {}
    for row in rows:
        parts = tuple(int(digit) for digit in str(int(row[0])))
        by_placement.setdefault(parts, []).append(row[1:])
        by_triple.setdefault((len(parts), sum(parts), float(row[1])), []).append(row[2:])
    curves = {}
    for parts, found in by_placement.items():
        table = np.array(sorted(found, key=lambda row: float(row[0])))
        curves[parts] = table[:, 0], table[:, 1], table[:, 2]
    means = [(*triple, *np.mean(found, axis=0)) for triple, found in sorted(by_triple.items())]
    return curves, np.array(means)


def _read(path: Path, columns: tuple[str, ...]) -> Array:
    """Read the named columns of a CSV file of numbers, shape (rows, columns)."""
    with path.open(newline="", encoding="utf-8") as file:
        return np.array([[float(row[column]) for column in columns] for row in csv.DictReader(file)])
