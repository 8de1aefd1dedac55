"""Where the product's modules get simulated stand-ins for threads, clocks, processes, files and descriptors.

`installed(world)` puts them in place for as long as one run lasts, and takes them out again. A name that a
module does not have any more is an error, and so is a module of the agent, the store or the coordinator that
imports one of `WATCHED` and stands in neither `STAND_INS` nor `NOT_RUN` (a test asks `unknown()`): whatever
moves, the simulator finds out loudly.
"""

from __future__ import annotations

import importlib
import pathlib
import pkgutil
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from adaptdl_elastic.agent.cluster import store_link
from adaptdl_elastic.agent.runtime.decision_recorder import DecisionRecorder
from faultsim import files, node, threads
from faultsim.kernel import Kernel

WATCHED = (
    "threading", "queue", "time", "secrets", "select", "selectors", "socket", "subprocess", "random", "uuid",
    "os", "shutil", "tempfile",
)  # fmt: skip

_T, _Q, _C, _S = threads.Threading, threads.Queue, threads.Time, threads.Secrets


class Watcher(threads.OnTasks, store_link.Watcher):
    """The product's, on tasks."""


class Writer(threads.OnTasks, store_link.Writer):
    """The product's, on tasks."""


class Decisions(DecisionRecorder):
    """The product's, without a file."""

    def write(self) -> None:
        """Keep the decisions in memory."""


STAND_INS: dict[str, dict[str, Any]] = {
    "adaptdl_elastic.agent.cluster.store_link": {"threading": _T, "queue": _Q},
    "adaptdl_elastic.agent.runtime.agent": {
        "time": _C,
        "select": node.Select,
        "Loop": node.Loop,
        "GenerationStore": node.Meeting,
        "Watcher": Watcher,
        "Writer": Writer,
        "DecisionRecorder": Decisions,
    },
    "adaptdl_elastic.agent.runtime.replica_starter": {"ReplicaHandle": node.Handle, "Path": files.Path},
    # simulated scripts are no files: their code is never known
    "adaptdl_elastic.agent.runtime.code_version": {"Path": pathlib.Path},
    "adaptdl_elastic.agent.runtime.failure_reporter": {"DirectoryStorage": None},  # the world's checkpoints
    "adaptdl_elastic.agent.runtime.replica_environment": {"Path": files.Path, "os": threads.Os},
    "adaptdl_elastic.agent.runtime.failure_reports": {"Path": files.Path},
    "adaptdl_elastic.agent.terminal.traceback_display": {"Path": files.Path},
    "adaptdl_elastic.agent.cluster.node_reporter": {"time": _C},
    "adaptdl_elastic.agent.terminal.event_recorder": {"time": _C},
    "adaptdl_elastic.agent.cluster.job_joining": {"time": _C},
    "adaptdl_elastic.agent.cluster.ended_run": {"time": _C},
    "adaptdl_elastic.agent.cluster.checkpoint_archive": {
        "time": _C,
        "secrets": _S,
        "kept": None,  # the world's checkpoints
        "Path": files.Path,
    },
    "adaptdl_elastic.agent.cluster.coordinator_host": {
        "time": _C,
        "threading": _T,
        "subprocess": node.Subprocess,
        "os": None,  # the world's pipes
        "Path": files.Path,
    },
    "adaptdl_elastic.rendezvous.store.follow": {"threading": _T},
    "adaptdl_elastic.rendezvous.store.prefix_cache": {"time": _C},
    "adaptdl_elastic.rendezvous.store.keepalive": {"time": _C, "threading": _T},
    "adaptdl_elastic.autoscaler.coordinator.following": {"queue": _Q, "threading": _T},
    "adaptdl_elastic.autoscaler.coordinator.process": {
        "time": _C,
        "queue": _Q,
        "threading": _T,
        "secrets": _S,
        "os": threads.Os,
        "socket": threads.Socket,
    },
}

