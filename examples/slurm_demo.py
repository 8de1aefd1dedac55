"""What `make slurm-demo` runs: a training eats the idle nodes of a real Slurm, and gives them back.

Slurm has three nodes, a munge key and ports of its own, in a folder that is removed at the end. `adaptdl
autoscale --provider slurm` begins on one node and grows by itself. The partition's owner takes two nodes
and gives them back. Batch file and options are those of docs/howto/slurm.md. A step's time is slept, 10 ms a
sample, as three nodes share the cores of this machine. Everything that it writes goes to .slurm-demo/.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from demo_ending import UnmetError, conclude, heed_signals
from draw_run import draw
from guarded_etcd import GuardedEtcd
from polling import until
from slurm_cluster import Slurm, missing
from slurm_script import TRAIN, batch_file

from adaptdl_elastic.rendezvous.run_record import Generation, Run
from adaptdl_elastic.rendezvous.schema.autoscaler_status import AutoscalerStatus
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.store.base import read_record
from adaptdl_elastic.rendezvous.store.connect import connect

OUT = Path(__file__).resolve().parents[1] / ".slurm-demo"
AUTOSCALE = """autoscale --provider=slurm --partition=idle --batch-file=idle.sbatch --max-nodes=3
    --job=shared --until-done --interval=0.5"""
EPOCH = 240  # samples
PATIENCE = 180.0  # seconds, which only a demo that goes wrong reaches
# a step's time is slept, and is that of its samples: three nodes share the cores of this machine
SCRIPT = TRAIN.replace("(64,", f"({EPOCH},").replace("size=8", "size=24").replace("0.02", "0.01 * len(a)")


class Demo:
    """The story, told step by step."""

    def __init__(self, slurm: Slurm, etcd: GuardedEtcd) -> None:
        self.slurm, self.etcd, self.began = slurm, etcd, time.time()
        (OUT / "train.py").write_text(SCRIPT)
        log = "adaptdl-run --event-log=$SLURM_JOB_ID.events "
        (OUT / "idle.sbatch").write_text(batch_file("test_idle_nodes").replace("adaptdl-run ", log))
        (OUT / "owner").write_text("#!/bin/sh\nuntil [ -e ended ]; do sleep 0.1; done\n")
        environ = {**slurm.environment, **etcd.environ, "ADAPTDL_ETCD": etcd.etcd.endpoint}
        command = [sys.executable, "-m", "adaptdl_elastic.autoscaler", *AUTOSCALE.split()]
        with (OUT / "autoscaler.log").open("w") as file:
            self.autoscaler = subprocess.Popen(command, cwd=OUT, env=environ, stdout=file, stderr=file)

    def tell(self, text: str) -> float:
        """Print a line of the timeline; return the time."""
        print(f"{time.time() - self.began:6.1f} s  {text}", flush=True)
        return time.time()

    def trains_on(self, nodes: int) -> Generation:
        """Wait for a size of the training, and for 20 s more; return the generation."""

        def look() -> list[Generation]:
            return [one for one in run().generations[-1:] if one.nodes == nodes]

        try:
            (found,) = until(f"the training is not on {nodes} node(s)", look, PATIENCE, pause=0.2)
        except TimeoutError as error:
            raise UnmetError(f"{error}; autoscaler.log and *.out have why") from None
        pause = f", a pause of {found.pause_s:.2f} s" if found.pause_s is not None else ""
        end = self.tell(f"the training is on {nodes} node(s){pause}") + 20.0
        until("time stands still", lambda: time.time() > end, pause=0.2)
        return found

    def __call__(self) -> int:
        """Tell it all; return the autoscaler's exit code."""
        self.tell("three nodes are idle, the autoscaler begins")
        first = self.trains_on(1)
        self.trains_on(3)
        self.slurm.submit(OUT / "owner", "--partition=owner", "--nodes=2")
        taken = self.tell("the partition's owner takes two nodes")
        self.trains_on(1)
        (OUT / "ended").touch()
        back = self.tell("the owner gives them back")
        again = self.trains_on(3)
        (OUT / "finish").touch()
        code = self.autoscaler.wait(PATIENCE)
        ended = self.tell("the training is done, and no node is held")
        with connect(self.etcd.etcd.endpoint, options=self.etcd.options()) as store:
            bill = read_record(AutoscalerStatus, store.get(Keys().autoscaler_status))
        held = 3600 * sum(hours for _, _, hours, _ in bill.bought)
        self.report(first.time - self.began, again.time - back, held, (taken, back, ended))
        return code

    def report(self, start: float, again: float, held: float, times: tuple[float, float, float]) -> None:
        """Print the table, and what fixed allocations would have done on the same comings and goings."""
        seen, ends = run(), [float(line.split()[2]) for line in (OUT / "epochs").read_text().splitlines()]
        print(f"\n{'when':>9}{'nodes':>7}{'pause':>9}{'samples/s':>11}  because")
        rates: dict[int, list[float]] = {}
        for one, end in seen.spans:
            inside = [moment for moment in ends if one.time <= moment <= end]
            pair = [EPOCH * (len(inside) - 1), inside[-1] - inside[0]] if len(inside) > 1 else [0.0, 0.0]
            rates[one.nodes] = [a + b for a, b in zip(pair, rates.get(one.nodes, [0.0, 0.0]), strict=True)]
            rate = f"{pair[0] / pair[1]:.1f}" if pair[1] else ""
            pause = "" if one.pause_s is None else f"{one.pause_s:.2f} s"
            print(f"{one.time - self.began:>7.1f} s{one.nodes:>7}{pause:>9}{rate:>11}  {one.reason}")
        rate_of = {nodes: samples / seconds for nodes, (samples, seconds) in rates.items() if seconds}
        taken, back, ended = (moment - self.began for moment in times)
        three = taken + ended - back
        fixed_one, fixed_three = rate_of[1] * (ended - start), rate_of[3] * (three - 2 * start)
        rows = [
            ("this training", EPOCH * len(ends), held),
            ("one node, fixed", fixed_one, ended),
            ("three nodes, fixed", fixed_three, 3 * three),
        ]
        print(f"\n{'':20}{'samples':>9}{'node-seconds':>14}{'samples per node-hour':>23}{'of idle time':>14}")
        for name, samples, seconds in rows:
            share = samples / (rate_of[1] * (3 * three + back - taken))
            print(f"{name:20}{samples:>9.0f}{seconds:>14.0f}{3600 * samples / seconds:>23.0f}{share:>13.0%}")
        print(
            "fixed: computed by the rates above, on the same comings and goings, with the same first start;\n"
            "of idle time: of one node's rate on all node-seconds that the owner left idle\n\n"
            f"from idleness to the first step: {start:.1f} s at the beginning, {again:.1f} s after the owner"
        )
        draw(seen, OUT / "run.png", "a training that eats idle nodes of Slurm")
        print(f"picture: {OUT / 'run.png'}")


