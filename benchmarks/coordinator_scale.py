"""What a coordinator costs: many simulated nodes and jobs on a real etcd, one real coordinator process.

Agents are played by this process: they register, follow plans (each of their replicas starts at once), and
every job reports hints at an interval, in real time. Measured over the steady part, after all jobs run:
CPU of the coordinator and of etcd, what etcd received and sent, and how long the coordinator takes from a
person's request to the plan, which is how far its watch lags and how busy it is.

    python benchmarks/coordinator_scale.py --nodes 1000 --jobs 500
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from adaptdl_elastic import sched_hints
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.held import GenerationEnd, Held
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    JobRequest,
    JobSpec,
    NodeRecord,
    Outcome,
    Plan,
)
from adaptdl_elastic.rendezvous.store.base import Store, Watch
from adaptdl_elastic.rendezvous.store.connect import connect
from adaptdl_elastic.sched_hints import JobHints

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from etcd_server import EtcdServer
from figures import here


@dataclass
class Fleet:
    """All agents of all jobs."""

    store: Store
    keys: Keys
    plans: dict[str, Plan] = field(default_factory=dict)
    plan_times: list[tuple[str, Plan, float]] = field(default_factory=list)
    profiled: dict[str, int] = field(default_factory=dict)
    carried_out: dict[str, int] = field(default_factory=dict)  # job -> generation that runs
    lag: list[float] = field(default_factory=list)  # put to watch event, seconds
    events: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    work: queue.SimpleQueue[tuple[Plan | None, Plan]] = field(default_factory=queue.SimpleQueue)

    def register(self, nodes: int, jobs: int, slots: int, per_job: int, seed: int) -> None:
        rng = random.Random(seed)
        lease = self.store.lease(60.0)
        for index in range(jobs):
            job = f"job{index:04d}"
            spec = JobSpec(
                job=job,
                run=f"{job}-1",
                max_nodes=per_job,
                max_replicas=per_job * slots,
                created=time.time(),
            )
            self.store.put(self.keys.job(job, "spec"), records.encode(spec))
            first = index * nodes // jobs
            others = rng.sample(range(nodes), per_job - 1) if per_job > 1 else []
            for number in {first, *others}:
                node = f"node{number:04d}"
                record = NodeRecord(node, job, spec.run, f"{node}-{job}", "127.0.0.1", slots)
                self.store.put(self.keys.node(node, job), records.encode(record), lease)

    def follow(self, watch: Watch) -> None:
        """Note every plan, and hand it to those that carry it out."""
        for change in watch:
            self.events += 1
            if change.kind != "put" or change.value is None:
                continue
            if change.key.endswith("/plan"):
                plan = records.decode(Plan, change.value)
                with self.changed:
                    before = self.plans.get(plan.job)
                    self.plans[plan.job] = plan
                    if not plan.claim and (before is None or before.generation < plan.generation):
                        self.plan_times.append((plan.job, plan, time.time()))
                        self.work.put((before, plan))
                    self.changed.notify_all()
            elif change.key.endswith("/hints"):
                self.lag.append(time.time() - sched_hints.decode(change.value).time)

    def carry_out(self) -> None:
        """Leave the generation before, start the next."""
        while True:
            _, plan = self.work.get()
            now = time.time()
            agents = {one.node: one.agent for one in (*plan.leaving, *plan.placements)}
            placed = {placement.node for placement in plan.placements}
            left = {one.node: one.generation for one in plan.leaving}
            for node, agent in agents.items():
                held = Held(node, agent, acted=plan.generation)
                if node in left:
                    end = GenerationEnd(left[node], Outcome.STOPPED, ran=True, last_step=now, time=now)
                    held = replace(held, ends=(end,))
                if node in placed:
                    now_there = {"generation": plan.generation, "library": True, "started": now}
                    held = replace(held, first_step=now + 3.0, **now_there)
                self.store.put(self.keys.held(plan.job, node), records.encode(held))
            self.carried_out[plan.job] = plan.generation
            if plan.placements:
                known = self.profiled.get(plan.job, 1)
                self.profiled[plan.job] = max(known, plan.replicas)
                self.report(plan)

    def report(self, plan: Plan) -> None:
        rng = random.Random(hash((plan.job, plan.generation)))
        hints = JobHints(
            job=plan.job,
            generation=plan.generation,
            nodes=plan.nodes,
            replicas=plan.replicas,
            init_batch_size=128,
            batch_size=512,
            atomic_bsz=128,
            max_batch_size=4096,
            local_bsz_bounds=(32, 256),
            max_profiled_replicas=self.profiled.get(plan.job, 1),
            grad_params=(0.01, 5.0 + rng.random()),
            perf_params=(0.05, 0.001, 0.02, 0.001, 0.01, 0.001, 1.5),
            remaining_samples=1e6 + 1e7 * rng.random(),
            goodput=800.0 * plan.replicas * (0.95 + 0.1 * random.random()),
            predicted_goodput=800.0 * plan.replicas * (0.95 + 0.1 * random.random()),
            throughput=1000.0 * plan.replicas,
            efficiency=0.8,
            progress=0.3,
            step=1000,
            time=time.time(),
        )
        self.store.put(self.keys.job(plan.job, "hints"), sched_hints.encode(hints))

    def running(self) -> list[Plan]:
        with self.changed:
            return [plan for plan in self.plans.values() if plan.placements]


def etcd_bytes(endpoint: str) -> tuple[float, float]:
    """(received, sent) by etcd from and to clients since its start."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = {line.split()[0]: float(line.split()[1]) for line in lines if line and not line.startswith("#")}
    return (
        found.get("etcd_network_client_grpc_received_bytes_total", 0.0),
        found.get("etcd_network_client_grpc_sent_bytes_total", 0.0),
    )


