"""What `make cluster-demo` runs: one job on three nodes of one machine, while nodes come and go.

Three agents with 2 + 1 + 1 slots share one etcd. One joins late, one is drained, one is killed with -9;
the job ends with the accuracy of a plain one-process run of the same script. Everything it writes goes
to .cluster-demo/; the exit code is non-zero when the run did not show what it should.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # the etcd is the tests'

from etcd_server import EtcdServer

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / ".cluster-demo"
SCRIPT = HERE / "image_classification.py"
JOB = "cluster-demo"
EPOCHS = 16
WITHIN = 0.02  # of the one-process run's accuracy
PATIENCE = 90.0  # seconds for anything to happen

Event = dict[str, Any]


class Agents:
    """The agents, one event log each, all events in one queue."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.events: list[Event] = []
        self._queue: queue.Queue[Event] = queue.Queue()
        self._began = time.time()

    def start(self, node: str, slots: str) -> None:
        """`adaptdl-run` as it would be typed on that node."""
        log = OUT / f"{node}.events"
        os.mkfifo(log)
        # both directions: opening does not wait for the agent, and its end is not ours
        descriptor = os.open(log, os.O_RDWR)
        threading.Thread(target=self._read, args=(node, descriptor), daemon=True).start()
        command = [
            *(sys.executable, "-m", "adaptdl_elastic.agent", "--nnodes=1:3", f"--nproc-per-node={slots}"),
            *(f"--rdzv-endpoint={self.endpoint}", f"--rdzv-id={JOB}", f"--node-name={node}"),
            *(f"--checkpoint-path={OUT / 'checkpoint'}", "--checkpoint-interval=5", "--no-autoscale"),
            *(f"--event-log={log}", f"--log-dir={OUT / 'logs'}", "--redirects=3"),
            *(str(SCRIPT), f"--epochs={EPOCHS}", "--fixed-batch-size"),
        ]
        self.processes[node] = subprocess.Popen(command, cwd=OUT)
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
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                event = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise SystemExit(f"cluster-demo: {what} did not happen within {PATIENCE:g} s") from None
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

    def end(self) -> int:
        """The first node's exit code, and the last events."""
        code = self.processes["a"].wait(PATIENCE)
        while True:
            try:
                self._note(self._queue.get(timeout=0.2))
            except queue.Empty:
                return code

    def stop(self) -> None:
        """Nothing is left behind, whatever happened."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def adaptdl(*arguments: str) -> None:
    """The command, as in another terminal."""
    subprocess.run([sys.executable, "-m", "adaptdl_elastic.autoscaler", *arguments], check=True)


def act(agents: Agents, endpoint: str) -> int:
    """What happens; the job's exit code."""
    scale = ("scale", JOB, "--etcd", endpoint, "--replicas")
    agents.start("a", "1:2")
    agents.start("b", "1:1")
    agents.wait_for_epochs(1)
    adaptdl(*scale, "3")
    agents.wait_for_size(3)
    agents.start("c", "1:1")
    agents.wait_for_epochs(2)
    adaptdl(*scale, "4")
    agents.wait_for_size(4)
    agents.wait_for_epochs(2)
    agents.tell("node b is drained")
    adaptdl("drain", "b", "--etcd", endpoint)
    agents.wait_for_size(3)
    agents.tell(f"node b has left with exit code {agents.processes['b'].wait(PATIENCE)}")
    agents.wait_for_epochs(2)
    agents.tell("node c is killed with -9")
    agents.processes["c"].kill()
    agents.wait_for_size(2)
    return agents.end()


def accuracy_of_one_process() -> float:
    """The same script without a launcher."""
    path = OUT / "one-process.events"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ADAPTDL_")}
    subprocess.run(
        [sys.executable, str(SCRIPT), f"--epochs={EPOCHS}", "--fixed-batch-size"],
        env={**environment, "ADAPTDL_EVENT_LOG": str(path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return last_accuracy([json.loads(line) for line in path.read_text().splitlines()])


def last_accuracy(events: list[Event]) -> float:
    """What was reported last."""
    return float([e for e in events if e["event"] == "metrics"][-1]["accuracy"])


def main() -> int:
    """Run it, draw it, and say whether it showed what it should."""
    from adaptdl_elastic.agent.terminal.run_plot import draw
    from adaptdl_elastic.agent.terminal.run_summary import summarise

    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    alone = None
    if "--no-comparison" not in sys.argv:
        print("a plain run of the same script in one process, for comparison ...", flush=True)
        alone = accuracy_of_one_process()
    with EtcdServer() as etcd:
        agents = Agents(etcd.endpoint)
        try:
            code = act(agents, etcd.endpoint)
        finally:
            agents.stop()
    (OUT / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in agents.events))
    summary = summarise(agents.events)
    draw(summary, OUT / "run.png", "one job on three nodes that come and go")
    together = last_accuracy(agents.events)
    alone = together if alone is None else alone
    agents.tell(f"done: accuracy {together:.4f}, in one process {alone:.4f}")
    print(f"events: {OUT / 'events.jsonl'}\npicture: {OUT / 'run.png'}")
    if code != 0 or abs(together - alone) > WITHIN:
        print(f"cluster-demo: exit code {code}, accuracies {together} and {alone}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
