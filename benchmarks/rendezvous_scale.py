"""How long from publishing a plan until N agents hold their rank, and what that costs the store.

    python benchmarks/rendezvous_scale.py --agents 128

One real etcd (a private one, or `--etcd HOST:PORT`) and N agents as threads over a few processes. Each has
its own client, its own lease and registration, and follows its job with the code that a real agent uses
(`agent.storelink.Watcher`, `agent.mirror.Mirror`, `rendezvous.plans`); what it does not watch here is who
else is registered. The coordinator's part is to write the plan, in parts where it is large. Times are the
system-wide monotonic clock; operations and bytes are etcd's own counters.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import statistics
import sys
import time
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import requests

from adaptdl_elastic.agent.cluster.store_link import Registration, Watcher
from adaptdl_elastic.agent.cluster.store_view import StoreView
from adaptdl_elastic.agent.core.states import PlanSeen
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import Cause, NodeRecord, Placement, Plan, Transition, encode
from adaptdl_elastic.rendezvous.store.base import Store
from adaptdl_elastic.rendezvous.store.connect import StoreOptions, connect

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from etcd_server import EtcdServer
from figures import here

JOB = "scale"
DEADLINE = 120.0  # seconds until a step of this benchmark is given up
COUNTERS = {
    "operations": r"^grpc_server_started_total\{.*\} (\S+)$",
    "messages_to_clients": r"^grpc_server_msg_sent_total\{.*\} (\S+)$",
    "bytes_to_clients": r"^etcd_network_client_grpc_sent_bytes_total (\S+)$",
    "bytes_from_clients": r"^etcd_network_client_grpc_received_bytes_total (\S+)$",
}


@dataclass(frozen=True)
class Held:
    """One agent has its rank."""

    generation: int
    rank: int
    at: float


class Agent:
    """What of a real agent is between the store and its rank."""

    def __init__(self, endpoint: str, keys: Keys, number: int, results: Queue[Any]) -> None:
        self.node = f"node-{number:05}"
        self._results = results
        self._store = connect(endpoint, api="v3", options=StoreOptions(timeout=60))
        self._view = StoreView(keys, JOB, self.node)
        record = NodeRecord(self.node, JOB, "run", f"agent-{number:05}", "127.0.0.1", 1, joined=time.time())
        self._registration = Registration(self._store, keys, record, ttl=30.0)
        self._registration.register()
        self._watcher = Watcher(self._store, keys.job(JOB), self._news)
        self._watcher.start()

    def _news(self, news: Any) -> None:
        for event in self._view.apply(news):
            if isinstance(event, PlanSeen):
                ranks = event.plan.ranks(self.node)
                self._results.put(Held(event.plan.generation, ranks[0], time.monotonic()))

    def close(self) -> None:
        self._watcher.close()
        self._registration.close()
        self._store.close()


def work(endpoint: str, numbers: list[int], results: Queue[Any], done: Any) -> None:
    """One process full of agents."""
    # A real agent has a process, and thus an interpreter lock, of its own. Here hundreds of threads wait for
    # one lock, and would wake up every 5 ms each to ask for it: four fifths of both cores, for half a minute.
    sys.setswitchinterval(0.05)
    agents = [Agent(endpoint, Keys(), number, results) for number in numbers]
    results.put("ready")
    done.wait()
    for agent in agents:
        agent.close()


def counters(endpoint: str) -> dict[str, float]:
    with requests.Session() as session:
        session.trust_env = False
        text = session.get(f"http://{endpoint}/metrics", timeout=30).text
    return {
        name: sum(float(value) for value in re.findall(pattern, text, re.M))
        for name, pattern in COUNTERS.items()
    }


def publish(store: Store, agents: int, generation: int, revision: int) -> tuple[float, int, int]:
    """The coordinator's part: when, at which revision, and how many bytes."""
    placements = tuple(Placement(f"node-{n:05}", 1, f"agent-{n:05}") for n in range(agents))
    plan = Plan(JOB, "run", generation, placements, Cause.MANUAL, Transition.RESTART, "benchmark")
    text = encode(plan)
    start = time.monotonic()
    done = store.compare_and_swap(Keys().job(JOB, "plan"), text, revision)
    assert done is not None
    return start, done, len(text)


def gather(results: Queue[Any], agents: int, generation: int) -> float:
    """When the last agent held its rank; all ranks are there, each once."""
    held = []
    while len(held) < agents:
        one = results.get(timeout=DEADLINE)
        if isinstance(one, Held) and one.generation == generation:
            held.append(one)
    assert sorted(one.rank for one in held) == list(range(agents))
    return max(one.at for one in held)


def measure(endpoint: str, agents: int, processes: int, rounds: int) -> dict[str, Any]:
    """One line of the result."""
    spawn = multiprocessing.get_context("spawn")
    results: Queue[Any] = spawn.Queue()
    done = spawn.Event()
    workers = [
        spawn.Process(target=work, args=(endpoint, list(range(agents))[part::processes], results, done))
        for part in range(processes)
    ]
    with connect(endpoint, api="v3", options=StoreOptions(timeout=60)) as store:
        for worker in workers:
            worker.start()
        try:
            for _ in workers:
                if results.get(timeout=DEADLINE) != "ready":
                    raise AssertionError("a plan of another run is in this etcd: use an empty one")
            times, costs, size, revision = [], [], 0, 0
            for generation in range(1, rounds + 1):
                before = counters(endpoint)
                start, revision, size = publish(store, agents, generation, revision)
                times.append(gather(results, agents, generation) - start)
                after = counters(endpoint)
                costs.append({name: after[name] - before[name] for name in COUNTERS})
        finally:
            done.set()
            for worker in workers:
                worker.join(DEADLINE)
                worker.kill()
            store.delete_prefix(Keys().root)
    return {
        "agents": agents,
        "processes": processes,
        "seconds": statistics.median(times),
        "seconds_of_each": [round(one, 4) for one in times],
        "plan_bytes": size,
        **{name: statistics.median(cost[name] for cost in costs) for name in COUNTERS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[128], metavar="N")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="plans to publish; the median is reported")
    parser.add_argument("--etcd", metavar="HOST:PORT", help="an etcd to use (default: a private one)")
    options = parser.parse_args()
    server = None if options.etcd else EtcdServer().start()
    try:
        endpoint = options.etcd or (server.endpoint if server else "")
        lines = [measure(endpoint, n, min(options.processes, n), options.rounds) for n in options.agents]
    finally:
        if server:
            server.stop()
    print(json.dumps({**here(), "results": lines}, indent=2))


if __name__ == "__main__":
    main()
