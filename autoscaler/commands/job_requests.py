"""Write into the store what a person asks of a job, by a command or on the page.

A request is one record in the store, changed by compare-and-swap, which the coordinator carries out. A
cancellation or resumption is signed; node services carry it out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from adaptdl_elastic.autoscaler.cli import CommandError
from adaptdl_elastic.autoscaler.cluster_view import JobView, View, view_of
from adaptdl_elastic.autoscaler.coordinator.slots import fewest
from adaptdl_elastic.autoscaler.diagnostics.rows import is_lost, why_lost
from adaptdl_elastic.rendezvous.schema import records
from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import JobRequest
from adaptdl_elastic.rendezvous.schema.submissions import Cancellation, Resumption, Submission
from adaptdl_elastic.rendezvous.services import signatures
from adaptdl_elastic.rendezvous.services.admission import Request
from adaptdl_elastic.rendezvous.services.context import ClusterContext
from adaptdl_elastic.rendezvous.services.service_client import (
    ServiceClient,
    ServiceError,
    ServiceRefusedError,
)
from adaptdl_elastic.rendezvous.services.submitted import SubmissionReader, Submitted, sign_record
from adaptdl_elastic.rendezvous.store.base import Store

_ATTEMPTS = 20


class RequestError(CommandError):
    """A request cannot be made; the message says why."""


def change(
    store: Store,
    keys: Keys,
    name: str,
    change: Callable[[JobRequest], JobRequest],
    look: Callable[[View], JobView],
) -> str:
    """Change a job's request in the store, and return the run that the request is for.

    If others change the request at the same time, try again.

    Args:
        store: The store.
        keys: Keys of the cluster.
        name: Name of the job.
        change: Returns the new request for the present one.
        look: Returns the job in a view; raises an error if nothing can be asked of the job.

    Raises:
        RequestError: others keep changing it.
    """
    for attempt in range(_ATTEMPTS):
        job = look(view_of(keys, store.range(keys.root), time.monotonic(), time.time()))
        assert job.spec is not None
        run = job.spec.record.run
        old = job.request.record if job.request else JobRequest()
        if old.run not in ("", run):
            old = JobRequest(checkpoint=old.checkpoint)  # requests to an earlier run are not valid any more
        wanted = records.encode(replace(change(old), run=run))
        revision = job.unreadable.get("request") or (job.request.revision if job.request else 0)
        if store.compare_and_swap(keys.job(name, "request"), wanted, revision) is not None:
            return run
        time.sleep(0.01 * attempt)
    raise RequestError(f"the request of {name} keeps changing; try again")


def check_running(view: View, job: JobView) -> None:
    """Raise RequestError if a job has ended, or if no agent and no coordinator is there to obey."""
    status = job.status_now
    if status is not None and status.state.ended:
        reason = " ".join(status.reason.splitlines())
        raise RequestError(f"{job.job} has already ended: {status.state.value} ({reason})")
    if is_lost(view, job):
        raise RequestError(f"{job.job} cannot be asked for anything: {why_lost(job)}")


def check_size(view: View, job: JobView, replicas: int) -> None:
    """Raise RequestError if a job cannot have so many replicas."""
    assert job.spec is not None
    least, most = fewest(view, job), job.spec.record.max_replicas
    if not least <= replicas <= most:
        raise RequestError(f"{job.job} was started for {least} to {most} replicas, not {replicas}")


def cancel(store: Store, keys: Keys, context: ClusterContext, client: ServiceClient, job: str) -> str:
    """Write a signed request that a submitted job ends or does not begin; return a message for the person.

    Nodes obey the request if the job's owner or an administrator has signed it.

    Args:
        store: The store.
        keys: Keys of the cluster.
        context: The cluster.
        client: Asks nodes as the person.
        job: Name of the job.

    Raises:
        RequestError: there is no such job, it has ended, or it is another person's.
        SignatureError: the person's key cannot be used.
    """
    found = SubmissionReader(store, keys, context.cluster_id).read(None)
    request = find(found, context, job)
    if request.run.ended:
        assert request.run.state is not None
        raise RequestError(f"{job} has already ended: {request.run.state.value}")
    _check_allowed(client, found, request.submission, context.person)
    record = signed(context, Cancellation(job, context.person, time.time(), request.submission.created))
    if request.run.state is not None:
        # First the coordinator, which ends all replicas at once. It would take agents that leave one after
        # the other for nodes that are drained, and move the job to the others.
        change(store, keys, job, lambda asked: replace(asked, stop=True), lambda view: view.jobs[job])
    store.put(keys.cancellation(job), record)
    if request.submission.owner == context.person:
        return f"{job} is cancelled"
    return f"{job} belongs to {request.submission.owner}: it ends if {context.person} is an administrator"


def resume(store: Store, keys: Keys, context: ClusterContext, client: ServiceClient, job: str) -> str:
    """Write a signed request that a stopped or failed job goes on; return a message for the person.

    Nodes obey the request if the job's owner or an administrator has signed it.

    Args:
        store: The store.
        keys: Keys of the cluster.
        context: The cluster.
        client: Asks nodes as the person.
        job: Name of the job.

    Raises:
        RequestError: there is no such job, it has not broken off, or it is another person's.
        SignatureError: the person's key cannot be used.
    """
    found = SubmissionReader(store, keys, context.cluster_id).read(None)
    request = find(found, context, job, "the command line that started it elsewhere resumes it")
    run, again = request.run, f"adaptdl submit --replace --name {job} submits it again"
    if request.cancelled_by is not None:
        raise RequestError(f"{job} was cancelled by {request.cancelled_by} for good: {again}")
    if run.resumed:
        return f"{job} is resumed already"
    if run.state not in (records.JobState.STOPPED, records.JobState.FAILED):
        what = "waits" if run.state is None else f"is {run.state.value}"
        then = again if run.ended else "see adaptdl ls --all"
        raise RequestError(f"{job} {what}: only a job that was stopped or has failed is resumed; {then}")
    check_kept(request)
    _check_allowed(client, found, request.submission, context.person)
    record = Resumption(job, context.person, run.run, time.time(), run.number)
    store.put(keys.resumption(job), signed(context, record))
    if request.submission.owner == context.person:
        return f"{job} is resumed"
    return f"{job} belongs to {request.submission.owner}: it goes on if {context.person} is an administrator"


def resume_started(store: Store, keys: Keys, job: str) -> str:
    """Write a request that a stopped or failed job, which was not submitted, goes on; return a message.

    Args:
        store: The store.
        keys: Keys of the cluster.
        job: Name of the job.

    Raises:
        RequestError: there is no such job, or it has not broken off.
    """

    def look(view: View) -> JobView:
        found = view.jobs.get(job)
        status = None if found is None else found.status_now
        if found is None or found.spec is None:
            raise RequestError(f"there is no job {job!r}; see adaptdl ls --all")
        if status is None or status.state not in (records.JobState.STOPPED, records.JobState.FAILED):
            what = "runs" if status is None or not status.state.ended else f"is {status.state.value}"
            raise RequestError(f"{job} {what}: only a job that was stopped or has failed is resumed")
        return found

    change(store, keys, job, lambda asked: replace(asked, stop=False, resume=True), look)
    return f"{job} goes on when a node starts its command; an autoscaler buys one"


def signed(context: ClusterContext, record: Submission | Cancellation | Resumption) -> str:
    """Return a record as the store holds it, with this person's signature."""
    return sign_record(
        context.cluster_id, record, context.person, lambda text: signatures.sign(context.identity, text)
    )


