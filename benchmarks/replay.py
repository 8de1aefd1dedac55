"""Replay a workload under a policy, with a simulated clock.

python benchmarks/replay.py --generate 10 --hours 0.5 --nodes 4 --rescale-cost 1
python benchmarks/replay.py --workload workload.csv --apps traces/   # see --help
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from simulator.simulate_command import simulate

if __name__ == "__main__":
    simulate()
