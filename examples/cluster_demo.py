"""What `make cluster-demo` runs: one job on three nodes, while nodes come and go.

`cluster_site` has the nodes. Their agents have 2 + 1 + 1 slots. One joins late, one is drained, one is
killed with -9; the job ends with the accuracy of a plain one-process run of the same script. Everything it
writes goes to .cluster-demo/. Where it did not show what it should, one line says so, and the exit code is 1.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster_site import Site, best_site
from demo_ending import UnmetError, conclude

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / ".cluster-demo"
SCRIPT = HERE / "image_classification.py"
JOB = "cluster-demo"
EPOCHS = 16
WITHIN = 0.02  # of the one-process run's accuracy
PATIENCE = 180.0  # seconds without any event, which only a demo that goes wrong reaches

Event = dict[str, Any]


class Agents:
    """The agents, one event log each, all events in one queue."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.events: list[Event] = []
        self._queue: queue.Queue[Event] = queue.Queue()
        self._began = time.time()

    def start(self, node: str, slots: str) -> None:
        """`adaptdl-run` as it would be typed on that node."""
        log = self.site.outside(f"{node}.events")
        os.mkfifo(log)
        # both directions: opening does not wait for the agent, and its end is not ours
        descriptor = os.open(log, os.O_RDWR)
        threading.Thread(target=self._read, args=(node, descriptor), daemon=True).start()
        folder = self.site.folder
        command = [
            *(sys.executable, "-m", "adaptdl_elastic.agent", "--nnodes=1:3", f"--nproc-per-node={slots}"),
            *(f"--rdzv-endpoint={self.site.endpoint}", f"--rdzv-id={JOB}", f"--node-name={node}"),
            *(f"--checkpoint-path={folder}/checkpoint", "--checkpoint-interval=5", "--no-autoscale"),
            *(f"--event-log={folder}/{log.name}", f"--log-dir={folder}/logs", "--redirects=3"),
            *(str(SCRIPT), f"--epochs={EPOCHS}", "--fixed-batch-size"),
        ]
        self.processes[node] = self.site.start(node, command)
        self.tell(f"node {node} comes with {slots.rpartition(':')[2]} slot(s)")

    def _read(self, node: str, descriptor: int) -> None:
        with open(descriptor, closefd=False) as lines:
            for line in lines:
                self._queue.put({**json.loads(line), "node": node})

    def tell(self, text: str) -> None:
        """One line of the timeline."""
        print(f"{time.time() - self._began:6.1f} s  {text}", flush=True)

    def wait(self, what: str, wanted: Callable[[Event], bool]) -> Event:
        """The next event that is wanted; generations are told as they begin."""
        while True:
            try:
                event = self._queue.get(timeout=PATIENCE)
            except queue.Empty:
                raise UnmetError(f"expected {what}; for {PATIENCE:g} s {self.seen()}") from None
            if self._note(event) and wanted(event):
                return event

    def _note(self, event: Event) -> bool:
        """Keep an event; False for a generation that another node has told already."""
        if event["event"] == "generation":
            told = [e for e in self.events if e["event"] == "generation"]
            known = [e for e in told if e["generation"] == event["generation"]]
            if known:  # from another node, which may know better when the last step before it was
                if known[0]["pause_s"] is None and event["pause_s"] is not None:
                    known[0]["pause_s"] = event["pause_s"]
                    self.tell(f"... after a pause of {event['pause_s']:.2f} s")
                return False
            nodes = ", ".join(f"{node}: {count}" for node, count in event["placements"].items())
            pause = "" if event["pause_s"] is None else f" after a pause of {event['pause_s']:.2f} s"
            size = f"{event['replicas']} replica{'s' * (event['replicas'] > 1)}"
            self.tell(f"{size} ({nodes}){pause}: {event['reason']}")
        self.events.append(event)
        return True

    def wait_for_size(self, replicas: int) -> None:
        """Until that many replicas have taken their first step."""
        self.wait(f"a size of {replicas}", lambda e: e["event"] == "generation" and e["replicas"] == replicas)

    def wait_for_epochs(self, more: int) -> None:
        """Until so many more epochs are done."""
        done = max((e["epoch"] for e in self.events if e["event"] == "metrics"), default=-1)
        self.wait("progress", lambda e: e["event"] == "metrics" and e["epoch"] >= done + more)

    def seen(self) -> str:
        """In short, how far the job is."""
        sizes = [e["replicas"] for e in self.events if e["event"] == "generation"]
        done = [e["epoch"] + 1 for e in self.events if e["event"] == "metrics"]
        return (
            f"the job has {sizes[-1] if sizes else 0} replica(s) and {max(done, default=0)}/{EPOCHS} epochs"
        )

    def exit_code(self, process: subprocess.Popen[str], what: str) -> int:
        """Of a process that is about to end."""
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise UnmetError(f"expected the end of {what} within {PATIENCE:g} s; {self.seen()}") from None

    def end(self) -> int:
        """The first node's exit code, and the last events."""
        self.wait("the end of the job", lambda e: e["event"] == "exit" and e["node"] == "a")
        code = self.exit_code(self.processes["a"], "the agent of node a")
        while True:
            try:
                self._note(self._queue.get(timeout=0.2))
            except queue.Empty:
                return code

    def adaptdl(self, command: str, *arguments: str) -> None:
        """Run the command, as in another terminal of node a."""
        line = [sys.executable, "-m", "adaptdl_elastic.autoscaler", command, *arguments]
        process = self.site.start("a", [*line, "--etcd", self.site.endpoint])
        if self.exit_code(process, f"adaptdl {command}"):
            raise UnmetError(f"expected adaptdl {command} to succeed; a.log has what it said")


