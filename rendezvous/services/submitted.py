"""Read the submissions of a cluster and the registrations of its node services from the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

from adaptdl_elastic.rendezvous.schema.keys import Keys
from adaptdl_elastic.rendezvous.schema.records import (
    DrainRequest,
    JobSpec,
    JobStatus,
    MalformedRecordError,
    NodeRecord,
    decode,
    encode,
)
from adaptdl_elastic.rendezvous.schema.submissions import (
    MOST_PRIORITY,
    Cancellation,
    Resumption,
    ServiceRecord,
    Signed,
    Submission,
)
from adaptdl_elastic.rendezvous.services import signatures
from adaptdl_elastic.rendezvous.services.admission import JobState, Request, Verdict, admit
from adaptdl_elastic.rendezvous.services.signatures import People, SignatureError, UncheckedError
from adaptdl_elastic.rendezvous.store.base import KeyValue, Store, read_record

R = TypeVar("R", Submission, Cancellation, Resumption)


@dataclass(frozen=True)
class Submitted:
    """What the store says about submitted jobs, as of one reading.

    Attributes:
        services: The registrations, by node.
        requests: One per submission that can be read, in the order in which they were submitted.
        refused: Why a submission, cancellation or resumption is not valid, by job.
        drains: Requests that a node is to have no replicas, by node.
    """

    services: Mapping[str, ServiceRecord]
    requests: tuple[Request, ...]
    refused: Mapping[str, str]
    drains: Mapping[str, DrainRequest] = field(default_factory=dict)

    @cached_property
    def unused(self) -> dict[str, str]:
        """The nodes on which no job begins, and why and what to do.

        They are drained, or have another version than most slots: the agents of a job have the same version.
        """
        slots = Counter(one.version for one in self.services.values() for _ in range(one.slots))
        most = max(slots, key=lambda version: (slots[version], version), default="")
        return {
            node: f"has adaptdl-elastic {service.version}, most slots {most}: adaptdl cluster up"
            for node, service in self.services.items()
            if service.version != most
        } | {node: f"{drain.text}; adaptdl drain {node} --cancel" for node, drain in self.drains.items()}

    @property
    def slots(self) -> int:
        """How many replicas fit on the nodes on which jobs begin."""
        return sum(one.slots for node, one in self.services.items() if node not in self.unused)

    def verdicts(self) -> dict[str, Verdict]:
        """Return whether each job that is not over may begin, and if not, why."""
        left_out = [f"{node} ({self.unused[node]})" for node in sorted(self.services) if node in self.unused]
        return admit(self.requests, self.slots, ", ".join(left_out))

    def find(self, job: str) -> Request | None:
        """Return one job's request, or None."""
        return next((one for one in self.requests if one.submission.job == job), None)


def sign_record(
    cluster_id: str, record: Submission | Cancellation | Resumption, person: str, sign: Callable[[str], str]
) -> str:
    """Return a record as the store holds it, with a person's signature.

    Args:
        cluster_id: Identifier of the cluster.
        record: The record.
        person: Name of the person.
        sign: Returns the signature of a text.
    """
    text = encode(record)
    return encode(Signed(text, person, sign(signatures.record_text(cluster_id, type(record).__name__, text))))


def verify_record(cluster_id: str, people: People, kind: type[R], value: str, key: str) -> R:
    """Return the record that a person has signed.

    Raises:
        SignatureError: the signature is not valid, or the record is not the person's own.
        MalformedRecordError: the value is no record of this kind.
    """
    signed = decode(Signed, value, key)
    text = signatures.record_text(cluster_id, kind.__name__, signed.text)
    person = signatures.verify(people, signed.person, text, signed.signature)
    record = decode(kind, signed.text, key)
    if record.job != key.rpartition("/")[2]:
        raise SignatureError(f"{key}: was signed for job {record.job!r}")
    claimed = record.owner if isinstance(record, Submission) else record.person
    if claimed != person.name:
        raise SignatureError(f"{key}: was signed by {person.name} for {claimed}")
    return record


