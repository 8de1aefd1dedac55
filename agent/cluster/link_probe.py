"""Measure the links between the nodes of a job before its replicas train over them.

An agent that joins fetches a few MB from agents of the job, and puts what it has measured into its own
registration. Both sides prove that they know the secret of the job's agents. An agent that joins measures
nothing while the job trains on several nodes, since its steps wait for these links, and are measured
themselves. What cannot be measured stays unknown.

`LinkWatch` measures again: when replicas report that the network has changed, and, ever less often, while no
step is made over this node's links.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from adaptdl_elastic._door import STRANGERS, Door
from adaptdl_elastic._wire import introduce
from adaptdl_elastic.agent.cluster.job_joining import live_agents
from adaptdl_elastic.agent.cluster.store_link import Registration
from adaptdl_elastic.rendezvous.local.addresses import NoPortError, Ports, listen
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.node_links import FAST, MOVED, fastest_links, nodes_with_slow_links
from adaptdl_elastic.rendezvous.schema.records import JobStatus, Link, NodeRecord, Plan
from adaptdl_elastic.rendezvous.store.base import Store, StoreError, read_record

logger = logging.getLogger(__name__)

SECONDS = 1.0
"""Longest duration of all measurements that a node makes at a time."""

BYTES = 4 << 20
"""Size of one transfer."""

ROUNDS = 3
"""Measurements after a change of the network, of which the fastest counts."""

SOON, SELDOM = 30.0, 3600.0
"""First and longest pause between two measurements of a node that waits, in seconds; each one is doubled."""

_PEERS = 3  # most nodes that a newcomer measures its link to
_ROUNDS = 4  # most transfers of one measurement, of which the fastest counts
_SHORT = 0.1  # seconds of transfers after which no further one begins
_LEAST = 1 << 16  # bytes: a transfer that ends earlier says nothing
_LEAST_PORTS = 16  # of a range; a job needs the ports of a smaller one
_FETCH = b"f"
_INFINIBAND = Path("/sys/class/infiniband")  # also of RoCE and of EFA: replicas do not use TCP there


@cache
def serve(host: str, ports: Ports, key: bytes) -> int:
    """Serve the measurements of others, one at a time, until this process ends.

    Args:
        host: Address of this node.
        ports: Ports that may be used.
        key: Key that the agents of the job share.

    Returns:
        The port; 0: no link is measured here, since replicas do not use TCP, or all ports may be needed.
    """
    rdma = _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())
    if rdma or (ports is not None and ports[1] - ports[0] < _LEAST_PORTS):
        return 0
    try:
        server = listen(host, ports)
    except NoPortError:
        return 0
    port = int(server.getsockname()[1])
    threading.Thread(target=_serve, args=(server, key), name="links", daemon=True).start()
    return port


def _serve(server: socket.socket, key: bytes) -> None:
    door = Door(server, key, range(STRANGERS))
    while True:
        for rank, sock in door.wait(SECONDS):
            door.missing.add(rank)
            with sock, suppress(OSError):
                sock.settimeout(SECONDS)
                data = os.urandom(_LEAST) * (BYTES // _LEAST)
                for _ in range(_ROUNDS):
                    sock.sendall(data if sock.recv(1) else b"")


def measured_links(
    store: Store,
    keys: Keys,
    job: str,
    key: bytes | None,
    node: str,
    known: Sequence[Link] = (),
    again: bool = False,
) -> tuple[Link, ...]:
    """Return `known`, and the links from further agents of a job to this node, within `SECONDS`.

    Args:
        store: The store.
        keys: Keys of the cluster.
        job: The job.
        key: Key that the agents of the job share; None: nothing is measured.
        node: Name of this node.
        known: Links that are known already.
        again: Whether to measure what was measured before, also while the job trains on several nodes: the
            fastest link and some others, instead of those from the last nodes to join.
    """
    found = [] if again else list(known)
    there = {node, *(link.node for link in found)}
    if key is None:
        return tuple(found)
    with suppress(StoreError):  # whatever needs the store next reports it
        agents = [one for one in live_agents(store, keys, job) if one.link_port and one.node not in there]
        peers = sorted(agents, key=lambda one: one.joined)[-_PEERS:]
        if again:
            fastest = max(known, key=lambda link: link.bandwidth).node if known else ""
            random.shuffle(agents)
            peers = sorted(agents, key=lambda one: one.node != fastest)[:_PEERS]
        plan = read_record(Plan, store.get(keys.job(job, "plan"))) if peers and not again else None
        if peers and (plan is None or plan.nodes < 2 or plan.run != peers[0].run):
            worker = threading.Thread(target=_measure, args=(peers, key, found, again), daemon=True)
            worker.start()
            worker.join(SECONDS)
    return tuple(found)


# by this process, which may be a service with many jobs
_measured: dict[tuple[str, str, int, bytes], Link] = {}


def _measure(peers: Sequence[NodeRecord], key: bytes, found: list[Link], again: bool) -> None:
    """Append the links from `peers` to `found`, as far as they can be measured in time."""
    share = 0.95 * SECONDS / len(peers)
    for peer in peers:
        where = peer.node, peer.host, peer.link_port, key
        try:
            if again or where not in _measured:
                _measured[where] = _link(peer, key, time.monotonic() + share)
            found.append(_measured[where])
        except (OSError, ValueError) as error:
            logger.info("the link from %s is not measured: %s", peer.node, error)


def _link(peer: NodeRecord, key: bytes, until: float) -> Link:
    """Return the link from another agent. OSError: it is too late, or the agents' secrets differ."""
    began, rates = time.monotonic(), list[float]()
    with socket.create_connection((peer.host, peer.link_port), until - began) as sock:
        latency = (time.monotonic() - began) / 2  # a connection is made in one round trip
        introduce(sock, key, secrets.randbelow(STRANGERS), until - time.monotonic())
        began = time.monotonic()
        while len(rates) < _ROUNDS and (not rates or time.monotonic() < min(until, began + _SHORT)):
            sock.settimeout(until - time.monotonic())
            sock.sendall(_FETCH)
            rates.append(_rate(sock, until))
    return Link(peer.node, latency, max(rates))


