"""Connect this replica to the others when its script begins, however the replicas were started."""

from __future__ import annotations

import gc
import ipaddress
import json
import logging
import os
from dataclasses import replace
from functools import cache
from typing import Any

import torch.distributed

from adaptdl_elastic import _secrets, checkpoint, collective, env
from adaptdl_elastic._checks import whole
from adaptdl_elastic._private import RuntimeFileError
from adaptdl_elastic._session import Identity, Session
from adaptdl_elastic.protocol import environment
from adaptdl_elastic.reducer import Reducer
from adaptdl_elastic.torch._bootstrap import current_session
from adaptdl_elastic.torch._elastic.join import begin_joining
from adaptdl_elastic.torch._process_group import backends, capability, script_collectives
from adaptdl_elastic.torch._process_group.setup import connect_torch, listening_host, make_group
from adaptdl_elastic.torch._process_group.signed_store import signed
from adaptdl_elastic.torch._process_group.store import open_store
from adaptdl_elastic.torch._runtime import worker_processes

log = logging.getLogger(__name__)

dist: Any = torch.distributed  # its stub does not export the stores
_ADDRESS = "adaptdl/address"


def init_process_group(
    backend: str,
    init_method: str | None = None,
    world_size: int | None = None,
    rank: int | None = None,
) -> None:
    """Connect this replica to the others, however the replicas were started.

    - A script started by itself (`python script.py`) is a single replica and opens no port.
    - `adaptdl-run` and `torchrun` set all that is needed in the environment.
    - To start replicas by hand, set `ADAPTDL_NUM_REPLICAS` and `ADAPTDL_REPLICA_RANK` for each, and rank 0's
      address in `ADAPTDL_MASTER_ADDR` and `ADAPTDL_MASTER_PORT`. If all have the same `ADAPTDL_SECRET`, they
      may exchange objects of any type.

    Args:
        backend: Backend of `torch.distributed`: "gloo", "nccl", "cpu:gloo,cuda:nccl", …
        init_method: URL at which torch's process group meets; None: from the environment.
        world_size: Number of replicas; None: from the environment.
        rank: Rank of this replica; None: from the environment.

    Raises:
        RuntimeError: the process group exists already, or the others cannot be reached.
        ValueError: an argument or an environment variable has a wrong value. Nothing is changed then.
        TypeError: an argument has a wrong type. Nothing is changed then.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "torch's process group exists already: adaptdl_elastic.torch.init_process_group makes it, so "
            "leave torch.distributed.init_process_group out"
        )
    session = current_session()
    backend = checked_backend(backend)
    if init_method is not None and not isinstance(init_method, str):
        raise TypeError(f"init_method={init_method!r}: give a URL, e.g. tcp://10.0.0.1:29500")
    before = session.identity
    identity = _checked_identity(before, world_size, rank)
    _keep_groups_in_children()
    session.identity = identity
    try:
        _meet(session, backend, init_method)
    except BaseException:
        if not dist.is_initialized():
            session.identity = before
        raise


def checked_backend(backend: Any) -> str:
    """Return `backend` in torch's spelling.

    Raises:
        ValueError: torch has no such backend.
    """
    known = [name for name in dist.Backend.backend_list if name != "undefined"]
    names = str(backend).lower().split(",")
    several = len(names) > 1 or ":" in names[0]
    parts = [name.partition(":") for name in names]
    if not isinstance(backend, str) or any(
        (name if several else device) not in known or (several and not (device and colon))
        for device, colon, name in parts
    ):
        raise ValueError(
            f"backend={backend!r}: there are {', '.join(known)}, or one for each kind of device, "
            f"e.g. cpu:gloo,cuda:nccl"
        )
    return ",".join(names)


def _checked_identity(known: Identity, world_size: Any, rank: Any) -> Identity:
    """Return this replica's identity: `known`, with the given number of replicas and rank.

    Raises:
        ValueError: the rank or the number of replicas is not possible.
    """
    replicas = known.replicas if world_size is None else whole("world_size", world_size, 1)
    if rank is None and known.rank >= replicas:
        raise ValueError(
            f"world_size={world_size!r}, and this is rank {known.rank} by the environment: give the rank, too"
        )
    place = known.rank if rank is None else whole("rank", rank, 0, replicas - 1)
    return replace(known, rank=place, replicas=replicas)


def _meet(session: Session, backend: str, init_method: str | None) -> None:
    session.backend = backend
    script_collectives.watch()
    if session.channel is not None:
        worker_processes.guard()
    backends.kind(backend).place()
    capability.begin(session, backend)
    if os.environ.get(environment.JOIN):
        begin_joining(session, backend)
        return
    if session.replicas == 1:
        _alone(session, backend, init_method)
    elif os.environ.get(environment.MASTER_PORT) and environment.RANK in os.environ:
        meet_launched(session, backend, init_method)
    else:
        _by_hand(session, backend, init_method)
    session.start()
    capability.compare(session)
    checkpoint.agree(lambda value: collective.share(value, "checkpoint"))


def _alone(session: Session, backend: str, init_method: str | None) -> None:
    if init_method is not None:
        make_group(session, backend, None, init_method=init_method, world_size=1, rank=0)
    else:
        make_group(session, backend, None, store=dist.HashStore(), world_size=1, rank=0)
    session.reducer = session.reducer or Reducer(0, 1)


def meet_launched(session: Session, backend: str, init_method: str | None) -> None:
    """Connect replicas of this project's agent or torchrun's, by its store at MASTER_ADDR:MASTER_PORT."""
    store, _, _ = next(dist.rendezvous(init_method or "env://", session.rank, session.replicas))
    store = dist.PrefixStore(f"adaptdl/{session.generation}", store)
    find_secret(session)
    if os.environ.get(environment.ADAPTDL_MASTER_PORT):
        _connect(session, env.master_addr(), env.master_port())
    else:
        _connect_through(session, store)
    connect_torch(session, backend, store)


@cache
def _keep_groups_in_children() -> None:
    """Keep forked children (a loader's workers) from freeing the parent's process groups.

    The child does not have the threads of these groups. Its garbage collection would wait for them forever,
    or crash.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def _by_hand(session: Session, backend: str, init_method: str | None) -> None:
    """Connect replicas that were started without a launcher.

    The library's collectives use rank 0's given port. The port of torch's store is shared through them.
    """
    host, port = env.master_addr(), env.master_port()
    if not port:
        raise ValueError(
            f"{session.replicas} replicas and no ADAPTDL_MASTER_PORT: say where rank 0 listens by "
            f"ADAPTDL_MASTER_ADDR and ADAPTDL_MASTER_PORT, or start the script with adaptdl-run"
        )
    _connect(session, host, port)
    if init_method is not None:
        given = {"rank": session.rank, "world_size": session.replicas}
        make_group(session, backend, None, init_method=init_method, **given)
        return
    store: Any = open_store(host) if session.rank == 0 else None
    found = collective.share(None if store is None else store.port, "store")
    if store is None:
        store = dist.TCPStore(host, found, is_master=False, wait_for_workers=False)
    connect_torch(session, backend, store)


def find_secret(session: Session) -> None:
    """Set `ADAPTDL_SECRET` for replicas of torchrun's agents, if it is not set.

    The secret is derived from this user's secret on this machine. A replica on another machine derives
    another secret, and its signatures are refused.

    Raises:
        RuntimeError: this machine's secret cannot be used, and the replicas are on several machines.
    """
    if env.secret() is not None:
        return
    remedy = "set the same ADAPTDL_SECRET on all nodes (openssl rand -hex 24)"
    one_machine = session.nodes == 1 or _is_loopback(os.environ[environment.MASTER_ADDR])
    try:
        common = _secrets.machine_secret()
    except RuntimeFileError as error:
        if not one_machine:
            raise RuntimeError(f"replicas of several nodes need a secret: {remedy}") from None
        log.warning("replicas cannot prove who they are to each other: %s; or %s", error, remedy)
        return
    if not one_machine and session.rank == 0:
        log.warning("ADAPTDL_SECRET is not set, so replicas of other machines are refused: %s", remedy)
    os.environ[environment.SECRET] = _secrets.derive(common, "torchrun", session.job).hex()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _connect_through(session: Session, store: Any) -> None:
    """Connect the library's collectives on a free port of rank 0, which torch's store tells the others.

    With torchrun's c10d backend the store outlives a round of the rendezvous, and so does its address: the
    others read it again until rank 0 answers there.
    """
    key = _secrets.generation_key(env.secret(), _secrets.MEETING, session.job, session.generation)
    store = signed(store, key)
    if session.rank == 0:
        host = listening_host()

        def publish(port: int) -> None:
            store.set(_ADDRESS, json.dumps([host, port]))

        _connect(session, host, 0, publish=publish)
    else:

        def find_root() -> tuple[str, int]:
            host, port = json.loads(store.get(_ADDRESS))
            return str(host), int(port)

        _connect(session, *find_root(), find_root=find_root)


def _connect(session: Session, host: str, port: int, **options: Any) -> None:
    if session.reducer is not None:
        if session.reducer.replicas == session.replicas:
            return  # collective.initialize was called by the script
        session.reducer.close()
    session.reducer = collective.reducer_of(session, host, port, **options)