def run() -> Run:
    """Read the events of all agents. A generation that several have told is one."""
    lines = [line for log in OUT.glob("*.events") for line in log.read_text().splitlines(keepends=True)]
    events: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("\n")]
    found, told = Run(), dict[int, dict[str, Any]]()
    for event in sorted(events, key=lambda event: float(event["time"])):
        if event["event"] == "generation":
            known = told.setdefault(event["generation"], event)
            known["pause_s"] = known["pause_s"] if known["pause_s"] is not None else event["pause_s"]
            if known is not event:
                continue
        found.add(event)
    return found


def demo() -> int:
    """Start everything, tell the story, and remove everything."""
    if why := missing():
        raise UnmetError(why)
    with tempfile.TemporaryDirectory(prefix="adaptdl-slurm-", ignore_cleanup_errors=True) as folder:
        slurm = Slurm(Path(folder))
        try:
            slurm.start()
            with GuardedEtcd(OUT / "etcd") as etcd:
                story = Demo(slurm, etcd)
                try:
                    return story()
                finally:
                    story.autoscaler.kill()
                    story.autoscaler.wait()
        finally:
            slurm.close()


def main() -> int:
    """Prepare the folder, and run the demo."""
    for name in [name for name in os.environ if name.startswith(("ADAPTDL_", "SLURM_"))]:
        del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    heed_signals()
    return conclude("slurm-demo", OUT, demo)


if __name__ == "__main__":
    sys.exit(main())
