"""What a node service does all the time.

It stays registered, reads what is asked for, registers its node for jobs, and starts their agents. The
services of two nodes have coordinators as child processes, which plan jobs that have no agent yet.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from adaptdl_elastic import _own_python, _program
from adaptdl_elastic.agent.cluster.coordinator_host import (
    SETTLED_AFTER,
    CoordinatorChild,
    CoordinatorCommand,
    CoordinatorHost,
    Holder,
)
from adaptdl_elastic.agent.cluster.etcd_server import EtcdServer
from adaptdl_elastic.agent.cluster.store_link import Watcher, claim, release
from adaptdl_elastic.agent.cluster.usage_reporter import UsageReporter
from adaptdl_elastic.agent.machine.devices import DeviceWatch, Gpus
from adaptdl_elastic.agent.service import environments
from adaptdl_elastic.agent.service.agents import Agents
from adaptdl_elastic.agent.service.blobs import Blobs
from adaptdl_elastic.agent.service.checkpoint_copies import CheckpointCopies, OutputCopies
from adaptdl_elastic.agent.service.decisions import Step, decide, hopeless
from adaptdl_elastic.agent.service.http_server import Served, ServicePort
from adaptdl_elastic.agent.service.job_records import JobRecords
from adaptdl_elastic.agent.service.known_jobs import KnownJobs, LostListError
from adaptdl_elastic.agent.service.stand_in import Membership
from adaptdl_elastic.agent.terminal.run_options import parse_ports
from adaptdl_elastic.rendezvous.local.addresses import listen
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import CheckpointRecord, NodeRecord, Plan, encode
from adaptdl_elastic.rendezvous.schema.submissions import ServiceRecord
from adaptdl_elastic.rendezvous.services import signatures
from adaptdl_elastic.rendezvous.services.etcd_gateway import EtcdError
from adaptdl_elastic.rendezvous.services.service_client import ServiceClient, node_context
from adaptdl_elastic.rendezvous.services.service_config import ServiceConfig, ServiceDirectory
from adaptdl_elastic.rendezvous.services.signatures import SignatureError, UncheckedError
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader
from adaptdl_elastic.rendezvous.store.base import (
    Lease,
    LeaseLostError,
    Store,
    StoreError,
    read_record,
)
from adaptdl_elastic.rendezvous.store.connect import connect

logger = logging.getLogger(__name__)

LEASE_SECONDS = 5.0
"""Seconds after which a service that has vanished is not registered any more."""

_LOOK_SECONDS = 0.5  # between two looks at the agents
_READ_SECONDS = 5.0  # between two readings of the store if nothing is written there that concerns the service
_SWEEP_SECONDS = 3600.0  # between two looks for archives that are not needed any more
_RETRY_SECONDS = 1.0  # until a store that failed is tried again


def prepare_nccl() -> None:
    """Have NCCL's self-test run before the first job needs its result; a failure concerns jobs only."""
    command = _own_python.module("adaptdl_elastic.torch._process_group.selftest", "nccl", "--keep")
    with contextlib.suppress(OSError):
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)


