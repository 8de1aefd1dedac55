"""A script without the library that answers SIGTERM in its own way, as Lightning's Trainer does with exit 0.

`answers.py CODES` writes a line to the FIFO `ready` once its handler is installed, and ends by itself with
exit code 0 as soon as a file `hurry` is there. SIGTERM makes generation N exit with the N-th of CODES, which
are separated by commas, or does nothing where that is `deaf`. `answers.py CODES lingers` is busy in an atexit
function until its agent asks it to stop.
"""

import atexit
import os
import select
import signal
import sys
import time
from pathlib import Path
from types import FrameType


def answer(number: int, frame: FrameType | None) -> None:
    code = sys.argv[1].split(",")[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
    if code != "deaf":
        sys.exit(int(code))


def tell(word: str) -> None:
    place = f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ['RANK']} {os.environ['WORLD_SIZE']}"
    with Path("ready").open("w") as fifo:
        fifo.write(f"{word} {place}\n")


def linger() -> None:
    tell("lingers")
    select.select([int(os.environ["ADAPTDL_AGENT_FD"])], [], [])


if sys.argv[2:] == ["lingers"]:
    atexit.register(linger)
signal.signal(signal.SIGTERM, answer)
tell("ready")
while not Path("hurry").exists():
    time.sleep(0.05)
