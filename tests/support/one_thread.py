"""Import this before torch: no pool of threads may exist where a process is forked."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