class Supervisor:
    """The node service."""

    def __init__(self, config: ServiceConfig, directory: ServiceDirectory) -> None:
        self._config, self._directory = config, directory
        self._keys = Keys(config.cluster)
        self._etcd = EtcdServer(config, config.etcd, directory) if config.etcd is not None else None
        self._blobs = Blobs(directory.blobs)
        client = ServiceClient(node_context(directory.ca, directory.cert, directory.key))
        self._devices = Gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
        gpus = self._devices.devices
        self._gpus, model = len(gpus), gpus[0].model if gpus else ""
        slots = config.slots or self._gpus or 1
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._agents = Agents(config, directory, slots, self._blobs, client, self._wake.set)
        self._copies, self._outputs = CheckpointCopies(directory, client), OutputCopies(directory, client)
        self._peers: list[ServiceRecord] = []
        self._copied: set[str] = set()  # jobs whose checkpoints lie on the nodes
        self._known = KnownJobs(directory.state / "jobs.json", config.node)
        self._refused: dict[str, str] = {}
        self._swept_at = float("-inf")
        self._membership: Membership | None = None
        self._host = self._coordinator_host()
        listening = listen(config.host, parse_ports(config.port_range) if config.port_range else None)
        known = self._known
        served = Served(config, directory, self._blobs, known.owner, known.folder, self._running, self._state)
        self._port = ServicePort(listening, served)
        self._record = ServiceRecord(
            node=config.node,
            host=config.host,
            port=listening.getsockname()[1],
            slots=slots,
            gpus=self._gpus,
            gpu_model=model,
            version=_program.version(),
        )

    @property
    def record(self) -> ServiceRecord:
        """The registration of this service."""
        return self._record

    def stop(self) -> None:
        """End the service; its agents and etcd go on."""
        self._stopping.set()
        self._wake.set()

    def prepare(self) -> None:
        """Have etcd serve, if it runs on this node; EtcdError if it does not."""
        if self._etcd is not None:
            self._etcd.ensure()

    def run(self, registered: Callable[[], None]) -> None:
        """Serve until `stop`; call `registered` whenever the node has come into the store."""
        self._port.start()
        self._agents.forker.prepare()
        given = self._stopping, self._config.node, lambda: self._peers
        threading.Thread(target=self._outputs.run, args=given, name="outputs", daemon=True).start()
        if self._gpus:
            threading.Thread(target=prepare_nccl, name="self-test", daemon=True).start()
        try:
            while not self._stopping.is_set():
                try:
                    self.prepare()
                    with contextlib.closing(
                        connect(self._config.endpoint, api="v3", options=self._directory.store_options())
                    ) as store:
                        self._serve(store, registered)
                except (StoreError, EtcdError) as error:
                    logger.warning("%s", error)
                    self._stopping.wait(_RETRY_SECONDS)
        finally:
            self._host.close()
            self._agents.forker.close()
            self._port.close()

    def _serve(self, store: Store, registered: Callable[[], None]) -> None:
        """Serve with one connection to the store; StoreError if it fails."""
        keys, node = self._keys, self._config.node
        coordinator = keys.coordinators
        with contextlib.ExitStack() as stack:
            asked = keys.submissions, keys.cancellations, keys.resumptions
            for prefix in (*asked, coordinator, keys.drains):
                watcher = Watcher(store, prefix, lambda _: self._wake.set())
                stack.callback(watcher.close)
                watcher.start()
            registration = _Registration(store, keys.service(node), registered)
            stack.callback(registration.close)
            stack.callback(self._agents.withdraw, lambda _: True)
            jobs = JobRecords(store, keys, self._wake.set)
            stack.callback(jobs.close)
            reader = SubmissionReader(store, keys, self._config.cluster_id, jobs.get)
            watch = DeviceWatch(self._devices, self._agents.renew)
            usage = UsageReporter(store, keys, node, self._devices, lambda: registration.lease, [watch.look])
            stack.callback(usage.close)
            read_at = float("-inf")
            while not self._stopping.is_set():
                if self._etcd is not None and not self._etcd.alive:
                    return  # `run` starts it again
                problems = {**self._agents.unsuited, **self._problems()}
                news = {"problems": problems, "given_up": self._agents.given_up}
                registration.write(ServiceRecord(**{**vars(self._record), **news}))
                self._agents.withdraw(lambda held: held.lease.lost.is_set())
                self._copy_checkpoints(jobs)
                woken = self._wake.wait(_LOOK_SECONDS)
                self._wake.clear()
                self._agents.follow(partial(jobs.read, Plan, name="plan"))
                now = time.monotonic()
                host, ready = self._host, jobs.ready and registration.lease is not None
                due = now - read_at > _READ_SECONDS or (host.due is not None and now >= host.due)
                due = due or self._agents.due(read_at, now)
                if ready and (woken or due or self._some_agent_ended()):
                    assert registration.lease is not None
                    read_at, self._membership = now, Membership(store, registration.lease)
                    said = {item.key: item.value for item in store.range(coordinator).items}
                    holders = (keys.coordinator_host, keys.coordinator_second, keys.coordinator_leader)
                    host.update(*map(said.get, holders))
                    self._act(reader, self._membership, jobs)

    def _coordinator_host(self) -> CoordinatorHost:
        """Return what runs a coordinator if this is one of the two nodes that do."""
        options = ("--etcd", self._config.endpoint, "--cluster", self._config.cluster, "--etcd-api", "v3")
        command = CoordinatorCommand(options, {**os.environ, **self._directory.store_environment()})
        log = self._directory.state / "coordinator.log"
        me = Holder(self._config.node, f"service-{os.getpid()}")

        def take(key: str, other: str) -> None:
            if (held := self._membership) is not None:
                claim(held.store, key, str(me), other, held.lease)

        def give(key: str) -> None:
            if (held := self._membership) is not None:
                release(held.store, key, str(me))

        return CoordinatorHost(
            me,
            self._keys,
            lambda: CoordinatorChild(command, log, logger.warning),
            take,
            give,
            time.monotonic() + SETTLED_AFTER,
        )

    def _copy_checkpoints(self, jobs: JobRecords) -> None:
        newest = {}
        for job in self._copied & self._agents.registered:
            if (found := jobs.read(CheckpointRecord, job, "checkpoint")) is not None:
                newest[job] = found.id
        self._copies.look(newest, self._peers)

    def _some_agent_ended(self) -> bool:
        before = set(self._agents.running)
        self._agents.states()
        return set(self._agents.running) != before

    def _act(self, reader: SubmissionReader, membership: Membership, jobs: JobRecords) -> None:
        try:
            people = signatures.decode_people(self._directory.people.read_text())
        except (OSError, SignatureError) as error:
            logger.warning("the list of people cannot be read: %s", error)
            return
        agents = self._agents.states()  # before the store: what ended an agent is written there by then
        try:
            found = reader.read(people)
        except UncheckedError as error:  # an agent is not ended because of that
            logger.warning("submissions are not read: %s", error)
            return
        try:
            found = self._known.check(found, people)
        except LostListError as error:
            self._refused = {one.submission.job: str(error) for one in found.requests}
            return
        except OSError as error:  # a full disk
            logger.warning("nothing is started: submissions cannot be remembered: %s", error)
            return
        self._refused = dict(found.refused)
        peers = [service for node, service in sorted(found.services.items()) if node != self._config.node]
        self._peers = peers
        self._copied = {one.submission.job for one in found.requests if not one.submission.checkpoint_path}
        self._agents.review(found.requests, jobs.number)
        by_job = {one.submission.job: one for one in found.requests}
        vanished = self._known.vanished(agents, found, people)
        for job, reason in hopeless(found.requests, found.services, found.unused).items():
            self._agents.record_failure(by_job[job], reason, membership.store)
        unused = self._config.node in found.unused
        steps = decide(found.requests, found.slots, agents, time.monotonic(), vanished, unused)
        for job, step in steps.items():
            if step is Step.START:
                self._agents.start(by_job[job], peers, membership)
            else:
                self._agents.end(job, step)
        for one in found.requests:
            if one.over:
                self._agents.forget(one.submission.job)
        if time.monotonic() - self._swept_at > _SWEEP_SECONDS:
            self._swept_at = time.monotonic()
            self._blobs.sweep(self._known.needed_archives())
            nodes = membership.store.range(self._keys.nodes).items
            agents_of = {record.version for item in nodes if (record := read_record(NodeRecord, item))}
            try:
                environments.sweep(self._directory, agents_of, time.time(), self._agents.pythons)
            except OSError as error:  # the next look tries again
                logger.warning("old versions are not removed: %s", error)

    def _running(self) -> list[str]:
        return self._agents.running

    def _problems(self) -> dict[str, str]:
        return {**self._copies.problems, **self._refused, **self._agents.problems}

    def _state(self) -> dict[str, Any]:
        disk = shutil.disk_usage(self._directory.path)
        return {
            "node": self._config.node,
            "version": self._record.version,
            "slots": self._record.slots,
            "gpus": self._gpus,
            "agents": self._agents.running,
            "unfinished": self._known.unfinished,
            "problems": self._problems(),
            "disk_free": disk.free,
            "etcd": None if self._etcd is None else self._etcd.alive,
        }


class _Registration:
    """The service's key, under a lease that is taken again when it was lost."""

    def __init__(self, store: Store, key: str, written: Callable[[], None]) -> None:
        self._store, self._key, self._tell = store, key, written
        self.lease: Lease | None = None
        self._written: ServiceRecord | None = None

    def write(self, record: ServiceRecord) -> None:
        """Write the record unless it stands there already."""
        if self.lease is not None and self.lease.lost.is_set():
            self.lease = self._written = None
        if record == self._written:
            return
        if self.lease is None:
            self.lease = self._store.lease(LEASE_SECONDS)
        try:
            self._store.put(self._key, encode(record), self.lease)
        except LeaseLostError:
            self.lease = self._written = None
            return
        if self._written is None:
            self._tell()
        self._written = record

    def close(self) -> None:
        """Take the key out of the store, if the store answers."""
        if self.lease is not None:
            with contextlib.suppress(StoreError):
                self.lease.revoke()
