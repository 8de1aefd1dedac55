"""Known defects, each of which takes one guard out of the product: twenty of the protocol, and nine others.

The guards of the protocol are needed by real faults, and the fault simulator finds that one is missing, but
for one whose schedule it rarely comes upon. That one and the other defects are found by a file of tests each.

Each is a textual edit for a temporary copy of the tree. A search text that is not there exactly once is an
error, so a rename breaks this list loudly. `was_real`: the defect was in this product before.

Two guards of the protocol have a second one behind them and are not in it: an agent does not act on the
plan of another run (`decisions.py`: it leaves when it reads the run's specification), and a silent node is
given up (`job_health.py`: after `patience` the others go on without a word from it, or fail).

`make planted-defects` runs the simulator or the tests against each of them. It says with which seed and after
how many seconds of CPU time, or by which tests, it was found.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from product_copy import PACKAGES, ROOT, copy_folders, copy_to, run_tests


@dataclass(frozen=True)
class Planted:
    """One defect."""

    name: str
    what: str
    path: str
    search: str
    replace: str
    was_real: bool = False
    tests: str = ""
    """Test file that finds it; empty: the simulator does."""


_AGENT, _CORE = "agent/core/decisions.py", "autoscaler/coordinator"
_TORCH = "adaptdl_elastic/torch"

PLANTED: tuple[Planted, ...] = (
    Planted(
        "hello-is-ready",
        "a newcomer counts as ready and running at its hello",
        _AGENT,
        "        case Hello() if present and not isinstance(held.course, Joining):",
        "        case Hello() if present:",
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
        "before(plan) if plan.transition is Transition.INPLACE else generation\n",
        "before(plan)\n",
        True,
    ),
    Planted(
        "leaver-is-waited-for",
        "a node that left before it started is not planned without",
        f"{_CORE}/reactive.py",
        "    if not gone:\n        return False\n    how",
        "    if True:\n        return False\n    how",
        True,
        # the simulator comes upon such a schedule in some minutes only; a script of events has it
        "tests/autoscaler/test_coordinator_failures.py",
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
        f"{_CORE}/decide.py",
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
        "if isinstance(held.end, Stopping) and now >= held.end.until:",
        "if False:",
    ),
    Planted(
        "older-run-stays",
        "an agent of an older run stays",
        _AGENT,
        "            if run == state.me.spec.run:",
        "            if True:",
    ),
    Planted(
        "unheard-plans",
        "an agent does not say that a generation which was replaced never starts",
        _AGENT,
        "acted=max(state.acted, plan.generation - 1)",
        "acted=state.acted",
    ),
    Planted(
        "lapsed-and-starts",
        "an agent that has stood still starts replicas in slots that others have by then",
        _AGENT,
        "if plan is None or state.lapsed or",
        "if plan is None or",
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
        "rendezvous/store/follow.py",
        "            except CompactedError:\n                pass",
        "            except CompactedError:\n                return",
    ),
    Planted(
        "hung-replicas-stay",
        "a replica that does not answer is left alone",
        "agent/core/hang_detection.py",
        "if replica.pinged is not None and now >= replica.pinged + half:",
        "if False:",
    ),
    Planted(
        "mixture-is-newest",
        "a survivor whose model is partially restored is taken for the newest",
        f"{_TORCH}/_elastic/survivors.py",
        "[one.step for one in everybody if not one.partially_restored]",
        "[one.step for one in everybody]",
        tests="tests/library/test_survivors.py",
    ),
    Planted(
        "sums-are-lost",
        "sums that only one replica knows are lost without a word",
        f"{_TORCH}/_elastic/survivors.py",
        "return any(one.synced[name] == newest[name] for one in some for name in one.unsynced)",
        "return False",
        tests="tests/library/test_survivors.py",
    ),
    Planted(
        "stopped-time-is-billed",
        "an instance that was stopped and started again is charged for the time between",
        "autoscaler/scaling/observed_history.py",
        "since = max(old.final, instance.launched)",
        "since = (before or old).final",
        tests="tests/scaling/test_bill.py",
    ),
    Planted(
        "error-is-a-tenth",
        "`adaptdl status` shows a tenth of the model's error",
        "autoscaler/commands/jobs.py",
        "off by {error:+.0%}",
        "off by {error / 10:+.0%}",
        tests="tests/autoscaler/test_standalone_jobs.py",
    ),
    Planted(
        "longest-pause-for-the-sum",
        "`adaptdl report` shows the longest pause for the sum of all",
        "autoscaler/diagnostics/run_report.py",
        "sum(one.pause_s or 0.0 for one in run.generations)",
        "max([one.pause_s or 0.0 for one in run.generations], default=0.0)",
        tests="tests/autoscaler/test_report_command.py",
    ),
    Planted(
        "stream-of-another-worker",
        "after a change a stream goes on with the part of another worker",
        f"{_TORCH}/_data/iterable.py",
        "part = (info.id + settings.turn) % self.parts",
        "part = info.id",
        tests="tests/library/test_loops.py",
    ),
    Planted(
        "record-of-another-job",
        "a record that was signed for one job counts for another",
        "rendezvous/services/submitted.py",
        'if record.job != key.rpartition("/")[2]:',
        "if False:",
        tests="tests/services/test_played_signatures.py",
    ),
    Planted(
        "archive-of-another-person",
        "the archive of another person is unpacked",
        "agent/service/archives.py",
        "if found.owner != owner:",
        "if False:",
        tests="tests/services/test_bundle.py",
    ),
    Planted(
        "request-of-next-year",
        "a request counts whenever it was signed",
        "agent/service/access.py",
        "if abs(now - int(moment)) > VALID_SECONDS:",
        "if False:",
        tests="tests/services/test_played_signatures.py",
    ),
)


def edited(planted: Planted, root: Path = ROOT) -> str:
    """Return the text of the file with the defect in it; ValueError when the guard is not there once."""
    text = (root / planted.path).read_text()
    if text.count(planted.search) != 1:
        raise ValueError(f"{planted.name}: found {text.count(planted.search)} times in {planted.path}")
    return text.replace(planted.search, planted.replace)


SEEDS_APART = 10_000  # more seeds than a process tries
TEST_SECONDS = 400.0


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


def tested(planted: Planted) -> str:
    """Run the tests of a defect on a copy of the product without and with it; return what they say."""
    arguments = ["-x", planted.tests]
    with tempfile.TemporaryDirectory(prefix="planted-") as place:
        copy = copy_to(Path(place))
        if run_tests(copy, arguments, TEST_SECONDS) != 0:
            return f"error: {planted.tests} fails without the defect, too"
        (copy / planted.path).write_text(edited(planted))
        code = run_tests(copy, arguments, TEST_SECONDS)
    return {0: "", 1: f"found after a failure in {planted.tests}"}.get(
        code, f"error: pytest ended with {code}"
    )


def simulated(planted: Planted, seconds: float, seed: int, processes: int) -> str:
    """Search for a defect as `search` does, past seeds that report something without it, too."""
    while True:
        said = search(planted, seconds, seed, processes)
        if (known := also_without(said)) is None:
            return said
        found = re.search(r"^found after ([\d.]+) s", said, re.MULTILINE)
        seconds -= float(found[1]) if found else seconds
        if seconds <= 0:
            return f"error: without the defect, too: {said}"
        seed += (known - seed) % SEEDS_APART + 1


def also_without(said: str) -> int | None:
    """Return the seed that a simulator names if it reports something without the planted defect, too."""
    seed = re.search(r"^seed (\d+):", said, re.MULTILINE)
    if seed is None:
        return None
    output, _ = simulator(str(ROOT), 60.0, int(seed[1]), "--runs=1").communicate()
    return int(seed[1]) if "found after" in output else None


def simulator(place: str, seconds: float, seed: int, *options: str) -> subprocess.Popen[str]:
    """Start the simulator on the product in a folder."""
    paths = [place, str(ROOT / "tests/simulation"), str(ROOT / "tests/support")]
    command = [sys.executable, "-m", "faultsim", "--seconds", str(seconds), "--seed", str(seed), *options]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        command, env=environ, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def main() -> int:
    """Look for the defects that are named, or all.

    Return 1 if tests miss one of theirs, or the simulator more than three.
    """
    parser = argparse.ArgumentParser(description="Hold the simulator and tests against planted defects.")
    parser.add_argument("names", nargs="*", help="which defects [all]")
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU time of a process for each [60]")
    parser.add_argument("--seed", type=int, default=1, help="the first seed [1]")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="at a time [all cores]")
    given = parser.parse_args()
    chosen = [one for one in PLANTED if not given.names or one.name in given.names]
    hidden: list[Planted] = []
    for planted in chosen:
        if planted.tests:
            said = tested(planted)
        else:
            said = simulated(planted, given.seconds, given.seed, given.processes)
        lines = [line for line in said.splitlines() if line.startswith(("seed ", "found after", "error"))]
        if said.startswith("error") or "found after" not in said:
            hidden.append(planted)
        print(f"{planted.name}: {' | '.join(lines)[:400] or 'not found'}", flush=True)
    print(f"{len(chosen) - len(hidden)} of {len(chosen)} found")
    return 1 if len(hidden) > 3 or any(one.tests for one in hidden) else 0


if __name__ == "__main__":
    sys.exit(main())
