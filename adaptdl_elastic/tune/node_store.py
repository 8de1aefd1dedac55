"""The store that the trials of one node share: a Ray actor per node, which ends when no trial uses it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from adaptdl_elastic.rendezvous.local.store_server import LocalServer

_ATTEMPTS = 5  # at entering, while actors of earlier trials end
_LOOK_EVERY = 10.0  # seconds between two looks for trials that died


class NodeStore:
    """A store in memory. Ray makes an actor of it."""

    def __init__(self) -> None:
        self._server = LocalServer()
        self._trials: set[int] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, name="trials", daemon=True).start()

    def enter(self, pid: int) -> str:
        """Count the process of a trial as a user; return the store's endpoint."""
        with self._lock:
            self._trials.add(pid)
        return self._server.endpoint

    def leave(self, pid: int) -> None:
        """Count the process of a trial no more; end with the last one."""
        with self._lock:
            self._trials.discard(pid)
            last = not self._trials
        if last:
            self._server.close()
            ray.actor.exit_actor()

    def _watch(self) -> None:
        """End this process when all trials have died, for example with their driver."""
        while True:
            threading.Event().wait(_LOOK_EVERY)
            with self._lock:
                if self._trials and not any(Path(f"/proc/{pid}").exists() for pid in self._trials):
                    self._server.close()
                    os._exit(0)


def enter() -> tuple[str, object]:
    """Enter the store of this node for this process; return its endpoint and a handle for `leave`."""
    context = ray.get_runtime_context()
    node = context.get_node_id()
    for attempt in range(_ATTEMPTS):
        actor = (
            ray.remote(NodeStore)
            .options(
                namespace="adaptdl",
                name=f"adaptdl-{context.get_job_id()}-{node}",
                get_if_exists=True,
                lifetime="detached",  # it outlives the trial that comes first
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote()
        )
        try:
            return ray.get(actor.enter.remote(os.getpid())), actor
        except ray.exceptions.RayActorError:  # it is ending, because its last trial has left
            if attempt + 1 == _ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def leave(actor: object) -> None:
    """Leave the store; errors of an actor that has died are of no interest."""
    actor.leave.remote(os.getpid())  # type: ignore[attr-defined]
