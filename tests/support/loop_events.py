"""What the scripts of `loop_grammar` call: where something happens to a replica, and what it has counted.

EVENTS holds the places (epoch, number of the loop, index) at which the agent does something. There every
replica says "at" and waits until the agent has acted and the library is about to act. `hold` holds the
generation that the agent waits for: until then every batch waits for an agreement to be under way.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from signs import sign

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session

OUT = Path(os.environ.get("OUT", "."))
EVENTS = json.loads(os.environ.get("EVENTS", "[]"))
LIMIT = 200.0  # seconds


class Totals(dict[str, Any]):
    """The sums of each loop, in a file of this process."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        (OUT / f"totals-{os.getpid()}").write_text(json.dumps(self))


totals = Totals()


def here(epoch: int, number: int, unit: int) -> None:
    """Called by the body of each data loop, whose position is counted in `unit` samples."""
    if not adl.batch_counts():
        return
    loader = adl.current_dataloader()
    assert loader is not None
    place = [epoch, number, loader.current_index * unit]
    session, deadline = _session.current(), time.monotonic() + LIMIT
    if place in EVENTS:
        sign("at", place=place)
        acted = OUT / f"acted-{'-'.join(map(str, place))}"
        while not acted.exists() and session.generation >= _held():  # else the event before is under way
            _wait(deadline)
    control = session.consensus
    while session.generation < _held() and not control.round_open and control.lost is None:
        _wait(deadline)


def _held() -> int:
    """The generation that the agent waits for."""
    try:
        return int((OUT / "hold").read_text())
    except FileNotFoundError:
        return -1


def _wait(deadline: float) -> None:
    assert time.monotonic() < deadline
    time.sleep(0.001)


def stop_at_the_next_boundary(epoch: int, number: int, unit: int) -> None:
    """Ask for a stop behind this batch, instead of `here`."""
    if not adl.batch_counts():
        return
    control = _session.current().consensus
    control.request({"kind": "stop", "reason": "test"})
    deadline = time.monotonic() + LIMIT
    while not control.round_open:
        assert time.monotonic() < deadline
        time.sleep(0.0005)