class SubmissionReader:
    """Reads what the store holds, and verifies each signature once.

    Args:
        store: The store of the cluster.
        keys: Its keys.
        cluster_id: Identifier of the cluster.
        get: Returns a job's specification or status, as `Store.get` does; None: the store is asked.
    """

    def __init__(
        self, store: Store, keys: Keys, cluster_id: str, get: Callable[[str], KeyValue | None] | None = None
    ) -> None:
        self._store, self._keys, self._cluster_id = store, keys, cluster_id
        self._get = get or store.get
        self._verified: dict[tuple[str, int, str], Submission | Cancellation | Resumption | str] = {}
        # how jobs ended whose other records are deleted: their submissions stay, and become ever more
        self._outcomes: dict[str, JobStatus] = {}

    def read(self, people: People | None) -> Submitted:
        """Return what is there now.

        Args:
            people: Whose signatures count; None: none is checked, for commands that only show.

        Raises:
            UncheckedError: a signature cannot be checked now.
            StoreError: the store fails.
        """
        services = {}
        for item in self._store.range(self._keys.services).items:
            service = read_record(ServiceRecord, item)
            if service is not None and item.key == self._keys.service(service.node):
                services[service.node] = service
        found = (read_record(DrainRequest, item) for item in self._store.range(self._keys.drains).items)
        drains = {drain.node: drain for drain in found if drain is not None}
        agents = self._agents()
        cancellations, refused, _ = self._records(Cancellation, self._keys.cancellations, people)
        resumptions, not_resumed, _ = self._records(Resumption, self._keys.resumptions, people)
        submissions, more, revisions = self._records(Submission, self._keys.submissions, people)
        requests = []
        for job, submission in submissions.items():
            cancellation = cancellations.get(job)
            # the one that ended the submission that this one replaces stays in the store
            if cancellation and submission.replaces and cancellation.submitted != submission.created:
                cancellation = None
            person = cancellation.person if cancellation is not None else None
            if people is not None and not _may_decide(person, submission, people):
                refused[job] = f"{person} may not cancel it: it belongs to {submission.owner}"
                person = None
            resumption = resumptions.get(job)
            if (
                people is not None
                and resumption is not None
                and not _may_decide(resumption.person, submission, people)
            ):
                refused[job] = f"{resumption.person} may not resume it: it belongs to {submission.owner}"
                resumption = None
            asked, number = ("", 0) if resumption is None else (resumption.run, resumption.number)
            state = self._state(job, agents.get(job, 0), {submission.follows, asked} - {""})
            state = replace(state, resumption=asked, resumption_number=number)
            owner = None if people is None else people[submission.owner]
            most, heaviest = (owner.priority_limit, owner.weight_limit) if owner else (MOST_PRIORITY, 1.0)
            requests.append(Request(submission, person, state, most, revisions[job], heaviest))
        requests.sort(key=lambda one: (one.submission.created, one.submission.job))
        return Submitted(services, tuple(requests), {**not_resumed, **refused, **more}, drains)

    def _agents(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for item in self._store.range(self._keys.nodes).items:
            if (node := read_record(NodeRecord, item)) is not None:
                found[node.job] = found.get(node.job, 0) + 1
        return found

    def _state(self, job: str, agents: int, resumed: set[str]) -> JobState:
        if agents:
            self._outcomes.pop(job, None)  # it runs again
        elif job in self._outcomes:
            return _told(self._outcomes[job], agents, resumed, forgotten=True)
        spec_item = self._get(self._keys.job(job, "spec"))
        status_item = self._get(self._keys.job(job, "status"))
        try:
            spec = None if spec_item is None else decode(JobSpec, spec_item.value)
            status = None if status_item is None else decode(JobStatus, status_item.value)
        except MalformedRecordError:
            return JobState(agents=agents)
        forgotten = spec is None or status is None
        if forgotten:  # read last: the outcome is written before spec and status are deleted
            status = read_record(JobStatus, self._store.get(self._keys.outcome(job, "status")))
        if status is None or (spec is not None and status.run != spec.run):
            return JobState(agents=agents)
        if spec_item is None and status_item is None and not agents:
            self._outcomes[job] = status
        return replace(_told(status, agents, resumed, forgotten), number=0 if spec is None else spec.number)

    def _records(
        self, kind: type[R], prefix: str, people: People | None
    ) -> tuple[dict[str, R], dict[str, str], dict[str, int]]:
        """Return the records below a prefix, why others are not valid, and revisions, all by job."""
        good: dict[str, R] = {}
        bad: dict[str, str] = {}
        revisions: dict[str, int] = {}
        for item in self._store.range(prefix).items:
            job = item.key.rpartition("/")[2]
            revisions[job] = item.mod_revision
            try:
                if people is None:
                    good[job] = decode(kind, decode(Signed, item.value, item.key).text, item.key)
                else:
                    good[job] = self._verify(kind, item.key, item.value, item.mod_revision, people)
            except UncheckedError:
                raise
            except (SignatureError, MalformedRecordError) as error:
                bad[job] = str(error)
        return good, bad, revisions

    def _verify(self, kind: type[R], key: str, value: str, revision: int, people: People) -> R:
        mark = (key, revision, signatures.digest(signatures.encode_people(people).encode()))
        if mark not in self._verified:
            try:
                self._verified[mark] = verify_record(self._cluster_id, people, kind, value, key)
            except UncheckedError:
                raise  # not remembered: the next reading tries again
            except (SignatureError, MalformedRecordError) as error:
                self._verified[mark] = str(error)
        found = self._verified[mark]
        if isinstance(found, str):
            raise SignatureError(found)
        assert isinstance(found, kind)
        return found


def _told(status: JobStatus, agents: int, resumed: set[str], forgotten: bool) -> JobState:
    """Return the state that a status says, unless its run is one that is to be followed by another one."""
    if status.state.ended and status.run in resumed:
        return JobState(agents, run=status.run, resumed=True)
    code = status.process_exit_code
    return JobState(
        agents, status.state, status.reason, status.run, False, forgotten, code, ran_on=status.ran_on
    )


def _may_decide(person: str | None, submission: Submission, people: People) -> bool:
    return person in (None, submission.owner) or (person in people and people[person].admin)


def why_not_started(found: Submitted, job: str) -> str:
    """Return what nodes say about a job that has no agent; "" if they say nothing."""
    problems = [
        f"{node}: {service.problems[job]}"
        for node, service in sorted(found.services.items())
        if job in service.problems
    ]
    return "; ".join(problems)


def waits_because(reason: str, found: Submitted, job: str) -> str:
    """Return a waiting job's reason, and what keeps nodes from running it: it may need their slots."""
    versions = [f"{node}: {why}" for node, why in found.unused.items() if node not in found.drains]
    problems = "; ".join(filter(None, [why_not_started(found, job), *versions]))
    if any(job in service.given_up for service in found.services.values()):
        problems += f"; not tried again before adaptdl stop {job} and adaptdl resume {job}"
    return f"{reason}; not on {problems}" if problems else reason


def state_of(request: Request, found: Submitted) -> tuple[str, str]:
    """Return state and reason of a submitted job of which no coordinator has a status."""
    if request.cancelled_by is not None:
        return "cancelled", f"by {request.cancelled_by}"
    if request.run.state is not None and request.run.ended:
        return request.run.state.value, request.run.reason
    verdict = found.verdicts().get(request.submission.job)
    if verdict is not None and not verdict.admitted:
        return "queued", verdict.reason
    return "starting", why_not_started(found, request.submission.job) or "nodes fetch its files"
