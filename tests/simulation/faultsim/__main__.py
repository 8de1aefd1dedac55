"""Run simulated clusters, one seed after the other: `make simulate-faults SECONDS= SEED=`."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from faultsim.run import Theme, run


def main(arguments: list[str] | None = None) -> int:
    """Run seeds until the CPU time is spent; 1 when one of them has found a defect."""
    parser = argparse.ArgumentParser(prog="faultsim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed [1]")
    parser.add_argument("--seconds", type=float, default=60.0, help="how much CPU time to spend [60]")
    parser.add_argument("--runs", type=int, default=0, help="at most so many runs [0: any number]")
    parser.add_argument("--keep-going", action="store_true", help="go on after a seed that found a defect")
    parser.add_argument("--theme", choices=[one.value for one in Theme], help="of every run [drawn]")
    parser.add_argument("--trace", action="store_true", help="show the last lines of every run's trace")
    given = parser.parse_args(arguments)
    began, cpu, seed = time.monotonic(), time.process_time(), given.seed
    simulated, faults, bad = 0.0, 0, 0
    states: Counter[str] = Counter()
    while time.process_time() - cpu < given.seconds and not (given.runs and seed >= given.seed + given.runs):
        outcome = run(seed, keep_lines=given.trace, theme=given.theme)
        simulated, faults = simulated + outcome.seconds, faults + outcome.faults
        states.update(outcome.states.values())
        if given.trace:
            print("\n".join(outcome.lines))
        if outcome.defects:
            bad += 1
            print(f"seed {seed}: {outcome.defects[0][:600]}", flush=True)
            if not given.keep_going:
                print(f"found after {time.process_time() - cpu:.1f} s of CPU time")
                print(f"see all of it: python -m faultsim --seed {seed} --runs 1 --trace", flush=True)
                seed += 1
                break
        seed += 1
        if sys.stderr.isatty():
            told = f"{time.process_time() - cpu:.0f} of {given.seconds:.0f} s of CPU time"
            print(f"\rseed {seed}: {told}", end="", file=sys.stderr, flush=True)
    spent, wall = max(time.process_time() - cpu, 1e-9), time.monotonic() - began
    print(
        f"seeds {given.seed} to {seed - 1}: {bad} with defects; {faults} faults in {simulated / 3600:.2f} "
        f"simulated hours, {simulated / 3600 / spent:.2f} of them in a second of CPU time "
        f"({wall:.0f} s in all); jobs ended {dict(sorted(states.items()))}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
