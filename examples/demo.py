"""What `make demo` runs: one job that grows on this machine, a summary and a picture.

Everything it writes goes to .demo/ (in ADAPTDL_DEMO_DIR, if that is set); the exit code is non-zero when the
run did not show what it should, and a line for each says what was expected and what was seen.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import draw_run
from demo_ending import UnmetError, complain, conclude

HERE = Path(__file__).resolve().parent
OUT = Path(os.environ.get("ADAPTDL_DEMO_DIR") or HERE.parent).resolve() / ".demo"
ACCURACY = 0.95  # what the network reaches on held-out images
TASK = (
    "--data=digits",
    "--net=recurrent",
    "--batch-size=32",
    "--lr=0.05",
    "--max-batch-size=512",
    "--epochs=60",
)
# At least: the last batch size to the first, and goodput in the last third to the first measured one.
GROWTH, GAIN = 2.0, 1.5


def command(events: Path, arguments: list[str]) -> list[str]:
    """The run, as a user would type it; `arguments` go to the script."""
    return [
        *(sys.executable, "-m", "adaptdl_elastic.agent", "--standalone", "--nproc-per-node=1:2"),
        *("--rdzv-id=demo", f"--checkpoint-path={OUT / 'checkpoint'}"),
        *(f"--event-log={events}", "--summary"),
        *(str(HERE / "image_classification.py"), *TASK, *arguments),
    ]


def values(events: list[dict[str, object]], kind: str, field: str) -> list[float]:
    """Return the numbers of a field in the events of one kind."""
    return [float(str(e[field])) for e in events if e["event"] == kind and e.get(field) is not None]


def goodput_change(events: list[dict[str, object]]) -> tuple[float, float]:
    """Return the first measured goodput, and the median of the last third; zeros if none was measured."""
    measured = values(events, "goodput", "goodput")
    if not measured:
        return 0.0, 0.0
    return measured[0], statistics.median(measured[len(measured) * 2 // 3 :])


def shortcomings(events: list[dict[str, object]]) -> list[str]:
    """What a demonstration should have shown and did not."""
    grown = [
        e
        for e in events
        if e["event"] == "generation" and e["replicas"] == 2 and "goodput" in str(e.get("reason"))
    ]
    accuracies = values(events, "metrics", "accuracy")
    sizes = values(events, "generation", "replicas")
    missing = []
    if not grown:
        missing.append(
            f"expected the policy to choose two replicas; the most was {max(sizes, default=0):.0f}"
        )
    batches = values(events, "batch_size", "batch_size")
    if not batches or batches[-1] < GROWTH * batches[0]:
        seen = f"it went from {batches[0]:.0f} to {batches[-1]:.0f}" if batches else "none was reported"
        missing.append(f"expected the last batch size to be {GROWTH:g} times the first; {seen}")
    first, last = goodput_change(events)
    if not first or last < GAIN * first:
        seen = f"it went from {first:.0f} to {last:.0f} samples/s" if first else "none was measured"
        missing.append(f"expected the last goodput to be {GAIN:g} times the first; {seen}")
    if not accuracies or accuracies[-1] < ACCURACY:
        seen = f"{accuracies[-1]:.4f}" if accuracies else "not reported"
        missing.append(f"expected an accuracy of {ACCURACY}; the last one is {seen}")
    return missing


def demo() -> int:
    """Run it, and say what is where."""
    events, picture = OUT / "events.jsonl", OUT / "run.png"
    code = subprocess.run(command(events, sys.argv[1:]), check=False).returncode
    if code:
        raise UnmetError(f"expected the run to end well; its exit code is {code}")
    draw_run.main(str(events), str(picture))
    missing = shortcomings([json.loads(line) for line in events.read_text().splitlines()])
    for text in missing:
        complain("demo", text, OUT)
    print(f"events: {events}\npicture: {picture}")
    return 1 if missing else 0


def main() -> int:
    """Prepare the folder, and run the demo."""
    # its replicas share the cores of this machine, also where that has a GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    return conclude("demo", OUT, demo)


if __name__ == "__main__":
    sys.exit(main())