def _rate(sock: socket.socket, until: float) -> float:
    """Receive one transfer, and return its bytes per second.

    Links let a burst pass before they limit the rate, so the second half counts if it was slower.
    """
    buffer, arrived = bytearray(_LEAST), [(time.monotonic(), 0)]
    while (total := arrived[-1][1]) < BYTES and (now := time.monotonic()) < until:
        sock.settimeout(until - now)
        with suppress(TimeoutError):  # what has come counts
            count = sock.recv_into(buffer, min(_LEAST, BYTES - total))
            if not count:
                break
            arrived.append((time.monotonic(), total + count))
    # not from when it was asked for: the other side serves one node at a time
    (began, first), (ended, total) = arrived[min(1, len(arrived) - 1)], arrived[-1]
    if total - first < _LEAST:
        raise ConnectionError(f"only {total} bytes have arrived")
    half, before = next(one for one in arrived if one[1] >= total / 2)
    return min((total - first) / max(ended - began, 1e-6), (total - before) / max(ended - half, 1e-6))


def _slower_than_predicted(plan: Plan, status: JobStatus | None) -> bool:
    """Return whether the steps of a plan's generation take `MOVED` times as long as was predicted."""
    if status is None or status.generation != plan.generation or status.prediction_error is None:
        return False
    return status.prediction_error < 1 / MOVED - 1


class LinkWatch:
    """Measure the links to this node again. All methods but `_run` are called in the agent's own thread.

    Args:
        measure: Measures the links from other nodes, given those that are known.
        registration: Of this node.
        post: Has a function called in the agent's own thread.
        submit: Has a function called that writes to the store.
    """

    def __init__(
        self,
        measure: Callable[[Sequence[Link]], tuple[Link, ...]],
        registration: Registration,
        post: Callable[[Callable[[], None]], None],
        submit: Callable[[Callable[[], None]], None],
    ) -> None:
        self._measure, self._registration, self._post, self._submit = measure, registration, post, submit
        self.measuring = False
        self._pause = SOON
        self._compared = -1  # generation of the slow steps, or of the changed links, after which it measured
        self.due: float | None = None  # monotonic time to call `look` again at the latest

    def look(
        self,
        agents: Mapping[str, NodeRecord],
        plan: Plan | None,
        status: JobStatus | None,
        idle: bool,
        now: float,
    ) -> None:
        """Measure if steps are slower than was predicted, or if other links have changed.

        Measure also, ever less often, while no steps use these links. None do while the job trains on one
        node, or while this node has no replica because its links are slow, or were.

        Args:
            agents: The registrations of the job, by node.
            plan: The newest plan.
            status: The job's status.
            idle: Whether the node has no replica.
            now: Monotonic seconds.
        """
        record, several = self._registration.record, plan is not None and plan.nodes > 1
        if not record.link_port:
            return  # no link can be measured here
        used = plan if several and not idle else None
        if used and used.generation != self._compared and _slower_than_predicted(used, status):
            self._compared = used.generation
            self.measure(agents, plan)
        changed = max((one.links_since for one in agents.values()), default=-1) if idle else -1
        if changed > max(record.links_at, self._compared):
            self._compared = changed
            self.measure(agents, plan)
        slow = idle and (record.links_since >= 0 or record.node in nodes_with_slow_links(agents))
        waits = slow or not several
        if not waits or fastest_links(agents).get(record.node, FAST) >= FAST:
            self.due, self._pause = None, SOON
        elif self.due is None:
            self.due = now + self._pause
        elif now >= self.due:
            self._pause = min(2 * self._pause, SELDOM)
            self.due = now + self._pause
            self.measure(agents, plan, rounds=1)

    def measure(self, agents: Mapping[str, NodeRecord], plan: Plan | None, rounds: int = ROUNDS) -> None:
        """Measure now, and register what was found."""
        if not self.measuring:
            self.measuring = True
            before = fastest_links(agents).get(self._registration.record.node)
            how = rounds, before, -1 if plan is None else plan.generation
            threading.Thread(target=self._run, args=how, name="measured links", daemon=True).start()

    def _run(self, rounds: int, before: float | None, generation: int) -> None:
        found: dict[str, Link] = {}
        try:
            for _ in range(rounds):
                for link in self._measure(self._registration.record.links):
                    # processes that wait for a core make a link look slow
                    if link.node not in found or link.bandwidth > found[link.node].bandwidth:
                        found[link.node] = link
        finally:
            self._post(partial(self._measured, tuple(found.values()), before, generation))

    def _measured(self, links: tuple[Link, ...], before: float | None, generation: int) -> None:
        self.measuring = False
        if not links:
            return
        fields: dict[str, Any] = {"links": links, "links_at": generation}
        after = max(one.bandwidth for one in links)
        if before is not None and not 1 / MOVED < after / before < MOVED:
            self.due, self._pause, fields["links_since"] = None, SOON, generation
        self._submit(partial(self._registration.update, **fields))