NOT_RUN: dict[str, str] = {
    # module or package: why nothing of it runs here, or why what it imports does not matter
    "adaptdl_elastic.agent.cli": "the command line",
    "adaptdl_elastic.agent.launch": "agents.AgentProcess takes its place",
    "adaptdl_elastic.agent.taking_part": "agents.AgentProcess takes its place",
    "adaptdl_elastic.agent.own_records": "agents.AgentProcess takes its place",
    "adaptdl_elastic.agent.cluster.run_secret": "only `taking_part` asks for a secret",
    "adaptdl_elastic.agent.cluster.usage_reporter": "only `launch` reports a node's load",
    "adaptdl_elastic.agent.cluster.link_probe": "only `taking_part` measures links",
    "adaptdl_elastic.agent.machine.node_end": "a process of its own on a cloud's node",
    "adaptdl_elastic.agent.machine.device_locks": "inside a replica's process",
    "adaptdl_elastic.agent.machine.devices": "only `taking_part` asks for devices; each machine has its own",
    "adaptdl_elastic.agent.machine.interruption": "a cloud's notices; faults ask agents to leave instead",
    "adaptdl_elastic.agent.runtime.event_loop": "node.Loop takes its place",
    "adaptdl_elastic.agent.cluster.allocation_store": "the etcd of a step of Slurm",
    "adaptdl_elastic.agent.cluster.etcd_server": "an etcd of a cluster or of a step of Slurm",
    "adaptdl_elastic.agent.machine.kept_process": "processes that outlive a service",
    "adaptdl_elastic.agent.machine.slurm_end": "asks Slurm",
    "adaptdl_elastic.agent.runtime.fork_server": "node.Forks takes its place",
    "adaptdl_elastic.agent.runtime.forked_child": "inside a replica's process",
    "adaptdl_elastic.agent.runtime.generation_store": "node.Meeting takes its place",
    "adaptdl_elastic.agent.runtime.replica_handle": "node.Handle takes its place",
    "adaptdl_elastic.agent.service": "a machine's service, which starts agents as processes",
    "adaptdl_elastic.agent.terminal.display": "the terminal",
    "adaptdl_elastic.agent.terminal.event_log": "a file; the simulator's journals write into a list",
    "adaptdl_elastic.agent.terminal.replica_output": "node.Output takes its place",
    "adaptdl_elastic.agent.terminal.run_options": "the command line",
    "adaptdl_elastic.agent.terminal.run_parser": "the command line",
    "adaptdl_elastic.agent.terminal.torchrun_options": "the command line",
    "adaptdl_elastic.rendezvous.local.addresses": "real sockets",
    "adaptdl_elastic.rendezvous.local.runtime_file": "a file that tells other processes of this machine",
    "adaptdl_elastic.rendezvous.local.safe_stream": "the real terminal",
    "adaptdl_elastic.rendezvous.local.file_lock": "a file that keeps other jobs from a folder",
    "adaptdl_elastic.rendezvous.local.scratch_directory": "directories",
    "adaptdl_elastic.rendezvous.local.store_server": "real sockets",
    "adaptdl_elastic.rendezvous.local.tcp_store": "a process of its own",
    "adaptdl_elastic.rendezvous.decision_record": "a file, which no agent and no coordinator writes here",
    "adaptdl_elastic.rendezvous.run_record": "`read_run` reads the file of `adaptdl report`",
    "adaptdl_elastic.rendezvous.services": "addresses and signatures of services, which no agent here uses",
    "adaptdl_elastic.rendezvous.store.base": "only names the type of Lease.lost",
    "adaptdl_elastic.rendezvous.store.connection_error": "for drivers",
    "adaptdl_elastic.rendezvous.store.credentials": "files of passwords and certificates, for drivers",
    "adaptdl_elastic.rendezvous.store.endpoints": "a driver; client.SimClient takes its place",
    "adaptdl_elastic.rendezvous.store.etcd_v2": "a driver",
    "adaptdl_elastic.rendezvous.store.etcd_v2_client": "a driver",
    "adaptdl_elastic.rendezvous.store.etcd_v3": "a driver",
    "adaptdl_elastic.rendezvous.store.http": "a driver",
    "adaptdl_elastic.rendezvous.store.local_socket": "a driver",
    "adaptdl_elastic.rendezvous.store.login": "a driver",
    "adaptdl_elastic.rendezvous.store.memory": "a store; etcd.Etcd takes its place",
    "adaptdl_elastic.rendezvous.store.store_options": "the command line",
    "adaptdl_elastic.rendezvous.text": "`clock` shows a time to people",
    "adaptdl_elastic.rendezvous.torchrun.elastic_agent": "starts `adaptdl-run` for programs of torch",
    "adaptdl_elastic.rendezvous.torchrun.gathering": "plain torchrun",
    "adaptdl_elastic.rendezvous.torchrun.handler": "plain torchrun, which has no agent of ours",
    "adaptdl_elastic.rendezvous.torchrun.roster": "plain torchrun",
    "adaptdl_elastic.autoscaler.coordinator.rounds": "the clock is passed in",
}

_PACKAGES = ("adaptdl_elastic.agent", "adaptdl_elastic.rendezvous", "adaptdl_elastic.autoscaler.coordinator")


@contextmanager
def installed(kernel: Kernel, **of_the_world: object) -> Iterator[None]:
    """Run the product on this kernel, with what belongs to the world in place of the None in `STAND_INS`."""
    threads.use(kernel)
    before: list[tuple[types.ModuleType, str, Any]] = []
    try:
        for name, stand_ins in STAND_INS.items():
            module = importlib.import_module(name)
            for attribute, value in stand_ins.items():
                before.append((module, attribute, getattr(module, attribute)))
                setattr(module, attribute, of_the_world[attribute] if value is None else value)
        yield
    finally:
        for module, attribute, value in reversed(before):
            setattr(module, attribute, value)


def unknown() -> list[str]:
    """Modules of the product that reach for a clock, a thread, a file or chance and are not listed here."""
    found = []
    for package in _PACKAGES:
        for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            unused = any(f"{info.name}.".startswith(f"{name}.") for name in NOT_RUN)
            if unused or info.name.endswith("__main__"):
                continue
            module = importlib.import_module(info.name)
            for attribute, value in vars(module).items():
                module_watched = isinstance(value, types.ModuleType) and value.__name__ in WATCHED
                reaches = module_watched or value is pathlib.Path
                if reaches and attribute not in STAND_INS.get(info.name, {}):
                    found.append(f"{info.name} imports {attribute}")
    return found
