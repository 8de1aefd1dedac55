"""`train.py` in a script that makes exit code 0 of every other: `swallows.py EPOCHS SECONDS_PER_STEP`."""

import runpy
import sys
from pathlib import Path

try:
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
except SystemExit as error:
    print(f"exit code {error.code} is swallowed", flush=True)
    sys.exit(0)
