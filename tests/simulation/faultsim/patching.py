"""Where the product's modules get simulated stand-ins for threads, clocks, processes and descriptors.

`installed(world)` puts them in place for as long as one run lasts, and takes them out again. A name that a
module does not have any more is an error, and so is a module of the agent, the store or the coordinator that
imports one of `WATCHED` and stands in neither `STAND_INS` nor `NOT_RUN` (a test asks `unknown()`): whatever
moves, the simulator finds out loudly.
"""

from __future__ import annotations

import importlib
import pkgutil
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from faultsim import node, threads
from faultsim.kernel import Kernel

from adaptdl_elastic.agent import storelink

WATCHED = ("threading", "queue", "time", "secrets", "select", "selectors", "subprocess", "random", "uuid")

_T, _Q, _C, _S = threads.Threading, threads.Queue, threads.Time, threads.Secrets


class Watcher(threads.OnTasks, storelink.Watcher):
    """The product's, on tasks."""


class Writer(threads.OnTasks, storelink.Writer):
    """The product's, on tasks."""


STAND_INS: dict[str, dict[str, Any]] = {
    "adaptdl_elastic.agent.storelink": {"threading": _T, "queue": _Q},
    "adaptdl_elastic.agent.elastic": {
        "time": _C,
        "select": node.Select,
        "Loop": node.Loop,
        "Meeting": node.Meeting,
        "ReplicaHandle": node.Handle,
        "Watcher": Watcher,
        "Writer": Writer,
    },
    "adaptdl_elastic.agent.books": {"time": _C},
    "adaptdl_elastic.agent.journal": {"time": _C},
    "adaptdl_elastic.agent.joining": {"time": _C, "threading": _T},
    "adaptdl_elastic.agent.coordinator_host": {
        "time": _C,
        "threading": _T,
        "subprocess": node.Subprocess,
        "os": None,  # the world's pipes
    },
    "adaptdl_elastic.rendezvous._keepalive": {"time": _C, "threading": _T},
    "adaptdl_elastic.rendezvous.plans": {"threading": _T, "secrets": _S},
    "adaptdl_elastic.autoscaler.coordinator.following": {"queue": _Q, "threading": _T},
    "adaptdl_elastic.autoscaler.coordinator.process": {
        "time": _C,
        "queue": _Q,
        "threading": _T,
        "secrets": _S,
    },
}

NOT_RUN: dict[str, str] = {
    # module: why nothing of it runs here, or why what it imports does not matter
    "adaptdl_elastic.agent.child": "inside a replica's process",
    "adaptdl_elastic.agent.cli": "the command line",
    "adaptdl_elastic.agent.display": "the terminal",
    "adaptdl_elastic.agent.eventlog": "a file; the simulator's journals write into a list",
    "adaptdl_elastic.agent.finished": "checkpoints of finished runs, on a disk",
    "adaptdl_elastic.agent.forkserver": "node.Forks takes its place",
    "adaptdl_elastic.agent.interruption": "a cloud's notices; faults ask agents to leave instead",
    "adaptdl_elastic.agent.launch": "agents.run_agent takes its place",
    "adaptdl_elastic.agent.loop": "node.Loop takes its place",
    "adaptdl_elastic.agent.meeting": "node.Meeting takes its place",
    "adaptdl_elastic.agent.options": "the command line",
    "adaptdl_elastic.agent.output": "node.Output takes its place",
    "adaptdl_elastic.rendezvous._endpoints": "a driver; client.SimClient takes its place",
    "adaptdl_elastic.rendezvous._http": "a driver",
    "adaptdl_elastic.rendezvous._roster": "plain torchrun, which has no agent of ours",
    "adaptdl_elastic.rendezvous._torchrun_handler": "plain torchrun",
    "adaptdl_elastic.rendezvous.addresses": "real sockets",
    "adaptdl_elastic.rendezvous.etcd_v2": "a driver",
    "adaptdl_elastic.rendezvous.etcd_v3": "a driver",
    "adaptdl_elastic.rendezvous.memory": "a store; etcd.Etcd takes its place",
    "adaptdl_elastic.rendezvous.scratch": "directories",
    "adaptdl_elastic.rendezvous.server": "a real etcd",
    "adaptdl_elastic.rendezvous.store": "only names the type of Lease.lost",
    "adaptdl_elastic.autoscaler.coordinator.rounds": "the clock is passed in",
}

_PACKAGES = ("adaptdl_elastic.agent", "adaptdl_elastic.rendezvous", "adaptdl_elastic.autoscaler.coordinator")


@contextmanager
def installed(kernel: Kernel, pipes: node.Pipes) -> Iterator[None]:
    """Run the product on this kernel."""
    threads.use(kernel)
    before: list[tuple[types.ModuleType, str, Any]] = []
    try:
        for name, stand_ins in STAND_INS.items():
            module = importlib.import_module(name)
            for attribute, value in stand_ins.items():
                before.append((module, attribute, getattr(module, attribute)))
                setattr(module, attribute, pipes if value is None else value)
        yield
    finally:
        for module, attribute, value in reversed(before):
            setattr(module, attribute, value)


def unknown() -> list[str]:
    """Modules of the product that reach for a clock, a thread or chance, and that nobody has looked at."""
    found = []
    for package in _PACKAGES:
        for info in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            if info.name in NOT_RUN or info.name.endswith("__main__"):
                continue
            module = importlib.import_module(info.name)
            for attribute, value in vars(module).items():
                reaches = isinstance(value, types.ModuleType) and value.__name__ in WATCHED
                if reaches and attribute not in STAND_INS.get(info.name, {}):
                    found.append(f"{info.name} imports {attribute}")
    return found