def cpu(pid: int) -> float:
    """Seconds of CPU of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def reports(fleet: Fleet, period: float, until: float, names: list[str]) -> int:
    """Let every job report once per period, evenly spread; how many reports that made."""
    gap, count, due = period / len(names), 0, time.time()
    while time.time() < until:
        plan = fleet.plans.get(names[count % len(names)])
        if plan is not None and plan.placements:
            fleet.report(plan)
        count += 1
        due += gap
        threading.Event().wait(max(0.0, due - time.time()))
    return count


def probes(fleet: Fleet, until: float, found: list[float], beside: list[float]) -> None:
    """Ask for sizes by hand, now and then, and time how long the plan takes.

    `found` gets the latencies of jobs that nothing else happened to, `beside` those of jobs that were
    changing (the plan waits until the agents have carried out the one before).
    """
    rng = random.Random(7)
    while time.time() < until:
        threading.Event().wait(1.0)
        plan = rng.choice(fleet.running())
        if plan.replicas == 1 or fleet.carried_out.get(plan.job) != plan.generation:
            continue
        size = plan.replicas - 1
        asked = time.time()
        fleet.store.put(fleet.keys.job(plan.job, "request"), records.encode(JobRequest(replicas=size)))
        with fleet.changed:
            done = fleet.changed.wait_for(
                lambda job=plan.job, size=size: fleet.plans[job].replicas == size, timeout=30
            )
        took = time.time() - asked if done else float("inf")
        (found if fleet.plans[plan.job].generation == plan.generation + 1 else beside).append(took)


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Run it all."""
    keys = Keys("scale")
    with EtcdServer() as server, connect(server.endpoint) as store, connect(server.endpoint) as second:
        fleet = Fleet(store, keys)
        fleet.register(arguments.nodes, arguments.jobs, arguments.slots, arguments.nodes_per_job, 1)
        watch = second.watch(keys.jobs, second.range(keys.jobs).revision + 1)
        for target, args in ((fleet.follow, (watch,)), (fleet.carry_out, ()), (fleet.carry_out, ())):
            threading.Thread(target=target, args=args, daemon=True).start()
        command = [
            sys.executable,
            "-m",
            "adaptdl_elastic.autoscaler",
            "coordinator",
            "--etcd",
            server.endpoint,
        ]
        command += ["--cluster", keys.cluster, "--interval", str(arguments.interval)]
        process = subprocess.Popen(command)
        try:
            started = time.time()
            names = [f"job{index:04d}" for index in range(arguments.jobs)]
            with fleet.changed:
                fleet.changed.wait_for(lambda: sum(bool(p.placements) for p in fleet.plans.values()) > 0, 120)
            settle = time.time() + arguments.settle
            reports(fleet, arguments.period, settle, names)
            placed = len(fleet.running())
            return _steady(arguments, fleet, server, process, names, placed, started)
        finally:
            process.terminate()
            process.wait(30)
            watch.close()