def find(found: Submitted, context: ClusterContext, job: str, then: str = "see adaptdl ls --all") -> Request:
    """Return the request of a job; RequestError if it was not submitted."""
    request = found.find(job)
    if request is None:
        raise RequestError(f"no job {job!r} was submitted to cluster {context.name}; {then}")
    return request


def check_kept(request: Request) -> None:
    """Raise RequestError if the records of a job that has ended are deleted, so that no run can follow."""
    if request.run.forgotten:
        raise RequestError(
            f"{request.submission.job} has ended, and so many jobs have ended since that its records are "
            "deleted: submit it again with another --name"
        )


def check_owner(store: Store, keys: Keys, context: ClusterContext, client: ServiceClient, job: str) -> None:
    """Check that a job is this person's, was not submitted, or that the person is an administrator.

    It keeps people from changing each other's jobs by mistake: the store lets everybody write requests.

    Args:
        store: The store.
        keys: Keys of the cluster.
        context: The cluster.
        client: Asks nodes as the person.
        job: Name of the job.

    Raises:
        RequestError: it is another person's.
        SignatureError: the person's key cannot be used.
    """
    found = SubmissionReader(store, keys, context.cluster_id).read(None)
    request = found.find(job)
    if request is not None:
        _check_allowed(client, found, request.submission, context.person)


def check_administrator(store: Store, keys: Keys, context: ClusterContext, client: ServiceClient) -> None:
    """Check that a person is an administrator, who may change what others have.

    As `check_owner`, it only prevents mistakes. If no node answers, or the node's version does not say who is
    an administrator, the person may ask.

    Args:
        store: The store.
        keys: Keys of the cluster.
        context: The cluster.
        client: Asks nodes as the person.

    Raises:
        RequestError: the person is no administrator.
        SignatureError: the person's key cannot be used.
    """
    found = SubmissionReader(store, keys, context.cluster_id).read(None)
    if not (_ask(client, found, "/v1/status") or {}).get("admin", True):
        raise RequestError(f"this changes what others have: ask an administrator of cluster {context.name}")


def most_weight(client: ServiceClient, found: Submitted) -> float:
    """Return the largest weight of a person's jobs that counts; 1 if no node says more."""
    return float((_ask(client, found, "/v1/status") or {}).get("most_weight", 1.0))


def _check_allowed(client: ServiceClient, found: Submitted, submission: Submission, person: str) -> None:
    """Raise RequestError if a node says that a job of another person is none of this person's business.

    A record that no node obeys would stay in the store, and show the job as cancelled. Nodes know who is an
    administrator. A node that does not answer, or does not know the job yet, keeps nobody from asking.
    """
    if submission.owner != person:  # output is for those who may decide on the job
        _ask(client, found, f"/v1/logs/{submission.job}", tail=1)


def _ask(client: ServiceClient, found: Submitted, path: str, **query: int) -> Any:
    """Return the first answer of a node; None if there is none. RequestError if it forbids the question."""
    for _, service in sorted(found.services.items()):
        try:
            return client.get_json(service, path, **query)
        except ServiceError as error:
            if isinstance(error, ServiceRefusedError) and error.status == 403:
                raise RequestError(str(error)) from None
    return None
