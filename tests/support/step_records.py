"""Two things that training scripts of tests do: write down their steps, and ask for a stop at one of them."""

import json
import os
import signal
import time
from pathlib import Path

import adaptdl_elastic.torch as adl
from adaptdl_elastic import _session


def record(**fields):
    """Write a line that `generations.records` reads, into the folder OUT."""
    with (Path(os.environ["OUT"]) / f"record-{os.getpid()}").open("a") as file:
        file.write(json.dumps({"rank": adl.rank(), "replicas": adl.world_size(), **fields}) + "\n")


def note(**fields):
    """Write such a line unless the batch has no effect."""
    if adl.batch_counts():
        record(**fields)


def stop(rank=0):
    """Ask for a stop on a rank, and return when all replicas are held at the end of this step."""
    if adl.rank() == rank:
        os.kill(os.getpid(), signal.SIGINT)
    deadline = time.monotonic() + 200
    while not _session.current().consensus.round_open:
        assert time.monotonic() < deadline
        time.sleep(0.001)
