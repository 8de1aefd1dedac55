"""Carry out what a person asks of a job on the page, by the same requests as the commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from adaptdl_elastic.autoscaler.cluster_view import JobView, View
from adaptdl_elastic.autoscaler.commands import job_requests
from adaptdl_elastic.autoscaler.commands.job_requests import RequestError
from adaptdl_elastic.autoscaler.commands.logs import chosen
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.services.context import ClusterContext
from adaptdl_elastic.rendezvous.services.service_client import ServiceClient, ServiceError
from adaptdl_elastic.rendezvous.services.submitted import Submitted
from adaptdl_elastic.rendezvous.store.base import Store

_LAST_BYTES = 1 << 18
"""Bytes of each node's output with which the page begins."""

_NODES_AT_A_TIME = 8


class Actions:
    """Requests of the person who started the server.

    Args:
        connect: Opens the store.
        keys: Keys of the cluster.
        context: The cluster, if it has node services.
        client: Asks the node services.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        keys: Keys,
        context: ClusterContext | None = None,
        client: ServiceClient | None = None,
    ) -> None:
        self._connect, self._keys, self._context, self._client = connect, keys, context, client

    def scale(self, job: str, replicas: int | None) -> str:
        """Ask for a number of replicas; None: the policy chooses again. Return what was done."""

        def look(view: View) -> JobView:
            found = _running(view, job)
            if replicas is not None:
                job_requests.check_size(view, found, replicas)
            return found

        with self._connect() as store:
            self._check_owner(store, job)
            job_requests.change(store, self._keys, job, lambda old: replace(old, replicas=replicas), look)
        return f"{job}: sized by the policy again" if replicas is None else f"{job}: {replicas} asked for"

    def stop(self, job: str) -> str:
        """Ask a job to save and end. Return what was done."""
        with self._connect() as store:
            self._check_owner(store, job)
            job_requests.change(
                store, self._keys, job, lambda old: replace(old, stop=True), lambda view: _running(view, job)
            )
        return f"{job} is stopping"

    def _check_owner(self, store: Store, job: str) -> None:
        if self._context is not None and self._client is not None:
            job_requests.check_owner(store, self._keys, self._context, self._client, job)

    def cancel(self, job: str) -> str:
        """End a submitted job, or take it out of the queue. Return what was done."""
        if self._context is None or self._client is None:
            raise RequestError(f"{job} was not submitted; stop it instead")
        with self._connect() as store:
            return job_requests.cancel(store, self._keys, self._context, self._client, job)

    def resume(self, job: str) -> str:
        """Let a submitted job that was stopped or has failed go on. Return what was done."""
        if self._context is None or self._client is None:
            raise RequestError(f"{job} was not submitted; the command line that started it resumes it")
        with self._connect() as store:
            return job_requests.resume(store, self._keys, self._context, self._client, job)

    def output(
        self, job: str, submitted: Submitted | None, offsets: Mapping[str, int], ranks: tuple[int, ...]
    ) -> dict[str, Any]:
        """Return lines of a job's output that follow on these offsets, from every node.

        Args:
            job: Name of the job.
            submitted: The submissions and services.
            offsets: Where the last answer ended, by node; a node that is missing begins near its end.
            ranks: Ranks of the replicas whose lines are returned; empty: all lines.
        """
        client = self._client
        if client is None or submitted is None:
            raise RequestError("the output of this job is where adaptdl-run was started, or in its --log-dir")
        if submitted.find(job) is None:
            raise RequestError(f"no job {job!r} was submitted")
        services = sorted(submitted.services.items())

        def ask(node: str) -> tuple[str, Any]:
            service = submitted.services[node]
            try:
                if node in offsets:
                    return node, client.get_json(service, f"/v1/logs/{job}", after=offsets[node])
                return node, client.get_json(service, f"/v1/logs/{job}", tail=_LAST_BYTES)
            except ServiceError as error:
                return node, error

        with ThreadPoolExecutor(_NODES_AT_A_TIME) as threads:
            answers = list(threads.map(ask, [node for node, _ in services]))
        lines: list[str] = []
        problems: list[str] = []
        ends = dict(offsets)
        for node, answer in answers:
            if isinstance(answer, ServiceError):
                problems.append(str(answer))
                continue
            ends[node] = int(answer["offset"])
            lines += chosen(str(answer["text"]).splitlines(), node, ranks)
        return {"lines": lines, "offsets": ends, "problems": problems}


def _running(view: View, name: str) -> JobView:
    job = view.jobs.get(name)
    if job is None or job.spec is None:
        raise RequestError(f"no job {name!r} has begun")
    job_requests.check_running(view, job)
    return job
