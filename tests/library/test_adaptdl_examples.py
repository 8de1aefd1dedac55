"""AdaptDL's examples, with only their imports changed, go through changes of size and a death."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import generations
import pytest
from elastic_run import ROOT
from fake_agent import FakeAgent, Process

from adaptdl_elastic.protocol.messages import SaveCheckpoint, Stop

pytestmark = pytest.mark.processes

FOLDER = ROOT / "examples" / "adaptdl"
ENDLESS = 10**6  # epochs
EXAMPLES = {  # arguments that make an epoch short, and the samples of the training set; None: it has tokens
    "cifar.py": ("--samples=256 --bs=32 --width=4", 256),
    "transformer.py": ("--tokens=4001 --bs=8 --bptt=10 --size=16", None),
    "ncf.py": ("--users=32 --items=40 --bs=64", 32 * 10 * 5),
    "dcgan.py": ("--samples=256 --bs=32 --width=4", 256),
    "bert.py": ("--samples=256 --bs=32 --size=16", 256),
}


# A batch takes its time, so that little is trained while replicas come. Rank 1 waits where it reads a batch
# while the file is there. If it dies in the middle of a step of a GAN, when one of two models has stepped,
# all restart.
HOLD = """
import os, time, torch
from torch.utils.data._utils.fetch import _MapDatasetFetcher

def held(fetcher, index, fetch=_MapDatasetFetcher.fetch):
    time.sleep(0.05)
    if os.path.exists({hold!r}) and torch.distributed.get_rank() == 1:
        import signs
        signs.sign("held")
        while os.path.exists({hold!r}):
            time.sleep(0.01)
    return fetch(fetcher, index)

_MapDatasetFetcher.fetch = held
"""


class Heard(queue.Queue[tuple[Process, dict[str, Any], float]]):
    """Messages of replicas; keeps what each finished epoch reported."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: dict[int, int] = {}  # epoch → samples

    def put(self, item: Any, *args: Any, **kwargs: Any) -> None:
        message = item[1]
        if message["type"] == "event" and message["event"] == "epoch":
            self.epochs[message["fields"]["epoch"]] = message["fields"]["samples"]
        super().put(item, *args, **kwargs)


def script(folder: Path, name: str, arguments: str) -> Path:
    """A script that runs an example with these arguments."""
    path = folder / "script.py"
    run = HOLD.format(hold=str(folder / "hold"))
    run += f"import runpy, sys\nsys.argv += {arguments.split()!r}\n"
    path.write_text(f"{run}runpy.run_path({str(FOLDER / name)!r}, run_name='__main__')\n")
    return path


def stop_after_epochs(job: FakeAgent, heard: Heard, more: int) -> None:
    """Stop the job when so many more epochs have ended."""
    begun = len(heard.epochs)
    while len(heard.epochs) < begun + more:
        job.wait_for("event")
    job.running[0].channel.send(Stop("test"))
    assert job.running[0].join() == 143, job.outputs()


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_an_example_grows_shrinks_loses_a_replica_and_goes_on(tmp_path: Path, name: str) -> None:
    """From 1 to 2 to 1 to 2 replicas in place, then a death, a stop, and a start from the checkpoint."""
    arguments, size = EXAMPLES[name]
    heard = Heard()
    with FakeAgent(script(tmp_path, name, f"{arguments} --epochs={ENDLESS}"), tmp_path) as job:
        job.messages = heard
        job.start(1)
        job.wait_for("step")
        for replicas in (2, 1, 2):
            job.rescale(replicas)
            job.wait_for("step", replicas)
        if size is not None:
            if name == "dcgan.py":
                (tmp_path / "hold").touch()
                job.wait_for("held")
            job.kill(1)
            (tmp_path / "hold").unlink(missing_ok=True)
            job.survive()
            stop_after_epochs(job, heard, 2)
        else:  # a death of this one is a restart: no samples are handed out again in memory
            job.running[0].channel.send(SaveCheckpoint(1))
            job.wait_for("saved")
            job.kill(0, 1)
        again = script(tmp_path, name, f"{arguments} --epochs={len(heard.epochs) + 1}")
        (ended,) = generations.run(again, 1, tmp_path, **job.environment)
    assert sorted(heard.epochs) == list(range(len(heard.epochs)))
    if size is not None:
        assert set(heard.epochs.values()) == {size}
    assert ended.code == 0, ended.output
    assert f"epoch {len(heard.epochs)}" in ended.output
