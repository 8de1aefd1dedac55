"""What an agent writes of itself and of its job into the store, from its command line and its machine."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Sequence

from adaptdl_elastic import _program
from adaptdl_elastic.agent.cluster.job_joining import JoinError, node_name
from adaptdl_elastic.agent.machine.devices import Device, Gpus
from adaptdl_elastic.agent.machine.interruption import InstanceIdentity
from adaptdl_elastic.agent.terminal.run_options import RunOptions
from adaptdl_elastic.protocol.environment import CODE
from adaptdl_elastic.rendezvous.local.addresses import network
from adaptdl_elastic.rendezvous.schema.records import JobSpec, NodeRecord
from adaptdl_elastic.rendezvous.text import pluralize


def node_record(
    options: RunOptions, host: str, identity: InstanceIdentity | None, run: str, gpus: Gpus
) -> NodeRecord:
    """Return the registration of this agent.

    Raises:
        JoinError: the node cannot have a replica of the job.
    """
    devices = gpus.devices
    slots, divided = _slots_on(devices, options)
    return NodeRecord(
        node=options.node_name or node_name(socket.gethostname()),
        job=options.job,
        run=run,
        agent=uuid.uuid4().hex[:12],
        host=host,
        network=network(),
        slots=slots,
        min_slots=min(options.min_slots, slots),
        version=options.version or _program.version(),
        pid=os.getpid(),
        gpus=len(devices),
        devices=tuple(device.name for device in devices) if divided else (),
        unusable=gpus.unusable() if divided else (),
        node_type=(devices[0].model if devices else "") if options.node_type is None else options.node_type,
        instance=identity.instance if identity else None,
        instance_type=identity.instance_type if identity else None,
        zone=identity.zone if identity else None,
        preemptible=identity.preemptible if identity else False,
        joined=time.time(),
    )


def _slots_on(gpus: Sequence[Device], options: RunOptions) -> tuple[int, bool]:
    """Return how many replicas this node takes, and whether each has GPUs of its own."""
    each = options.gpus_per_replica
    if not gpus or (each == 1 and options.min_slots > len(gpus)):
        return options.slots, False  # a script that needs no GPU may have more replicas than there are GPUs
    if len(gpus) < each:
        raise JoinError(f"--gpus-per-replica={each}: this node has {pluralize(len(gpus), 'GPU')}")
    return min(options.slots, len(gpus) // each), True


def job_spec(options: RunOptions) -> JobSpec:
    """Return the job as the command line describes it, as a new run."""
    # records are UTF-8, and an argument may be any bytes: this command is only shown
    shown = tuple(os.fsencode(one).decode(errors="backslashreplace") for one in options.command)
    now = {"run": new_run(), "profile_key": _digest(options), "created": time.time(), "command": shown}
    return JobSpec(**{**vars(options), **now, "code": os.environ.get(CODE, "")})


def new_run() -> str:
    """Return the name of a run that begins now; `JobSpec.number`, not the name, tells which run is later."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"


def _digest(options: RunOptions) -> str:
    """Return a digest of script and arguments, independent of the directory.

    Jobs with the same digest share their profiles; agents with different ones do not belong to one job.
    """
    program, *rest = options.command
    script = options.directory / program
    name = program if options.mode == "module" else script.name
    text = json.dumps([options.mode, name, *rest]).encode()
    if options.mode == "script" and script.is_file():
        text += script.read_bytes()
    return hashlib.sha256(text).hexdigest()[:16]
