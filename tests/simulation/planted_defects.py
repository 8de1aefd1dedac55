"""Twenty protocol defects, each of which takes one guard out of the product that a real fault needs.

Each is a textual edit for a temporary copy of the tree. A search text that is not there exactly once is an
error, so a rename breaks this list loudly. `was_real`: the defect was in this product before.

Two guards of the first list have a second one behind them and are not in it: an agent does not act on the
plan of another run (`decisions.py`: it leaves when it reads the run's specification), and a silent node is
given up (`job_health.py`: after `patience` the others go on without a word from it, or fail).

`make planted-defects` runs the simulator against each of them, from one seed on, and says with which seed and
after how many seconds of CPU time it was found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Planted:
    """One defect."""

    name: str
    what: str
    path: str
    search: str
    replace: str
    was_real: bool = False


_AGENT, _CORE = "agent/core/decisions.py", "autoscaler/coordinator"

PLANTED: tuple[Planted, ...] = (
    Planted(
        "hello-is-ready",
        "a newcomer counts as ready and running at its hello",
        _AGENT,
        "        case ReplicaHello() if held.joining:\n            pass",
        "        case ReplicaHello() if False:\n            pass",
        True,
    ),
    Planted(
        "deposed-leader-writes",
        "a leader goes on after another one was elected",
        f"{_CORE}/decide.py",
        "view.leader is not None and view.leader.revision > fence",
        "False",
        True,
    ),
    Planted(
        "resilient-by-heritage",
        "restarted replicas inherit what those before had said",
        f"{_CORE}/survivors.py",
        "(generation, before(plan)) if plan.transition is Transition.INPLACE",
        "(generation, before(plan)) if True",
        True,
    ),
    Planted(
        "leaver-is-waited-for",
        "a node that left before it started is not planned without",
        f"{_CORE}/reactive.py",
        "    if not gone:\n        return False\n    saves",
        "    if True:\n        return False\n    saves",
        True,
    ),
    Planted(
        "drained-is-stopped",
        "a job whose newest plan has only drained nodes is stopped, whoever else is there",
        f"{_CORE}/job_phase.py",
        "if phase is Phase.LEFT and (others_take_over(view, job, plan) or",
        "if phase is Phase.LEFT and (",
        True,
    ),
    Planted(
        "spins-when-insisting",
        "an agent that keeps its size on purpose is always due",
        "agent/core/pending_notice.py",
        "status.reason)\n            self._reason = self._told = self.due = None",
        "status.reason)",
        True,
    ),
    Planted(
        "no-fence",
        "a new leader does not write plans again with its fence",
        f"{_CORE}/fence.py",
        "if plan.fence != fence:",
        "if False:",
    ),
    Planted(
        "starts-early",
        "a generation starts before those that leave have left",
        _AGENT,
        "def _all_gone(state: State, plan: Plan) -> bool:\n",
        "def _all_gone(state: State, plan: Plan) -> bool:\n    return True\n",
    ),
    Planted(
        "older-plans-count",
        "an agent takes a plan that is older than the one it has",
        _AGENT,
        "if before is not None and plan.generation <= before.generation:",
        "if False:",
    ),
    Planted(
        "restarts-come-back",
        "the restart budget is restored without progress",
        f"{_CORE}/job_phase.py",
        "return lived >= settings.refill_after and job.checkpoint.record.step > plan.failed_step",
        "return True",
    ),
    Planted(
        "stopped-is-done",
        "a script that exits with 0 after a stop is taken for finished",
        _AGENT,
        "if event.exit_code == STOPPED or replica.stopping:",
        "if event.exit_code == STOPPED:",
        True,
    ),
    Planted(
        "name-taken",
        "an agent whose name another one has goes on",
        _AGENT,
        "if agents.get(state.me.node, state.me.agent) == state.me.agent:",
        "if True:",
    ),
    Planted(
        "stop-without-end",
        "replicas that do not stop in time are waited for",
        _AGENT,
        "if held.phase is Phase.STOPPING and held.until is not None and now >= held.until:",
        "if False:",
    ),
    Planted(
        "older-run-stays",
        "an agent of an older run stays",
        _AGENT,
        "            if run == state.me.run:",
        "            if True:",
    ),
    Planted(
        "unheard-plans",
        "an agent does not answer for a plan that it never saw",
        _AGENT,
        "        if generation not in _under_way(state) and (generation, state.me.node) not in state.ended:",
        "        if False:",
    ),
    Planted(
        "lapsed-and-starts",
        "an agent that has stood still starts replicas in slots that others have by then",
        _AGENT,
        "if plan is None or not newest or state.lapsed or",
        "if plan is None or not newest or",
        True,
    ),
    Planted(
        "done-too-early",
        "a job is done while replicas that a change was to leave out come to their end",
        f"{_CORE}/job_phase.py",
        "if phase is Phase.FINISHED and not _leavers_ended(view, job, plan):",
        "if False:",
        True,
    ),
    Planted(
        "no-second-registration",
        "a lapsed registration is not made again",
        "agent/cluster/store_link.py",
        "            self.register_again()\n",
        "            return\n",
    ),
    Planted(
        "watch-ends-at-compaction",
        "a watch whose history is forgotten ends",
        "agent/cluster/store_link.py",
        "            except CompactedError:\n                continue",
        "            except CompactedError:\n                return",
    ),
    Planted(
        "hung-replicas-stay",
        "a replica that does not answer is left alone",
        "agent/core/hang_detection.py",
        "if replica.pinged is not None and now >= replica.pinged + half:",
        "if False:",
    ),
)


def edited(planted: Planted, root: Path = ROOT) -> str:
    """Return the text of the file with the defect in it; ValueError when the guard is not there once."""
    text = (root / planted.path).read_text()
    if text.count(planted.search) != 1:
        raise ValueError(f"{planted.name}: found {text.count(planted.search)} times in {planted.path}")
    return text.replace(planted.search, planted.replace)


SEEDS_APART = 10_000  # more seeds than a process tries
PACKAGES = ("adaptdl_elastic", "agent", "autoscaler", "rendezvous")


def copy_folders(names: Iterable[str], place: Path) -> None:
    """Copy folders of the checkout into a place, without compiled files."""
    for name in names:
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, place / name, symlinks=True, ignore=skipped)


def search(planted: Planted, seconds: float, seed: int, processes: int) -> str:
    """Run the simulator on a copy of the product with the defect in it; return what it says.

    Args:
        planted: The defect.
        seconds: CPU time of each process.
        seed: The first seed of the first process; those of the next one are `SEEDS_APART` higher.
        processes: Simulators beside each other; the first that finds the defect ends the search.
    """
    with tempfile.TemporaryDirectory(prefix="planted-") as place, ThreadPoolExecutor(processes) as pool:
        copy_folders(PACKAGES, Path(place))
        (Path(place) / planted.path).write_text(edited(planted))
        started = [simulator(place, seconds, seed + SEEDS_APART * number) for number in range(processes)]
        ends = [pool.submit(one.communicate) for one in started]
        said = ""
        try:
            for end in as_completed(ends):
                output, errors = end.result()
                failed = started[ends.index(end)].returncode not in (0, 1)
                said += f"error: {errors.strip()[-300:]}\n" if failed else output
                if failed or "found after" in output:
                    break
        finally:
            for one in started:
                one.kill()
    return said


def also_without(said: str) -> bool:
    """Return whether the seed that a simulator names reports something without the planted defect, too."""
    seed = re.search(r"^seed (\d+):", said, re.MULTILINE)
    if seed is None:
        return False
    output, _ = simulator(str(ROOT), 60.0, int(seed[1]), "--runs=1").communicate()
    return "found after" in output


def simulator(place: str, seconds: float, seed: int, *options: str) -> subprocess.Popen[str]:
    """Start the simulator on the product in a folder."""
    paths = [place, str(ROOT / "tests/simulation"), str(ROOT / "tests/support")]
    command = [sys.executable, "-m", "faultsim", "--seconds", str(seconds), "--seed", str(seed), *options]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        command, env=environ, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def main() -> int:
    """Run the simulator against the defects that are named, or all; 1 when more than three stay hidden."""
    parser = argparse.ArgumentParser(description="Hold the simulator against planted defects.")
    parser.add_argument("names", nargs="*", help="which defects [all]")
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU time of a process for each [60]")
    parser.add_argument("--seed", type=int, default=1, help="the first seed [1]")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at a time [all cores]")
    given = parser.parse_args()
    chosen = [one for one in PLANTED if not given.names or one.name in given.names]
    hidden = 0
    for planted in chosen:
        said = search(planted, given.seconds, given.seed, given.processes)
        lines = [line for line in said.splitlines() if line.startswith(("seed ", "found after", "error"))]
        if also_without(said):
            said = f"error: without the defect, too: {said}"
        hidden += said.startswith("error") or "found after" not in said
        print(f"{planted.name}: {' | '.join(lines)[:400] or 'not found'}", flush=True)
    print(f"{len(chosen) - hidden} of {len(chosen)} found")
    return 1 if hidden > 3 else 0


if __name__ == "__main__":
    sys.exit(main())
