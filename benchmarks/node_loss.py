"""How soon the loss of a node is noticed, and how soon the others train on.

    python benchmarks/node_loss.py --rounds 6
    python benchmarks/node_loss.py --rounds 3 --how stop
    python benchmarks/node_loss.py --rounds 3 --how all --leader --between 16

Three agents with one replica each train on one real etcd. Then, round after round, a node goes that does
not keep the leading coordinator, or with --leader the one that does: its agent is killed, so that its
connections close and the coordinator ends (`kill`), all of its processes are killed (`all`), or all of them
are stopped, so that nobody hears anything (`stop`). From that moment on, in seconds: until the
first and the last of the living nodes has said `broken` (their replicas have noticed), until the plan
without the lost node is in the store, and until the first step of its generation is finished. Then another
agent takes its place.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from cluster import JOB, Cluster  # noqa: E402
from etcd_server import EtcdServer  # noqa: E402
from figures import here  # noqa: E402

from adaptdl_elastic.rendezvous.schema.keys import Keys  # noqa: E402
from adaptdl_elastic.rendezvous.schema.records import LeaderRecord, Plan, Transition, decode  # noqa: E402
from adaptdl_elastic.rendezvous.store.base import Store  # noqa: E402

TRAIN = str(ROOT / "tests" / "agent" / "scripts" / "train.py")
NODES = ("first", "second", "third")
PATIENCE = 120.0  # seconds


class Diary:
    """When what was written to the store, by this process's clock."""

    def __init__(self, store: Store) -> None:
        self.entries: list[tuple[float, str, str]] = []
        self._changed = threading.Condition()
        self._watch = store.watch(Keys("default").root)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for change in self._watch:
            with self._changed:
                self.entries.append((time.time(), change.key, change.value or ""))
                self._changed.notify_all()

    def wait_for_recovery(self, since: float) -> float:
        """When the plan by which the others go on was written."""
        key = Keys("default").job(JOB, "plan")

        def found() -> list[float]:
            plans = [(t, decode(Plan, v)) for t, k, v in self.entries if k == key and t > since]
            return [t for t, plan in plans if plan.transition is Transition.RECOVER]

        with self._changed:
            if not self._changed.wait_for(found, PATIENCE):
                raise RuntimeError(f"nobody went on without the lost node: {self.entries[-5:]}")
            return found()[0]

    def broken(self, since: float, until: float) -> list[float]:
        """When living nodes said that somebody is gone."""
        return [t for t, key, value in self.entries if "/broken/" in key and value and since < t < until]

    def close(self) -> None:
        self._watch.close()
        self._thread.join()


def leading(cluster: Cluster, runs: dict[str, Any]) -> str:
    """The node whose coordinator leads, when another stands by."""
    keys = Keys("default")
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        leader = cluster.store.get(keys.coordinator_leader)
        if leader is not None and cluster.store.range(keys.coordinator_standby("")).items:
            pid = decode(LeaderRecord, leader.value).pid
            for node, run in runs.items():
                if pid in [child.pid for child in psutil.Process(run.process.pid).children()]:
                    return node
        time.sleep(0.2)
    raise RuntimeError("no coordinator leads while another stands by")


def lose(cluster: Cluster, diary: Diary, how: str, victim: Any, watcher: Any) -> dict[str, float | None]:
    """One node."""
    agent = psutil.Process(victim.process.pid)
    family = [agent, *agent.children(recursive=True)]
    seen = len(watcher.events)
    since = time.time()
    if how == "kill":
        agent.kill()
    else:
        for process in family:
            process.send_signal(signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    planned = diary.wait_for_recovery(since)
    event = watcher.wait_for_event("generation", replicas=2, after=seen)
    broken = diary.broken(since, event["time"])
    for process in family:
        if process.is_running():
            process.kill()
    victim.process.wait()
    return {
        "first_broken": broken[0] - since if broken else None,
        "last_broken": broken[-1] - since if broken else None,
        "plan": planned - since,
        "step": event["time"] - since,
    }


def measure(args: argparse.Namespace) -> list[dict[str, float | None]]:
    rounds = []
    with tempfile.TemporaryDirectory() as folder, EtcdServer() as etcd, ExitStack() as stack:
        cluster = Cluster(etcd, Path(folder), stack)
        diary = Diary(cluster.store)
        stack.callback(diary.close)
        runs = {"first": cluster.start("first", TRAIN, "100000", "0.01")}
        runs["first"].wait_for_event("generation")
        runs |= {node: cluster.start(node, TRAIN, "100000", "0.01") for node in NODES[1:]}
        cluster.scale(3, runs["first"])
        for number in range(args.rounds):
            first = leading(cluster, runs)
            time.sleep(args.between)
            lost = first if args.leader else next(node for node in reversed(NODES) if node != first)
            watcher = runs[next(node for node in NODES if node != lost)]
            rounds.append(lose(cluster, diary, args.how, runs[lost], watcher))
            print(f"round {number}: {lost} {rounds[-1]}", file=sys.stderr)
            seen = len(watcher.events)
            runs[lost] = cluster.start(lost, TRAIN, "100000", "0.01")
            watcher.wait_for_event("generation", replicas=3, after=seen)
    return rounds


def summary(values: list[float]) -> list[float] | None:
    """Median, least, most."""
    if not values:
        return None
    return [round(one, 2) for one in (statistics.median(values), min(values), max(values))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--how", choices=["kill", "all", "stop"], default="kill")
    parser.add_argument("--leader", action="store_true", help="the node of the coordinator that leads")
    parser.add_argument("--between", type=float, default=3.0, help="seconds of training before each loss")
    args = parser.parse_args()
    rounds = measure(args)
    names = ("first_broken", "last_broken", "plan", "step")
    found = {name: summary([one[name] for one in rounds if one[name] is not None]) for name in names}
    print(
        json.dumps(
            {**here(), "how": args.how, "leader": args.leader, "rounds": len(rounds), "seconds": found}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
