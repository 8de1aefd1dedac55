"""A page whose cluster is in a store in memory: jobs, nodes and events as the tests want them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from adaptdl_elastic.autoscaler.web.actions import Actions
from adaptdl_elastic.autoscaler.web.command import explainer
from adaptdl_elastic.autoscaler.web.feed import Feed
from adaptdl_elastic.autoscaler.web.http_server import Served, WebServer
from adaptdl_elastic.protocol.hints import JobHints
from adaptdl_elastic.protocol.hints import encode as encode_hints
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    Cause,
    GpuUsage,
    JobSpec,
    JobState,
    JobStatus,
    LeaderRecord,
    NodeRecord,
    NodeUsage,
    Placement,
    Plan,
    Transition,
    encode,
)
from adaptdl_elastic.rendezvous.store.memory import MemoryStore


class PageWorld:
    """A cluster in memory, and what coordinator and agents write into it."""

    def __init__(self) -> None:
        self.store, self.keys = MemoryStore(), Keys("team")
        self.began = time.time() - 600
        self._events = 0
        self.store.put(self.keys.coordinator_leader, encode(LeaderRecord("c", "node0")))

    def _put(self, job: str, name: str, value: str) -> None:
        # not by `Keys.job`, which refuses names that a stranger may write all the same
        self.store.put(f"{self.keys.jobs}{job}/{name}", value)

    def node(self, name: str, *jobs: str, slots: int = 8, gpus: int = 0) -> None:
        """Register a node for these jobs, with its load."""
        for job in jobs:
            record = NodeRecord(name, job, "run", f"{name}-{job}", "10.0.0.1", slots)
            self.store.put(f"{self.keys.nodes}{name}/{job}", encode(record))
        load = tuple(GpuUsage(0.9, 60 << 30, 80 << 30) for _ in range(gpus))
        self.store.put(self.keys.usage_of(name), encode(NodeUsage(name, 0.31, 9 << 30, 64 << 30, load)))

    def job(self, name: str, state: JobState = JobState.RUNNING, reason: str = "", **fields: Any) -> None:
        """Write a job's records; `placements` and the fields of its report may be given."""
        placements = {str(node): int(count) for node, count in fields.pop("placements", {}).items()}
        spec = JobSpec(name, "run", ("train.py", "--epochs", "90"), max_replicas=16, created=self.began)
        self._put(name, "spec", encode(spec))
        status = JobStatus(name, "run", state, 3, reason, started=self.began, pauses=(0.42, 0.38))
        self._put(name, "status", encode(status))
        places = tuple(Placement(node, count, f"{node}-{name}") for node, count in placements.items())
        plan = Plan(name, "run", 3, places, Cause.POLICY, Transition.INPLACE, reason)
        self._put(name, "plan", encode(plan))
        if placements:
            self.report(
                name, replicas=max(1, sum(placements.values())), nodes=max(1, len(placements)), **fields
            )

    def report(self, name: str, **fields: Any) -> None:
        """Write a job's report."""
        hints = JobHints(name, 3, 1, 1, 32, 256, 64, perf_params=(0.01, 0.001, 0.02, 0.002, 0.01, 0.001, 1.2))
        hints = replace(hints, grad_params=(0.02, 0.9), goodput=900.0, predicted_goodput=950.0, progress=0.4)
        hints = replace(hints, epoch=36, epochs=90, efficiency=0.8, lr_factor=2.3, max_batch_size=1024)
        self._put(name, "hints", encode_hints(replace(hints, **{"time": time.time(), **fields})))

    def event(self, name: str, at: float | None = None, **fields: Any) -> None:
        """Write one line of the log of events."""
        self._events += 1
        when = time.time() if at is None else at
        key = f"{self.keys.events}{int(1000 * when):013d}-{self._events:04d}"
        self.store.put(key, json.dumps({"time": when, "event": name, **fields}))

    @contextmanager
    def served(self, port: int = 0) -> Iterator[WebServer]:
        """Serve the page of this cluster; port 0: any free one."""
        feed = Feed(self.store.client, self.keys)
        with ExitStack() as stack:
            served = Served("team", feed, Actions(self.store.client, self.keys), explainer(feed))
            server = WebServer(port, served)
            stack.callback(server.server_close)
            feed.start()
            stack.callback(feed.close)
            thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            yield server


def small_world() -> PageWorld:
    """Return a cluster as a team has one: running, waiting and ended jobs, and one with a hostile name."""
    world = PageWorld()
    names = ("speech", "resnet50-lr-sweep", HOSTILE)
    for index in range(6):
        world.node(f"node{index}", *names, slots=8, gpus=4 if index < 3 else 0)
    why = "goodput 1,919 → 2,435 samples/s (+27 %) with 12 replicas pays the 0.4 s pause within 1.9 s"
    world.job("speech", reason=why, placements={"node0": 8, "node1": 4}, reported={"loss": 0.83})
    world.job("resnet50-lr-sweep", reason="was started so", placements={"node1": 2}, reported={"loss": 2.1})
    world.job(HOSTILE, reason="<script>alert(1)</script>", placements={"node2": 1})
    waits = "waits for slots: needs at least 32 replicas on 1 node, 25 are free"
    world.job("llm-finetune", JobState.PENDING, waits)
    world.job("done-yesterday", JobState.DONE, "all replicas have finished")
    for index, replicas in enumerate((1, 2, 4, 8, 12)):
        world.event(
            "plan",
            world.began + 90 * index,
            job="speech",
            generation=index,
            replicas=replicas,
            nodes=1 + replicas // 9,
            cause="policy",
            reason=why,
        )
    return world


HOSTILE = "<img src=x onerror=alert(1)>"
"""A name that a page must show as text. (Submitting it is refused, but the store takes it.)"""


def large_world(jobs: int, nodes: int) -> PageWorld:
    """Return a cluster of that many jobs and nodes."""
    world = PageWorld()
    for index in range(nodes):
        world.node(f"node{index}", f"job{index % jobs}", slots=8, gpus=8)
    for index in range(jobs):
        places = {f"node{at}": 4 for at in range(index, nodes, jobs)}
        world.job(f"job{index}", reason=f"the policy chose {len(places)} nodes", placements=places)
    return world
