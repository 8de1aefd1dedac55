"""Change the size of a job whose two or three ranks share one GPU; gpu_checks.py runs it.

NCCL refuses two ranks on one device of a host. The script (that of rescale_pause.py) gives each process a
host id of its own, so NCCL takes them for hosts and connects them by sockets. NVML is hidden from the agent,
which then counts slots and gives no rank a device of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import rescale_pause
from rescale_pause import ROOT, first_of, read_steps, scale, settle

SIZES = (2, 3, 2, 1)  # before the deaths
BUCKET = 25 << 20  # bytes that one death may keep


def change(device: str, params: int, deaths: int = 2, seconds: float = 2.0) -> dict[str, Any]:
    """Grow, shrink and kill; return each pause, and the bytes that rank 0 holds after each.

    Args:
        device: "cuda", or "cpu" with gloo.
        params: parameters of the model.
        deaths: how often rank 1 of two is killed.
        seconds: time of training between two changes.
    """
    from elastic_run import ElasticRun

    with tempfile.TemporaryDirectory(prefix="gpu-ranks-") as directory:
        folder = Path(directory)
        (folder / "hidden").mkdir()
        (folder / "hidden" / "pynvml.py").write_text('raise ImportError("NVML is hidden from this job")\n')
        script = folder / "pause_job.py"
        script.write_text(rescale_pause.SCRIPT)
        arguments = [
            *("--standalone", "--no-autoscale", "--nproc-per-node=1:3", "--rdzv-id=pause"),
            *("--checkpoint-path=saved", "--checkpoint-interval=1000"),
            *(str(script), str(ROOT / "benchmarks"), "linear", str(params), directory, device),
        ]
        path = {"PYTHONPATH": f"{folder / 'hidden'}:{ROOT}"}
        with ElasticRun(arguments, folder, env=path, fresh=True) as run:
            run.wait_for_event("generation", timeout=100)
            _wait_for_steps(folder)
            settle(run, seconds)
            changes = []
            for replicas in SIZES:
                changes.append(scale(run, replicas))
                settle(run, seconds)
            for _ in range(deaths):
                changes.append(scale(run, 2))
                settle(run, seconds)
                seen, killed = len(run.events), time.time()
                os.kill(run.of("started")[-1]["pids"]["1"], signal.SIGKILL)
                gone = run.wait_for_event("generation", after=seen, replicas=1, timeout=60)
                # another rank takes the place of the one that was killed
                back = run.wait_for_event("generation", after=seen, replicas=2, timeout=60)
                changes += [{**gone, "asked": killed}, {**back, "asked": gone["time"]}]
                settle(run, seconds)
                changes.append(scale(run, 1))
                settle(run, seconds)
            run.process.kill()
            run.process.wait()
        return _evaluated(folder, changes, device)


def _wait_for_steps(folder: Path, limit: float = 100.0) -> None:
    deadline = time.monotonic() + limit
    while not any(path.stat().st_size for path in folder.glob("steps-*")):
        assert time.monotonic() < deadline, "the job makes no steps"
        time.sleep(0.1)


def _evaluated(folder: Path, changes: list[dict[str, Any]], device: str) -> dict[str, Any]:
    steps, _ = read_steps(folder)
    held = _held(folder)
    rows, before = [], 1
    for change in changes:
        end = first_of(steps, change)
        assert end is not None, f"no step after {change}"
        size = change["replicas"]
        rows.append(
            {
                "change": f"{before}->{size}",
                "transition": change.get("transition"),
                "seconds": round(steps[end][0] - max(change["asked"], steps[end - 1][0]), 3),
                "asked_to_step": round(steps[end][0] - change["asked"], 3),
                "bytes": _last(held, steps[end][0], size),
            }
        )
        before = size
    alone = [row["bytes"] for row in rows if row["change"] == "2->1"]
    if device == "cuda":
        assert all(row["transition"] in ("inplace", "recover") for row in rows), rows
        assert max(alone) - alone[0] <= BUCKET, f"bytes after each change to one rank: {alone}"
    return {"changes": rows, "bytes_alone": alone}


def _held(folder: Path) -> list[tuple[float, int, int]]:
    """Return (time, world size, bytes) of each step of rank 0."""
    lines = [line.split() for path in folder.glob("steps-*") for line in path.read_text().splitlines()]
    return sorted(
        (float(at), int(size), int(held)) for at, size, rank, held in filter(_is_step, lines) if rank == "0"
    )


def _is_step(parts: list[str]) -> bool:
    return len(parts) == 4 and parts[0] != "marks"


def _last(held: list[tuple[float, int, int]], begun: float, size: int) -> int:
    """Return the bytes at the last step of the generation that began at `begun`."""
    found = 0
    for at, replicas, held_then in held:
        if at >= begun:
            if replicas != size:
                break
            found = held_then
    return found