def act(agents: Agents) -> int:
    """What happens; the job's exit code."""
    scale = ("scale", JOB, "--replicas")
    agents.start("a", "1:2")
    agents.start("b", "1:1")
    agents.wait_for_epochs(1)
    agents.adaptdl(*scale, "3")
    agents.wait_for_size(3)
    agents.start("c", "1:1")
    agents.wait_for_epochs(2)
    agents.adaptdl(*scale, "4")
    agents.wait_for_size(4)
    agents.wait_for_epochs(2)
    agents.tell("node b is drained")
    agents.adaptdl("drain", "b")
    agents.wait_for_size(3)
    code = agents.exit_code(agents.processes["b"], "the agent of node b")
    agents.tell(f"node b has left with exit code {code}")
    agents.wait_for_epochs(2)
    agents.tell("node c is killed with -9")
    agents.site.kill(agents.processes["c"])
    agents.wait_for_size(2)
    return agents.end()


def accuracy_of_one_process() -> float:
    """The same script without a launcher."""
    path = OUT / "one-process.events"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ADAPTDL_")}
    with (OUT / "one-process.log").open("w") as log:
        run = subprocess.run(
            [sys.executable, str(SCRIPT), f"--epochs={EPOCHS}", "--fixed-batch-size"],
            env={**environment, "ADAPTDL_EVENT_LOG": str(path), "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
            check=False,
        )
    if run.returncode:
        raise UnmetError(
            f"expected a plain run to succeed; its exit code is {run.returncode}, see one-process.log"
        )
    return last_accuracy([json.loads(line) for line in path.read_text().splitlines()])


def last_accuracy(events: list[Event]) -> float:
    """What was reported last."""
    return float([e for e in events if e["event"] == "metrics"][-1]["accuracy"])


def demo() -> int:
    """Run it, draw it, and say whether it showed what it should."""
    from draw_run import draw

    from adaptdl_elastic.rendezvous.run_record import Run

    alone = None
    if "--no-comparison" not in sys.argv:
        print("a plain run of the same script in one process, for comparison ...", flush=True)
        alone = accuracy_of_one_process()
    with best_site(OUT) as site:
        print(f"cluster-demo: {site.what}", flush=True)
        agents = Agents(site)
        code = act(agents)
    (OUT / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in agents.events))
    run = Run()
    for event in sorted(agents.events, key=lambda event: float(event["time"])):
        run.add(event)
    draw(run, OUT / "run.png", "one job on three nodes that come and go")
    together = last_accuracy(agents.events)
    alone = together if alone is None else alone
    agents.tell(f"done: accuracy {together:.4f}, in one process {alone:.4f}")
    print(f"events: {OUT / 'events.jsonl'}\npicture: {OUT / 'run.png'}")
    if code != 0 or abs(together - alone) > WITHIN:
        raise UnmetError(
            f"expected exit code 0 and an accuracy within {WITHIN} of one process's; "
            f"the exit code is {code}, the accuracies are {together:.4f} and {alone:.4f}"
        )
    return 0


def main() -> int:
    """Prepare the folder, and run the demo."""
    # its replicas share the cores of this machine, also where that has a GPU
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    return conclude("cluster-demo", OUT, demo)


if __name__ == "__main__":
    sys.exit(main())