def _steady(
    arguments: argparse.Namespace,
    fleet: Fleet,
    server: EtcdServer,
    process: subprocess.Popen[bytes],
    names: list[str],
    placed: int,
    started: float,
) -> dict[str, object]:
    before = cpu(process.pid), cpu(server.pid), etcd_bytes(server.endpoint), time.time()
    fleet.lag.clear()
    events, plans = fleet.events, len(fleet.plan_times)
    until = time.time() + arguments.seconds
    latencies: list[float] = []
    beside: list[float] = []
    prober = threading.Thread(target=probes, args=(fleet, until, latencies, beside), daemon=True)
    prober.start()
    count = reports(fleet, arguments.period, until, names)
    prober.join(40)
    took = time.time() - before[3]
    received, sent = etcd_bytes(server.endpoint)
    lag = sorted(fleet.lag)
    return {
        "nodes": arguments.nodes,
        "jobs": arguments.jobs,
        "slots_per_node": arguments.slots,
        "nodes_per_job": arguments.nodes_per_job,
        "report_period_s": arguments.period,
        "jobs_running": placed,
        "all_started_s": round(
            max((t for _, p, t in fleet.plan_times if p.generation == 0), default=0) - started, 2
        ),
        "seconds": round(took, 1),
        "reports": count,
        "plans": len(fleet.plan_times) - plans,
        "plans_by_cause": dict(Counter(plan.cause.value for _, plan, _ in fleet.plan_times[plans:])),
        "watch_events": fleet.events - events,
        "coordinator_cores": round((cpu(process.pid) - before[0]) / took, 3),
        "coordinator_rss_mib": psutil.Process(process.pid).memory_info().rss >> 20,
        "etcd_cores": round((cpu(server.pid) - before[1]) / took, 3),
        "etcd_received_kib_s": round((received - before[2][0]) / took / 1024, 1),
        "etcd_sent_kib_s": round((sent - before[2][1]) / took / 1024, 1),
        "request_to_plan_s": _summary(sorted(latencies)),
        "request_to_plan_of_changing_jobs_s": _summary(sorted(beside)),
        "watch_lag_s": _summary(lag),
        **here(),
    }


def _summary(values: list[float]) -> dict[str, float | int]:
    if not values:
        return {"count": 0}
    return {
        "count": len(values),
        "median": round(statistics.median(values), 4),
        "p99": round(values[min(len(values) - 1, int(0.99 * len(values)))], 4),
        "max": round(values[-1], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--slots", type=int, default=4, help="of a node")
    parser.add_argument("--nodes-per-job", type=int, default=4, help="nodes that each job is registered on")
    parser.add_argument("--period", type=float, default=30.0, help="seconds between the reports of a job")
    parser.add_argument("--interval", type=float, default=60.0, help="seconds between rounds of the policy")
    parser.add_argument("--settle", type=float, default=60.0, help="seconds before measuring")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds to measure")
    print(json.dumps(measure(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
