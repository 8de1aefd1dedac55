"""What `make demo` runs: one job that grows on this machine, a summary and a picture.

Everything it writes goes to .demo/ (in ADAPTDL_DEMO_DIR, if that is set); the exit code is non-zero when the
run did not show what it should.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
OUT = Path(os.environ.get("ADAPTDL_DEMO_DIR") or HERE.parent).resolve() / ".demo"
ACCURACY = {"digits": 0.95, "Fashion-MNIST": 0.87}  # what the network reaches on held-out images


def command(events: Path, picture: Path, arguments: list[str]) -> list[str]:
    """The run, as a user would type it; `arguments` go to the script."""
    return [
        *(sys.executable, "-m", "adaptdl_elastic.agent", "--standalone", "--nproc-per-node=1:2"),
        *("--rdzv-id=demo", f"--checkpoint-path={OUT / 'checkpoint'}"),
        *(f"--event-log={events}", f"--plot={picture}", "--summary"),
        *(str(HERE / "image_classification.py"), *arguments),
    ]


def shortcomings(events: list[dict[str, object]], data: str) -> list[str]:
    """What a demonstration should have shown and did not."""
    grown = [
        e
        for e in events
        if e["event"] == "generation" and e["replicas"] == 2 and "goodput" in str(e.get("reason"))
    ]
    accuracies = [float(str(e["accuracy"])) for e in events if e["event"] == "metrics" and "accuracy" in e]
    missing = [] if grown else ["the policy never chose two replicas"]
    if not accuracies or accuracies[-1] < ACCURACY[data]:
        missing.append(f"the final accuracy {accuracies[-1:]} is below {ACCURACY[data]} on {data}")
    return missing


def main() -> int:
    """Run it, and say what is where."""
    sys.path.insert(0, str(HERE))
    from image_data import DEBIAN

    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    events, picture = OUT / "events.jsonl", OUT / "run.png"
    code = subprocess.run(command(events, picture, sys.argv[1:]), check=False).returncode
    if code:
        return code
    data = "Fashion-MNIST" if DEBIAN.is_dir() or "fashion" in " ".join(sys.argv).lower() else "digits"
    missing = shortcomings([json.loads(line) for line in events.read_text().splitlines()], data)
    for text in missing:
        print(f"demo: {text}", file=sys.stderr)
    print(f"events: {events}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
